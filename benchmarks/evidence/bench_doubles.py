"""Measures a job in which requests come several times, beside one of as many requests that differ.

    python benchmarks/evidence/bench_doubles.py [--lines 10000] [--doubles 0.6] [--rounds 3]

Both jobs have as many lines, of like lengths, and are greedy. Each round runs both, and changes who comes first. The
seconds are those of a job's summary: loading does not count. Nor does a first round, which fills caches. The last line
is JSON: the seconds of each round.
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

from nanovllm import EngineConfig
from nanovllm.apps.jobs.job import Job, Status
from nanovllm.apps.jobs.run import run_job


def write_jobs(folder: Path, num_lines: int, share: float, max_tokens: int) -> None:
    """Write the inputs "distinct" and "doubles". Of the second, `share` of the lines repeat another line."""
    draw = random.Random(0)
    distinct = [[draw.randrange(600) for _ in range(draw.randint(20, 60))] for _ in range(num_lines)]
    num_kept = round(num_lines * (1 - share))
    doubles = distinct[:num_kept] + draw.choices(distinct[:num_kept], k=num_lines - num_kept)
    draw.shuffle(doubles)
    for name, prompts in (("distinct", distinct), ("doubles", doubles)):
        with open(folder / name, "w") as file:
            for prompt in prompts:
                line = {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
                file.write(json.dumps(line) + "\n")


def time_job(folder: Path, name: str, config: EngineConfig) -> tuple[float, int]:
    """Run a job; return its seconds, and how many of its answers are copies."""
    stats = folder / "stats"
    job = Job(str(folder / name), str(folder / "out"), config, config.model, overwrite=True, stats=str(stats))
    if (status := run_job(job)) != Status.OK:
        raise SystemExit(f"the job {name} ended with {status!r}")
    found = json.loads(stats.read_text())
    return found["seconds"], found["num_copied"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--doubles", type=float, default=0.6, help="the share of the lines that repeat another one")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    config = EngineConfig(options.model, max_model_len=256, attention_backend="cpu", device="cpu")
    seconds: dict[str, list[float]] = {"distinct": [], "doubles": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_jobs(folder, options.lines, options.doubles, options.max_tokens)
        for number in range(options.rounds + 1):
            for name in list(seconds)[:: 1 if number % 2 else -1]:
                spent, num_copied = time_job(folder, name, config)
                seconds[name].append(spent)
                print(f"{name}: {spent:.2f} s, {num_copied} of {options.lines} answers are copies")
    for taken in seconds.values():
        del taken[0]
    ratios = [after / before for before, after in zip(*seconds.values(), strict=True)]
    print(f"doubles / distinct: {statistics.median(ratios):.3f} (median), {min(ratios):.3f} to {max(ratios):.3f}")
    print(json.dumps({"lines": options.lines, "doubles": options.doubles, "seconds": seconds}))


if __name__ == "__main__":
    main()
