"""Compares order="auto" with order="given" on jobs whose requests are all known in advance.

    python benchmarks/evidence/bench_admission.py                             steps and tokens; nothing is computed
    python benchmarks/evidence/bench_admission.py --seconds 5 --scale 0.25    five pairs of seconds, on tiny-qwen3

Without --seconds the runner only says when a request ends. So steps, computed tokens and preemptions are exact, on a
busy machine, too. The estimate of time adds, for each step, the time to read the weights, or that to compute the step's
tokens if it is longer; the former is as long as computing 300 tokens on a large GPU. With --seconds two engines in one
process take turns, and each round changes who comes first. The last line is one JSON document.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any, NamedTuple

import numpy as np

from nanovllm import LLM, SamplingParams
from nanovllm.engine.plan import StepPlan, StepResult

STOP = 600
"""The token id that ends an output of NoModel."""
BLOCK = 64


class Work(NamedTuple):
    """A job.

    Attributes:
        lengths: the number of output tokens of each prompt.
        options: the engine's.
        are_known: max_tokens tells the lengths. Otherwise only a stop token ends an output.
    """

    prompts: list[list[int]]
    lengths: list[int]
    options: dict[str, Any]
    are_known: bool = True


def draw_prompts(count: int, low: int, high: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [source.choices(range(STOP - 1), k=source.randint(low, high)) for _ in range(count)]


def draw_lengths(count: int, seed: int) -> list[int]:
    """Draw lengths as those of reasoning: most are short, and a few very long."""
    source = random.Random(seed)
    return [min(max(int(source.lognormvariate(5.0, 1.0)), 8), 1500) for _ in range(count)]


def make_works(scale: float, seed: int) -> dict[str, Work]:
    """Draw the jobs. Numbers of requests and of rows are multiplied by `scale`."""
    room: dict[str, Any] = {"max_model_len": 2048, "kvcache_block_size": BLOCK, "num_kvcache_blocks": 20_000}
    source = random.Random(seed)
    rows = round(64 * scale)
    count = 4 * rows
    lengths = [source.randint(100, 1024) for _ in range(count)]
    works = {"nano-vLLM": Work(draw_prompts(count, 100, 1024, seed), lengths, room | {"max_num_seqs": count})}
    for times in (2, 4, 16):
        prompts = draw_prompts(times * rows, 16, 128, seed)
        lengths = draw_lengths(times * rows, seed)
        for are_known in (True, False):
            name = f"reasoning, {times} x rows{'' if are_known else ', unknown'}"
            works[name] = Work(prompts, lengths, room | {"max_num_seqs": rows}, are_known)
            if times == 4:
                sizes = sorted(-(-(len(p) + n) // BLOCK) for p, n in zip(prompts, lengths, strict=True))
                options = room | {"max_num_seqs": rows, "num_kvcache_blocks": max(sum(sizes[-rows:]) // 2, 32)}
                works[f"half a pool{name[9:]}"] = Work(prompts, lengths, options, are_known)
    short = [source.randint(1, 64) for _ in range(16 * rows)]
    works["short outputs"] = Work(draw_prompts(16 * rows, 50, 150, seed), short, room | {"max_num_seqs": rows})
    prefixes = draw_prompts(64, 1000, 1000, seed)
    count = round(2000 * scale)
    prompts = [prefixes[i % 64] + tail for i, tail in enumerate(draw_prompts(count, 24, 24, seed + 1))]
    lengths = [source.randint(1, 32) for _ in range(count)]
    for name, num_blocks in (("room for 16", 256), ("room for all", 1600)):
        options = room | {"max_num_seqs": 16, "num_kvcache_blocks": num_blocks}
        works[f"64 prefixes sorted, {name}"] = Work(sorted(prompts), lengths, options)
        shuffled = source.sample(prompts, count)
        works[f"64 prefixes shuffled, {name}"] = Work(shuffled, lengths, options)
        works[f"64 prefixes shuffled, {name}, unknown"] = Work(shuffled, lengths, options, False)
        alike = [50 * (prompt[0] % 4) + length for prompt, length in zip(shuffled, lengths, strict=True)]
        works[f"64 prefixes that tell the length, {name}, unknown"] = Work(shuffled, alike, options, False)
    return works


class NoModel:
    """A runner that computes nothing. An output ends when the sequence has as many tokens as its seed says."""

    def __init__(self, num_rows: int) -> None:
        self._ends = np.zeros(num_rows, np.int64)
        self.counts = {"steps": 0, "tokens": 0, "units": 0.0}

    def launch(self, plan: StepPlan, *_: object) -> "NoModel":
        self.counts["steps"] += 1
        self.counts["tokens"] += plan.num_tokens
        self.counts["units"] += max(1.0, plan.num_tokens / 300)
        self._ends[plan.new_rows["row"]] = plan.new_rows["seed_low"]
        is_sampling = plan.num_sampled > 0
        num_tokens = (plan.num_computed + plan.num_scheduled)[is_sampling] + 1
        self._tokens = np.where(num_tokens >= self._ends[plan.rows[is_sampling]], STOP, 1).astype(np.int32)
        return self

    def result(self) -> StepResult:
        return StepResult(self._tokens)

    def reason_to_close(self) -> None:
        return None

    def close(self) -> None:
        pass


def start(work: Work, order: str, args: argparse.Namespace) -> LLM:
    return LLM(args.model, order=order, dtype=args.dtype, load_format=args.load_format, overlap=False, **work.options)


def run(llm: LLM, work: Work) -> float:
    """Run a job, and return the seconds."""
    params = []
    for prompt, length in zip(work.prompts, work.lengths, strict=True):
        most = length if work.are_known else 1600
        seed = len(prompt) + length  # for NoModel
        params.append(SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, stop_token_ids=[STOP], seed=seed))
    before = time.perf_counter()
    llm.generate(work.prompts, params, use_tqdm=False)
    return time.perf_counter() - before


def count(work: Work, order: str, args: argparse.Namespace) -> dict[str, float]:
    """Run a job without a model, and return its counts."""
    with start(work, order, args) as llm:
        llm.engine.runner.close()
        runner = NoModel(llm.engine.config.max_num_seqs)
        llm.engine.runner = runner
        runner.counts["host seconds"] = run(llm, work)
        runner.counts["preemptions"] = llm.stats()["num_preemptions"]
        return runner.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-qwen3", help="as the option of LLM")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the numbers of requests and rows")
    parser.add_argument("--seeds", type=int, default=5, help="count so many drawings of each job")
    parser.add_argument("--seconds", type=int, default=0, metavar="PAIRS", help="measure seconds, in so many pairs")
    parser.add_argument("--only", default="", help="jobs whose name begins so")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    names = [name for name in make_works(args.scale, 0) if name.startswith(args.only)]
    for name in names:
        if not args.seconds:
            works = [make_works(args.scale, seed)[name] for seed in range(args.seeds)]
            sums = {}
            steps = {}
            for order in ("given", "auto"):
                counts = [count(work, order, args) for work in works]
                steps[order] = [one["steps"] for one in counts]
                sums[order] = {key: round(sum(one[key] for one in counts), 2) for key in counts[0]}
            ratios = (f"{key} {sums['auto'][key] / sums['given'][key]:.3f}" for key in ("steps", "tokens", "units"))
            most = max(auto / given for auto, given in zip(steps["auto"], steps["given"], strict=True))
            print(
                f"{name:36s} auto / given: {', '.join(ratios)}; steps of the worst drawing {most:.3f}; "
                f"given {sums['given']}",
                flush=True,
            )
            found[name] = sums
        elif not name.endswith("unknown"):
            work = make_works(args.scale, 0)[name]
            times: dict[str, list[float]] = {"given": [], "auto": []}
            with start(work, "given", args) as given, start(work, "auto", args) as auto:
                turns = [("given", given), ("auto", auto)]
                for llm in (given, auto):
                    run(llm, work._replace(prompts=work.prompts[:8], lengths=[4] * 8))
                for _ in range(args.seconds):
                    for order, llm in turns:
                        llm.reset_prefix_cache()
                        times[order].append(run(llm, work))
                    turns.reverse()
            pairs = [a / b for a, b in zip(times["auto"], times["given"], strict=True)]
            print(
                f"{name:36s} given {statistics.median(times['given']):.2f} s, auto / given by pairs: "
                f"{' '.join(f'{pair:.3f}' for pair in sorted(pairs))}",
                flush=True,
            )
            found[name] = times
    print(json.dumps({"benchmark": "admission", "scale": args.scale, "found": found}))


if __name__ == "__main__":
    main()
