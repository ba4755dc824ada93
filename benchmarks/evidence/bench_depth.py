"""Measures prompts and decode steps at several depths of context, with keys and values in the model's type and in int8.

    python benchmarks/evidence/bench_depth.py --model qwen3-0.6b --depths 512 2048 8192 --num-seqs 1 8 32

The engines live in one process and take turns, and each round begins with another one. A case is NUM_SEQS sequences
of DEPTH tokens. "prompts" is the median of the seconds until every sequence has its first token. "step" is the median
of the milliseconds of the decode steps that follow; its "bytes" are the weights, and the keys and values of all
sequences. "x auto" divides the figures with the model's type by those with int8. The last line is one JSON document.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.measuring import commit
from nanovllm import LLM, SamplingParams
from nanovllm.models.shapes import PRESETS

KINDS = ("auto", "int8")
NUM_DECODES = 24
"""Decode steps of a round. The first two are left out: they may record a step."""


def measure(llm: LLM, num_seqs: int, depth: int) -> tuple[float, list[float]]:
    """Return the seconds of the prompts, and those of each decode step."""
    params = SamplingParams(temperature=0, max_tokens=NUM_DECODES + 1, ignore_eos=True)
    for i in range(num_seqs):
        llm.add_request([10 + (7 * i + 13 * j) % 900 for j in range(depth)], params)
    steps = []
    prompts = 0.0
    while not llm.is_finished():
        since = time.perf_counter()
        _, num_tokens = llm.step()
        seconds = time.perf_counter() - since
        if num_tokens < 0:
            steps.append(seconds)
        else:
            prompts += seconds
    return prompts, steps[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=PRESETS, default="qwen3-0.6b", help="a shape, with random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", help="of the weights")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--max-tokens", type=int, default=70_000, help="leave out cases of more tokens than this")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cases = [(n, d) for n in args.num_seqs for d in args.depths if n * d <= args.max_tokens]
    options: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": args.dtype,
        "quantization": args.quantization,
        "enable_prefix_caching": False,
        "max_num_seqs": max(args.num_seqs),
        "max_model_len": max(args.depths) + NUM_DECODES + 2,
        "num_kvcache_blocks": max(n * ((d + NUM_DECODES) // 64 + 2) for n, d in cases),
    }
    llms = {kind: LLM(args.model, kv_cache_dtype=kind, **options) for kind in KINDS}
    runners: dict[str, Any] = {kind: llm.engine.runner for kind, llm in llms.items()}
    weight_bytes = runners["auto"].sizes.weight_bytes(runners["auto"].dtype, runners["auto"].quantizer)
    token_bytes = {kind: runner.sizes.kv_bytes(runner.kv_dtype) for kind, runner in runners.items()}
    results = []
    print(f"{'case':>12} {'prompts, s':>16} {'x auto':>7} {'step, ms':>16} {'x auto':>7} {'bytes, GB':>12}", flush=True)
    for num_seqs, depth in cases:
        prompts: dict[str, list[float]] = {kind: [] for kind in KINDS}
        steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(args.rounds):
            for kind in KINDS[:: 1 - number % 2 * 2]:
                seconds, decodes = measure(llms[kind], num_seqs, depth)
                prompts[kind].append(seconds)
                steps[kind] += decodes
        prompt = {kind: statistics.median(prompts[kind]) for kind in KINDS}
        step = {kind: statistics.median(steps[kind]) for kind in KINDS}
        read = {kind: weight_bytes + num_seqs * depth * token_bytes[kind] for kind in KINDS}
        results.append({"num_seqs": num_seqs, "depth": depth, "prompts": prompt, "step": step, "bytes": read})
        gain = prompt["auto"] / prompt["int8"]
        step_gain = step["auto"] / step["int8"]
        print(
            f"{num_seqs:4d} x {depth:5d} {prompt['auto']:8.3f}{prompt['int8']:8.3f} {gain:7.3f}"
            f" {step['auto'] * 1e3:8.2f}{step['int8'] * 1e3:8.2f} {step_gain:7.3f}"
            f" {read['auto'] / 1e9:6.2f}{read['int8'] / 1e9:6.2f}",
            flush=True,
        )
    print(json.dumps({"commit": commit(), "arguments": vars(args), "results": results}))


if __name__ == "__main__":
    main()
