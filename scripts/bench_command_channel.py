"""What it costs to tell the other ranks of a step: packing the plan, and writing it into the ring.

    python scripts/bench_command_channel.py [--model tiny-qwen3] [--num-seqs 256] [--ranks 2]

Runs a tiny random model on the CPU, so that nearly all of a step is overhead. The last line is JSON.
"""

import argparse
import json

from nanovllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    options = {"max_num_seqs": args.num_seqs, "max_model_len": 256, "kvcache_block_size": 16}
    blocks = args.num_seqs * 16
    with LLM(
        args.model,
        device="cpu",
        tensor_parallel_size=args.ranks,
        num_kvcache_blocks=blocks,
        **options,
    ) as llm:
        params = SamplingParams(max_tokens=128, ignore_eos=True)
        runner, steps = llm.engine.runner, 0
        llm.generate([[1, 2, 3]], params, use_tqdm=False)
        seconds, steps = runner.command_seconds, llm.stats()["num_steps"]
        prompts = [[1 + i % 7, 2, 3] for i in range(args.num_seqs)]
        llm.generate(prompts, params, use_tqdm=False)
        steps = llm.stats()["num_steps"] - steps
        each = (runner.command_seconds - seconds) / steps
    print(f"{each * 1e6:.1f} microseconds a step in the command channel, {args.num_seqs} sequences, {args.ranks} ranks")
    print(json.dumps({"command_microseconds": each * 1e6, "num_seqs": args.num_seqs, "ranks": args.ranks}))


if __name__ == "__main__":
    main()
