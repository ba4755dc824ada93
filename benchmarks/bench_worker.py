"""What each worker of bench.py --compare does, whatever engine it runs. Imports nothing beyond the standard library."""

import json
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[dict[str, Any]], int]
"""Runs a workload, and counts the tokens that come out."""


def measure(load: Callable[[], Run], spec: dict[str, Any], versions: dict[str, str]) -> None:
    """Load an engine, warm it up, run the workload, and print one line of JSON.

    Args:
        load: makes the engine.
        spec: what bench_compare.py has written.
    """
    start = time.perf_counter()
    run = load()
    loaded = time.perf_counter()
    run(spec["warm_up"])
    warm = time.perf_counter()
    num_tokens = run(spec["workload"])
    result = {
        "seconds": time.perf_counter() - warm,
        "num_output_tokens": num_tokens,
        "load_seconds": loaded - start,
        "warm_up_seconds": warm - loaded,
        "versions": versions,
    }
    print(json.dumps(result), flush=True)
