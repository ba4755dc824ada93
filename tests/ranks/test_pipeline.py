"""A pipeline gives each request the bits of one rank, whatever its stages do when. All stages are in this process.

tests/ranks/test_pipeline_ranks.py has processes.
"""

import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.integrity import check_scheduler
from helpers.stages import LocalPipeline, ctrl_c_at_launch, resolve_with_overlap
from helpers.tiny import draw_prompts, save_random
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm import LLM, EngineConfig, Output, SamplingParams
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.engine.plan import ROW_SAMPLING, StepPlan
from nanovllm.features.distributed.pipeline import StageInputs, StageRunner
from nanovllm.features.distributed.stage_decoder import make_stage_decoder
from nanovllm.features.distributed.stages import Stage, choose_stages, split_layers
from nanovllm.features.shapes import PRESETS
from nanovllm.load import resolve_options
from nanovllm.models import weight_reader
from nanovllm.models.decoder import find_decoder
from nanovllm.models.sizes import Sizes
from nanovllm.ops.sample import unpack_sampling
from nanovllm.runner.head_inputs import HeadInputs

CPU = torch.device("cpu")
NUM_LAYERS = 5
OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 160, "kvcache_block_size": 16, "num_kvcache_blocks": 64}
TIGHT = {"num_kvcache_blocks": 10, "max_num_batched_tokens": 40, "max_num_seqs": 8}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("five-layers")
    save_random(folder, num_hidden_layers=NUM_LAYERS)
    return folder


@pytest.fixture(autouse=True)
def stages_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.features.distributed.leader.LeadingRunner", LocalPipeline)


Requests = list[tuple[list[int], SamplingParams]]


def make_requests() -> Requests:
    """Seeded, greedy, scored and edited requests; some share a beginning, some are longer than a tight budget.

    Those with an odd number stop at every 32nd token id: a later step may be in flight by then that has them.
    """
    common = draw_prompts([70], seed=1)[0]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 1.0, "prompt_logprobs": 1},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.2, "logprobs": 1},
        {"temperature": 1.5, "min_p": 0.01, "logit_bias": {7: 5.0}, "n": 2},
        {"max_tokens": 0, "prompt_logprobs": 0},
    ]
    prompts = draw_prompts([1 + 7 * i % 61 for i in range(20)], seed=2)
    prompts = [common[: 16 * (i % 5)] + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]
    stops = [None, list(range(0, 500, 32))]
    common_params = [
        {"seed": i, "max_tokens": 4 + 3 * i % 13, "ignore_eos": True, "stop_token_ids": stops[i % 2]} for i in range(20)
    ]
    return [(prompt, SamplingParams(**common_params[i] | kinds[i % 5])) for i, prompt in enumerate(prompts)]


def read(output: Output) -> list[Any]:
    """All that a request got: token ids and log-probabilities, of its completions and of its prompt."""
    own = [(one.token_ids, one.finish_reason, one.logprobs) for one in output.outputs]
    return [own, output.get("prompt_logprobs")]


