"""The control plane around a device without a model: whatever happens, every request gets its own tokens."""

import inspect
import random
import re
import signal
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.fakes import VOCAB, expected_scores, expected_tokens, found_scores, make_engine, three_bit_digest
from helpers.integrity import check_scheduler
from helpers.traces import run_trace, traces
from hypothesis import example, given, settings

from nanovllm.engine.plan import LAST_TOKEN, StepPlan
from nanovllm.sampling_params import SamplingParams


def make_collision():
    """A trace at whose end a block's parent was evicted, and another block with the parent's digest has its place."""
    config = {
        "block_size": 2,
        "max_model_len": 8,
        "num_blocks": 6,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 3,
        "caching": True,
        "digest": three_bit_digest,
        "eos": frozenset(),
    }
    requests = [
        ([0, 1], SamplingParams(max_tokens=1, seed=0, prompt_logprobs=0), None, 0, None),
        ([11, 1], SamplingParams(max_tokens=6, seed=2), None, 8, None),
        ([0], SamplingParams(max_tokens=7, seed=1), None, 7, None),
        ([0], SamplingParams(max_tokens=4, seed=0), None, 0, None),
    ]
    return config, requests


@pytest.mark.parametrize("depth", [1, 2, 3])
@settings(max_examples=100, deadline=None)
@given(trace=traces())
@example(trace=make_collision())
def test_every_request_gets_its_own_tokens_and_everything_is_freed(depth, trace):
    config, requests = trace
    seqs, engine = run_trace(config, requests, depth)
    for i, (prompt, params, pair, _, aborted) in enumerate(requests):
        tokens, reason = expected_tokens(prompt, params, params.seed, config["eos"], config["max_model_len"], pair)
        if seqs[i].finish_reason == "abort":
            assert aborted is not None
            assert tokens[: len(seqs[i].output_token_ids)] == seqs[i].output_token_ids
        else:
            assert (seqs[i].output_token_ids, seqs[i].finish_reason) == (tokens, reason)
    expected = [expected_scores(prompt, params) for prompt, params, *_ in requests]
    for i, scores in enumerate(expected):
        if (found := found_scores(seqs[i])) != scores:
            assert seqs[i].finish_reason == "abort" and found == scores[: len(found)]
    if not any(seq.finish_reason == "abort" for seq in seqs.values()):
        of_all = sum(len(scores) - scores.count(None) for scores in expected)
        assert engine.runner.num_scored == of_all, "a token was scored twice"
    manager = engine.scheduler.block_manager
    assert manager.num_free == manager.num_blocks
    assert not engine.scheduler.running and not engine.scheduler.waiting


@settings(max_examples=100, deadline=None)
@given(trace=traces())
def test_overlap_wastes_at_most_one_row_for_each_stop_and_none_for_lengths(trace):
    """With room for all and nothing recomputed, depth 2 computes what depth 1 does, and one row for each "stop"."""
    config, requests = trace
    config = {**config, "caching": False, "num_blocks": 400, "max_num_seqs": 8, "max_num_batched_tokens": 400}
    requests = [(prompt, params, pair, arrives, None) for prompt, params, pair, arrives, _ in requests]
    _, synchronous = run_trace(config, requests, 1)
    seqs, overlapped = run_trace(config, requests, 2)
    stops = sum(seq.finish_reason == "stop" for seq in seqs.values())
    wasted = overlapped.runner.num_rows_computed - synchronous.runner.num_rows_computed
    assert 0 <= wasted <= stops


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_observer_is_told_of_the_end_of_every_planned_step_also_if_all_is_aborted(depth):
    engine = make_engine(depth=depth)
    planned = []
    finished = []
    engine.observe(
        SimpleNamespace(
            planned=lambda number, *_: planned.append(number),
            finished=lambda number, *_: finished.append(number),
            close=lambda: None,
        )
    )
    for _ in range(3):
        engine.add(engine.prepare([1, 2], SamplingParams(max_tokens=20)))
    for _ in range(4):
        engine.step()
    assert len(planned) - len(finished) == depth - 1, "so many are in flight"
    engine.abort_all()
    assert finished == planned
    assert not engine.has_work


def run_all(engine, prompts, **params):
    seqs = [engine.add(engine.prepare(prompt, SamplingParams(seed=0, **params))) for prompt in prompts]
    while engine.has_work:
        engine.step()
        check_scheduler(engine.scheduler)
    return seqs


