"""Times what the k most likely tokens cost beside scores alone: pairs in turn, in one process.

    python benchmarks/evidence/bench_teach.py tiny-qwen3 --option dtype=float32 --option attention_backend=cpu
    python benchmarks/evidence/bench_teach.py qwen3-0.6b --option load_format=dummy --texts 4 --length 256

Each run scores the same texts of random tokens: once with the log-probabilities of their own tokens, and once with
those of the k most likely ones, too, as arrays. The quotients of the pairs are printed, then their median and their
quartiles. The last line is one JSON document.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.measuring import commit
from nanovllm import LLM, SamplingParams
from nanovllm.features.scoring.arrays import read_arrays


def measure(llm: LLM, prompts: list[list[int]], k: int) -> float:
    """Return the seconds of one run. Nothing of it comes from the prefix cache."""
    llm.reset_prefix_cache()
    requests = llm.prepare_requests(prompts, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=k))
    since = time.perf_counter()
    for _ in llm.run_requests(requests, make_output=read_arrays):
        pass
    return time.perf_counter() - since


def read_option(text: str) -> tuple[str, Any]:
    """Return the name and the value of NAME=VALUE; the value is JSON or else text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--top", type=int, default=64, metavar="K")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="tokens of a text")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--option", type=read_option, action="append", default=[], help="NAME=VALUE, an option of LLM")
    args = parser.parse_args()
    draw = np.random.default_rng(0)
    options = {"max_model_len": args.length, **dict(args.option)}
    with LLM(args.model, **options) as llm:
        prompts = draw.integers(0, llm.engine.config.vocab_size, (args.texts, args.length)).tolist()
        used = {name: getattr(llm.engine.config, name) for name in ("dtype", "device", "attention_backend")}
        for k in (0, args.top):  # the first runs are slower
            measure(llm, prompts[:2], k)
        pairs = []
        for number in range(args.pairs):
            first, second = (0, args.top) if number % 2 else (args.top, 0)
            seconds = {first: measure(llm, prompts, first)}
            seconds[second] = measure(llm, prompts, second)
            pairs.append((seconds[0], seconds[args.top]))
            print(f"{seconds[0]:.2f} s without, {seconds[args.top]:.2f} s with: {seconds[args.top] / seconds[0]:.3f}")
    quartiles = np.quantile([with_top / without for without, with_top in pairs], (0.25, 0.5, 0.75)).round(3).tolist()
    print(f"median {quartiles[1]}, quartiles {quartiles[0]} and {quartiles[2]}")
    print(json.dumps({"commit": commit(), "model": args.model, **used, **vars(args), "quartiles": quartiles}))


if __name__ == "__main__":
    main()