class Runs:
    """Runs requests in engines of any options, and notes the logits of every token before they are edited.

    A chunk of a preempted sequence samples, too, and nobody wants this sample, so its logits are not edited.
    """

    def __init__(self, folder: Path, dtype: str, backend: str) -> None:
        self._options = OPTIONS | {"model": str(folder), "dtype": dtype, "attention_backend": backend}
        self._options |= {"enforce_eager": True}  # a recorded step calls no method of the backend, so no spy sees it
        self.requests = make_requests()
        self.logits: dict[tuple[int, int], Tensor] = {}
        self.alone, _ = self.run(range(len(self.requests)))
        self.expected_logits = self.logits

    def run(self, chosen: Any, overlaps: bool = False, **options: Any) -> tuple[list[Any], LLM]:
        """
        Args:
            overlaps: whether the host plans a step while rank 0 computes the tokens that the step begins with.
        """
        self.logits = {}
        with pytest.MonkeyPatch.context() as patch:
            if overlaps:
                patch.setattr("nanovllm.features.distributed.options.resolve_ranks", resolve_with_overlap)
            llm = LLM(**self._options | options)
        with llm:
            runner = llm.engine.runner
            local = getattr(runner, "local", runner)
            sample = local.sampler.sample

            def spy(logits: Tensor, rows: Tensor, positions: Tensor, edits: Any = None) -> Tensor:
                seeds = unpack_sampling(local.device_rows.sampling[rows]).seeds
                for row, seed, position in zip(logits, seeds.tolist(), positions.tolist(), strict=True):
                    self.logits[seed, position] = row.clone()
                return sample(logits, rows, positions, edits)

            local.sampler.sample = spy
            if llm.engine.scheduler.speculation is not None:
                from helpers.fakes_drafts import FREE

                llm.engine.scheduler.speculation.costs = FREE
            prompts, params = zip(*(self.requests[i] for i in chosen), strict=True)
            outputs = [read(output) for output in llm.generate(prompts, params, use_tqdm=False)]
            check_scheduler(llm.engine.scheduler)
            assert llm.engine.scheduler.block_manager.num_used == 0
            if isinstance(runner, LocalPipeline):
                while runner.find_ready():  # prompt chunks that nobody waited for
                    runner.go_on()
                assert not any(runner.queues) and not any(runner.mail.values()), "something was sent to nobody"
            return outputs, llm

    def check(self, chosen: list[int], **options: Any) -> LLM:
        """Assert that the chosen requests get in a pipeline what they get on one rank, bit for bit."""
        outputs, llm = self.run(chosen, **options)
        assert outputs == [self.alone[i] for i in chosen]
        for i in chosen:
            prompt, params = self.requests[i]
            for position in range(len(prompt), len(prompt) + len(outputs[chosen.index(i)][0][0][0])):
                key = (params.seed, position)
                assert torch.equal(self.logits[key], self.expected_logits[key]), key
        return llm


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runs(request: pytest.FixtureRequest, model: Path) -> Runs:
    if reason := CpuBackend.why_cannot(CPU):
        pytest.skip(reason)
    return Runs(model, request.param, "cpu")


EVERY = list(range(20))


@pytest.mark.parametrize(("stages", "overlaps"), [(2, True), (3, False), (4, True)])
def test_a_pipeline_gives_the_bits_of_one_rank_through_preemption_chunks_and_hits(
    stages: int, overlaps: bool, runs: Runs
) -> None:
    llm = runs.check(EVERY, overlaps=overlaps, pipeline_parallel_size=stages, **TIGHT)
    stats = llm.stats()
    assert stats["num_preemptions"] > 0 and stats["num_cached_tokens"] > 0
    assert llm.engine.runner.most_unfinished == stages + overlaps, "the pipeline was never full"


@pytest.mark.parametrize("speculative_config", [NGRAM, "a model"], ids=["from the text", "from a model"])
def test_drafts_change_no_bit_of_a_pipeline(speculative_config: Any, runs: Runs, model: Path) -> None:
    """The draft model is the model itself: most of its drafts are right."""
    if speculative_config == "a model":
        speculative_config = {"model": str(model), "num_speculative_tokens": 3}
    stats = runs.check(EVERY, pipeline_parallel_size=3, speculative_config=speculative_config, **TIGHT).stats()
    assert stats["num_accepted_tokens"] > 0 and stats["num_preemptions"] > 0


def check_any(runs: Runs, chosen: list[int], seed: int, stages: int, spare: int, **options: Any) -> None:
    LocalPipeline.order = random.Random(seed)
    runs.check(chosen, pipeline_parallel_size=stages, num_kvcache_blocks=10 + spare, **options)


ANY = {
    "chosen": st.lists(st.sampled_from(EVERY), min_size=1, max_size=12, unique=True),
    "seed": st.integers(0, 99),
    "stages": st.integers(1, 4),
    "spare": st.integers(0, 12),
    "max_num_seqs": st.integers(1, 12),
    "max_num_batched_tokens": st.integers(12, 120),
    "enable_prefix_caching": st.booleans(),
    "overlaps": st.booleans(),
    "speculative_config": st.sampled_from([None, None, NGRAM]),
}


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(**ANY)
@example(  # a preempted sequence with a bias is computed again in chunks
    chosen=[8, 9, 10, 11, 18, 0, 1, 2, 19, 17],
    seed=0,
    stages=2,
    spare=4,
    max_num_seqs=5,
    max_num_batched_tokens=22,
    enable_prefix_caching=True,
    overlaps=False,
    speculative_config=None,
)
def test_any_pipeline_gives_the_bits_of_one_rank(runs: Runs, **options: Any) -> None:
    check_any(runs, **options)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(**ANY)