def test_resident_sequences_never_exceed_max_num_seqs_although_each_step_serves_fewer():
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=4, num_blocks=64)
    for prompt in ([1] * 9, [2] * 9, [3] * 9, [4] * 9, [5] * 9):
        engine.add(engine.prepare(prompt, SamplingParams(max_tokens=5)))
    residents = []
    while engine.has_work:
        engine.step()
        residents.append(len(engine.scheduler.running))
    assert max(residents) == 3


def test_a_small_pool_preempts_the_last_admitted_and_admits_nobody_in_that_step():
    engine = make_engine(num_blocks=8, max_num_seqs=4, max_num_batched_tokens=64, caching=False)
    seqs = [engine.add(engine.prepare([i] * 7, SamplingParams(max_tokens=16, seed=0))) for i in range(4)]
    scheduler = engine.scheduler
    victims = []
    while engine.has_work:
        before = list(scheduler.running)
        count = scheduler.num_preemptions
        engine.step()
        if scheduler.num_preemptions > count:
            gone = [seq for seq in before if seq not in scheduler.running and seq.finish_reason is None]
            victims += gone
            assert gone == before[len(before) - len(gone) :], "only the most recently admitted go"
            assert all(seq in before for seq in scheduler.running), "nobody is admitted in a step that preempted"
    assert victims and seqs[0] not in victims
    assert [len(seq.output_token_ids) for seq in seqs] == [16] * 4


def test_a_sequence_at_its_limit_asks_for_no_computation_while_its_last_token_is_awaited():
    engine = make_engine(depth=2, num_blocks=64)
    run_all(engine, [[1, 2, 3]], max_tokens=4)
    assert engine.runner.num_rows_computed == 4


class ReadingEditor:
    """Has all steps in flight read within the launch of every step, as masks of grammars do."""

    def lacks_tokens(self, step):
        return True

    def collect(self, step):
        return None


@pytest.mark.parametrize("way", ["run", "step"])
@pytest.mark.parametrize("closes", [False, True])
def test_what_a_step_ended_is_returned_even_if_its_launch_then_fails(way, closes):
    """The launch reads the steps before it. What ended there has its answer, and the error comes after that."""
    engine = make_engine(depth=2)
    engine._editor = ReadingEditor()
    engine.scheduler.edited_rows.add(0)
    launch = engine.runner.launch
    if closes:
        engine.runner.reason_to_close = lambda: "nothing can be trusted"

    def launch_head(plan, edits):
        if engine._ended:
            raise RuntimeError("the launch failed")
        return launch(plan)

    engine.runner.launch_layers = lambda plan: plan
    engine.runner.launch_head = launch_head
    requests = [engine.prepare([number, 3], SamplingParams(max_tokens=length)) for number, length in ((1, 2), (2, 9))]
    found = []
    with pytest.raises(RuntimeError, match="the launch failed"):
        if way == "run":
            for some in engine.run(requests):
                found += some
        else:
            for request in requests:
                engine.add(request)
            while engine.has_work:
                found += engine.step()
    assert [seq.seq_id for seq in found] == [0] and found[0].finish_reason == "length"
    assert found[0].output_token_ids == expected_tokens([1, 3], requests[0].params, found[0].seed, frozenset(), 32)[0]
    assert engine.closed == closes and not engine.has_work
    if not closes:
        engine.runner.launch_head = lambda plan, edits: launch(plan)
        assert sum(len(some) for some in engine.run(requests)) == 2


def test_what_a_step_ended_is_returned_even_if_an_observer_then_fails():
    engine = make_engine()
    engine.observers.append(SimpleNamespace(planned=lambda *_: None, finished=Mock(side_effect=KeyError("broken"))))
    engine.add(engine.prepare([1, 2], SamplingParams(max_tokens=1)))
    assert [seq.finish_reason for seq in engine.step()] == ["length"]
    with pytest.raises(KeyError, match="broken"):
        engine.step()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_ctrl_c_is_raised_after_the_ended_requests_even_if_the_caller_leaves_before(leaves):
    engine = make_engine()
    launch = engine.runner.launch

    def interrupt(plan, edits):
        signal.raise_signal(signal.SIGINT)
        return launch(plan)

    engine.runner.launch = interrupt
    requests = [engine.prepare([number, 3], SamplingParams(max_tokens=number)) for number in (1, 2)]
    run = engine.run(requests)
    assert [(seq.seq_id, seq.finish_reason) for seq in next(run)] == [(0, "length")]
    with pytest.raises(KeyboardInterrupt):
        run.close() if leaves else next(run)
    assert not engine.has_work
    engine.runner.launch = launch
    assert sum(len(ended) for ended in engine.run(requests)) == 2


