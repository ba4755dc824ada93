"""Compares a model's two codes, this engine's and transformers', in one process. They take turns.

    python benchmarks/bench_any_model.py                                 Qwen3-0.6B's shape, random weights
    python benchmarks/bench_any_model.py --model FOLDER --rounds 9

Each work is one call of `generate`: decodes of 1, 8 and 32 sequences, whose prompts have two tokens, and one prompt of
512 tokens. For each work the table has the median milliseconds of both codes, of a step or of the prompt, and the
median and the quartiles of the quotients of pairs. The last line is one JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

GOALS = {"decode 1": 1.35, "decode 8": 1.2, "decode 32": 1.1, "prompt 512": 1.05}
"""The largest quotient that we want, transformers' code / ours."""


def make_works(llm: object, num_steps: int) -> dict[str, Callable[[], float]]:
    """Return {name of a work: a function that does it and returns its seconds}."""
    from nanovllm import SamplingParams

    def seconds(num_seqs: int, num_prompt: int, num_tokens: int) -> float:
        prompts = [[10 + (7 * i + 13 * j) % 600 for j in range(num_prompt)] for i in range(num_seqs)]
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)  # type: ignore[attr-defined]
        return time.perf_counter() - start

    def decode(num_seqs: int) -> float:
        return seconds(num_seqs, 2, num_steps) / num_steps

    return {
        "decode 1": lambda: decode(1),
        "decode 8": lambda: decode(8),
        "decode 32": lambda: decode(32),
        "prompt 512": lambda: seconds(1, 512, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder, or a shape, which gets random weights")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=32, help="decode steps of a call")
    args = parser.parse_args()
    from nanovllm import LLM
    from nanovllm.features.shapes import PRESETS

    options = {
        "load_format": "dummy" if args.model in PRESETS else "auto",
        "dtype": args.dtype,
        "attention_backend": args.attention_backend,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "kvcache_memory_bytes": 1 << 29,
        "enable_prefix_caching": False,
    }
    found: dict[str, dict[str, list[float]]] = {name: {} for name in GOALS}
    with (
        LLM(args.model, model_impl="nanovllm", **options) as ours,
        LLM(args.model, model_impl="transformers", **options) as theirs,
    ):
        codes = {"nanovllm": make_works(ours, args.steps), "transformers": make_works(theirs, args.steps)}
        for works in codes.values():
            for work in works.values():
                work()  # recorded steps and caches are warm from now on
        for number in range(args.rounds):
            for name in GOALS:
                for code in sorted(codes, reverse=bool(number % 2)):
                    found[name].setdefault(code, []).append(codes[code][name]())
        backend = ours.engine.config.attention_backend
        dtype = ours.engine.config.dtype
    print(f"{args.model}, {dtype}, {backend} attention, {args.rounds} rounds")
    print(f"{'':12}{'ours, ms':>12}{'theirs, ms':>12}{'quotient':>10}{'quartiles':>16}{'goal':>7}")
    summary = {}
    for name, goal in GOALS.items():
        own = found[name]["nanovllm"]
        other = found[name]["transformers"]
        quotients = [b / a for a, b in zip(own, other, strict=True)]
        low, middle, high = statistics.quantiles(quotients, n=4) if len(quotients) > 1 else quotients * 3
        medians = [1000 * statistics.median(times) for times in (own, other)]
        print(f"{name:12}{medians[0]:12.2f}{medians[1]:12.2f}{middle:10.3f}{f'{low:.2f} - {high:.2f}':>16}{goal:7.2f}")
        summary[name] = {"quotients": quotients, "goal": goal, "milliseconds": medians}
    print(json.dumps({"model": args.model, "dtype": dtype, "backend": backend, "works": summary}))


if __name__ == "__main__":
    main()
