"""With the CPU kernels a decode step is recorded once, and its calls are replayed: nobody can tell from the results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hybrids import save_hybrid, save_sparse_hybrid
from helpers.tiny import CROWDED, SLIDING, draw_prompts, save_random
from transformers import Qwen3MoeForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.library import record_calls
from nanovllm.backends.cpu.recorded_steps import MOST_SEQS, RecordedSteps
from nanovllm.backends.cpu.scratch import Scratch, borrow_from
from nanovllm.backends.steps import EAGER
from nanovllm.models.decoder import Decoder
from nanovllm.ops.step_inputs import StepInputs

if reason := CpuBackend.why_cannot(torch.device("cpu")):
    pytest.skip(reason, allow_module_level=True)

EXPERTS: dict[str, Any] = {
    "model_class": Qwen3MoeForCausalLM,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **CROWDED | {"attention_backend": "cpu"} | options)


def answer(llm: LLM, num_requests: int = 20) -> list[dict[str, Any]]:
    """Return the outputs of requests of every kind: without log-probabilities, and with those of five tokens.

    Without them most steps sample as they were recorded. With them, and with penalties, the sampler runs eagerly.
    """
    lengths = [1 + 7 * i % 61 for i in range(num_requests)]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.2, "top_k": 50},
        {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01},
    ]
    answers = []
    for more in ({}, {"logprobs": 5}, {"presence_penalty": 0.5}):
        params = [SamplingParams(seed=i, max_tokens=3 + i % 17, **kinds[i % 3], **more) for i in range(num_requests)]
        outputs = llm.generate(draw_prompts(lengths), params, use_tqdm=False)
        answers += [{key: value for key, value in output.items() if key != "metrics"} for output in outputs]
    return answers


def find_recorded(llm: LLM) -> RecordedSteps:
    recorded = llm.engine.runner.steps  # type: ignore[attr-defined]
    assert isinstance(recorded, RecordedSteps)
    return recorded


@pytest.mark.parametrize(
    ("save", "options", "dtype"),
    [
        (save_random, {}, "float32"),
        (save_random, {}, "bfloat16"),
        (lambda folder: save_random(folder, tie_word_embeddings=False, **SLIDING), {}, "bfloat16"),
        (save_hybrid, {}, "float32"),
        (save_sparse_hybrid, {}, "float32"),
        (save_sparse_hybrid, {}, "bfloat16"),
        (save_sparse_hybrid, {"quantization": "int8"}, "float32"),
        (save_sparse_hybrid, {"quantization": "int8"}, "bfloat16"),
        (lambda folder: save_random(folder, **EXPERTS), {}, "float32"),
        (lambda folder: save_random(folder, **EXPERTS), {"quantization": "int8"}, "bfloat16"),
        (save_random, {"quantization": "int8-dynamic"}, "float32"),
        (save_random, {"quantization": "int8-dynamic"}, "bfloat16"),
        (save_random, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, "float32"),
    ],
    ids=[
        "tied-float32",
        "tied-bfloat16",
        "untied-window-bfloat16",
        "hybrid-float32",
        "both-float32",
        "both-bfloat16",
        "int8-both-float32",
        "int8-both-bfloat16",
        "experts-float32",
        "int8-experts-bfloat16",
        "int8-dynamic-float32",
        "int8-dynamic-bfloat16",
        "drafts-float32",
    ],
)
def test_replayed_steps_give_the_very_numbers_of_eager_ones(
    save: Callable[[Path], object], options: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    save(tmp_path)
    with open_llm(tmp_path, dtype=dtype, enforce_eager=True, **options) as llm:
        assert llm.engine.runner.steps is EAGER  # type: ignore[attr-defined]
        expected = answer(llm)
    with open_llm(tmp_path, dtype=dtype, **options) as llm:
        for _ in range(2):
            assert answer(llm) == expected
        parts = [part for part, _ in find_recorded(llm)._recordings]
        assert parts.count("layers") > 2 and parts.count("head") > 2


def test_python_runs_the_model_once_for_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_random(tmp_path)
    sizes: list[int] = []
    forward = Decoder.forward

    def watch(model: Decoder, inputs: StepInputs, *arguments: Any) -> torch.Tensor:
        sizes.append(len(inputs.token_ids))
        return forward(model, inputs, *arguments)

    monkeypatch.setattr(Decoder, "forward", watch)
    with open_llm(tmp_path, max_num_seqs=MOST_SEQS + 1, num_kvcache_blocks=800, max_num_batched_tokens=2048) as llm:
        for num_requests in (3, MOST_SEQS, MOST_SEQS + 1):
            for times_run in (2, 1):  # the prompts, and one decode step that is recorded
                sizes.clear()
                params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
                llm.generate(draw_prompts([9] * num_requests), params, use_tqdm=False)
                assert len(sizes) == (5 if num_requests > MOST_SEQS else times_run)


def test_a_model_that_needs_torch_s_operators_is_not_recorded(tmp_path: Path) -> None:
    """The C++ kernels multiply no experts of 40 features. A step that finds it out has run once, and is right."""
    save_random(tmp_path, **EXPERTS | {"moe_intermediate_size": 40})
    with open_llm(tmp_path, enforce_eager=True) as llm:
        expected = answer(llm)
    with open_llm(tmp_path) as llm:
        assert answer(llm) == expected
        assert not find_recorded(llm)._recordings


@pytest.mark.parametrize(
    "change",
    [lambda y: y * 1, lambda y: y.double().to(y.dtype), lambda y: y.t().contiguous().t().contiguous()],
    ids=["computes", "converts", "copies"],
)
def test_a_step_that_torch_takes_part_in_is_not_recorded_and_carries_states_on_once(
    change: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_hybrid(tmp_path)
    with open_llm(tmp_path, enforce_eager=True) as llm:
        expected = answer(llm)
    multiply = CpuBackend.silu_and_mul
    monkeypatch.setattr(CpuBackend, "silu_and_mul", lambda backend, x: change(multiply(backend, x)))
    with open_llm(tmp_path) as llm:
        assert answer(llm) == expected
        assert not find_recorded(llm)._recordings


def test_new_weights_and_a_new_cache_make_new_recordings(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    states = [save_random(folder, seed=seed).state_dict() for seed, folder in enumerate(folders)]
    expected = []
    for folder in folders:
        with open_llm(folder, enforce_eager=True) as llm:
            expected.append(answer(llm))
    with open_llm(folders[0]) as llm:
        for level in (1, 2):
            assert answer(llm) == expected[0]
            llm.sleep(level=level)
            llm.wake_up()
        assert answer(llm) == expected[0]
        llm.load_weights(states[1].items())
        assert answer(llm) == expected[1]


def test_calls_are_recorded_in_one_thread_and_only_within_the_block() -> None:
    backend = CpuBackend()
    memory = Scratch(keeps_all=True)
    x = torch.randn(3, 64)
    with borrow_from(memory), record_calls() as calls:
        y = backend.silu_and_mul(x)
        z = backend.silu_and_mul(y)
    backend.silu_and_mul(x)
    assert len(calls) == 2
    x.copy_(torch.randn(3, 64))
    calls.replay()
    assert torch.equal(z, backend.silu_and_mul(backend.silu_and_mul(x)))


def test_a_kernel_that_cannot_be_called_again_is_noticed() -> None:
    from nanovllm.backends.cpu.edit_logits import Operators as CpuEditOperators
    from nanovllm.features.edits.edit_logits import MaskAndPenalties

    backend = CpuBackend()
    rows = torch.zeros(1, dtype=torch.int32)
    with record_calls() as calls:
        backend.silu_and_mul(torch.randn(3, 64))
        assert calls.can_replay
        edits = MaskAndPenalties(rows, None, rows, None, None)
        CpuEditOperators(backend).edit_logits(torch.zeros(1, 64), edits)
    assert not calls.can_replay