def test_many_pipelines_give_the_bits_of_one_rank(runs: Runs, **options: Any) -> None:
    check_any(runs, **options)


def test_plain_torch_gives_the_same_tokens_in_float32(model: Path) -> None:
    runs = Runs(model, "float32", "torch")
    outputs, _ = runs.run(EVERY, pipeline_parallel_size=3, **TIGHT)

    def tokens(found: list[Any]) -> list[Any]:
        return [[one[0] for one in completions] for completions, _ in found]

    assert tokens(outputs) == tokens(runs.alone)


def test_the_comparison_notices_hidden_states_that_changed_on_a_link(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = StageRunner._send

    def change(self: StageRunner, x: Tensor, rank: int) -> None:
        send(self, (x * 1.01).to(x.dtype), rank)

    monkeypatch.setattr(StageRunner, "_send", change)
    with pytest.raises(AssertionError):
        runs.check([0, 2], pipeline_parallel_size=2)


# ---- plans in flight


@pytest.fixture(params=[False, True], ids=["read first", "handed over"])
def llm(request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    if reason := CpuBackend.why_cannot(CPU):
        pytest.skip(reason)
    if request.param:
        monkeypatch.setattr("nanovllm.features.distributed.options.resolve_ranks", resolve_with_overlap)
    options = OPTIONS | TIGHT | {"dtype": "float32", "attention_backend": "cpu"}
    with LLM(str(model), pipeline_parallel_size=3, **options) as llm:
        yield llm


def generate(llm: LLM) -> list[Any]:
    prompts, params = zip(*make_requests(), strict=True)
    return [read(output) for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    """Answer all requests on one rank, which nobody disturbs."""
    with LLM(str(model), dtype="float32", attention_backend="cpu", **OPTIONS) as llm:
        return generate(llm)


def test_chunks_of_one_prompt_follow_each_other_and_want_no_logits(llm: LLM) -> None:
    """A plan of nothing but chunks: nothing comes back to rank 0, and nobody waits for it."""
    prompt = draw_prompts([150])[0]
    plans = []
    launch = llm.engine.runner.launch

    def note(plan: Any, edits: Any = None) -> Any:
        plans.append(plan.num_scheduled.tolist())
        return launch(plan, edits)

    llm.engine.runner.launch = note
    llm.generate([prompt], SamplingParams(max_tokens=2), use_tqdm=False)
    assert plans == [[40], [40], [40], [30], [1]]
    assert llm.engine.runner.most_unfinished == llm.engine.depth


def test_a_prefix_is_found_in_blocks_whose_plan_is_in_flight(llm: LLM) -> None:
    """It is right, because each stage runs the plans in order."""
    prefix = draw_prompts([36])[0]
    params = SamplingParams(temperature=0.0, max_tokens=3)
    engine = llm.engine
    seqs = [engine.add(engine.prepare([*prefix, number], params)) for number in (1, 2)]
    assert engine.step() == [] and engine.step() == []
    assert len(engine._in_flight) == 2 and seqs[1].num_cached_tokens == 32
    while engine.has_work:
        engine.step()
    for number, seq in zip((1, 2), seqs, strict=True):
        engine.scheduler.block_manager.forget_all()
        output = llm.generate([[*prefix, number]], params, use_tqdm=False)[0]
        assert output["token_ids"] == seq.output_token_ids


def test_forgotten_prefixes_are_computed_again_by_every_stage(llm: LLM) -> None:
    """Blocks that were found before are written anew. While requests run, nothing can be forgotten."""
    prompt = draw_prompts([36])[0]
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1)

    def say() -> tuple[Any, int]:
        before = llm.stats()["num_cached_tokens"]
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        return read(output), llm.stats()["num_cached_tokens"] - before

    first, cached = say()
    assert cached == 0
    assert say() == (first, 32)
    assert llm.reset_prefix_cache()
    for runner in llm.engine.runner.runners:
        for cache in runner.caches:
            cache.keys.fill_(float("nan"))
            cache.values.fill_(float("nan"))
    assert say() == (first, 0)
    assert say() == (first, 32)
    stream = llm.stream(make_requests())
    next(stream)
    assert len(llm.engine._in_flight) == llm.engine.depth - 1
    with pytest.raises(RuntimeError, match="is open"):
        llm.reset_prefix_cache()
    stream.close()  # type: ignore[attr-defined]


def test_leaving_with_steps_in_flight_leaves_the_engine_whole(llm: LLM, expected: list[Any]) -> None:
    for num_outputs in (1, 4):
        stream = llm.stream(make_requests())
        for _ in itertools.islice(stream, num_outputs):
            pass
        assert llm.engine._in_flight
        stream.close()  # type: ignore[attr-defined]
        assert not llm.engine._in_flight and llm.engine.scheduler.block_manager.num_used == 0
    assert generate(llm) == expected


def test_the_rows_of_aborted_sequences_serve_others_while_steps_in_flight_have_them(
    llm: LLM, expected: list[Any]
) -> None:
    engine = llm.engine
    seqs = [engine.add(engine.prepare(*request)) for request in make_requests()]
    for turn in itertools.count():
        running = engine.scheduler.running
        if turn % 7 == 3 and len(running) > 1:
            engine.scheduler.end(running[0], "abort")
        if not engine.has_work:
            break
        engine.step()
    num_aborted = 0
    for seq, (completions, _) in zip(seqs, expected, strict=True):
        for one, (token_ids, reason, _) in zip((seq, *seq.others), completions, strict=True):
            if one.finish_reason == "abort":
                num_aborted += 1
                token_ids = token_ids[: len(one.output_token_ids)]
            else:
                assert one.finish_reason == reason
            assert one.output_token_ids == token_ids
    assert 4 < num_aborted < 20
    assert engine.scheduler.block_manager.num_used == 0


def test_ctrl_c_with_steps_in_flight_leaves_the_engine_whole(llm: LLM, expected: list[Any]) -> None:
    for number in (2, 9):
        with ctrl_c_at_launch(llm, number):
            generate(llm)
    assert generate(llm) == expected


def test_a_back_reads_what_its_front_has_kept_whatever_ran_between() -> None:
    """Three fronts write the same memory, as a graph does, before the backs come in their order."""
    most = 4
    inputs = StageInputs(most, 3, torch.float32, CPU)
    hidden, rows, positions = inputs.view(most)
    assert rows.tolist() == [most] * most, "the row of padding"
    assert not hidden.any() and not positions.any()
    written: Any = HeadInputs(None, torch.zeros(most, 3), None, None, *torch.zeros(2, most, dtype=torch.int32))  # type: ignore[arg-type]
    kept = []
    for number, size in enumerate((1, most, 2), 1):
        head = written._replace(rows=written.rows[:size], positions=written.positions[:size])
        for tensor in (head.hidden, head.rows, head.positions):
            tensor.fill_(number)
        kept.append(inputs.keep(head, size))
    for number, head in enumerate(kept, 1):
        size = len(head.rows)
        assert head.hidden.tolist() == [[number] * 3] * size
        filled = inputs.fill(head, torch.full((size, 3), 10.0 * number))
        for found in (filled[1:2] + filled[4:], inputs.view(size)):
            assert [tensor.flatten().unique().tolist() for tensor in found] == [[10 * number], [number], [number]]
            assert [len(tensor) for tensor in found] == [size] * 3


# ---- what else a user may ask for


@pytest.mark.parametrize("overlaps", [False, True], ids=["read first", "handed over"])
def test_grammars_hold_with_steps_in_flight(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence with a grammar is planned when its tokens are known, so a mask never depends on a step in flight.

    Others, with a stop string, are planned before that.
    """
    if overlaps:
        monkeypatch.setattr("nanovllm.features.distributed.options.resolve_ranks", resolve_with_overlap)
    grammars: list[dict[str, Any]] = [{"choice": ["yes", "no"]}, {"regex": "[0-9]{3}"}, {"json": {"type": "boolean"}}]
    params = [SamplingParams(structured_outputs=grammars[i % 3], n=1 + i % 2, seed=i, max_tokens=12) for i in range(9)]
    params += [SamplingParams(seed=i, max_tokens=30, stop=["e", "t "]) for i in range(5)]
    prompts = [f"question {i}" for i in range(len(params))]

    def say(**options: Any) -> list[list[str]]:
        with LLM("tiny-qwen3", dtype="float32", attention_backend="cpu", **OPTIONS | TIGHT | options) as llm:
            found = llm.generate(prompts, params, use_tqdm=False)
            runner = llm.engine.runner
            assert not isinstance(runner, LocalPipeline) or runner.most_unfinished >= 3, "the pipeline was never full"
            return [[one.text for one in output.outputs] for output in found]

    texts = say(pipeline_parallel_size=3)
    assert texts == say()
    for i, forms in enumerate(["yes|no", "[0-9]{3}", "true|false"] * 3):
        assert all(re.fullmatch(forms, text) for text in texts[i]), texts[i]


def test_a_batch_job_is_answered_as_by_one_rank(tmp_path: Path) -> None:
    from helpers.batch_jobs import texts_by_id, write_lines

    from nanovllm.apps.jobs.job import Job, Status
    from nanovllm.apps.jobs.run import run_job

    lines = [
        {"prompt": f"Question {i}:", "max_tokens": 12, "temperature": 0.0 if i % 2 else 0.9, "seed": i}
        for i in range(12)
    ]
    source = write_lines(tmp_path / "in", [*lines, b"{"])
    texts = []
    for stages in (1, 3):
        config = EngineConfig("tiny-qwen3", dtype="float32", pipeline_parallel_size=stages, **OPTIONS | TIGHT)
        results = tmp_path / f"out-{stages}"
        assert run_job(Job(str(source), str(results), config, "tiny-qwen3")) == Status.LINES_FAILED
        texts.append(texts_by_id(results))
    assert texts[0] == texts[1] and len(texts[0]) == len(lines)


# ---- layers, weights and refusals


@pytest.mark.parametrize(
    ("weights", "head", "stages", "ends"),
    [
        ([10] * 8, 0, 2, [4, 8]),
        ([10] * 36, 32, 2, [16, 36]),
        ([10] * 36, 32, 4, [6, 16, 26, 36]),
        ([10] * 5, 100, 4, [1, 2, 3, 5]),  # at least one
        ([10, 10, 50, 10, 10], 0, 3, [2, 3, 5]),
        ([10] * 3, 5, 3, [1, 2, 3]),
        ([10] * 3, 5, 1, [3]),
    ],
)
def test_the_heaviest_stage_is_as_light_as_it_can_be(
    weights: list[int], head: int, stages: int, ends: list[int]
) -> None:
    found = split_layers(weights, head, stages)
    loads = [head * stage.is_first + sum(weights[stage.first : stage.end]) for stage in found]
    expected = [head * (first == 0) + sum(weights[first:end]) for first, end in zip([0, *ends], ends, strict=False)]
    assert max(loads) == max(expected)
    assert [stage.first for stage in found] == [0, *(stage.end for stage in found[:-1])]
    assert found[-1].end == len(weights) and all(stage.first < stage.end for stage in found)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 40), min_size=1, max_size=8), head=st.integers(0, 90), data=st.data())
def test_no_other_split_has_a_lighter_heaviest_stage(weights: list[int], head: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(weights)))

    def heaviest(ends: tuple[int, ...]) -> int:
        return max(head * (first == 0) + sum(weights[first:end]) for first, end in zip((0, *ends), ends, strict=False))

    best = min(heaviest((*cuts, len(weights))) for cuts in itertools.combinations(range(1, len(weights)), stages - 1))
    assert heaviest(tuple(stage.end for stage in split_layers(weights, head, stages))) == best


@pytest.mark.parametrize("name", PRESETS)
def test_the_stages_of_a_model_have_its_parameters_and_rank_0_fewer_layers(name: str) -> None:
    from nanovllm.apps.estimate import fetch_config

    config = fetch_config(name)
    chosen = choose_stages(config, 3)
    parts = [Sizes(config, decoder=make_stage_decoder(find_decoder(config), stage)) for stage in chosen]
    assert sum(part.num_parameters for part in parts) == Sizes(config).num_parameters
    num_layers = [len(part.model.layers) for part in parts]
    assert sum(num_layers) == config.num_hidden_layers
    assert num_layers[0] == min(num_layers)


def test_a_stage_reads_no_weights_of_another(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill = weight_reader._fill
    read_names: list[str] = []

    def note(target: Any, source: Any, what: str, *rest: Any) -> None:
        read_names.append(what.split()[-1])
        fill(target, source, what, *rest)

    monkeypatch.setattr(weight_reader, "_fill", note)
    with LLM(str(model), dtype="float32", pipeline_parallel_size=3, **OPTIONS) as llm:
        stages: list[Stage] = [runner.stage for runner in llm.engine.runner.runners]
        assert len(read_names) == len(set(read_names)), "a tensor was read twice"
        for number in range(NUM_LAYERS):
            assert f"model.layers.{number}.self_attn.o_proj.weight" in read_names
        for runner, stage in zip(llm.engine.runner.runners, stages, strict=True):
            assert len(runner.caches) == len(runner.model.layers) == stage.end - stage.first


def test_a_tensor_that_no_stage_has_is_refused(model: Path, tmp_path: Path) -> None:
    save_random(tmp_path, num_hidden_layers=NUM_LAYERS + 1)
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    with pytest.raises(ValueError, match=r"has 11 tensors that the model does not: model\.layers\.5\."):
        LLM(str(tmp_path), dtype="float32", pipeline_parallel_size=2, **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 6}, "pipeline_parallel_size is 6, and the model has 5 layers"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size.*0"),
        ({"pipeline_parallel_size": 9}, "pipeline_parallel_size.*9.*8"),
        (
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
            "tensor_parallel_size is 2 and pipeline_parallel_size is 2; only one of them may be above 1",
        ),
        (
            {"pipeline_parallel_size": 2, "distributed_backend": "nccl"},
            'distributed_backend="nccl" needs CUDA devices; on a CPU use "gloo"',
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, Any], message: str, model: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(str(model), **OPTIONS | options)


def test_embeddings_of_prompts_have_the_bits_of_one_rank(llm: LLM, model: Path) -> None:
    prompts = [prompt for prompt, _ in make_requests()[:6]]
    with LLM(str(model), dtype="float32", attention_backend="cpu", **OPTIONS) as alone:
        expected = alone.embed(prompts, use_tqdm=False)
    assert str(llm.embed(prompts, use_tqdm=False)) == str(expected)


def plan_prompt(temperature: float) -> StepPlan:
    """A prompt of five tokens that moves into row 0."""
    one = np.ones(1, np.int32)
    new_rows = np.zeros(1, ROW_SAMPLING)
    new_rows["temperature"] = temperature
    new_rows["top_p"] = 1
    new_rows["num_logprobs"] = new_rows["num_prompt_logprobs"] = -1
    return StepPlan(
        rows=0 * one,
        num_computed=0 * one,
        num_scheduled=5 * one,
        num_sampled=one,
        num_scored=0 * one,
        token_ids=np.arange(5, dtype=np.int32),
        targets=one[:0],
        block_entries=np.array([[0, 0, 1]], np.int32),
        new_rows=new_rows,
    )


def test_a_step_samples_as_its_row_s_owner_asked_though_the_row_has_a_new_one(model: Path) -> None:
    with LLM(str(model), dtype="float32", pipeline_parallel_size=3, **OPTIONS) as llm:
        launch = llm.engine.runner.launch
        likeliest, drawn = (launch(plan_prompt(t)).result().token_ids.tolist() for t in (0.0, 50.0))
        assert likeliest != drawn
        handles = [launch(plan_prompt(temperature)) for temperature in (0.0, 50.0, 0.0)]
        assert [handle.result().token_ids.tolist() for handle in handles] == [likeliest, drawn, likeliest]


def test_a_pipeline_keeps_as_many_steps_in_flight_as_it_has_stages(model: Path) -> None:
    from nanovllm.apps.estimate import fetch_config

    hf_config = fetch_config(str(model))
    for stages, budget in ((1, 2048), (3, 128)):
        config = resolve_options(EngineConfig(str(model), pipeline_parallel_size=stages, device="cpu"), hf_config)
        assert config.depth == stages and config.num_ranks == stages
        assert config.max_num_batched_tokens == budget, "a prompt keeps all stages busy if it is many chunks"


def test_a_later_stage_can_measure_its_largest_step_without_the_others(model: Path) -> None:
    """startup.py does that on a GPU, before the ranks have run anything together."""
    with LLM(str(model), dtype="float32", pipeline_parallel_size=3, **OPTIONS) as llm:
        for runner in llm.engine.runner.runners[1:]:
            plan = StepPlan.largest(4, 40, 160)
            plan.rows[:] = runner.device_rows.padding_row
            assert len(runner.launch(plan).result().token_ids) == 0
