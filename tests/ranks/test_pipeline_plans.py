"""Plans for a pipeline: a row waits until its token can be there, and the steps in flight share the decodes."""

from collections import deque

import numpy as np
import pytest
from helpers.fakes import FakeRunner, expected_scores, expected_tokens, found_scores, make_engine
from helpers.traces import run_trace, traces
from hypothesis import given, settings

from nanovllm.features.distributed.stages import choose_ready
from nanovllm.sampling_params import SamplingParams


class PipelinedRunner(FakeRunner):
    """Draws a step's tokens later than its launch, as `FirstStage` does."""

    def prepare(self, num_stages, overlaps):
        """
        Args:
            overlaps: whether tokens are drawn when enough later steps are launched; else when they are read.
        """
        self.num_stages = num_stages
        self.overlaps = overlaps
        self.drawn_by = np.zeros(len(self.last_token) + 1)
        self.num_launched = self.num_drawn = 0
        self.fronts = deque()

    def choose_running(self, table):
        return choose_ready(table, self.num_stages, self.drawn_by <= self.num_drawn)

    def launch(self, plan, *edits):
        self.num_launched += 1
        self.drawn_by[plan.rows] = self.num_launched
        before = list(self.last_token)
        handle = super().launch(plan, *edits)
        number = self.num_launched
        self.fronts.append((plan.rows.tolist(), self.last_token))
        self.last_token = before
        read = handle.result

        def result():
            while self.num_drawn < number:
                self.draw()
            return read()

        handle.result = result
        if self.overlaps and len(self.fronts) == self.num_stages:
            self.draw()
        return handle

    def draw(self):
        self.num_drawn += 1
        rows, drawn = self.fronts.popleft()
        for row in rows:
            self.last_token[row] = drawn[row]


def prepare(num_stages, overlaps):
    def prepare_engine(engine):
        engine.runner.__class__ = PipelinedRunner
        engine.runner.prepare(num_stages, overlaps)
        engine.scheduler.choose_running = engine.runner.choose_running

    return prepare_engine


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
@settings(max_examples=80, deadline=None)
@given(trace=traces())
def test_every_request_gets_its_own_tokens_whatever_is_in_flight(stages, overlaps, trace):
    """Sequences stop, are preempted and aborted while steps in flight have their rows, which get new owners."""
    config, requests = trace
    seqs, engine = run_trace(config, requests, stages + overlaps, prepare(stages, overlaps))
    for i, (prompt, params, pair, _, aborted) in enumerate(requests):
        tokens, reason = expected_tokens(prompt, params, params.seed, config["eos"], config["max_model_len"], pair)
        scores = expected_scores(prompt, params)
        if seqs[i].finish_reason == "abort":
            assert aborted is not None and tokens[: len(seqs[i].output_token_ids)] == seqs[i].output_token_ids
        else:
            assert (seqs[i].output_token_ids, seqs[i].finish_reason) == (tokens, reason)
            assert found_scores(seqs[i]) == scores
    assert engine.scheduler.block_manager.num_used == 0


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_batch_that_came_in_one_step_is_shared_by_all_stages(stages, overlaps):
    """Once all decode, each step has its share, and no launch waits for a free stage.

    If tokens are drawn when they are read, the steps in flight are as many as stages. Otherwise they are one more, and
    the host reads the tokens of a step while a later step has been given them already.
    """
    engine = make_engine(max_num_seqs=12, max_num_batched_tokens=64, num_blocks=200, depth=stages + overlaps)
    prepare(stages, overlaps)(engine)
    launch = engine.runner.launch
    sizes = []

    def note(plan, *edits):
        ends = plan.num_computed + plan.num_scheduled
        unread = np.count_nonzero(engine.scheduler.table.num_known[plan.rows] < ends)
        sizes.append((plan.num_seqs, int(unread), len(engine._in_flight)))
        return launch(plan, *edits)

    engine.runner.launch = note
    for number in range(10):
        engine.add(engine.prepare([number], SamplingParams(max_tokens=20, ignore_eos=True)))
    for _ in range(30):
        engine.step()
    assert sizes[0][0] == 10  # the prompts
    share = -(-10 // stages)
    settled = sizes[stages + 1 :]
    assert {size for size, _, _ in settled} <= {share, 10 - share * (stages - 1)}
    assert {in_flight for _, _, in_flight in settled} == {stages - 1 + overlaps}
    assert all(unread == size * overlaps for size, unread, _ in settled)
