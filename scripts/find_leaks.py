"""Looks for leaks while requests, engines or lines come and go: of memory, descriptors, threads, processes and files.

    python scripts/find_leaks.py requests [--count 50000]
    python scripts/find_leaks.py engines [--count 200]
    python scripts/find_leaks.py lines [--count 1000000]
    python scripts/find_leaks.py arrays [--count 1000000]
    python scripts/find_leaks.py texts [--count 1000000]

`requests` runs so many requests of all kinds through one engine. `engines` makes and closes so many engines: plain
ones, ones that write a trace, ones that read grammars, and, every eighth, ones of two ranks. `lines` runs one job of so
many lines: of twenty one is wrong, one asks for a ranking, and the others are completions. A runner without a model
answers them, as a model would take hours. `arrays` runs such a job with --top-logprobs-file, and `texts` one of
`nanovllm teach`.

The first third is a warm-up. From then on all that is counted must stay as it is, and memory may grow by TOLERANCE
bytes for each request, engine or line: the slope of a line through the samples, by least squares. A growth below STEP
in all is none. The exit status is 1 if something grows.
"""

import argparse
import ctypes
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for steps this small, more threads only wait for each other

from nanovllm import LLM, EngineConfig, SamplingParams
from nanovllm.apps.jobs.job import Job, ShardOptions, Status
from nanovllm.apps.jobs.run import load_llm, run_job
from nanovllm.apps.teach.run import TeachJob, run_teach_job
from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.engine.token_scores import TokenScores

TOLERANCE = {"requests": 400, "engines": 64 << 10, "lines": 40, "arrays": 40, "texts": 40}
"""Bytes. A request that is kept has 2,000 bytes or more, an engine some megabytes. A line costs 9 by design."""

STEP = 4 << 20
"""Bytes. The heap grows and shrinks in steps of one to three MiB, so less than this says nothing."""

COUNTS = {"requests": 50_000, "engines": 200, "lines": 1_000_000, "arrays": 1_000_000, "texts": 1_000_000}

TOP = 4
"""How many of the most likely tokens have scores."""

NUM_SAMPLES = 40
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 128,
    "max_num_seqs": 128,
    "kvcache_memory_bytes": 16 << 20,
}


Sample = dict[str, int]


def take_sample(pid: int, folder: Path) -> Sample:
    """Count what a process holds. `folder` is where it makes its temporary files."""
    if pid == os.getpid():
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # free memory that the allocator keeps is no leak
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    maps = (process / "maps").read_text().splitlines()
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir(process / "fd")),
        "threads": len(os.listdir(process / "task")),
        "processes": len((process / "task" / str(pid) / "children").read_text().split()),
        "pieces of shared memory": sum("memfd:" in line or "/dev/shm" in line for line in maps),
        "files": sum(len(files) for _, _, files in os.walk(folder)),
    }


