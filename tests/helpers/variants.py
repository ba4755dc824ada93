"""Requests, and the many ways to run them that must all give the same tokens.

All in float32, where another batch shape moves a logit by about 1e-6: the fixture's seeds are such that no two
candidates are that close.
"""

from typing import Any

from helpers.tiny import draw_prompts
from nanovllm import SamplingParams

PREFIX, *TAILS = draw_prompts([40, 5, 24, 24, 33])
PROMPTS = [
    *draw_prompts([1, 15, 16, 17, 63, 64, 65]),
    *(PREFIX + tail for tail in TAILS),
    PREFIX + TAILS[1],
    PREFIX[:32],
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=28),
    SamplingParams(temperature=1.0, seed=7, max_tokens=28),
    SamplingParams(temperature=0.7, top_p=0.8, max_tokens=20),  # seeded by the engine's seed and its own number
    SamplingParams(temperature=1.3, top_k=20, min_p=0.05, seed=11, max_tokens=25, logprobs=2),
]
REQUESTS = [(prompt, PARAMS[i % 3]) for i, prompt in enumerate(PROMPTS)] + [(PREFIX, PARAMS[3])]
TINY_POOL = {"num_kvcache_blocks": 9}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "every prompt in chunks": {"max_num_batched_tokens": 7},
    "one token a step": {"max_num_batched_tokens": 1},
    "a pool so small that sequences are preempted": TINY_POOL,
    "preempted, without prefix cache": TINY_POOL | {"enable_prefix_caching": False},
    "preempted and in chunks": TINY_POOL | {"max_num_batched_tokens": 19},
    "without prefix cache": {"enable_prefix_caching": False},
    "one at a time": {"max_num_seqs": 1},
    "three at a time": {"max_num_seqs": 3},
    "64 at a time": {"max_num_seqs": 64},
    "larger blocks": {"kvcache_block_size": 32},
    "a block for a whole sequence": {"kvcache_block_size": 128},
}


def tokens(outputs: list[dict[str, Any]]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]
