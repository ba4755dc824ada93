"""Speculative decoding: whatever is drafted, every request gets the tokens that it gets without."""

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fakes import (
    VOCAB,
    FakeRunner,
    expected_tokens,
    make_engine,
    next_token,
    run_all,
    state_after,
)
from helpers.fakes_drafts import FREE
from helpers.integrity import check_scheduler
from helpers.traces import run_trace, traces
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.features.drafts.costs import StepCosts, choose_num_drafts, measure_costs, time_steps
from nanovllm.features.drafts.draft_model import ModelDrafter
from nanovllm.features.drafts.ngrams import NgramDrafter
from nanovllm.features.drafts.options import read_speculative_config
from nanovllm.features.drafts.speculation import DraftRecord, Speculation
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.progress import ProgressBar


class Adversary:
    """Knows every token, and drafts the right ones with a given probability, as many as it likes."""

    def __init__(self, share: float, rng: random.Random, eager: bool = False) -> None:
        self._share = share
        self._rng = rng
        self._eager = eager

    def offer(self, seqs: list[Sequence], most: np.ndarray) -> np.ndarray:
        return most if self._eager else np.array([self._rng.randint(0, n) for n in most.tolist()], np.int32)

    def write_drafts(self, batch: ScheduledStep) -> None:
        for seq, tokens in batch.shares():
            state = 0
            for token in seq.token_ids:
                state = state_after(state, token)
            for i in range(1, len(tokens)):
                right = next_token(state, seq.seed)
                tokens[i] = right if self._rng.random() < self._share else (right + self._rng.randint(1, 3)) % VOCAB
                state = state_after(state, int(tokens[i]))

    def note_end(self, seq: Sequence) -> None:
        pass


def speculate(drafter: Any, most: int, costs: StepCosts = FREE) -> Callable[[LLMEngine], None]:
    def prepare(engine: LLMEngine) -> None:
        engine.scheduler.speculation = Speculation(engine.scheduler, drafter, most, costs)

    return prepare


def check_trace(trace: Any, prepare: Callable[[LLMEngine], None]) -> LLMEngine:
    config, requests = trace
    seqs, engine = run_trace(config, requests, 1, prepare)
    for i, (prompt, params, pair, _, aborted) in enumerate(requests):
        tokens, reason = expected_tokens(prompt, params, params.seed, config["eos"], config["max_model_len"], pair)
        found = seqs[i].output_token_ids
        if seqs[i].finish_reason == "abort":
            assert aborted is not None and tokens[: len(found)] == found
        else:
            assert (found, seqs[i].finish_reason) == (tokens, reason)
    stats = engine.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert 0 <= stats["num_accepted_tokens"] <= stats["num_draft_tokens"]
    assert stats["num_generated_tokens"] == sum(len(seq.output_token_ids) for seq in seqs.values())
    return engine


@pytest.mark.parametrize("share", [1.0, 0.0, 0.5, pytest.param(0.9, marks=pytest.mark.slow)])
@settings(max_examples=100, deadline=None)
@given(trace=traces(), most=st.integers(1, 9), seed=st.integers(0, 1000))
def test_whatever_is_drafted_every_request_gets_its_own_tokens(share: float, trace: Any, most: int, seed: int) -> None:
    stats = check_trace(trace, speculate(Adversary(share, random.Random(seed)), most)).stats()
    if share == 1:
        assert stats["num_accepted_tokens"] == stats["num_draft_tokens"]


@settings(max_examples=100, deadline=None)
@given(trace=traces(), most=st.integers(1, 9), bounds=st.sampled_from([(1, 1), (1, 3), (2, 2), (2, 5)]))
def test_drafts_from_text_leave_every_request_its_own_tokens(trace: Any, most: int, bounds: tuple[int, int]) -> None:
    check_trace(trace, speculate(NgramDrafter(*bounds, num_bytes=1 << 12), most))


class TwoModels(FakeRunner):
    """A device with a draft model that knows what the model knows, in a cache of its own."""

    def __init__(self, engine: LLMEngine) -> None:
        config = engine.config
        scheduler = engine.scheduler
        sizes = (config.num_kvcache_blocks, config.block_size, config.max_num_seqs)
        super().__init__(*sizes, scheduler.max_num_batched_tokens)
        self.draft = FakeRunner(*sizes, scheduler.max_num_batched_tokens + config.max_num_seqs)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(trace=traces(), most=st.integers(1, 6))
