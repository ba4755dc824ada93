"""Blocks: in exactly one place each, shared by equal prefixes, evicted in the right order."""

import random

import pytest
from helpers.fakes import three_bit_digest
from helpers.integrity import check_blocks, check_contents
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.block_manager import BlockManager, prefix_digest
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


def make_seq(tokens):
    return Sequence(0, tokens, SamplingParams(), max_model_len=1000)


def hold(manager, tokens, register=True):
    """Admit a sequence: share the hits, take the rest, and make the full blocks findable."""
    seq = make_seq(tokens)
    hits = manager.find_prefix(seq)
    count = manager.blocks_for(len(tokens)) - len(hits)
    if not manager.can_take(count, hits):
        return None
    manager.reference(hits)
    seq.block_table = hits + manager.take(count)
    if register:
        for index in range(len(hits), len(tokens) // manager.block_size):
            if not manager.register(seq, index):
                break
    check_blocks(manager)
    return seq


def let_go(manager, seq):
    manager.release(seq.block_table)
    check_blocks(manager)


@settings(max_examples=500, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(1, 12),
    block_size=st.sampled_from([1, 2, 4]),
    digest=st.sampled_from([prefix_digest, three_bit_digest]),
)
def test_any_order_of_holding_and_releasing_keeps_every_block_in_one_place(seed, num_blocks, block_size, digest):
    rng = random.Random(seed)
    manager = BlockManager(num_blocks, block_size)
    manager._digest = digest
    held = []
    for _ in range(40):
        if held and rng.random() < 0.5:
            let_go(manager, held.pop(rng.randrange(len(held))))
            continue
        seq = hold(manager, [rng.randrange(2) for _ in range(rng.randrange(1, 3 * block_size + 2))])
        if seq is not None:
            held.append(seq)
            check_contents(manager, seq)
    for seq in held:
        let_go(manager, seq)
    assert manager.num_free == num_blocks


def test_worthless_blocks_are_reused_before_cached_ones():
    manager = BlockManager(4, 2)
    cached = hold(manager, [1, 2, 3])
    partial = hold(manager, [9])
    kept = cached.block_table[0]
    worthless = [cached.block_table[1], partial.block_table[0]]
    let_go(manager, cached)
    let_go(manager, partial)
    assert set(worthless) < set(manager.take(3))
    assert manager.take(1) == [kept]


def test_least_recently_used_goes_first_and_the_tail_of_a_prefix_before_its_head():
    manager = BlockManager(4, 1)
    first = hold(manager, [1, 2])
    second = hold(manager, [3, 4])
    tables = first.block_table, second.block_table
    let_go(manager, first)
    let_go(manager, second)
    again = hold(manager, [1, 9], register=False)  # revives the head of the first, and evicts the oldest: its tail
    assert again.block_table == [tables[0][0], tables[0][1]]
    assert manager.take(2) == [tables[1][1], tables[1][0]]


def test_hits_are_not_evicted_by_the_allocation_that_found_them():
    manager = BlockManager(3, 1)
    let_go(manager, hold(manager, [1, 2]))
    seq = hold(manager, [1, 2, 3])
    assert len(set(seq.block_table)) == 3
    assert hold(manager, [7]) is None


def test_a_recycled_block_is_not_found_by_its_old_content():
    manager = BlockManager(2, 2)
    let_go(manager, hold(manager, [1, 2]))
    let_go(manager, hold(manager, [5, 6, 7]))
    assert manager.find_prefix(make_seq([1, 2, 3])) == []


def test_equal_tokens_behind_another_prefix_are_no_hit():
    manager = BlockManager(8, 2)
    hold(manager, [1, 1, 5, 5, 0])
    assert len(manager.find_prefix(make_seq([2, 2, 5, 5, 0]))) == 0
    assert len(manager.find_prefix(make_seq([1, 1, 5, 5, 9]))) == 2


def test_a_digest_held_by_other_content_ends_registration():
    manager = BlockManager(8, 1)
    manager._digest = lambda parent, tokens: b"same"
    first = make_seq([1, 2])
    first.block_table = manager.take(2)
    assert manager.register(first, 0)
    assert not manager.register(first, 1)
    second = make_seq([3, 4])
    second.block_table = manager.take(2)
    assert not manager.register(second, 0)
    assert manager.find_prefix(make_seq([3, 4])) == []


def hold_apart(manager, tokens):
    """Admit a sequence that computes all of its blocks, as one that is scored does, and make them findable."""
    seq = make_seq(tokens)
    seq.block_table = manager.take(len(tokens))
    for index in range(len(tokens)):
        assert manager.register(seq, index)
    return seq


def evict_all(manager):
    """Give out every block that no sequence has, and take it back empty."""
    manager.release(manager.take(manager.num_free))


def test_a_child_is_found_after_its_own_parent_and_not_after_another_with_the_parents_digest():
    manager = BlockManager(8, 1)
    manager._digest = lambda parent, tokens: bytes([len(parent)]) + tokens[1:]  # 1 and 2 have the same digest
    parent = hold(manager, [1])
    child = hold_apart(manager, [1, 5])
    let_go(manager, parent)
    evict_all(manager)
    other = hold(manager, [2])
    assert manager.find_prefix(make_seq([2, 5, 0])) == other.block_table
    assert manager.find_prefix(make_seq([1, 5, 0])) == []
    let_go(manager, other)
    evict_all(manager)
    parent = hold(manager, [1])
    assert manager.find_prefix(make_seq([1, 5, 0])) == [*parent.block_table, child.block_table[1]]


def test_a_long_prefix_that_was_evicted_and_computed_anew_is_found_with_the_child_that_stayed():
    prefix = list(range(3000))
    manager = BlockManager(2 * len(prefix) + 2, 1)
    first = hold(manager, prefix)
    child = hold_apart(manager, [*prefix, 5])
    let_go(manager, first)
    evict_all(manager)
    anew = hold(manager, prefix)
    assert manager.find_prefix(make_seq([*prefix, 5, 0])) == [*anew.block_table, child.block_table[-1]]


def test_forgetting_all_leaves_the_blocks_and_no_content():
    manager = BlockManager(4, 2)
    let_go(manager, hold(manager, [1, 2, 3, 4]))
    held = hold(manager, [7, 8, 9])
    manager.forget_all()
    check_blocks(manager)
    assert manager.find_prefix(make_seq([1, 2, 3, 4])) == []
    let_go(manager, held)
    assert manager.num_free == 4


def test_giving_back_twice_and_taking_too_many_are_impossible_states():
    manager = BlockManager(2, 2)
    blocks = manager.take(1)
    manager.release(blocks)
    with pytest.raises(RuntimeError, match="given back"):
        manager.release(blocks)
    with pytest.raises(RuntimeError, match=r"3 blocks wanted, .* of 2"):
        manager.take(3)