def test_equal_prefixes_in_one_step_are_computed_once():
    engine = make_engine(block_size=4, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=256)
    prompt = [*range(12), 1]
    for _ in range(5):
        engine.add(engine.prepare(prompt, SamplingParams(max_tokens=1)))
    batch = engine.scheduler.schedule()
    assert batch.plan.num_tokens == len(prompt) + 4 * 1


def test_a_prompt_that_is_cached_to_its_last_block_still_computes_one_token_in_a_block_of_its_own():
    engine = make_engine(block_size=4, num_blocks=64)
    prompt = list(range(12))
    run_all(engine, [prompt], max_tokens=2)
    (again,) = run_all(engine, [prompt], max_tokens=2)
    assert again.num_cached_tokens == 8


def test_generated_tokens_are_reused_by_a_prompt_that_contains_them():
    for depth in (1, 2):
        engine = make_engine(block_size=4, num_blocks=64, depth=depth)
        (first,) = run_all(engine, [[1, 2, 3]], max_tokens=14)
        (second,) = run_all(engine, [list(first.token_ids)], max_tokens=1)
        assert second.num_cached_tokens == (len(first.token_ids) - 1) // 4 * 4


def test_planning_does_not_look_at_the_waiting_beyond_the_first():
    engine = make_engine(max_num_seqs=1, num_blocks=16)
    for _ in range(100):
        engine.add(engine.prepare([1, 2, 3], SamplingParams(max_tokens=8)))
    looked_at = []
    manager = engine.scheduler.block_manager
    find_prefix = manager.find_prefix
    manager.find_prefix = lambda seq: looked_at.append(seq) or find_prefix(seq)
    for _ in range(5):
        engine.step()
    assert len(looked_at) == 1


@pytest.mark.parametrize(("asked", "sent"), [(0.0, 0.0), (2e-39, 0.0), (1e-29, 1e-29), (1e200, 1e30)])
def test_temperatures_that_float32_cannot_divide_by_mean_greedy(asked: float, sent: float):
    """1 / 2e-39 is infinite in float32. A kernel would multiply 0 by it: the most likely token would weigh NaN."""
    engine = make_engine(num_blocks=64)
    engine.add(engine.prepare([1, 2, 3], SamplingParams(temperature=asked)))
    new_rows = engine.scheduler.schedule().plan.new_rows
    assert new_rows["temperature"].tolist() == [np.float32(sent)]


def test_the_example_in_the_docstring_of_a_plan_is_what_the_scheduler_plans():
    engine = make_engine(max_num_batched_tokens=4)
    plans = []
    seen = SimpleNamespace(planned=lambda number, at, step: plans.append(step.plan), finished=lambda *_: None)
    engine.observers.append(seen)
    run_all(engine, [list(range(10, 16))], max_tokens=2, prompt_logprobs=0)
    (header,) = re.findall(r"^ +(num_computed .*)", inspect.getdoc(StepPlan), re.MULTILINE)
    planned = [[number for name in header.split() for number in getattr(plan, name).tolist()] for plan in plans]
    example = inspect.getdoc(StepPlan).replace("LAST_TOKEN", str(LAST_TOKEN))
    lines = re.findall(r"^ +(\d[-\d ]+)$", example, re.MULTILINE)
    assert planned == [[int(number) for number in line.split()] for line in lines]


def test_continuations_of_one_context_compute_it_once():
    """Of 64 contexts of 512 tokens with 4 continuations of 8 each: all of the first, of the others the last block."""
    engine = make_engine(num_blocks=128, block_size=64, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=2048)
    rng = random.Random(0)
    num_tokens = 0
    for _ in range(64):
        context = [rng.randrange(VOCAB) for _ in range(512)]
        for _ in range(4):
            prompt = context + [rng.randrange(VOCAB) for _ in range(8)]
            params = SamplingParams(max_tokens=0, prompt_logprobs=1, prompt_logprob_start=512)
            engine.add(engine.prepare(prompt, params))
            num_tokens += len(prompt)
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats["num_prompt_tokens"] == num_tokens and engine.runner.num_scored == 64 * 4 * 8
    assert 1 - stats["num_cached_tokens"] / num_tokens <= 0.36
    assert engine.runner.num_tokens_computed / num_tokens <= 0.36
