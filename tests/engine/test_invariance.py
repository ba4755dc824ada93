"""A request gets the same tokens however the engine happens to run it.

All in float32, where another batch shape moves a logit by about 1e-6: the fixture's seeds are such that no two
candidates are that close.
"""

import random
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import SMALL, draw_prompts, save_random
from helpers.variants import PREFIX, REQUESTS, TINY_POOL, VARIANTS, tokens

from nanovllm import LLM, SamplingParams

AT_DEPTH_1 = ["as it is", *(name for name in VARIANTS if "chunks" in name or "preempted" in name)]
"""Variants whose steps are planned otherwise while another one is in flight."""


def run(folder: Path, options: dict[str, Any], depth: int = 1) -> tuple[list[dict[str, Any]], dict[str, int]]:
    with LLM(folder, **SMALL | options) as llm:
        llm.engine.depth = depth
        prompts, params = zip(*REQUESTS, strict=True)
        return llm.generate(prompts, params, use_tqdm=False), llm.stats()


@pytest.fixture(scope="module")
def expected(random_model: Path) -> list[list[int]]:
    """Each request on an engine of its own would do; one that runs them all one after another is quicker."""
    return tokens(run(random_model, {"max_num_seqs": 1, "enable_prefix_caching": False})[0])


@pytest.mark.parametrize(("name", "depth"), [*((name, 2) for name in VARIANTS), *((name, 1) for name in AT_DEPTH_1)])
def test_outputs_are_the_same_however_requests_are_run(
    name: str, depth: int, random_model: Path, expected: list[list[int]]
) -> None:
    options = VARIANTS[name]
    outputs, stats = run(random_model, options, depth)
    assert tokens(outputs) == expected
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_generated_tokens"] == sum(map(len, expected))
    assert stats["num_prompt_tokens"] == sum(len(prompt) for prompt, _ in REQUESTS)
    assert (stats["num_preemptions"] > 0) == ("num_kvcache_blocks" in options)
    assert (stats["num_cached_tokens"] > 0) == options.get("enable_prefix_caching", True) or "128" in str(options)


@pytest.mark.parametrize("depth", [1, 2])
def test_early_ends_do_not_disturb_the_others(depth: int, random_model: Path, expected: list[list[int]]) -> None:
    """Each request ends at a token of its own, in the middle of the others' steps; rows and blocks change hands."""
    cut = [ids[: i % 11 + 1] for i, ids in enumerate(expected)]
    cut = [ids[: ids.index(ids[-1]) + 1] for ids in cut]
    prompts = [prompt for prompt, _ in REQUESTS]
    with LLM(random_model, **SMALL | {"num_kvcache_blocks": 12, "max_num_seqs": 4}) as llm:
        llm.engine.depth = depth
        params = [replace(p, stop_token_ids=[ids[-1]]) for (_, p), ids in zip(REQUESTS, cut, strict=True)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert tokens(outputs) == cut
        assert {o["finish_reason"] for o in outputs} == {"stop"}
        assert llm.stats()["num_generated_tokens"] == sum(map(len, cut))


def test_outputs_follow_their_prompts_in_any_order(random_model: Path, expected: list[list[int]]) -> None:
    """Requests with no seed of their own take one from their number, so they are left out."""
    order = [i for i, (_, params) in enumerate(REQUESTS) if params.temperature == 0 or params.seed is not None]
    random.Random(1).shuffle(order)
    with LLM(random_model, **SMALL) as llm:
        outputs = llm.generate([REQUESTS[i][0] for i in order], [REQUESTS[i][1] for i in order], use_tqdm=False)
    assert tokens(outputs) == [expected[i] for i in order]
    assert [o["prompt_token_ids"] for o in outputs] == [REQUESTS[i][0] for i in order]


def test_a_request_gets_the_same_alone_and_among_64(random_model: Path, expected: list[list[int]]) -> None:
    number = next(i for i, (_, params) in enumerate(REQUESTS) if params.seed is not None)
    prompt, params = REQUESTS[number]
    others = draw_prompts([3 + i % 30 for i in range(63)], seed=5)
    with LLM(random_model, **SMALL, max_num_seqs=64) as llm:
        alone = llm.generate([prompt], params, use_tqdm=False)
        among = llm.generate([*others[:40], prompt, *others[40:]], params, use_tqdm=False)
    assert tokens(alone) == tokens(among[40:41]) == expected[number : number + 1]


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 7}, TINY_POOL], ids=["as it is", "chunks", "preempted"]
)
@pytest.mark.parametrize("depth", [1, 2])
def test_logprobs_are_one_a_token_however_requests_are_run(
    options: dict[str, Any], depth: int, random_model: Path
) -> None:
    outputs, _ = run(random_model, options, depth)
    for output, (_, params) in zip(outputs, REQUESTS, strict=True):
        assert ("logprobs" in output) == (params.logprobs is not None)
        if params.logprobs is not None:
            assert [next(iter(likely)) for likely in output["logprobs"]] == output["token_ids"]


def test_a_new_engine_with_the_same_seed_repeats_itself_and_another_seed_does_not(random_model: Path) -> None:
    free = SamplingParams(temperature=1.0, max_tokens=16)
    runs = []
    for seed in (3, 3, 4):
        with LLM(random_model, **SMALL, seed=seed) as llm:
            runs.append(tokens(llm.generate([PREFIX] * 8, free, use_tqdm=False)))
    assert runs[0] == runs[1] != runs[2]
    assert len(set(map(tuple, runs[0]))) > 4, "requests without a seed draw the same numbers"


@pytest.mark.slow
def test_a_prompt_of_100_k_tokens_takes_little_memory_and_is_cached_whole(tmp_path: Path) -> None:
    """Beside the KV cache, which is there before. The scores of one chunk alone would be 800 MB a head."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 32, "num_hidden_layers": 1}
    save_random(tmp_path, max_position_embeddings=131072, **heads)
    options = {"dtype": "float32", "device": "cpu", "attention_backend": "cpu", "max_num_batched_tokens": 2048}
    short, prompt = draw_prompts([500, 100_000])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(tmp_path, **options, max_model_len=100_100, num_kvcache_blocks=1600, kvcache_block_size=64) as llm:
        llm.generate([short], params, use_tqdm=False)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        computed = llm.generate([prompt], params, use_tqdm=False)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "in KiB"
        cached = llm.generate([prompt], params, use_tqdm=False)
    assert cached[0]["num_cached_tokens"] == 99_968
    assert tokens(cached) == tokens(computed)
