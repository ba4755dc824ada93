"""Keys and values in one byte: the same requests, and other numbers only where a code rounds."""

from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import SMALL, draw_prompts, save_random
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.config import EngineConfig
from nanovllm.ops.attention import KVCache
from nanovllm.ops.norm_rope_store import NormRope

INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}
BACKENDS: list[Any] = ["torch", "cpu"]
if CpuBackend.why_cannot(torch.device("cpu")):
    BACKENDS.remove("cpu")
NUMBERS: list[Any] = [(backend, dtype) for backend in BACKENDS for dtype in ("float32", "bfloat16")]
"""The types that each backend multiplies here. Triton's interpreter multiplies the bits of bfloat16 as integers."""
if find_spec("triton"):
    BACKENDS.append(pytest.param("triton", marks=pytest.mark.slow))  # by its interpreter
    NUMBERS.append(pytest.param("triton", "float32", marks=pytest.mark.slow))


def score(folder: Path | str, prompts: list[list[int]], **options: Any) -> list[float]:
    """Return the log-probabilities of the prompts' tokens, each given those before it."""
    with LLM(folder, **SMALL | options) as llm:
        scores = llm.score([prompt[:1] for prompt in prompts], [prompt[1:] for prompt in prompts], use_tqdm=False)
    return [value for one in scores for value in one["logprobs"]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probabilities_differ_little_from_those_of_the_models_type(backend: str, random_model: Path) -> None:
    prompts = draw_prompts([3, 40, 100], seed=1)
    expected = score(random_model, prompts, attention_backend="torch")
    got = score(random_model, prompts, attention_backend=backend, **INT8)
    differences = (torch.tensor(got) - torch.tensor(expected)).abs()
    assert 0 < differences.max() < 0.5
    assert differences.mean() < 0.1


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no C++ compiler")
def test_the_kernels_give_plain_torchs_numbers(random_model: Path) -> None:
    """They round other sums, so here and there a code is the next one."""
    prompts = draw_prompts([3, 40, 100], seed=2)
    expected, got = (score(random_model, prompts, attention_backend=name, **INT8) for name in ("torch", "cpu"))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=0, atol=1e-2)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("column", [4 * 32, -1], ids=["key", "value"])
@pytest.mark.parametrize(("backend", "dtype"), NUMBERS)
def test_what_is_no_number_ends_with_an_error(
    backend: str, dtype: str, column: int, value: float, random_model: Path
) -> None:
    """A head of the token at position 9 has such an element. Only one request has so many tokens."""
    prompts = draw_prompts([2, 3, 12], seed=3)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    options = SMALL | INT8 | {"dtype": dtype, "attention_backend": backend, "enforce_eager": True}
    with LLM(random_model, **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        operators = llm.engine.runner.backend
        store = operators.norm_rope_store

        def spoil(qkv: Tensor, norms: NormRope, positions: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
            qkv[positions == 9, column] = value
            return store(qkv, norms, positions, cache, slots)

        operators.norm_rope_store = spoil  # type: ignore[method-assign]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o["token_ids"] for o in outputs[:2]] == [o["token_ids"] for o in expected[:2]]
    assert outputs[2]["finish_reason"] == "error"


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no C++ compiler")
def test_stages_leave_the_bits_and_ranks_the_log_probabilities(random_model: Path, local_ranks: None) -> None:
    prompts = draw_prompts([3, 40, 100], seed=4)
    options: dict[str, Any] = {"dtype": "bfloat16", "attention_backend": "cpu", **INT8}
    expected = score(random_model, prompts, **options)
    assert score(random_model, prompts, pipeline_parallel_size=2, **options) == expected
    got = score(random_model, prompts, tensor_parallel_size=2, **options)
    assert (torch.tensor(got) - torch.tensor(expected)).abs().mean() < 0.1


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no C++ compiler")
def test_counts_and_ends_are_those_of_any_backend_and_of_ranks(random_model: Path, local_ranks: None) -> None:
    prompts = draw_prompts([3, 40, 100, 40], seed=5)
    prompts[3][:32] = prompts[1][:32]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    found = []
    small = SMALL | INT8 | {"num_kvcache_blocks": 14, "max_num_batched_tokens": 16}
    for options in ({"attention_backend": "torch"}, {"attention_backend": "cpu"}, {"tensor_parallel_size": 2}):
        with LLM(random_model, **small | options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            ends = [(len(o["token_ids"]), o["finish_reason"], o["num_cached_tokens"]) for o in outputs]
            found.append((ends, llm.stats()))
    assert found[0] == found[1] == found[2]


def test_a_job_that_goes_on_keeps_the_option() -> None:
    assert "kv_cache_dtype" in {field.name for field in fields(EngineConfig) if field.metadata["affects"] == "results"}


def test_a_cache_of_the_same_memory_holds_nearly_twice_the_tokens(tmp_path: Path) -> None:
    save_random(tmp_path, head_dim=128)
    blocks = {}
    for name in ("auto", "int8"):
        options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": name, "kvcache_memory_bytes": 1 << 22}
        with LLM(tmp_path, device="cpu", attention_backend="torch", max_model_len=64, **options) as llm:
            blocks[name] = llm.stats()["num_blocks"]
    assert 1.9 < blocks["int8"] / blocks["auto"] < 2


def test_what_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype of auto, int8, not fp8"):
        LLM("tiny-qwen3", device="cpu", kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match=r"kv_cache_dtype.*int4.*auto, int8"):
        LLM("tiny-qwen3", kv_cache_dtype="int4")
    with LLM("tiny-qwen3", kv_cache_dtype="int8_per_token_head", max_model_len=64) as llm:  # vLLM's name
        assert llm.engine.config.kv_cache_dtype == "int8"
