"""Measures what threads gain or cost, alone and beside other processes that compute all the time.

    python benchmarks/evidence/bench_threads.py                             the model in the package, 8 x 20 tokens
    python benchmarks/evidence/bench_threads.py --model qwen3-0.6b --num-seqs 4 --tokens 12 --before CHECKOUT

Each variant is a process of its own, because torch's threads read GOMP_SPINCOUNT only once. All load their model
first. Then they take turns, so that each round measures all of them beside the same neighbours. The table has the
seconds of one call of `generate`. The last line is one JSON document.
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
SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "spin 0": {"GOMP_SPINCOUNT": "0"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def answer_calls(args: argparse.Namespace) -> None:
    """Load the model; then, for each line of stdin, print the seconds that `generate` takes. Runs in a child."""
    from nanovllm import LLM, SamplingParams

    is_shape = args.model != "tiny-qwen3" and not Path(args.model).is_dir()
    load_format = "dummy" if is_shape else "auto"
    options = {"dtype": args.dtype, "attention_backend": args.backend, "max_num_seqs": args.num_seqs}
    options |= {"max_model_len": 1024, "num_kvcache_blocks": 64, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    with LLM(args.model, load_format=load_format, **options) as llm:
        prompts = [[100 + i] * args.prompt for i in range(args.num_seqs)]
        llm.generate(prompts, params, use_tqdm=False)
        print("ready", flush=True)
        for _ in sys.stdin:
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            print(time.perf_counter() - start, flush=True)


def start_child(root: Path, settings: dict[str, str]) -> subprocess.Popen[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, __file__, "--child", *sys.argv[1:]]
    environment = base | settings | {"PYTHONPATH": str(root)}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(child: subprocess.Popen[str]) -> float:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    return float(child.stdout.readline())


@contextmanager
def run_neighbours(count: int) -> Iterator[None]:
    """Run `count` processes that compute all the time. Kill them at the end."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="tiny-qwen3", help="a folder, or a shape such as qwen3-0.6b")
    add("--dtype", default="auto")
    add("--backend", default="auto", help="attention_backend")
    add("--num-seqs", type=int, default=8, help="sequences at a time")
    add("--prompt", type=int, default=16, help="tokens of each prompt")
    add("--tokens", type=int, default=20, help="tokens to generate per sequence")
    add("--rounds", type=int, default=5, help="measurements of each variant")
    add("--loads", type=int, nargs="+", default=[0, 2, 4], help="numbers of other processes")
    add("--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS), help="of this checkout")
    add("--before", type=Path, help="another checkout, measured, too")
    add("--before-settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS), help="of that checkout")
    add("--pairs", action="store_true", help="measure both checkouts as they are, and no other setting")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.child:
        return answer_calls(args)
    if args.pairs:
        args.settings = args.before_settings = ["as it is"]
    children = {name: start_child(ROOT, SETTINGS[name]) for name in args.settings}
    if args.before is not None:
        children |= {f"before, {name}": start_child(args.before, SETTINGS[name]) for name in args.before_settings}
    document: dict[int, dict[str, list[float]]] = {}  # by load and variant
    try:
        for child in children.values():
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                raise RuntimeError("a child could not load the model")
        for load in args.loads:
            found: dict[str, list[float]] = {name: [] for name in children}
            with run_neighbours(load):
                for _ in range(args.rounds):
                    for name, child in children.items():
                        found[name].append(ask(child))
            document[load] = found
            print(f"beside {load} processes: seconds of a call; the median, then all")
            for name, times in found.items():
                every = ", ".join(f"{seconds:.3f}" for seconds in times)
                print(f"  {name:20s} {statistics.median(times):8.3f}   {every}", flush=True)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    print(json.dumps({"benchmark": "threads", "model": args.model, "times": document}))
    return None


if __name__ == "__main__":
    main()
