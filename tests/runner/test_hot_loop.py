"""The parts that a GPU's loop relies on, without a GPU: buckets, padding, staging, a device that takes its time."""

import itertools
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.fakes import FakeRunner, expected_tokens, make_engine, run_all
from helpers.graphs import StandInGraphs
from helpers.traces import run_trace, traces
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM
from nanovllm.backends.gpu.cuda_graphs import graph_batch_sizes, smallest_that_holds
from nanovllm.backends.gpu.memory import GpuMemory, measure_memory
from nanovllm.backends.gpu.pinned import PinnedStaging
from nanovllm.backends.staging import Staging
from nanovllm.backends.steps import EAGER
from nanovllm.engine.plan import StepPlan
from nanovllm.ops.step_inputs import step_inputs_reference
from nanovllm.runner.device_rows import DeviceRows
from nanovllm.runner.kv_memory import blocks_that_fit
from nanovllm.sampling_params import SamplingParams


@pytest.mark.parametrize("max_num_seqs", [1, 3, 12, 100, 200, 300, 512])
def test_every_batch_size_finds_a_graph_that_is_not_much_larger(max_num_seqs):
    sizes = graph_batch_sizes(max_num_seqs)
    assert sizes[-1] == max_num_seqs
    for num_seqs in range(1, max_num_seqs + 1):
        size = smallest_that_holds(sizes, num_seqs)
        assert num_seqs <= size <= max(2 * num_seqs - 1, num_seqs + 31)
    with pytest.raises(IndexError):
        smallest_that_holds(sizes, max_num_seqs + 1)


def test_a_start_captures_a_bounded_number_of_sizes():
    for max_num_seqs in (1024, 1025, 4096, 1 << 15):
        sizes = graph_batch_sizes(max_num_seqs)
        assert sizes[-1] == 1024
        assert len(sizes) == 45


def test_padding_reads_a_row_of_nobody_and_stores_nothing():
    tables = DeviceRows(4, 8, torch.device("cpu"))
    tables.block_tables[:4] = torch.arange(1, 33).view(4, 8)
    engine = make_engine(max_num_seqs=4, num_blocks=32)
    for _ in range(3):
        engine.add(engine.prepare([1], SamplingParams(seed=0)))
    plan = engine.scheduler.schedule().plan
    padded = plan.pad(8, tables.padding_row)
    assert padded.rows.tolist() == [*plan.rows.tolist(), *[tables.padding_row] * 5]
    arrays = (padded.rows, padded.num_computed, padded.num_scheduled, padded.token_ids)
    slots = step_inputs_reference(*map(torch.from_numpy, arrays), tables.block_tables, tables.last_token, 4).slots
    assert (slots[:3] >= 4).all() and (slots[3:] == -1).all()
    assert padded.num_tokens == padded.num_decodes == 8 and padded.num_sampled.sum() == 3


def test_a_staging_buffer_is_written_only_after_the_copy_out_of_it(monkeypatch):
    log = []
    zeros = torch.zeros

    class Event:
        def __init__(self):
            self.number = len([entry for entry in log if entry[0] == "made"])
            log.append(("made", self.number))

        def record(self, stream):
            log.append(("recorded", self.number))

        def synchronize(self):
            log.append(("waited", self.number))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, pin_memory=False, **options: zeros(*sizes, **options))
    staging = PinnedStaging(16, torch.device("meta"))  # a device that keeps nothing: only the order counts
    for step in range(5):
        staging.send([np.full(4, step, np.int32), np.full(3, step, np.int32)])
    used = [number for what, number in log if what == "recorded"]
    assert used == [0, 1, 0, 1, 0]
    for i, entry in enumerate(log):
        if entry[0] == "recorded" and entry in log[:i]:
            assert log[i - 1] == ("waited", entry[1]), "the buffer's last copy is waited for before it is written"


def test_staging_delivers_what_was_sent_and_keeps_its_place():
    staging = Staging(16, torch.device("cpu"))
    address = staging.buffer.data_ptr()
    for step in range(3):
        sent = staging.send([np.arange(step, dtype=np.int32), np.array([7, 8], np.int32)])
        assert sent.tolist() == [*range(step), 7, 8] and sent.data_ptr() == address