def compute_slope(points: list[tuple[int, int]]) -> float:
    """Return the slope of the line through (x, y) points, by least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def draw_request(number: int) -> tuple[list[int], SamplingParams]:
    """Return the prompt and parameters of one request. There are six kinds, in turn."""
    prompt = [5 + (number * 7 + i) % 600 for i in range(1 + number % 23)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": number},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"repetition_penalty": 1.2, "logit_bias": {number % 600: 2.0}},
        {"n": 2, "stop": ["e"]},
        {"structured_outputs": {"regex": f"[a-z]{{2}}{number % 977}"}},
    ]
    return prompt, SamplingParams(max_tokens=2 + number % 3, **kinds[number % len(kinds)])


def run_requests(count: int, folder: Path) -> Generator[tuple[int, Sample], None, None]:
    """Run requests through one engine. Yield how many have ended, and a sample, now and then."""
    step = max(1, count // NUM_SAMPLES)
    with LLM("tiny-qwen3", **OPTIONS) as llm:
        for first in range(0, count, step):
            prompts, params = zip(*map(draw_request, range(first, min(count, first + step))), strict=True)
            llm.generate(list(prompts), list(params), use_tqdm=False)
            gc.collect()
            yield first + len(prompts), take_sample(os.getpid(), folder)


def run_engines(count: int, folder: Path) -> Generator[tuple[int, Sample], None, None]:
    """Make, use and close engines. Yield how many, and a sample, after every four of different kinds."""
    for number in range(count):
        kind = number % 4
        options = dict(OPTIONS)
        params = SamplingParams(max_tokens=4)
        trace = folder / "trace.json"
        if kind == 1:
            options["trace"] = str(trace)
        elif kind == 2:
            schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}
            params = SamplingParams(max_tokens=4, structured_outputs={"json": schema})
        elif number % 8 == 7:
            options["tensor_parallel_size"] = 2
        with LLM("tiny-qwen3", **options) as llm:
            llm.generate([[5, 6, 7]] * 3, params, use_tqdm=False)
        trace.unlink(missing_ok=True)
        if kind == 3:
            gc.collect()
            yield number + 1, take_sample(os.getpid(), folder)


def make_zeros(count: int) -> TokenScores:
    scores = TokenScores.allocate(count, TOP)
    for values in scores:
        values.fill(0)
    return scores


class NoModel:
    """A runner that computes nothing. Every token is 5, and every score 0; also those of tokens, which few ask for."""

    def launch(self, plan: StepPlan, *_: object) -> "NoModel":
        self._tokens = np.full(plan.num_sampled.sum(), 5, np.int32)
        self._scores = make_zeros(len(plan.targets))
        return self

    def result(self) -> StepResult:
        logprobs = {i: make_zeros(1) for i in range(len(self._tokens))}
        return StepResult(self._tokens, logprobs, self._scores)

    def reason_to_close(self) -> None:
        return None

    def close(self) -> None:
        pass


class Sampler:
    """An observer of an engine that takes a sample now and then. In each sample is how many tokens were counted."""

    def __init__(self, llm: LLM, count: str, distance: int, folder: Path) -> None:
        """`count` is the count of `LLM.stats` that grows by one with each request."""
        self.samples: list[tuple[int, Sample]] = []
        self._llm = llm
        self._count = count
        self._distance = distance
        self._folder = folder

    def planned(self, *_: object) -> None:
        pass

    def finished(self, *_: object) -> None:
        num_ended = self._llm.stats()[self._count]
        if num_ended >= self._distance * (1 + len(self.samples)):
            self.samples.append((num_ended, take_sample(os.getpid(), self._folder)))

    def close(self) -> None:
        pass


def run_lines(count: int, folder: Path) -> Generator[tuple[int, Sample], None, None]:
    """Run a job. Yield how many requests have run, and a sample, now and then."""
    job = Job(str(folder / "in.jsonl"), str(folder / "out.jsonl"), JOB, "tiny-qwen3", stats=str(folder / "stats.json"))
    yield from run_a_job(count, folder, lambda: run_job(job), {"max_tokens": 1, "seed": 0}, "num_generated_tokens")


def run_arrays(count: int, folder: Path) -> Generator[tuple[int, Sample], None, None]:
    """Run a job with arrays beside its results. Its shards lie elsewhere, because their number grows."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as shards:
        options = {"shards": ShardOptions(shards, TOP, tokens=3000), "stats": str(folder / "stats.json")}
        job = Job(str(folder / "in.jsonl"), str(folder / "out.jsonl"), JOB, "tiny-qwen3", **options)
        yield from run_a_job(count, folder, lambda: run_job(job), {"max_tokens": 1}, "num_generated_tokens")


