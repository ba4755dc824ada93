"""Runs a rival in `bench.py --compare`, whatever its engine. This file imports the standard library alone.

bench_compare.py starts `INTERPRETER -m benchmarks.rivals.NAME SPEC MODE`, where SPEC is the path of a JSON document.
The worker loads the engine, runs the warm-up and then the workload. Its last line is a JSON document: the seconds of
each, the number of output tokens, versions, and a note for this line of the table. An engine that cannot run the
workload raises CannotRun; the document then holds its sentence. For bench_depth.py the document has the seconds of
prompts and steps, and for gguf_distance.py the log-probabilities of prompts. A worker that takes turns, for
bench_gguf.py, prints a document once it has loaded; then it runs each workload that a line of its input holds, and
prints the seconds.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

Run = Callable[[dict[str, Any]], int]
"""Runs a workload and returns the number of output tokens."""


class DepthTimes(TypedDict):
    """The seconds of some sequences of one length, as benchmarks/evidence/bench_depth.py measures them."""

    prompt_seconds: float | None
    """Seconds until every sequence has its first token; None if that was not measured."""
    step_seconds: list[float]
    """Seconds of each later step in which every sequence gets a token."""


class Engine(NamedTuple):
    run: Run
    note: str
    """The types in which the engine stores and computes, for the table; may be empty."""
    measure_depth: Callable[[list[int]], list[DepthTimes]] | None = None
    """Measures the first n prompts of the workload, for each n of a list."""
    score: Callable[[list[int]], list[float]] | None = None
    """Returns the log-probability of each token of a prompt but the first."""


class CannotRun(Exception):
    """Its message is one sentence that says why this engine cannot run here."""


def main(load: Callable[[dict[str, Any], str], Engine], versions: dict[str, str]) -> None:
    """Measure one engine once and print the document, by the command line SPEC [MODE].

    Args:
        load: makes the engine from the specification and the mode, which is "" by default.
        versions: the versions of the packages, by name.
    """
    spec = json.loads(Path(sys.argv[1]).read_text())
    mode = "".join(sys.argv[2:3])
    try:
        if spec.get("takes_turns"):
            return _take_turns(load(spec, mode), versions)
        document = _measure(load, spec, mode) | {"versions": versions}
    except CannotRun as sentence:
        document = {"cannot_run": str(sentence)}
    print(json.dumps(document), flush=True)


def _take_turns(engine: Engine, versions: dict[str, str]) -> None:
    """Run the workloads of stdin, one a line, until it ends."""
    print(json.dumps({"note": engine.note, "versions": versions}), flush=True)
    for line in sys.stdin:
        workload = json.loads(line)
        start = time.perf_counter()
        engine.run(workload)
        print(time.perf_counter() - start, flush=True)


def _measure(load: Callable[[dict[str, Any], str], Engine], spec: dict[str, Any], mode: str) -> dict[str, Any]:
    start = time.perf_counter()
    engine = load(spec, mode)
    loaded = time.perf_counter()
    if engine.score is not None and spec.get("scores"):
        return {"logprobs": [engine.score(prompt) for prompt in spec["workload"]["prompts"]], "note": engine.note}
    engine.run(spec["warm_up"])
    if engine.measure_depth is not None and "depth" in spec:
        return {"depths": engine.measure_depth(spec["depth"]["num_seqs"]), "note": engine.note}
    warm = time.perf_counter()
    num_tokens = engine.run(spec["workload"])
    return {
        "seconds": time.perf_counter() - warm,
        "num_output_tokens": num_tokens,
        "load_seconds": loaded - start,
        "warm_up_seconds": warm - loaded,
        "note": engine.note,
    }


def computes_in_bfloat16() -> bool:
    """Whether this processor has instructions for bfloat16, and ONEDNN_MAX_CPU_ISA does not forbid them."""
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":
        return False
    flags = Path("/proc/cpuinfo").read_text().split()
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags)) or platform.machine() == "arm64"
