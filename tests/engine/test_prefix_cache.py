"""KV of equal prefixes is computed once, kept while there is room, and never mistaken for other KV."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from helpers.integrity import check_blocks
from helpers.tiny import BLOCK, VOCAB_SIZE, draw_prompts

from nanovllm import LLM, SamplingParams
from nanovllm.engine.block_manager import prefix_digest

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def make(open_llm: Callable[..., LLM]) -> Callable[..., LLM]:
    return partial(open_llm, max_model_len=12 * BLOCK, num_kvcache_blocks=64)


@pytest.fixture
def llm(make: Callable[..., LLM]) -> LLM:
    return make()


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> tuple[list[dict[str, Any]], int]:
    """The outputs, and how many prompt tokens the model computed (each sampled token but the last adds one)."""
    computed = 0
    launch = llm.engine.runner.launch

    def watch(plan: Any, *edits: Any) -> Any:
        nonlocal computed
        computed += plan.num_tokens
        return launch(plan, *edits)

    llm.engine.runner.launch = watch  # type: ignore[method-assign]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.runner.launch = launch  # type: ignore[method-assign]
    return outputs, computed - sum(len(o["token_ids"]) - 1 for o in outputs)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 3])
def test_a_second_identical_prompt_computes_one_block_or_less(length: int, llm: LLM) -> None:
    """Also where the prompt fills its blocks: all of it is cached then, and its last block is computed anew."""
    (prompt,) = draw_prompts([length])
    (first,), all_of_it = generate(llm, [prompt])
    (second,), computed = generate(llm, [prompt])
    assert (all_of_it, first["num_cached_tokens"]) == (length, 0)
    assert computed == length - second["num_cached_tokens"]
    assert 1 <= computed <= BLOCK
    assert second["token_ids"] == first["token_ids"]


def test_the_same_prefix_inside_one_batch_is_computed_once(llm: LLM, make: Callable[..., LLM]) -> None:
    prefix, *tails = draw_prompts([4 * BLOCK, 5, 5, 20, 1])
    prompts = [prefix + tail for tail in tails]
    outputs, computed = generate(llm, prompts)
    assert computed == len(prefix) + sum(map(len, tails))
    assert sorted(o["num_cached_tokens"] for o in outputs) == [0, 4 * BLOCK, 4 * BLOCK, 4 * BLOCK]
    apart, _ = generate(make(enable_prefix_caching=False), prompts)
    assert [o["token_ids"] for o in outputs] == [o["token_ids"] for o in apart]


def test_a_prefix_that_a_batch_computes_in_chunks_is_computed_once(make: Callable[..., LLM]) -> None:
    prefix, *tails = draw_prompts([6 * BLOCK, 3, 3, 3])
    _, computed = generate(make(max_num_batched_tokens=40), [prefix + tail for tail in tails])
    assert computed == 6 * BLOCK + 9


def test_generated_tokens_are_cached_for_the_next_turn(llm: LLM, make: Callable[..., LLM]) -> None:
    """All but the last generated token have been computed, so every full block of them can be found."""
    question, more = draw_prompts([BLOCK + 5, 7])
    (first,), _ = generate(llm, [question], SamplingParams(temperature=0, max_tokens=3 * BLOCK))
    conversation = question + first["token_ids"] + more
    (second,), _ = generate(llm, [conversation])
    known = len(question) + len(first["token_ids"]) - 1
    assert second["num_cached_tokens"] == known // BLOCK * BLOCK
    (afresh,), _ = generate(make(), [conversation])
    assert second["token_ids"] == afresh["token_ids"]


def test_a_hit_ends_with_the_first_block_that_differs(llm: LLM) -> None:
    (prompt,) = draw_prompts([5 * BLOCK])
    generate(llm, [prompt])
    for changed in (0, 2 * BLOCK + 1, 4 * BLOCK - 1):
        other = [*prompt[:changed], (prompt[changed] + 1) % VOCAB_SIZE, *prompt[changed + 1 :]]
        (output,), _ = generate(llm, [other])
        assert output["num_cached_tokens"] == changed // BLOCK * BLOCK


def test_the_same_block_after_another_prefix_is_no_hit(llm: LLM) -> None:
    a, b, shared = draw_prompts([BLOCK, BLOCK, 3 * BLOCK])
    generate(llm, [a + shared])
    (output,), _ = generate(llm, [b + shared])
    assert output["num_cached_tokens"] == 0


def test_the_least_recently_used_is_evicted_first_its_tail_before_its_head(make: Callable[..., LLM]) -> None:
    """12 blocks hold two prompts of four; a third of four evicts what was used longest ago, and no more."""
    one = SamplingParams(temperature=0, max_tokens=1)
    a, b, c = draw_prompts([4 * BLOCK] * 3)
    llm = make(num_kvcache_blocks=12)
    for prompt in (a, b, c, a):  # using `a` again leaves `b` the oldest
        generate(llm, [prompt], one)
    (new,) = draw_prompts([2 * BLOCK], seed=9)
    generate(llm, [new], one)
    cached = {name: generate(llm, [prompt], one)[0][0]["num_cached_tokens"] for name, prompt in (("b", b), ("a", a))}
    assert cached == {"b": 2 * BLOCK, "a": 3 * BLOCK}


def test_without_prefix_caching_nothing_is_cached(make: Callable[..., LLM]) -> None:
    llm = make(enable_prefix_caching=False)
    prompts = draw_prompts([50]) * 2
    outputs, computed = generate(llm, prompts)
    assert computed == 100
    assert [o["num_cached_tokens"] for o in outputs] == [0, 0]
    assert llm.stats()["num_cached_tokens"] == 0


def test_stats_count_cached_and_prompt_tokens_over_all_calls(llm: LLM) -> None:
    before = llm.stats()
    prompts = draw_prompts([2 * BLOCK + 1, 3 * BLOCK, 5])
    for calls in range(1, 4):
        outputs, _ = generate(llm, prompts)
        stats = llm.stats()
        assert stats["num_prompt_tokens"] == calls * sum(map(len, prompts))
        assert stats["num_generated_tokens"] == calls * 8 * len(prompts)
        assert stats["num_cached_tokens"] - before["num_cached_tokens"] == sum(o["num_cached_tokens"] for o in outputs)
        assert stats["num_free_blocks"] == stats["num_blocks"] == 64
        before = stats


def test_colliding_digests_never_serve_wrong_kv(make: Callable[..., LLM]) -> None:
    """With 3 bits of digest nearly every look-up meets other content."""
    turns = draw_prompts([3 * BLOCK + 5] * 12) * 2
    expected, _ = generate(make(enable_prefix_caching=False), turns)
    llm = make(num_kvcache_blocks=64)
    manager = llm.engine.scheduler.block_manager
    manager._digest = lambda parent, tokens: bytes([prefix_digest(parent, tokens)[0] & 7])
    outputs = [output for pair in pairwise([0, 5, 11, 24]) for output in generate(llm, turns[slice(*pair)])[0]]
    assert [o["token_ids"] for o in outputs] == [o["token_ids"] for o in expected]
    assert any(o["num_cached_tokens"] for o in outputs)
    check_blocks(manager)


def test_a_preempted_request_reports_what_was_cached_when_it_first_came_in(make: Callable[..., LLM]) -> None:
    """Its own blocks are often still there when it comes back; that is no hit of its prompt."""
    prompts = draw_prompts([2 * BLOCK + 1] * 6)
    llm = make(num_kvcache_blocks=14)
    outputs, _ = generate(llm, prompts, SamplingParams(temperature=0, max_tokens=5 * BLOCK))
    assert llm.stats()["num_preemptions"] > 0
    assert [o["num_cached_tokens"] for o in outputs] == [0] * 6
