"""Measures decode steps beside the time to read their bytes: both in turn, because memory's rate drifts within seconds.

    python benchmarks/evidence/bench_decode.py --quantization none int8 --num-seqs 1 8 32

One process has an engine for each quantization. In each round the threads read as many bytes as the weights of the
first engine have, and then every engine makes one step; each round begins with another engine. "of the floor" is the
median, over the rounds, of the time in which that round's rate reads all weights, divided by the time of the step. It
says nothing where arithmetic is the limit, and where a step does not read all weights, as of a model with experts.
"x first" compares the medians with the first engine's. The last line is one JSON document.
"""

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.measuring import commit
from nanovllm import LLM, SamplingParams
from nanovllm.features.shapes import PRESETS

INPUT_LEN = 32
FIRST_STEPS = 4
"""Steps before the measured ones: of the prompts, and those that record a step."""


def count_weights(llm: LLM) -> int:
    """Return the bytes of the weights."""
    runner: Any = llm.engine.runner
    return int(runner.sizes.weight_bytes(runner.dtype, runner.quantizer))


def read(pool: ThreadPoolExecutor, parts: list[Tensor]) -> float:
    """Let each thread sum its part; return the bytes a second."""
    since = time.perf_counter()
    list(pool.map(torch.sum, parts))
    return sum(part.nbytes for part in parts) / (time.perf_counter() - since)


def measure(llms: dict[str, LLM], parts: list[Tensor], num_seqs: int, rounds: int) -> dict[str, Any]:
    """Return the rates of reading, and the seconds of each engine's steps."""
    params = SamplingParams(temperature=0.6, max_tokens=rounds + FIRST_STEPS + 1, ignore_eos=True)
    for llm in llms.values():
        for i in range(num_seqs):
            llm.add_request([10 + (7 * i + 13 * j) % 900 for j in range(INPUT_LEN)], params)
        for _ in range(FIRST_STEPS):
            llm.step()
    seconds: dict[str, list[float]] = {name: [] for name in llms}
    rates = []
    names = list(llms)
    with ThreadPoolExecutor(len(parts), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for i in range(rounds):
            rates.append(read(pool, parts))
            for name in names[i % len(names) :] + names[: i % len(names)]:
                since = time.perf_counter()
                llms[name].step()
                seconds[name].append(time.perf_counter() - since)
    for llm in llms.values():
        while not llm.is_finished():
            llm.step()
    return {"rates": rates, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="qwen3-0.6b", help="a folder, or a shape with random weights")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--quantization", nargs="+", default=["none", "int8"], help="one engine for each; none: unquantised")
    add("--num-seqs", type=int, nargs="+", default=[1, 8, 32], help="sequences at a time")
    add("--rounds", type=int, default=100, help="of each number of sequences")
    args = parser.parse_args()
    options: dict[str, Any] = {"dtype": args.dtype, "max_num_seqs": max(args.num_seqs), "kvcache_memory_bytes": 1 << 30}
    options |= {
        "load_format": "dummy" if args.model in PRESETS else "auto",
        "max_model_len": INPUT_LEN + args.rounds + 8,
    }
    options |= {"enable_prefix_caching": False}
    llms = {
        name: LLM(args.model, quantization=None if name == "none" else name, **options) for name in args.quantization
    }
    weights = {name: count_weights(llm) for name, llm in llms.items()}
    parts = [*torch.ones(next(iter(weights.values())) // 4).chunk(torch.get_num_threads())]
    found = {}
    for num_seqs in args.num_seqs:
        of = found[num_seqs] = measure(llms, parts, num_seqs, args.rounds)
        rate = statistics.median(of["rates"])
        print(f"{num_seqs} sequences, {args.rounds} rounds, reads {rate / 1e9:.1f} GB/s (median)")
        first = statistics.median(of["seconds"][args.quantization[0]])
        for name, seconds in of["seconds"].items():
            step = statistics.median(seconds)
            shares = [weights[name] / r / s for r, s in zip(of["rates"], seconds, strict=True)]
            share = 100 * statistics.median(shares)
            times = f"step {1000 * step:7.2f} ms, lowest {1000 * min(seconds):7.2f}; {num_seqs / step:6.1f} tok/s"
            print(f"  {name:14} {times}; {share:3.0f} % of the floor; {first / step:.2f} x first", flush=True)
    document = {"benchmark": "decode", "model": args.model, "dtype": args.dtype, "commit": commit()}
    print(json.dumps(document | {"weights": weights, "found": found}))
    for llm in llms.values():
        llm.close()


if __name__ == "__main__":
    main()
