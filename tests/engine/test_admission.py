"""Requests are admitted in the order in which they arrived, whatever their lengths and whatever else happens."""

import random

import pytest
from helpers.fakes import make_engine

from nanovllm.sampling_params import SamplingParams


def admitted_order(engine, prompts, max_tokens=4):
    """Add all prompts and run them; returns the numbers of the sequences, each time that one is admitted."""
    for prompt in prompts:
        engine.add(engine.prepare(prompt, SamplingParams(max_tokens=max_tokens, seed=0)))
    order = []
    resident = []
    while engine.has_work:
        engine.step()
        running = [seq.seq_id for seq in engine.scheduler.running]
        order += [number for number in running if number not in resident]
        resident = running
    return order


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_sequences_are_admitted_in_the_order_of_their_arrival(depth, max_num_seqs):
    draw = random.Random(max_num_seqs)
    prompts = [[draw.randrange(16) for _ in range(draw.randint(1, 24))] for _ in range(20)]
    engine = make_engine(max_num_seqs=max_num_seqs, num_blocks=64, depth=depth)
    assert admitted_order(engine, prompts) == list(range(20))


def test_a_short_prompt_does_not_overtake_a_long_one_that_lacks_blocks():
    """The long prompt finds no blocks while the first one runs. The short one would find some, and waits."""
    engine = make_engine(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=64)
    assert admitted_order(engine, [[1] * 14, [2] * 20, [3] * 2], max_tokens=2) == [0, 1, 2]


def test_a_preempted_sequence_is_admitted_before_all_who_wait():
    engine = make_engine(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=64, caching=False)
    order = admitted_order(engine, [[1] * 10, [2] * 10, [3], [4]], max_tokens=14)
    assert engine.stats()["num_preemptions"] == 1
    assert order == [0, 1, 1, 2, 3]
