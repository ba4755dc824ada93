"""Multiple choice, ours beside the harness's own `hf` backend: the same pairs of token ids, in turn, in one process.

python benchmarks/evidence/bench_score.py [--contexts 64] [--rounds 3] [--dtype float32]

Needs the extra `eval` with `lm_eval[hf]`. The model has Qwen3-0.6B's shape and random weights.
"""

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from lm_eval.models.huggingface import HFLM

from benchmarks.bench_workload import write_checkpoint
from nanovllm.features.shapes import preset_config
from nanovllm.lm_eval import NanoVLLM, Pair
from nanovllm.models.hub import find_model


def make_pairs(contexts: int, context_len: int, choices: int, choice_len: int, vocab_size: int) -> list[Pair]:
    """Every context with each of its choices; ids drawn with a fixed seed."""
    draw = random.Random(0)

    def ids(count: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(count)]

    return [(None, context, ids(choice_len)) for context in map(ids, [context_len] * contexts) for _ in range(choices)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("contexts", 64), ("context-len", 512), ("choices", 4), ("choice-len", 8), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"(default: {default})")
    parser.add_argument("--dtype", default="float32", help="of both (default: float32)")
    args = parser.parse_args()
    config = preset_config("qwen3-0.6b")
    pairs = make_pairs(args.contexts, args.context_len, args.choices, args.choice_len, config["vocab_size"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(config, getattr(torch, args.dtype), folder)
        for path in find_model("tiny-qwen3").glob("*token*"):  # the harness asks for one; the pairs are ids
            shutil.copy(path, folder)
        hf = HFLM(pretrained=name, dtype=args.dtype, device="cpu", batch_size=8)
        ours = NanoVLLM(name, dtype=args.dtype, device="cpu", max_model_len=args.context_len + args.choice_len)
        seconds: dict[str, list[float]] = {"ours": [], "hf": []}
        for round_number in range(args.rounds):
            # Another first token each round: nothing is left in the prefix cache from the round before.
            fresh = [(None, [round_number, *context[1:]], choice) for _, context, choice in pairs]
            found = {}
            for who, model in (("ours", ours), ("hf", hf)):
                start = time.perf_counter()
                found[who] = model._loglikelihood_tokens(fresh, disable_tqdm=True)
                seconds[who].append(time.perf_counter() - start)
            worst = max(abs(a[0] - b[0]) for a, b in zip(found["ours"], found["hf"], strict=True))
            print(f"round {round_number + 1}: ours {seconds['ours'][-1]:.1f} s, hf {seconds['hf'][-1]:.1f} s; ", end="")
            print(f"log-likelihoods differ by at most {worst:.2g}", flush=True)
        stats = ours.llm.stats()
        share = 1 - stats["num_cached_tokens"] / stats["num_prompt_tokens"]
        ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["hf"], strict=True))
        print(f"{share:.1%} of the prompt tokens were computed; median of ours / hf: {ratio:.2f}")


if __name__ == "__main__":
    main()
