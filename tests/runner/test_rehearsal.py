"""A rehearsal on the CPU of what only CUDA reaches: see tests/helpers/rehearsal.

Each engine starts with its default options: it measures memory, captures graphs, and works at depth 2. Its tokens are
those of the torch backend. The stand-ins raise for what CUDA would refuse.
"""

import gc
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import pytest
import torch
from helpers.kernel_cases import give_variant
from helpers.tiny import END, draw_prompts, edit_json, make_tokenizer, save_random, save_reciter

pytest.importorskip("triton")

from helpers.rehearsal import rehearse
from helpers.rehearsal.card import current_card
from helpers.rehearsal.flash_attn import make_module
from helpers.rehearsal.timeline import has_passed
from safetensors.torch import load_file
from transformers import Qwen3_5MoeForCausalLM, Qwen3MoeForCausalLM

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.backends.gpu import device, few_rows
from nanovllm.backends.gpu.cuda_graphs import CudaGraphs
from nanovllm.backends.gpu.few_rows import Cut
from nanovllm.backends.gpu.few_rows_layer import FewRowsLayer
from nanovllm.backends.gpu.memory import GpuMemory
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.ops.attention import AttentionVariant
from nanovllm.outputs import Output
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.step_handle import StepHandle

pytestmark = pytest.mark.slow

TOLERANCE = 0.3
"""Of log-probabilities in bfloat16: the largest logits are about 16, and between 16 and 32 a unit in the last place is
1/8. Both sides round the hidden states of two layers a few times. float16 has three bits more."""
OPTIONS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
"""Small ones, because the interpreter takes a millisecond for each program."""
PARAMS = [
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=6, max_tokens=5, ignore_eos=True),
]
TINY: dict[str, Any] = {"vocab_size": 200, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 48,
}


def draw(lengths: list[int]) -> list[list[int]]:
    return [[token % 200 for token in prompt] for prompt in draw_prompts(lengths, seed=5)]


PROMPTS = draw([3, 20, 1])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    save_random(folder, **TINY)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first layer is dense and whose second one has experts."""
    folder = tmp_path_factory.mktemp("experts")
    save_random(folder, model_class=Qwen3MoeForCausalLM, mlp_only_layers=[0], **TINY, **EXPERTS)
    return folder


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first layer keeps a state for each row, and whose second one keeps keys and values.

    Both have experts and a shared one.
    """
    folder = tmp_path_factory.mktemp("hybrid")
    save_random(folder, model_class=Qwen3_5MoeForCausalLM, intermediate_size=..., **TINY, **HYBRID, **EXPERTS)
    return folder


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("speller")
    tokenizer = make_tokenizer()
    save_random(folder, **TINY | {"vocab_size": tokenizer.get_vocab_size()})
    tokenizer.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", eos_token=END)
    return folder


def expect(model: Path, params: Any = PARAMS, prompts: Any = PROMPTS, **options: Any) -> list[Output]:
    """Return the outputs of the torch backend on the CPU."""
    options = {"device": "cpu", "attention_backend": "torch", "dtype": "float32", "num_kvcache_blocks": 64} | options
    with LLM(str(model), **OPTIONS | options) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