def test_a_draft_model_that_knows_all_is_always_right_whatever_happens_to_its_cache(trace: Any, most: int) -> None:
    """It finds its keys and values wherever the model does: prefixes, blocks that changed hands, rows that went on."""

    def prepare(engine: LLMEngine) -> None:
        engine.runner = runner = TwoModels(engine)
        drafter = ModelDrafter(runner.draft, engine.config.max_num_seqs, VOCAB, VOCAB)
        speculate(drafter, most)(engine)

    stats = check_trace(trace, prepare).stats()
    assert stats["num_accepted_tokens"] == stats["num_draft_tokens"]


def run_one(engine: LLMEngine, prompt: list[int], **params: Any) -> Sequence:
    seq = engine.add(engine.prepare(prompt, SamplingParams(**params)))
    while engine.has_work:
        engine.step()
        check_scheduler(engine.scheduler)
    return seq


def test_right_drafts_save_steps_and_the_last_step_has_no_more_than_are_wanted() -> None:
    engine = make_engine(num_blocks=64)
    speculate(Adversary(1.0, random.Random(0), eager=True), 4)(engine)
    run_one(engine, [1, 2, 3], max_tokens=12, seed=0)
    # The prompt's step gives 1 token, two steps give 5 each, and one is left, which needs no draft.
    assert engine.num_steps == 4
    assert engine.stats()["num_draft_tokens"] == engine.stats()["num_accepted_tokens"] == 8


def test_draws_are_kept_as_far_as_drafts_agree_and_take_their_log_probabilities_along() -> None:
    """Three sequences decode with 3, 0 and 1 drafts; between them a prompt is cut, which samples nothing."""
    counts = np.array([[4, 1, 2, 2], [4, 1, 0, 2]], np.int32)
    token_ids = np.array([2, 3, 4, 5, -1, 8, 8, 6, 7], np.int32)
    plan = StepPlan.largest(4, 9, 9)._replace(num_scheduled=counts[0], num_sampled=counts[1], token_ids=token_ids)
    seqs = [Sequence(i, [1], SamplingParams(), max_model_len=9) for i in range(3)]
    step = ScheduledStep(plan, seqs, np.arange(3), 0)
    drawn = np.array([3, 4, 9, 5, 1, 7, 0], np.int32)  # after 2, 3, 4, 5; after -1; after 6, 7
    kept = step.count_kept(drawn)
    assert kept.tolist() == [3, 1, 2]
    owners, result = step.keep(StepResult(drawn, {i: {i: -1.0} for i in (0, 3, 4, 6)}), np.array([3, 0, 2]))
    assert owners.tolist() == [0, 0, 0, 2, 2] and result.token_ids.tolist() == [3, 4, 9, 7, 0]
    assert result.logprobs == {0: {0: -1.0}, 4: {6: -1.0}}


def test_accepted_blocks_are_found_again_and_rejected_drafts_never() -> None:
    engine = make_engine(block_size=2, num_blocks=64)
    speculate(Adversary(0.8, random.Random(0), eager=True), 5)(engine)
    first = run_one(engine, [1, 2, 3], max_tokens=20, seed=0)
    again = run_one(engine, list(first.token_ids), max_tokens=2, seed=0)
    assert again.num_cached_tokens == (len(first.token_ids) - 1) // 2 * 2
    assert engine.stats()["num_draft_tokens"] > engine.stats()["num_accepted_tokens"] > 0


def test_drafts_take_no_blocks_that_others_wait_for() -> None:
    """In a pool where all just fit, nobody is preempted because of drafts."""
    engine = make_engine(block_size=2, num_blocks=20, max_num_seqs=4, max_model_len=10)
    speculate(Adversary(0.0, random.Random(0), eager=True), 7)(engine)
    for i in range(4):
        engine.add(engine.prepare([i] * 4, SamplingParams(max_tokens=6, seed=0)))
    while engine.has_work:
        engine.step()
    assert engine.scheduler.num_preemptions == 0