def run_texts(count: int, folder: Path) -> Generator[tuple[int, Sample], None, None]:
    """Run a job of `nanovllm teach`. Its shards lie elsewhere, because their number grows."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as shards:
        options = {"top": TOP, "shard_tokens": 3000, "stats": str(folder / "stats.json")}
        job = TeachJob(str(folder / "in.jsonl"), shards, JOB, "tiny-qwen3", **options)
        for num_tokens, sample in run_a_job(count, folder, lambda: run_teach_job(job), {}, "num_prompt_tokens"):
            yield num_tokens // 3, sample


JOB = EngineConfig("tiny-qwen3", **OPTIONS | {"max_model_len": 256})


def run_a_job(
    count: int, folder: Path, run: Callable[[], Status], fields: dict[str, Any], counted: str
) -> Generator[tuple[int, Sample], None, None]:
    """Run a job over a runner without a model, and yield samples.

    Args:
        run: runs the job, whose input is in.jsonl in the folder.
        fields: of each line beside its prompt. If they have a seed, each line has its own, and some ask for a ranking.
        counted: what the samples count: see `Sampler`.
    """
    with open(folder / "in.jsonl", "w") as file:
        for number in range(count):
            prompt = [5 + number % 600, 5 + number // 600 % 600, 7] if number % 20 else []
            line: dict[str, Any] = {"prompt": prompt, **fields}
            if "seed" in fields:
                line["seed"] = number
            if "seed" in fields and number % 20 == 10:
                body = {"query": str(number), "documents": ["a", "b"]}
                line = {"custom_id": str(number), "method": "POST", "url": "/v1/rerank", "body": body}
            file.write(json.dumps(line) + "\n")
    samplers = []

    def load_without_model(config: EngineConfig) -> LLM:
        llm = load_llm(config)
        llm.engine.runner.close()
        llm.engine.runner = NoModel()
        samplers.append(Sampler(llm, counted, max(1, count // NUM_SAMPLES), folder))
        llm.observe(samplers[0])
        return llm

    with (
        patch("nanovllm.apps.jobs.run.load_llm", load_without_model),
        patch("nanovllm.apps.teach.run.load_llm", load_without_model),
    ):
        status = run()
    stats = json.loads((folder / "stats.json").read_text())
    if status != Status.LINES_FAILED or stats["num_failed"] != -(-count // 20) or stats["num_lines"] != count:
        raise SystemExit(f"the job ended with {status!r}: {stats}")
    yield from samplers[0].samples


def judge(task: str, samples: list[tuple[int, Sample]]) -> bool:
    """Print what the samples after the warm-up say; return whether all of it is flat."""
    warm = samples[len(samples) // 3 :]
    growth = compute_slope([(count, sample["bytes"]) for count, sample in warm])
    sizes = [sample["bytes"] for _, sample in warm]
    is_flat = growth <= TOLERANCE[task] or max(sizes) - min(sizes) < STEP
    low = min(sizes) >> 20
    high = max(sizes) >> 20
    print(
        f"memory: {growth:.0f} bytes for each of the {task}, {low} to {high} MiB; at most {TOLERANCE[task]} are allowed"
    )
    for name in warm[0][1].keys() - {"bytes"}:
        counts = [sample[name] for _, sample in warm]
        is_flat = is_flat and counts[-1] <= counts[0]
        print(f"{name}: {counts[0]} at first, {counts[-1]} in the end, {max(counts)} at most")
    return is_flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=COUNTS)
    parser.add_argument("--count", type=int, help=f"how many (default: {COUNTS})")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing more after so many seconds")
    arguments = parser.parse_args()
    runs = {
        "requests": run_requests,
        "engines": run_engines,
        "lines": run_lines,
        "arrays": run_arrays,
        "texts": run_texts,
    }
    run = runs[arguments.task]
    since = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        with closing(run(arguments.count or COUNTS[arguments.task], Path(folder))) as taking:
            in_time = takewhile(lambda _: time.monotonic() - since < arguments.seconds, taking)
            samples = list(in_time)
    print(f"{samples[-1][0]} {arguments.task} in {time.monotonic() - since:.0f} s, {len(samples)} samples")
    return 0 if judge(arguments.task, samples) else 1


if __name__ == "__main__":
    sys.exit(main())
