"""Measures the cost of planning: schedule() and update() without a model, per decoded token.

The sequences decode in lockstep, as in the middle of a benchmark: each step plans all of them, registers full blocks,
takes new ones, and takes in one token each. The target is 0.4 microseconds a token at 256 running sequences,
whatever the number waiting.
"""

import argparse
import json
import statistics
import time

import numpy as np

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.plan import StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.scoring.scoring import Scoring

VOCAB = 151936
MEAN_PROMPT = 100


def microseconds_per_token(num_running: int, num_waiting: int, num_steps: int, block_size: int) -> float:
    """Median over the steps of (schedule + update) / num_running, in microseconds, once everything runs."""
    max_len = 2 * MEAN_PROMPT + num_steps + 2
    blocks = num_running * (-(-max_len // block_size) + 1)
    scheduler = Scheduler(
        BlockManager(blocks, block_size),
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * 2 * MEAN_PROMPT,
        vocab_size=VOCAB,
        make_scoring=Scoring,
    )
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=num_steps + 1)
    for i in range(num_running + num_waiting):
        length = rng.integers(MEAN_PROMPT // 2, MEAN_PROMPT * 3 // 2)  # spreads the steps at which blocks fill up
        prompt = rng.integers(1000, VOCAB, length).tolist()
        eos = frozenset({1, 2})
        scheduler.add(Sequence(i, prompt, params, max_model_len=max_len, eos_token_ids=eos))
    result = StepResult(rng.integers(1000, VOCAB, num_running).astype(np.int32))
    seconds = []
    for _ in range(num_steps):
        start = time.perf_counter()
        batch = scheduler.schedule()
        assert batch is not None and len(batch.seqs) == num_running
        scheduler.update(batch, result)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) / num_running * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="decode steps to time")
    parser.add_argument("--block-size", type=int, default=64, help="tokens a KV block")
    args = parser.parse_args()
    print("running  waiting  us per token  us per step")
    results = []
    for running, waiting in ((1, 10), (16, 10), (64, 10), (256, 10), (256, 100_000), (512, 10)):
        cost = microseconds_per_token(running, waiting, args.steps, args.block_size)
        results.append({"running": running, "waiting": waiting, "us_per_token": round(cost, 4)})
        print(f"{running:7d} {waiting:8d} {cost:13.3f} {cost * running:12.1f}", flush=True)
    print(json.dumps({"benchmark": "control_plane", "block_size": args.block_size, "results": results}))


if __name__ == "__main__":
    main()
