"""Measures replicas beside one engine that has the whole machine.

    python benchmarks/evidence/bench_replicas.py [--model tiny-qwen3] [--replicas 2] [--requests 512] [--rounds 5]

Both are loaded at the same time. In each round both do the same requests, first the one, then the other. The last line
is JSON: the seconds of each round.
"""

import argparse
import json
import random
import statistics
import time

from nanovllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    draw = random.Random(0)
    prompts = [[draw.randrange(300) for _ in range(draw.randint(100, 300))] for _ in range(options.requests)]
    params = [SamplingParams(max_tokens=draw.randint(100, 300), ignore_eos=True) for _ in prompts]
    num_tokens = sum(each.max_tokens or 0 for each in params)
    engines = {
        count: LLM(options.model, data_parallel_size=count, max_model_len=1024) for count in (1, options.replicas)
    }
    seconds: dict[int, list[float]] = {count: [] for count in engines}
    for _ in range(options.rounds + 1):
        for count, llm in engines.items():
            since = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds[count].append(time.perf_counter() - since)
    for count in seconds:
        del seconds[count][0]  # it filled caches
        median = statistics.median(seconds[count])
        print(f"{count} engines: {median:.2f} s (median), {num_tokens / median:.0f} tokens generated a second")
    print(json.dumps({"requests": options.requests, "tokens": num_tokens, "seconds": seconds}))


if __name__ == "__main__":
    main()