class SlowRunner(FakeRunner):
    """A device on a thread of its own: steps in order, each as slow as it likes, results whenever they are ready."""

    def __init__(self, runner: FakeRunner, delays: random.Random) -> None:
        self.__dict__.update(runner.__dict__)
        self._delays = delays
        self._stream = ThreadPoolExecutor(1)

    def launch(self, plan: StepPlan, *edits: None):
        class Handle:
            def __init__(self, future):
                self.future = future

            def result(self):
                return self.future.result().result()

        return Handle(self._stream.submit(self._work, plan))

    def _work(self, plan: StepPlan):
        time.sleep(self._delays.choice([0, 0, 1e-4, 1e-3]))
        return FakeRunner.launch(self, plan)


@settings(max_examples=60, deadline=None)
@given(trace=traces(), seed=st.integers(0, 1000))
def test_whatever_the_device_s_pace_every_request_gets_its_own_tokens(trace, seed):
    config, requests = trace

    def slow(engine):
        engine.runner = SlowRunner(engine.runner, random.Random(seed))

    seqs, _ = run_trace(config, requests, 2, prepare_engine=slow)
    for i, (prompt, params, pair, _, _) in enumerate(requests):
        if seqs[i].finish_reason != "abort":
            tokens, reason = expected_tokens(prompt, params, params.seed, config["eos"], config["max_model_len"], pair)
            assert (seqs[i].output_token_ids, seqs[i].finish_reason) == (tokens, reason)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_gives_the_same_tokens_at_any_depth(depth):
    engine = make_engine(depth=depth, num_blocks=12, max_num_seqs=4, eos=frozenset({0, 1}))
    rng = random.Random(0)
    prompts = [[rng.randrange(4) for _ in range(rng.randrange(1, 20))] for _ in range(60)]
    params = SamplingParams(max_tokens=10, seed=1)
    ended = run_all(engine, (engine.prepare(prompt, params) for prompt in prompts))
    for i, prompt in enumerate(prompts):
        assert ended[i].output_token_ids == expected_tokens(prompt, params, 1, engine.facts.eos_token_ids, 32)[0]
    assert engine.scheduler.num_preemptions > 0


def test_what_utilization_leaves_is_for_the_cache():
    memory = GpuMemory(total=1000, others=100, weights=300, activations=150, graphs=50)
    assert memory.left_for_cache(0.9) == 300
    assert blocks_that_fit(300, 7, 16, 64) == 42
    with pytest.raises(
        ValueError, match=r"2 blocks of 16 tokens.*max_model_len=64 needs 4: set max_model_len to at most 32"
    ):
        blocks_that_fit(15, 7, 16, 64)
    with pytest.raises(ValueError, match="nothing would fit"):
        blocks_that_fit(memory.left_for_cache(0.5), 7, 16, 64)


@pytest.mark.parametrize(("max_num_seqs", "budget", "max_len"), [(512, 16384, 4096), (4, 3, 100), (2, 1000, 64)])
def test_the_largest_step_spends_the_whole_budget_within_the_limits(max_num_seqs, budget, max_len):
    plan = StepPlan.largest(max_num_seqs, budget, max_len)
    assert plan.num_tokens == min(budget, plan.num_seqs * max_len)
    assert plan.num_seqs <= max_num_seqs and plan.num_scheduled.max() <= max_len


@pytest.fixture
def runner(random_model, request):
    """A runner on the CPU, for steps of at most 64 tokens of 4 sequences; request.param: more options."""
    options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    options |= getattr(request, "param", {})
    with LLM(str(random_model), kvcache_block_size=16, num_kvcache_blocks=40, **options) as llm:
        yield llm.engine.runner


@pytest.mark.parametrize("num_drafts", [0, 8])
def test_the_largest_step_runs_on_rows_of_padding(runner, num_drafts):
    """The memory profile runs it before any sequence exists."""
    plan = StepPlan.largest(4, 64, 128, num_drafts)
    plan.rows[:] = runner.device_rows.padding_row
    result = runner.launch(plan).result()
    assert len(result.token_ids) == 4 * (1 + num_drafts)
    assert result.scores.top_ids.shape == (64 - 4 * (1 + num_drafts), 0)
    assert not result.logprobs


SPECULATION = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 8}}


@pytest.mark.parametrize("runner", [{}, SPECULATION], ids=["plain", "with drafts"], indirect=True)
def test_the_memory_profile_runs_and_adds_up(runner, monkeypatch):
    """It runs where no size of the cache is given. Numbers stand in for the GPU's, and nothing is captured."""
    gib = 1 << 30
    numbers = {
        "mem_get_info": (60 * gib, 80 * gib),
        "memory_allocated": 2 * gib,
        "max_memory_allocated": 5 * gib,
        "memory_reserved": 6 * gib,
        "empty_cache": None,
        "reset_peak_memory_stats": None,
    }
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    caches = runner.caches
    with torch.inference_mode():
        memory = measure_memory(runner)
    assert (memory.total, memory.others, memory.weights, memory.graphs) == (80 * gib, 14 * gib, 2 * gib, 0)
    assert 3 * gib < memory.activations < 4 * gib
    assert runner.caches == []  # the trial's own is gone
    runner.caches = caches


