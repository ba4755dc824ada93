"""Compares this checkout with another one, in two processes that live side by side and take turns.

    python benchmarks/evidence/bench_pair.py --before CHECKOUT                       prompts, a batch, one sequence
    python benchmarks/evidence/bench_pair.py --before CHECKOUT --model tiny-qwen3 --dtype float32 --work 32x16x24
    python benchmarks/evidence/bench_pair.py --before CHECKOUT --model tiny-qwen3 --regex '[a-z ]{400}' --work 32x16x24
    python benchmarks/evidence/bench_pair.py --before . --kv-cache-dtype int8        an option alone

A machine that drifts drifts for both. Each round changes who comes first. For each work the table has the seconds and
the processor time of one call of `generate`. With OMP_NUM_THREADS=1 the processor time hardly depends on what else
runs. The last line is one JSON document.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORK = ["8x64x1", "32x4x9", "1x16x16"]


def answer_calls(args: argparse.Namespace) -> None:
    """Load the model; then, for each line of stdin, do every work and print its times. Runs in a child."""
    from nanovllm import LLM, SamplingParams, StructuredOutputsParams

    structured = None if args.regex is None else StructuredOutputsParams(regex=args.regex)

    def measure(work: str) -> tuple[float, float]:
        num_seqs, num_prompt_tokens, num_tokens = map(int, work.split("x"))
        prompts = [[10 + (7 * i + 13 * j) % 900 for j in range(num_prompt_tokens)] for i in range(num_seqs)]
        params = SamplingParams(
            temperature=0,
            max_tokens=num_tokens,
            ignore_eos=structured is None,
            logprobs=args.logprobs,
            structured_outputs=structured,
        )
        start = time.perf_counter()
        start_processor = time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start, time.process_time() - start_processor

    is_shape = args.model != "tiny-qwen3" and not Path(args.model).is_dir()
    longest = max(sum(map(int, work.split("x")[1:])) for work in args.work)
    options: dict[str, Any] = {"max_model_len": max(longest, 512)}
    options |= {"max_num_seqs": 64, "num_kvcache_blocks": 200, "enable_prefix_caching": False}
    if args.child == "now":
        options["kv_cache_dtype"] = args.kv_cache_dtype
    if args.quantization is not None:
        options["quantization"] = args.quantization
    with LLM(args.model, load_format="dummy" if is_shape else "auto", dtype=args.dtype, **options) as llm:
        for work in args.work:
            measure(work)
        print("ready", flush=True)
        for _ in sys.stdin:
            print(json.dumps([measure(work) for work in args.work]), flush=True)


def start_child(name: str, root: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", name, *sys.argv[1:]]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(child: subprocess.Popen[str]) -> list[list[float]]:
    """Return the seconds and the processor time of each work."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write("\n")
    child.stdin.flush()
    times: list[list[float]] = json.loads(child.stdout.readline())
    return times


def print_table(works: list[str], found: dict[str, list[list[list[float]]]]) -> None:
    """Print the quotients now / before of each work: by the best round, the first quartile, the median, and pairs."""
    for index, work in enumerate(works):
        for kind, name in enumerate(("seconds", "processor")):
            before = [times[index][kind] for times in found["before"]]
            now = [times[index][kind] for times in found["now"]]
            quartiles = statistics.quantiles(now, n=4)[0] / statistics.quantiles(before, n=4)[0]
            medians = statistics.median(now) / statistics.median(before)
            pairs = statistics.median(a / b for a, b in zip(now, before, strict=True))
            print(
                f"{work:10s} {name:9s} medians {statistics.median(before):.4f}, now {statistics.median(now):.4f}; "
                f"now / before: best {min(now) / min(before):.3f}, quartile {quartiles:.3f}, median {medians:.3f}, "
                f"median of pairs {pairs:.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--before", type=Path, required=True, help="the other checkout")
    add("--model", default="qwen3-0.6b", help="a folder, tiny-qwen3, or a shape")
    add("--dtype", default="bfloat16")
    add("--quantization", help="as the option of LLM, such as int8")
    add("--logprobs", type=int, help="as in SamplingParams")
    add("--regex", help="outputs must match it, so every step has masks; let it be long, since they end where it does")
    add("--work", nargs="+", default=WORK, metavar="SEQSxPROMPTxTOKENS", help="sequences, prompt tokens, output tokens")
    add("--seconds", type=float, default=110, help="begin no further round after this time, counted from loading")
    add("--kv-cache-dtype", default="auto", help="an option of LLM for this checkout; the other one has auto")
    add("--child", choices=("before", "now"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        return answer_calls(args)
    roots = {"before": args.before, "now": ROOT}
    children = {name: start_child(name, root) for name, root in roots.items()}
    found: dict[str, list[list[list[float]]]] = {name: [] for name in children}
    try:
        for child in children.values():
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                raise RuntimeError("a child could not load the model")
        start = time.monotonic()
        order = list(children)
        while time.monotonic() - start < args.seconds or len(found["now"]) < 2:
            for name in order:
                found[name].append(ask(children[name]))
            order.reverse()
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    print(f"{len(found['now'])} rounds")
    print_table(args.work, found)
    print(json.dumps({"benchmark": "pair", "model": args.model, "work": args.work, "times": found}))
    return None


if __name__ == "__main__":
    main()