def serve(model: Path, params: Any = PARAMS, prompts: Any = PROMPTS, **options: Any) -> list[Output]:
    """Return the outputs of an engine on a card. All of the card's memory is free again when it is gone."""
    with rehearse(num_devices=options.pop("num_devices", 1)) as card:
        with LLM(str(model), **OPTIONS | {"dtype": "float32"} | options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert card.memory.allocated > 0 and card.num_launches > 0
        del llm
        gc.collect()
        assert card.memory.allocated == 0
    return outputs


def tokens(outputs: Sequence[Output]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def assert_close(outputs: Sequence[Output], expected: Sequence[Output]) -> None:
    """Fail unless greedy tokens are the same as long as they are clear, and their log-probabilities nearly so."""
    compared = 0
    for output, reference in zip(outputs, expected, strict=True):
        assert output.logprobs is not None and reference.logprobs is not None
        pairs = zip(output.token_ids, reference.token_ids, output.logprobs, reference.logprobs, strict=True)
        for got, wanted, values, wanted_values in pairs:
            if got != wanted:
                assert wanted_values.get(got, -math.inf) > wanted_values[wanted] - TOLERANCE
                break
            assert values[got] == pytest.approx(wanted_values[got], abs=TOLERANCE)
            compared += 1
    assert compared >= 0.5 * sum(len(reference.token_ids) for reference in expected)


# ---- whole engines


def test_default_options_serve_and_change_no_token(dense: Path) -> None:
    """The start measures memory and captures graphs; decodes run as graphs, at depth 2.

    In the given order the long prompt decodes beside another one, so several programs share its keys.
    """
    prompts = draw([3, 40, 1])
    with rehearse() as card, LLM(str(dense), dtype="float32", order="given", **OPTIONS) as llm:
        config = llm.engine.config
        assert (config.use_graphs, config.depth, config.attention_backend) == (True, 2, "triton")
        cache = llm.stats()["num_blocks"] * config.block_size * 2 * 2 * 32 * 4
        assert 0.7 * card.memory.total < cache < 0.9 * card.memory.total
        before = card.num_launches
        found = llm.generate(prompts, PARAMS, use_tqdm=False)
        launches = card.num_launches - before
        again = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert llm.stats()["num_cached_tokens"] > 0 or config.block_size > 40
        # Half of the steps only decode, and launch nothing but a graph.
        assert 0 < launches < 40 * llm.stats()["num_steps"] / 2
    assert tokens(found) == tokens(again) == tokens(expect(dense, prompts=prompts))


def test_experts(experts: Path) -> None:
    assert tokens(serve(experts)) == tokens(expect(experts))


@pytest.mark.parametrize(("quantization", "kind"), [("int8", "hybrid"), ("w8a8", "experts"), ("w8a8", "hybrid")])
def test_quantised_weights(quantization: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Embedding, head, projections and experts are int8. Decodes run as graphs, with default options.

    `test_sleep_and_new_weights` serves the experts in int8. A layer of that model is dense.
    """
    model = request.getfixturevalue(kind)
    assert tokens(serve(model, quantization=quantization)) == tokens(expect(model, quantization=quantization))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_keys_and_values_in_one_byte(name: str, dense: Path) -> None:
    """Tokens in int8 are plain torch's. Triton's interpreter rounds to fp8 too coarsely for that."""
    found = serve(dense, kv_cache_dtype=name)
    expected = expect(dense, kv_cache_dtype="int8")
    assert [len(output.token_ids) for output in found] == [len(output.token_ids) for output in expected]
    if name == "int8":
        assert tokens(found) == tokens(expected)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_a_window_a_cap_and_sinks(options: dict[str, str], dense: Path) -> None:
    """Decodes run as graphs: the window moves on, and the lengths are read on the device."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=9)
    with give_variant(AttentionVariant(9, 2.0, torch.tensor([0.5, -1.0]))):
        expected = expect(dense, params, **{"dtype": "float32"} | options)
        assert_close(serve(dense, params, **options), expected)


def test_own_products_of_few_rows(dense: Path) -> None:
    """Prompts in chunks of 16 tokens and decodes as graphs, all by our own products.

    Sums of the second engine are cut into several parts. The third one has torch's products.
    """
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=9)
    expected = expect(dense, params, dtype="bfloat16")
    with rehearse(), LLM(str(dense), dtype="bfloat16", **OPTIONS) as llm:
        layers = llm.engine.runner.model.layers  # type: ignore[attr-defined]
        assert all(isinstance(layer, FewRowsLayer) for layer in layers)
        assert [layer.is_last for layer in layers] == [layer is layers[-1] for layer in layers]
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        assert_close(found, expected)
        llm.load_weights(load_file(dense / "model.safetensors").items())  # graphs read them where the old ones were
        assert tokens(llm.generate(PROMPTS, params, use_tqdm=False)) == tokens(found)
    cut = Cut(columns=16, stages=3, block_k=16, parts=2, part_steps=1)
    with mock.patch.object(few_rows, "cut_matrix", lambda out_size, in_size: cut._replace(parts=in_size // 16)):
        assert_close(serve(dense, params, dtype="bfloat16"), expected)
    with mock.patch.object(TritonKernels, "few_rows_bytes", 0):
        assert tokens(serve(dense, params, dtype="bfloat16")) == tokens(found)


def test_layers_of_few_rows_free_their_weights_at_once(dense: Path) -> None:
    """No circle of references holds them until Python collects its garbage."""
    with rehearse(), LLM(str(dense), dtype="bfloat16", **OPTIONS) as llm:
        model = llm.engine.runner.model  # type: ignore[attr-defined]
        assert isinstance(model.layers[0], FewRowsLayer)
        weights = {name: ref(weight) for name, weight in model.named_parameters()}
        del model
        gc.collect()
        gc.disable()
        try:
            llm.sleep(2)
            assert not [name for name, weight in weights.items() if weight() is not None]
        finally:
            gc.enable()
        llm.wake_up()


def test_states_of_rows(hybrid: Path) -> None:
    """Prompts come in chunks, decodes run as graphs, a sequence is preempted, and two rows serve five prompts.

    Before the first step the rows hold what is no number, so a new sequence that read them would show it.
    """
    from nanovllm.features.families.qwen3_5.ops import RowState

    prompts = draw([28, 30, 3, 1, 20])
    params = [SamplingParams(0, count, ignore_eos=True) for count in (7, 5, 4, 3, 2)]
    options: dict[str, Any] = {"num_kvcache_blocks": 4, "kvcache_block_size": 16}
    with rehearse() as card, LLM(str(hybrid), dtype="float32", **OPTIONS | options) as llm:
        config = llm.engine.config
        assert (config.use_graphs, config.depth, config.attention_backend) == (True, 2, "triton")
        states = [cache for cache in llm.engine.runner.caches if isinstance(cache, RowState)]  # type: ignore[attr-defined]
        assert [len(state.recurrent) for state in states] == [3]
        for tensor in states[0]:
            tensor.fill_(torch.nan)
        found = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
        assert stats["num_preemptions"] > 0 and stats["num_cached_tokens"] == 0
        assert card.num_launches > 0
    assert tokens(found) == tokens(expect(hybrid, params, prompts))


def test_a_start_counts_the_states(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are measured apart from activations. Keys and values get what both leave of the card."""
    measured: list[GpuMemory] = []
    measure = device.measure_memory

    def note(runner: ModelRunner) -> GpuMemory:
        measured.append(measure(runner))
        return measured[-1]

    monkeypatch.setattr(device, "measure_memory", note)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with rehearse() as card, LLM(str(hybrid), dtype="float32", enforce_eager=True, **OPTIONS) as llm:
        (memory,) = measured
        assert memory.states == 3 * (2 * 16 * 16 + 3 * (2 * 16 + 2 * 16)) * 4
        assert "states 0.00 GiB" in memory.describe() and memory.activations > 0
        cache = llm.stats()["num_blocks"] * llm.engine.config.block_size * 2 * 32 * 4
        assert 0 <= memory.left_for_cache(llm.engine.config.gpu_memory_utilization) - cache < 1 << 16
        assert cache + memory.states < card.memory.allocated < 0.9 * card.memory.total
        found = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    assert tokens(found) == tokens(expect(hybrid, params, PROMPTS[:1]))


def test_drafts_of_a_model(dense: Path, tmp_path: Path) -> None:
    save_random(tmp_path, seed=1, **TINY | {"num_hidden_layers": 1})
    config = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    params = [SamplingParams(0, 5, ignore_eos=True), SamplingParams(1.0, 4, seed=3, ignore_eos=True, logprobs=1)]
    prompts = draw([9, 20])
    assert tokens(serve_drafts(dense, config, params, prompts)) == tokens(expect(dense, params, prompts))


def test_drafts_from_the_text(tmp_path: Path) -> None:
    save_reciter(tmp_path, head_dim=32)
    config = {"method": "ngram", "num_speculative_tokens": 3}
    params = SamplingParams(0, 8)
    prompts = ["abcdefghiabcdefghiab", "cdefghcd"]
    assert tokens(serve_drafts(tmp_path, config, params, prompts)) == tokens(expect(tmp_path, params, prompts))


def serve_drafts(model: Path, config: dict[str, Any], params: Any, prompts: Any) -> list[Output]:
    """Return the outputs of an engine that verifies every draft it can get, and fail if it gets none."""
    from helpers.fakes_drafts import FREE

    from nanovllm.features.drafts.speculation import Speculation

    with rehearse(), LLM(str(model), dtype="float32", speculative_config=config, **OPTIONS) as llm:
        speculation = llm.engine.scheduler.speculation
        assert isinstance(speculation, Speculation)
        speculation.costs = FREE
        found = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats()["num_draft_tokens"] > 0
    return found


@pytest.mark.parametrize(("stages", "num_devices"), [(2, 1), (3, 3)])
def test_stages_of_a_pipeline(stages: int, num_devices: int, tmp_path: Path) -> None:
    """Stages that share a card send over gloo, and those with a card each over NCCL. Decodes run as graphs.

    Sequences are preempted, prompts are cut into chunks, and rows are edited, scored, or want log-probabilities. The
    graphs are of three sizes.
    """
    save_random(tmp_path, **TINY | {"num_hidden_layers": 3})
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1, "seed": 5, "logprobs": 2},
        {"temperature": 0.8, "top_p": 0.9, "seed": 6, "repetition_penalty": 1.2, "logit_bias": {9: 2.0}},
        {"temperature": 0, "prompt_logprobs": 1},
    ]
    params = [SamplingParams(max_tokens=8 - i, ignore_eos=True, **kinds[i % 4]) for i in range(6)]
    prompts = draw([28, 30, 3, 18, 1, 2])
    options: dict[str, Any] = {
        "max_num_seqs": 4,
        "num_kvcache_blocks": 5,
        "kvcache_block_size": 16,
        "enable_prefix_caching": False,
    }
    expected = expect(tmp_path, params, prompts, **options)
    if stages == 3:
        options["trace"] = str(tmp_path / "run.json")
    with rehearse(num_devices=num_devices) as card:
        with LLM(str(tmp_path), pipeline_parallel_size=stages, **OPTIONS | {"dtype": "float32"} | options) as llm:
            config = llm.engine.config
            assert config.use_graphs and config.distributed_backend == ("gloo" if num_devices == 1 else "nccl")
            # A send of NCCL ends when its receiver takes it, and that rank may wait for this one. So no rank waits for
            # all streams of its device.
            waits = AssertionError("the host waits for every stream of the device")
            with mock.patch.object(torch.cuda, "synchronize", side_effect=waits):
                found = llm.generate(prompts, params, use_tqdm=False)
            assert llm.stats()["num_preemptions"] > 0
        del llm
        gc.collect()
        assert card.memory.allocated == 0
    assert tokens(found) == tokens(expected)
    for output, wanted in zip(found, expected, strict=True):
        assert str(output.prompt_logprobs).count("logprob") == str(wanted.prompt_logprobs).count("logprob")
        for values, wanted_values in zip(output.logprobs or [], wanted.logprobs or [], strict=True):
            assert values == pytest.approx(wanted_values, abs=1e-3)


def test_the_host_reads_a_token_while_rank_0_of_a_pipeline_has_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the step that the host waits for, rank 0's stream has the front of a later step, and another one's back.

    At the start all requests are in one step, and at the end there is nothing left to launch.
    """
    stages = 3
    save_random(tmp_path, **TINY | {"num_hidden_layers": 3})
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    prompts = draw([3, 5, 1, 4, 2, 6])
    has_work: list[bool] = []
    read = StepHandle.result

    def note(handle: StepHandle) -> Any:
        stream = current_card().stream
        has_work.append(not has_passed({stream.number: stream.now()[stream.number]}, handle._stopwatch._end.time))  # type: ignore[attr-defined]
        return read(handle)

    monkeypatch.setattr(StepHandle, "result", note)
    options: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "pipeline_parallel_size": stages}
    with rehearse(num_devices=stages), LLM(str(tmp_path), dtype="float32", **OPTIONS | options) as llm:
        assert llm.engine.config.depth == stages + 1
        has_work.clear()  # of a step that measured memory
        found = llm.generate(prompts, params, use_tqdm=False)
    assert has_work == [False, *[True] * (len(has_work) - 1 - stages), *[False] * stages]
    assert len(has_work) == 1 + 8 * stages
    monkeypatch.undo()
    assert tokens(found) == tokens(expect(tmp_path, params, prompts))


def test_stages_start_with_default_memory(dense: Path) -> None:
    """Each stage measures its largest step and its graphs, without the others."""
    assert tokens(serve(dense, pipeline_parallel_size=2)) == tokens(expect(dense))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_two_ranks(backend: str, experts: Path) -> None:
    """gloo's ranks share a card and run eagerly; NCCL's have a card each, and their collectives are captured."""
    options = {"tensor_parallel_size": 2, "distributed_backend": backend}
    num_devices = 1 if backend == "gloo" else 2
    changes = {"num_attention_heads": 2, "num_key_value_heads": 2}
    save_random(experts / "two", model_class=Qwen3MoeForCausalLM, mlp_only_layers=[0], **TINY | EXPERTS | changes)
    found = serve(experts / "two", num_devices=num_devices, **options)
    assert tokens(found) == tokens(expect(experts / "two"))


@pytest.mark.parametrize(
    ("option", "end"),
    [
        ("tensor_parallel_size", "dropped"),
        ("tensor_parallel_size", "killed"),
        ("pipeline_parallel_size", "closed"),
        ("pipeline_parallel_size", "killed"),
    ],
)
def test_two_ranks_over_nccl_end_at_once(
    option: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for a rank that does not leave NCCL's group: rank 0 if it is dropped, a follower if it is killed."""
    monkeypatch.setattr("nanovllm.features.distributed.follower_group.PATIENCE", 200.0)  # who does not end is killed
    save_random(tmp_path, **TINY | {"num_key_value_heads": 2})
    options = {option: 2, "distributed_backend": "nccl", "num_kvcache_blocks": 8}
    with rehearse(num_devices=2):
        llm = LLM(str(tmp_path), dtype="float32", enforce_eager=True, **OPTIONS | options)
        llm.generate(PROMPTS[:1], PARAMS[0], use_tqdm=False)
        (follower,) = llm.engine.runner.pids
        if end == "killed":
            close = ModelRunner.close
            os.kill(follower, signal.SIGSTOP)  # else it might end in order before it is killed
            monkeypatch.setattr(ModelRunner, "close", lambda runner: (os.kill(follower, signal.SIGKILL), close(runner)))
        since = time.monotonic()
        if end != "dropped":
            llm.close()
        del llm
        gc.collect()
        assert time.monotonic() - since < 50, "an idle machine takes 0.3 s"
    assert not Path(f"/proc/{follower}").exists()


def test_a_dropped_engine_frees_its_memory_at_once(dense: Path) -> None:
    """No cycle holds it until Python looks for cycles, which may be long after the next engine wants the memory.

    A cycle would also end in any order, and NCCL's group must not end before graphs that have its collectives.
    """
    with rehearse() as card:
        llm = LLM(str(dense), dtype="float32", **OPTIONS)
        llm.generate(PROMPTS[:1], PARAMS[0], use_tqdm=False)
        gc.collect()
        gc.disable()
        try:
            del llm
            assert card.memory.allocated == 0
        finally:
            gc.enable()


@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_new_weights_on_two_ranks(option: str, tmp_path: Path) -> None:
    """Each rank takes its share of each tensor; graphs that were captured before read it. Both wake up with it."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for seed, name in ((0, "old"), (3, "new")):
        save_random(tmp_path / name, seed=seed, **TINY | {"num_key_value_heads": 2})
    new_weights = load_file(tmp_path / "new" / "model.safetensors")
    with rehearse(num_devices=2), LLM(str(tmp_path / "old"), dtype="float32", **{option: 2}, **OPTIONS) as llm:
        assert llm.engine.config.use_graphs
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.load_weights(new_weights.items())
        found_new = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.sleep(1)
        llm.wake_up()
        again = llm.generate(PROMPTS, params, use_tqdm=False)
    assert tokens(found) == tokens(expect(tmp_path / "old", params))
    assert tokens(found_new) == tokens(again) == tokens(expect(tmp_path / "new", params))


def test_edits_and_grammars(speller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edited rows beside others: the model's graph runs, and the sampler's does not.

    The model's graph of a step is launched, then the step before it is read, and then masks are made. The host has not
    waited for the graph by then.
    """
    from nanovllm.features.edits import editing

    pytest.importorskip("llguidance")
    order: list[str] = []
    overlaps: list[bool] = []

    def note(owner: Any, method: str, word: str) -> None:
        function = getattr(owner, method)

        def noted(*arguments: Any) -> Any:
            if word == "masks" and order[-2:] == ["layers", "read"]:
                card = current_card()
                overlaps.append(not has_passed(card.stream.now(), card.timeline.host))
            result = function(*arguments)
            order.append(word if word != "graph" else arguments[1])  # CudaGraphs.replay(part, size)
            return result

        monkeypatch.setattr(owner, method, noted)

    params = [
        SamplingParams(0, 6, ignore_eos=True, presence_penalty=1.0, repetition_penalty=1.2, logit_bias={9: 2.0}),
        SamplingParams(1.0, 6, seed=1, structured_outputs=StructuredOutputsParams(regex="[a-z]{3,9}")),
        SamplingParams(1.0, 4, seed=2, ignore_eos=True, logprobs=0),
        SamplingParams(0, 4, min_tokens=3, bad_words=["the"], allowed_token_ids=list(range(50))),
    ]
    prompts = ["ab", "the cat", "xyz", "d"]
    expected = tokens(expect(speller, params, prompts))
    note(CudaGraphs, "replay", "graph")
    note(StepHandle, "result", "read")
    note(editing, "collect_edits", "masks")
    assert tokens(serve(speller, params, prompts)) == expected
    assert len(overlaps) >= 3 and all(overlaps)


def test_scores_and_log_probabilities(dense: Path) -> None:
    params = [
        SamplingParams(0, 3, ignore_eos=True, logprobs=3, prompt_logprobs=2),
        SamplingParams(0, 3, ignore_eos=True, logprobs=0, prompt_logprobs=1),
    ]
    prompts = draw([12, 20])  # the first step scores tokens of both
    found = serve(dense, params, prompts)
    for output, expected in zip(found, expect(dense, params, prompts), strict=True):
        assert output.token_ids == expected.token_ids
        for values, wanted in (
            (output.logprobs, expected.logprobs),
            (output.prompt_logprobs, expected.prompt_logprobs),
        ):
            assert values is not None and wanted is not None
            for some, wanted_some in zip(values, wanted, strict=True):
                assert some == pytest.approx(wanted_some, abs=1e-3)


def test_embeddings(dense: Path) -> None:
    prompts = draw([9, 20])
    with rehearse(), LLM(str(dense), dtype="float32", **OPTIONS) as llm:
        found = llm.embed(prompts, use_tqdm=False)
    options = {"device": "cpu", "attention_backend": "torch", "dtype": "float32", "num_kvcache_blocks": 64}
    with LLM(str(dense), **OPTIONS | options) as llm:
        expected = llm.embed(prompts, use_tqdm=False)
    for embedding, wanted in zip(found, expected, strict=True):
        assert embedding["embedding"] == pytest.approx(wanted["embedding"], abs=1e-4)


@pytest.mark.parametrize(("kind", "quantization"), [("dense", None), ("experts", "int8")])
def test_sleep_and_new_weights(
    kind: str, quantization: str | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Asleep an engine leaves the card's memory to others; awake it has its graphs again. It is closed asleep.

    New weights, quantised ones too, lie in the memory of the old ones: no graph is captured a second time.
    """
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    model = request.getfixturevalue(kind)
    changes = {"model_class": Qwen3MoeForCausalLM, "mlp_only_layers": [0], **EXPERTS} if kind == "experts" else {}
    save_random(tmp_path, seed=3, **TINY, **changes)
    new_weights = load_file(tmp_path / "model.safetensors")
    with rehearse() as card, LLM(str(model), dtype="float32", quantization=quantization, **OPTIONS) as llm:
        llm.sleep(2)
        assert card.memory.reserved < card.memory.total / 4
        llm.wake_up()
        found = llm.generate(PROMPTS[:1], params, use_tqdm=False)
        with mock.patch.object(torch.cuda, "graph", side_effect=AssertionError("a graph is captured again")):
            llm.load_weights(new_weights.items())
        found_new = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.sleep(2)
    assert tokens(found) == tokens(expect(model, params, PROMPTS[:1], quantization=quantization))
    assert tokens(found_new) == tokens(expect(tmp_path, params, quantization=quantization))


def test_a_start_and_new_weights_on_a_stream_are_read_from_another_thread(dense: Path, tmp_path: Path) -> None:
    """`submit` has a thread of its own, whose steps run on the default stream."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    save_random(tmp_path, seed=3, **TINY)
    new_weights = load_file(tmp_path / "model.safetensors")
    prompt = [5, 6, 7]
    with rehearse():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            llm = LLM(str(dense), dtype="float32", enforce_eager=True, **OPTIONS)
        found = [llm.submit(prompt, params).result(timeout=300)]
        with torch.cuda.stream(stream):
            llm.load_weights(new_weights.items())
        found_new = [llm.submit(prompt, params).result(timeout=300)]
        llm.close()
    assert tokens(found) == tokens(expect(dense, params, [prompt]))
    assert tokens(found_new) == tokens(expect(tmp_path, params, [prompt]))


def test_preemption_an_abort_and_a_failed_step(dense: Path) -> None:
    """An engine with room for two short sequences is left early, fails once, serves on, and closes."""
    params = [SamplingParams(0, 7, ignore_eos=True), SamplingParams(1.0, 5, seed=1, ignore_eos=True)]
    prompts = draw([28, 30])
    options = {"num_kvcache_blocks": 5, "kvcache_block_size": 16, "dtype": "float32", "enable_prefix_caching": False}
    with rehearse() as card, LLM(str(dense), **OPTIONS | options) as llm:
        for _ in llm.stream(prompts, SamplingParams(max_tokens=2, ignore_eos=True)):
            break
        with (
            mock.patch.object(
                llm.engine.runner.device_rows, "add_blocks", side_effect=RuntimeError("an error in a step")
            ),
            pytest.raises(RuntimeError, match="an error in a step"),
        ):
            llm.generate(prompts[:1], params[0], use_tqdm=False)
        found = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats()["num_preemptions"] > 0
        with (
            mock.patch.object(torch.cuda, "synchronize", side_effect=RuntimeError("CUDA error: device-side assert")),
            mock.patch.object(llm.engine.runner.device_rows, "add_blocks", side_effect=RuntimeError("CUDA error")),
            pytest.raises(RuntimeError, match="CUDA error"),
        ):
            llm.generate(prompts[:1], params[0], use_tqdm=False)
        with pytest.raises(RuntimeError, match="closed"):
            llm.generate(prompts[:1], params[0], use_tqdm=False)
        assert card.memory.allocated < 1 << 16  # the rows' tables
    assert tokens(found) == tokens(expect(dense, params, prompts))


@pytest.mark.parametrize(("kind", "dtype"), [("experts", "bfloat16"), ("hybrid", "bfloat16"), ("dense", "float16")])
def test_half_precision(kind: str, dtype: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=9)
    expected = expect(model, params, dtype=dtype)
    assert_close(serve(model, params, dtype=dtype), expected)


def test_flash_attn(dense: Path) -> None:
    """With flash-attn 2.8.3's signatures and checks: blocks of 256 tokens, captured too. "auto" prefers Triton."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=9)
    expected = expect(dense, params, dtype="bfloat16")
    with mock.patch.dict(sys.modules, {"flash_attn": None}), rehearse():
        sys.modules["flash_attn"] = make_module()
        with LLM(str(dense), dtype="bfloat16", **OPTIONS) as llm:
            assert llm.engine.config.attention_backend == "triton"
        with LLM(str(dense), dtype="bfloat16", attention_backend="flash_attn", **OPTIONS) as llm:
            config = llm.engine.config
            assert (config.attention_backend, config.block_size, config.use_graphs) == ("flash_attn", 256, True)
            assert_close(llm.generate(PROMPTS, params, use_tqdm=False), expected)