SPANS = {"schedule", "prepare", "launch", "wait", "update", "step"}


def run_with_trace(path, depth):
    engine = make_engine(depth=depth, num_blocks=64, trace=str(path))
    run_all(engine, (engine.prepare([1, 2, 3], SamplingParams(max_tokens=6)) for _ in range(5)))
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_trace_has_every_span_of_every_step_and_its_charts(tmp_path, depth):
    engine = run_with_trace(tmp_path / "run.json", depth)
    engine.close()
    events = json.loads((tmp_path / "run.json").read_text())
    for step in range(1, engine.num_steps + 1):
        spans = [e for e in events if e["ph"] == "X" and e["args"]["step"] == step]
        assert sorted(e["name"] for e in spans) == sorted(SPANS), "each once"
        host = sorted((e["ts"], e["dur"]) for e in spans if e["name"] != "step")
        assert all(ts + dur <= later + 0.2 for (ts, dur), (later, _) in itertools.pairwise(host)), "one after another"
    charts = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in charts} == {"tokens", "sequences", "KV blocks", "prompt tokens"}
    assert sum(e["args"]["decode"] for e in charts if e["name"] == "tokens") > 0


def test_a_trace_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trace file .* cannot be written"):
        make_engine(trace=str(tmp_path / "missing" / "run.json"))


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_with_more_sequences_than_the_largest_graph_run_eagerly(random_model, depth, monkeypatch):
    monkeypatch.setattr("nanovllm.backends.gpu.cuda_graphs.MOST_SEQS", 4)
    options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 9, "num_kvcache_blocks": 90}
    prompts = [[i, 7, 9] for i in range(9)]
    params = [SamplingParams(i % 2, 4 + 3 * i, seed=i, ignore_eos=True) for i in range(9)]
    with LLM(str(random_model), **options) as llm:
        expected = [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]
    eager = []
    with LLM(str(random_model), **options) as llm:
        runner = llm.engine.runner
        graphs = StandInGraphs(runner)
        run_layers = runner.run_layers

        def note(plan, steps):
            if steps is EAGER:
                eager.append(plan)
            return run_layers(plan, steps)

        monkeypatch.setattr(runner, "run_layers", note)
        runner.steps = graphs
        llm.engine.depth = depth
        assert [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)] == expected
        runner.steps = EAGER
    assert {plan.num_seqs for plan in eager if plan.num_decodes == plan.num_seqs} == set(range(5, 10))
    assert graphs.sizes_run == {1, 2, 4}


@pytest.mark.parametrize("max_num_seqs", [3, 12])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_step_that_graphs_capture_gives_the_tokens_of_the_eager_one(random_model, max_num_seqs, depth):
    """Padded to a graph's size, from tensors alone: what a replay computes, up to the replay itself."""
    options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": max_num_seqs, "kvcache_block_size": 16}
    rng = random.Random(3)
    prompts = [[rng.randrange(100) for _ in range(rng.randrange(1, 50))] for _ in range(10)]
    params = [
        SamplingParams(temperature=i % 2, max_tokens=5 + 3 * i, seed=i, logprobs=i % 3 or None) for i in range(10)
    ]
    with LLM(str(random_model), **options, num_kvcache_blocks=40) as llm:
        eager = llm.generate(prompts, params, use_tqdm=False)
    with LLM(str(random_model), **options, num_kvcache_blocks=40) as llm:
        runner = llm.engine.runner
        runner.steps = StandInGraphs(runner)
        llm.engine.depth = depth
        replayed = llm.generate(prompts, params, use_tqdm=False)
        assert (runner.device_rows.block_tables[runner.device_rows.padding_row] == 0).all()
        runner.steps = EAGER
    for one, other in zip(eager, replayed, strict=True):
        assert one["token_ids"] == other["token_ids"]
        for a, b in zip(one.get("logprobs", []), other.get("logprobs", []), strict=True):
            assert a.keys() == b.keys()
            assert list(a.values()) == pytest.approx(list(b.values()), abs=1e-4)  # float32 logits of order 10
