"""Measures what threads gain: a step's time with one and with several, alone and beside a neighbour on each core.

    python benchmarks/evidence/bench_threads.py                         the model in the package, one sequence
    python benchmarks/evidence/bench_threads.py --model qwen3-0.6b --tokens 20 --rounds 3

Each measurement runs in its own process, because libgomp reads GOMP_SPINCOUNT only once. In each round all variants
take turns. The last line is one JSON document.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
THREADS = len(os.sched_getaffinity(0))
VARIANTS: dict[str, dict[str, str]] = {
    "the package's own rule": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
    **{
        f"{THREADS} threads, {spins} rounds": {"OMP_NUM_THREADS": str(THREADS), "GOMP_SPINCOUNT": str(spins)}
        for spins in (10_000, 50_000, 300_000)
    },
}


def measure(model: str, num_seqs: int, tokens: int) -> None:
    """Print the milliseconds of each step as JSON, without the prompts and the first steps. Runs in a child process."""
    from nanovllm import LLM, SamplingParams
    from nanovllm.models.shapes import PRESETS

    load_format = "dummy" if model in PRESETS else "auto"
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    with LLM(model, load_format=load_format, dtype="float32", max_model_len=256, max_num_seqs=num_seqs) as llm:
        for i in range(num_seqs):
            llm.add_request([100 + i] * 16, params)
        times = []
        while not llm.is_finished():
            start = time.perf_counter()
            llm.step()
            times.append(1000 * (time.perf_counter() - start))
    print(json.dumps(times[5:]))


@contextmanager
def run_neighbours(count: int) -> Iterator[None]:
    """Run `count` processes that compute all the time, each bound to one core. Kill them at the end."""
    code = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    cores = sorted(os.sched_getaffinity(0))[:count]
    processes = [subprocess.Popen([sys.executable, "-c", code, str(core)]) for core in cores]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="tiny-qwen3", help="a folder, or a shape such as qwen3-0.6b")
    add("--num-seqs", type=int, default=1, help="sequences at a time")
    add("--tokens", type=int, default=200, help="tokens to generate per sequence")
    add("--rounds", type=int, default=5, help="measurements of each variant")
    add(
        "--only",
        nargs="+",
        choices=("idle", "busy"),
        default=["idle", "busy"],
        help="without or with neighbours on the cores",
    )
    add("--variants", nargs="+", type=int, default=range(len(VARIANTS)), help="the variants to measure, counted from 0")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return measure(args.model, args.num_seqs, args.tokens)
    names = [list(VARIANTS)[i] for i in args.variants]
    own = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in ("model", "num_seqs", "tokens")]
    document: dict[str, dict[str, list[list[float]]]] = {}
    for when in args.only:
        found: dict[str, list[list[float]]] = {name: [] for name in names}
        with run_neighbours(THREADS if when == "busy" else 0):
            for _ in range(args.rounds):
                for name in names:
                    base = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
                    command = [sys.executable, __file__, "--child", *own]
                    environment = base | VARIANTS[name] | {"PYTHONPATH": str(ROOT)}
                    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
        document[when] = found
        print(f"{when}: ms a step; the best run's median, the runs' medians, the best run's sum in s")
        for name, runs in found.items():
            medians = [statistics.median(run) for run in runs]
            all_medians = ", ".join(f"{median:.3f}" for median in medians)
            print(f"  {name:32s} {min(medians):9.3f}   {all_medians}   {min(map(sum, runs)) / 1000:.3f}", flush=True)
    print(json.dumps({"benchmark": "threads", "model": args.model, "num_seqs": args.num_seqs, "times": document}))
    return None


if __name__ == "__main__":
    main()
