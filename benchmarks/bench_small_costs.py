"""Small costs beside their goals: a kernel's launch, a recorded step, a refused schema, a frame of the window.

    python benchmarks/bench_small_costs.py

Needs no GPU. The frames need Chromium and its driver. Figures are medians or best times, of an otherwise idle machine.
The last line is one JSON document.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the built-in model is fastest on one thread

from helpers.paths import BOX_MODEL, TESTS
from helpers.window import Page, record_a_hundred_thousand_events, start_browser

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.apps.view.page import read_recording
from nanovllm.features.edits.grammars import Grammars
from nanovllm.text.tokenizer import Tokenizer


class Cost(NamedTuple):
    """One figure, and the most that it should be, both in `unit`."""

    name: str
    figure: float
    goal: float
    unit: str


def measure_launches() -> list[Cost]:
    """Time 196 launches, as many as a mixed step of 28 layers had; a step may spend 1.5 ms on them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(TESTS / "helpers" / "direct_launches.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return [
        Cost("a direct launch", found["direct_us"], 1500 / 196, "us"),
        Cost("a direct launch, of Triton's time", 100 * found["direct_us"] / found["triton_us"], 50, "%"),
    ]


def measure_recording(folder: Path) -> list[Cost]:
    """Time what the recording of a trace adds to a step of the built-in model with two sequences."""
    path = folder / "run.json"
    spent: list[float] = []

    def timed(method: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            start = time.perf_counter()
            method(*arguments)
            spent.append(time.perf_counter() - start)

        return call

    with LLM("tiny-qwen3", trace=str(path), max_model_len=256) as llm:
        trace = llm.engine.observers[0]
        trace.planned = timed(trace.planned)  # type: ignore[method-assign]
        trace.finished = timed(trace.finished)  # type: ignore[method-assign]
        llm.generate(["1 2 3"] * 2, SamplingParams(max_tokens=150, ignore_eos=True), use_tqdm=False)
    starts = read_recording(path).start
    step = 1e-3 * statistics.median(later - earlier for earlier, later in itertools.pairwise(starts))
    recording = statistics.median(map(sum, zip(spent[::2], spent[1::2], strict=True)))
    return [Cost("recording, of a step of the built-in model", 100 * recording / step, 5, "%")]


def measure_refusal() -> list[Cost]:
    """Time the refusal of a schema of a thousand definitions, and the same refusal once more."""
    grammars = Grammars(Tokenizer(BOX_MODEL), 664, {0})
    many = {f"d{i}": {"type": "string", "minLength": 1} for i in range(1000)}
    bad = {"$defs": many, "type": "object", "properties": {"a": {"unevaluatedItems": 3}}}
    costs = []
    for name, goal in (("refusing a large schema", 2.0), ("refusing it again", 0.1)):
        start = time.process_time()
        try:
            grammars.compile(StructuredOutputsParams(json=bad))
        except ValueError:
            costs.append(Cost(name, time.process_time() - start, goal, "s"))
    return costs


def measure_frames(folder: Path) -> list[Cost]:
    """Time frames of the window over a recording of 100,000 events; 20 frames a second are 50 ms each."""
    try:
        browser = start_browser()
    except (FileNotFoundError, ImportError) as missing:
        print(f"frames are left out: {missing}")
        return []
    path = folder / "long.json"
    record_a_hundred_thousand_events(path)
    try:
        page = Page(browser, path)
        return [
            Cost(f"a frame while the window {name}", statistics.median(page.time_frames(scrubs)), 50, "ms")
            for name, scrubs in (("plays", False), ("is scrubbed", True))
        ]
    finally:
        browser.quit()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        costs = [
            *measure_launches(),
            *measure_recording(Path(folder)),
            *measure_refusal(),
            *measure_frames(Path(folder)),
        ]
    for cost in costs:
        verdict = "met" if cost.figure <= cost.goal else "missed"
        print(f"{cost.name:48s} {cost.figure:8.2f} {cost.unit:3s} goal {cost.goal:6.2f}  {verdict}")
    print(json.dumps({"benchmark": "small costs", "costs": [cost._asdict() for cost in costs]}))


if __name__ == "__main__":
    main()
