"""Plans for a pipeline: steps in flight have no sequence in common, and share the decodes among them."""

from collections import deque
from functools import partial

import pytest
from helpers.fakes import FakeRunner, expected_scores, expected_tokens, make_engine
from helpers.traces import run_trace, traces
from hypothesis import given, settings

from nanovllm.distributed.stages import choose_ready
from nanovllm.sampling_params import SamplingParams


class PipelinedRunner(FakeRunner):
    """Draws a step's tokens when its result is asked for, and checks which sequences are in flight."""

    num_stages = 1
    in_flight = None
    most_decodes = 0

    def launch(self, plan, *edits):
        if self.in_flight is None:
            self.in_flight = deque()
        sampling = set(plan.rows[plan.num_sampled > 0].tolist())
        for rows, others in self.in_flight:
            assert not set(plan.rows.tolist()) & others, "a row is planned whose token is in flight"
            assert rows is not None
        assert len(self.in_flight) < self.num_stages
        self.in_flight.append((plan.rows.tolist(), sampling))
        before = list(self.last_token)
        handle = super().launch(plan, *edits)
        drawn = self.last_token
        self.last_token = before
        read = handle.result

        def result():
            self.in_flight.popleft()
            for row in plan.rows.tolist():
                self.last_token[row] = drawn[row]
            return read()

        handle.result = result
        return handle


def prepare(num_stages):
    def prepare_engine(engine):
        engine.scheduler.choose_running = partial(choose_ready, num_stages=num_stages)
        engine.runner.__class__ = PipelinedRunner
        engine.runner.num_stages = num_stages

    return prepare_engine


@pytest.mark.parametrize("stages", [2, 3, 4])
@settings(max_examples=80, deadline=None)
@given(trace=traces())
def test_every_request_gets_its_own_tokens_whatever_is_in_flight(stages, trace):
    config, requests = trace
    # Rows change hands while steps are in flight: a preempted or aborted sequence's row is not "planned twice".
    requests = [(prompt, params, pair, arrives, None) for prompt, params, pair, arrives, _ in requests]
    config = {**config, "num_blocks": config["num_blocks"] + 8 * config["max_num_seqs"] * config["max_model_len"]}
    seqs, _ = run_trace(config, requests, stages, prepare(stages))
    check(seqs, requests, config)


@pytest.mark.parametrize("stages", [2, 3])
@settings(max_examples=80, deadline=None)
@given(trace=traces())
def test_preemption_and_aborts_with_steps_in_flight_disturb_nobody(stages, trace):
    config, requests = trace

    def prepare_engine(engine):
        engine.scheduler.choose_running = partial(choose_ready, num_stages=stages)

    seqs, engine = run_trace(config, requests, stages, prepare_engine)
    check(seqs, requests, config)
    assert engine.scheduler.block_manager.num_used == 0


def check(seqs, requests, config):
    for i, (prompt, params, pair, _, aborted) in enumerate(requests):
        tokens, reason = expected_tokens(prompt, params, params.seed, config["eos"], config["max_model_len"], pair)
        scores = expected_scores(prompt, params)
        if seqs[i].finish_reason == "abort":
            assert aborted is not None and tokens[: len(seqs[i].output_token_ids)] == seqs[i].output_token_ids
        else:
            assert (seqs[i].output_token_ids, seqs[i].finish_reason) == (tokens, reason)
            assert seqs[i].prompt_logprobs == scores


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_batch_that_came_in_one_step_is_shared_by_all_stages(stages):
    """Once all decode, each of the steps in flight has its share, and there are always as many as stages."""
    engine = make_engine(max_num_seqs=12, max_num_batched_tokens=64, num_blocks=200, depth=stages)
    prepare(stages)(engine)
    launch = engine.runner.launch
    sizes = []

    def note(plan, *edits):
        sizes.append((plan.num_seqs, len(engine._in_flight)))
        return launch(plan, *edits)

    engine.runner.launch = note
    for number in range(10):
        engine.add(engine.prepare([number], SamplingParams(max_tokens=20, ignore_eos=True)))
    for _ in range(30):
        engine.step()
    assert sizes[0][0] == 10  # the prompts
    share = -(-10 // stages)
    settled = sizes[stages:]
    assert {size for size, _ in settled} <= {share, 10 - share * (stages - 1)}
    assert {in_flight for _, in_flight in settled} == {stages - 1}