@pytest.mark.parametrize(("num_blocks", "num_drafts"), [(4, 2), (3, 3)])
def test_drafts_keep_nobody_waiting_who_could_be_admitted(num_blocks: int, num_drafts: int) -> None:
    """One that fits beside the known tokens of those that run is admitted; where it does not, its blocks stay free."""
    engine = make_engine(block_size=4, num_blocks=2 + num_blocks, max_model_len=20)
    speculate(Adversary(1.0, random.Random(0), eager=True), 7)(engine)
    first = engine.add(engine.prepare([1] * 4, SamplingParams(max_tokens=16, seed=0)))
    engine.step()
    second = engine.add(engine.prepare([2] * 13, SamplingParams(max_tokens=2, seed=0)))  # four blocks
    engine.step()
    assert (len(first.block_table), second.row >= 0) == (2, num_blocks == 4)
    assert engine.stats()["num_draft_tokens"] == num_drafts, "what the step and its own blocks have room for"
    while engine.has_work:
        engine.step()
    assert first.output_token_ids == expected_tokens([1] * 4, first.params, 0, frozenset(), 20)[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_breaks_while_drafts_are_made_leaves_the_engine_whole(error: type[BaseException]) -> None:
    class Breaking(Adversary):
        def write_drafts(self, batch: ScheduledStep) -> None:
            super().write_drafts(batch)
            if batch.plan.num_computed.max() > 8:
                raise error

    engine = make_engine(num_blocks=64)
    speculate(Breaking(1.0, random.Random(0), eager=True), 3)(engine)
    with pytest.raises(error):
        run_all(engine, [engine.prepare([1, 2, 3], SamplingParams(max_tokens=20, seed=0))] * 3)
    check_scheduler(engine.scheduler)
    assert engine.scheduler.block_manager.num_used == 0
    speculate(Adversary(0.9, random.Random(0)), 3)(engine)
    seq = run_one(engine, [1, 2, 3], max_tokens=20, seed=0)
    assert seq.output_token_ids == expected_tokens([1, 2, 3], seq.params, 0, frozenset(), 32)[0]


def test_a_trace_tells_how_many_drafts_each_request_verified(tmp_path: Path) -> None:
    from nanovllm.apps.view.page import read_recording

    engine = make_engine(num_blocks=64, trace=str(tmp_path / "run.json"))
    speculate(Adversary(0.8, random.Random(0), eager=True), 4)(engine)
    prompts = [[1, 2, 3], [4, 5], [6] * 14]
    run_all(engine, (engine.prepare(prompt, SamplingParams(max_tokens=15, seed=0)) for prompt in prompts))
    engine.close()
    run = read_recording(tmp_path / "run.json")
    told = sum(count for _, _, what in run.records for _, count in what.get("drafts", ()))
    assert told == sum(run.charts["draft"]) > engine.stats()["num_accepted_tokens"] > 0
    assert sum(run.charts["prefill"]) == sum(map(len, prompts))
    accepted = 0
    drafts = {}
    for kind, _, what in run.records:
        if kind == "plan":
            drafts = dict(what.get("drafts", ()))
        elif kind == "update":
            accepted += sum(len(ids) - 1 for number, *ids in what["tokens"] if number in drafts)
    assert accepted == engine.stats()["num_accepted_tokens"]


def test_the_bar_and_a_job_s_summary_tell_tokens_a_step() -> None:
    from nanovllm.apps.jobs.counts import JobCounts
    from nanovllm.apps.jobs.result_lines import ResultLine, Usage

    counts = dict.fromkeys(("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "num_draft_tokens"), 0)
    counts["num_accepted_tokens"] = 0
    with ProgressBar(lambda: counts, disable=True) as bar:
        assert "tok/step" not in bar.format_dict["postfix"]
        counts |= {"num_generated_tokens": 90, "num_draft_tokens": 80, "num_accepted_tokens": 60}
        assert ", 3.00 tok/step" in bar.format_dict["postfix"]
    tally = JobCounts()
    counts = dict.fromkeys(counts, 0)
    with tally.show(lambda: counts):
        counts |= {"num_generated_tokens": 100, "num_draft_tokens": 100, "num_accepted_tokens": 75}
        tally.count(ResultLine(1, b"", Usage(10, 0, 100)))
    assert tally.as_dict() | {"num_draft_tokens": 100, "num_accepted_tokens": 75} == tally.as_dict()
    assert tally.as_dict()["tokens_per_step"] == 4.0
    assert "75.0% of 100 drafts accepted, 4.00 tokens a step" in tally.describe()


# ---- how many drafts


def test_rows_are_spent_where_they_pay() -> None:
    offers = np.array([4, 4, 0], np.int32)
    rates = np.array([0.9, 0.2, 0.9])
    rows = np.arange(1.0, 65)
    linear = StepCosts(rows, rows, rows, np.zeros(64))
    assert choose_num_drafts(offers, rates, 3, 3, linear).tolist() == [0, 0, 0], (
        "a row costs as much as a token is worth"
    )
    steps = StepCosts(rows, *[np.where(rows <= 6, 1.0, 10.0)] * 2, np.zeros(64))
    assert choose_num_drafts(offers, rates, 3, 3, steps).tolist() == [3, 0, 0], "the likeliest drafts fill what is free"
    assert choose_num_drafts(offers, rates, 3, 3, FREE).tolist() == [4, 4, 0]
    passes = StepCosts(rows, np.ones(64), np.ones(64), np.full(64, 0.1))
    assert choose_num_drafts(np.array([4]), np.array([0.99]), 1, 1, passes).tolist() == [4]
    assert choose_num_drafts(np.array([4]), np.array([0.5]), 1, 1, passes).tolist() == [2], "further passes do not pay"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_drafts_go_to_the_sequence_whose_own_were_right_wherever_it_stands(order: tuple[int, ...]) -> None:
    """One was always right, one half of the time, and one never. A step has room for four drafts."""
    records = [DraftRecord(num_right=9.0 * i, num_tried=18.0) for i in (2, 1, 0)]
    seqs: list[Any] = [SimpleNamespace(drafting=records[i], token_ids=[1, 2, 3]) for i in order]
    offers = np.array([4, 3, 2], np.int32)[list(order)]
    drafter: Any = SimpleNamespace(offer=lambda _, limits: np.minimum(offers, limits))
    rows = np.arange(1.0, 65)
    costs = StepCosts(rows, *[np.where(rows <= 3 + 4, 1.0, 10.0)] * 2, np.zeros(64))
    scheduler: Any = None
    chosen = Speculation(scheduler, drafter, 4, costs).choose(seqs, np.full(3, 4, np.int32), 3)
    assert dict(zip(order, chosen.tolist(), strict=True)) == {0: 4, 1: 0, 2: 0}
    assert [record.num_offered for record in records] == [4, 3, 2]


def test_a_disturbed_start_makes_no_row_dearer_than_further_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Runner:
        """Takes 10 ms and 1 for each row; three times that for half a second; and always, with two rows."""

        def launch(self, plan: StepPlan) -> Any:
            nonlocal now
            now += (0.01 + 0.001 * plan.num_tokens) * (3 if 0.02 < now < 0.5 or plan.num_tokens == 2 else 1)
            return SimpleNamespace(result=lambda: None)

    monkeypatch.setattr("nanovllm.features.drafts.costs.time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr("nanovllm.features.drafts.costs.LONG", 0.2)
    found = time_steps(Runner(), SimpleNamespace(max_num_seqs=8), [1, 2, 3, 4, 6, 8, 12, 16, 24, 32], 3)
    assert (1000 * found).round(6).tolist() == [11, 13, 13, 14, 16, 18, 22, 26, 34, 42]


@pytest.mark.parametrize("eager", [False, True])
def test_a_step_without_drafts_is_priced_as_it_runs(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and recorded steps make it faster. A step of more than 0.2 s is measured with drafts alone."""
    now = 0.0

    class Runner:
        """Takes 10 ms for each token; half of that for a step that only decodes, if it may be replayed."""

        def launch(self, plan: StepPlan) -> Any:
            nonlocal now
            only_decodes = plan.num_tokens == plan.num_seqs
            now += 0.01 * plan.num_tokens * (0.5 if only_decodes and not eager else 1)
            return SimpleNamespace(result=lambda: None)

    monkeypatch.setattr("nanovllm.features.drafts.costs.time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr("nanovllm.features.drafts.costs.LONG", 0.2)
    config = SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=100, enforce_eager=eager, draft=None)
    costs = measure_costs(Runner(), config, 3)  # type: ignore[arg-type]
    share = 1 if eager else 0.5
    at = costs.num_tokens.tolist().index
    assert costs.plain[at(12)] == pytest.approx(0.12 * share) and costs.verified[at(12)] == pytest.approx(0.12)
    assert costs.plain[at(32)] == costs.verified[at(32)] == pytest.approx(0.32)


def test_rejected_drafts_stop_a_sequence_which_tries_again_later() -> None:
    engine = make_engine(num_blocks=64, max_model_len=200)
    adversary = Adversary(0.0, random.Random(0), eager=True)
    speculate(adversary, 1)(engine)
    run_one(engine, [1, 2, 3], max_tokens=150, seed=0)
    # After three misses pauses of 8, 16, 32, 64 tokens, each ended by a draft that fails.
    assert 5 <= engine.stats()["num_draft_tokens"] <= 9


# ---- drafts from text


def drafts_of(drafter: NgramDrafter, text: list[int], most: int = 8) -> list[int]:
    """Return the drafts that the drafter offers after a prompt."""
    seq = Sequence(drafts_of.__dict__.setdefault("count", 0), text, SamplingParams(), max_model_len=1000)
    drafts_of.__dict__["count"] += 1
    Speculation(make_engine().scheduler, drafter, most, FREE).choose([seq], np.array([most], np.int32), 1)
    return drafter._drafts[seq.seq_id].tolist()


@pytest.mark.parametrize("length", [10, 60])
def test_what_followed_the_same_tokens_is_drafted_no_longer_than_the_match(length: int) -> None:
    text = [*range(100, 100 + length)]
    assert drafts_of(NgramDrafter(2, 4), [*text, 1, *text[3:6]]) == text[6:9]
    assert drafts_of(NgramDrafter(2, 4), [*text, 1, *text[1:6]], 3) == text[6:9]
    assert drafts_of(NgramDrafter(2, 4), [*text, 1, text[3]]) == [], "one token is too short a match"
    assert drafts_of(NgramDrafter(1, 4), [*text, 1, text[3]]) == [text[4]]
    assert drafts_of(NgramDrafter(3, 4), [7, 8, 9] * 4, 8) == [7, 8, 9, 7, 8, 9, 7, 8], "repetition goes on"


def test_the_outputs_of_ended_sequences_are_found_by_others_until_there_is_no_room() -> None:
    drafter = NgramDrafter(2, 4, num_bytes=1 << 14)
    seq = Sequence(1000, [1, 2, 3], SamplingParams(), max_model_len=1000)
    seq.token_ids.extend(range(50, 80))
    drafter.note_end(seq)
    assert drafts_of(drafter, [9, 2, 3]) == [50, 51], "what follows the prompt's last tokens is output"
    assert drafts_of(drafter, [9, 60, 61, 62]) == [63, 64, 65]
    repeating = Sequence(1001, [1, 2, 3], SamplingParams(), max_model_len=1000)
    repeating.token_ids.extend([7] * 12)
    drafter.note_end(repeating)
    assert drafts_of(drafter, [7, 7]) == [7], "a text that is shorter than what agrees with it"
    for i in range(40):
        other = Sequence(2000 + i, [1, 2, 3], SamplingParams(), max_model_len=1000)
        other.token_ids.extend(range(100 * i, 100 * i + 30))
        drafter.note_end(other)
    assert drafter._room >= 0 and len(drafter._held) < 41
    assert drafts_of(drafter, [9, 60, 61, 62]) == []


def test_the_index_of_a_sequence_that_is_gone_is_empty() -> None:
    drafter = NgramDrafter(2, 4)
    drafts_of(drafter, [1, 2, 3, 4, 1, 2])
    assert not drafter._texts


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("ngram", "speculative_config is 'ngram'; it must be a dict"),
        ({"method": "eagle"}, "speculative_config: method is 'eagle'; it must be"),
        ({"method": 1}, "speculative_config: method is 1; it must be"),
        ({"model": "a", "prompt_lookup_max": 2}, "speculative_config has the key 'prompt_lookup_max'; with method"),
        ({"method": "ngram", "model": "a"}, "speculative_config has the key 'model'; with method"),
        ({"method": "draft_model"}, "speculative_config: model is None"),
        ({"method": "draft_model", "model": ""}, "speculative_config: model is ''"),
        ({"num_speculative_tokens": 0}, "speculative_config: num_speculative_tokens is 0"),
        ({"num_speculative_tokens": 65}, "speculative_config: num_speculative_tokens is 65"),
        ({"num_speculative_tokens": True}, "speculative_config: num_speculative_tokens is True"),
        ({"prompt_lookup_max": 0}, "speculative_config: prompt_lookup_max is 0"),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 2}, "speculative_config: prompt_lookup_min is 3"),
    ],
)
def test_a_wrong_value_of_each_key_is_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_speculative_config(config)


def test_keys_that_are_not_given_get_values_that_fit_the_others() -> None:
    assert read_speculative_config({"method": None})["method"] == "ngram"
    assert read_speculative_config({})["num_speculative_tokens"] == 4
    assert read_speculative_config({"model": "a"}) == {
        "method": "draft_model",
        "model": "a",
        "num_speculative_tokens": 4,
    }
    for most in (1, 64):
        assert read_speculative_config({"num_speculative_tokens": most})["num_speculative_tokens"] == most
    for asked, bounds in (({}, (5, 5)), ({"prompt_lookup_max": 1}, (1, 1)), ({"prompt_lookup_min": 64}, (64, 64))):
        found = read_speculative_config(asked)
        assert (found["prompt_lookup_min"], found["prompt_lookup_max"]) == bounds
