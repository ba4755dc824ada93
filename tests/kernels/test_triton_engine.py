"""The whole engine on the Triton backend, in the interpreter or on a GPU: token for token the torch backend's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kernel_cases import DEVICE, give_variant
from helpers.quantized import CHECKPOINTS, save_quantised
from helpers.tiny import save_random
from transformers import Qwen2ForCausalLM, Qwen3MoeForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.ops.attention import AttentionVariant

pytest.importorskip("triton")

PROMPTS = [[7, 3, 9], list(range(20, 61)), [7, 3, 9, 11, 5], [5]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=1, seed=5, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=6, max_tokens=4, ignore_eos=True),
]


def generate(folder: Path, backend: str, draws: bool = False, **options: Any) -> list[list[int]]:
    """Return two tokens of two greedy requests each; or, if `draws`, more tokens of these, and of two that are drawn.

    A small token budget cuts the long prompt into chunks: decodes and prefills share steps.
    """
    common = {"device": DEVICE.type, "dtype": "float32", "max_model_len": 128, "num_kvcache_blocks": 40}
    common |= {"kvcache_block_size": 16, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    prompts = PROMPTS if draws else PROMPTS[:2]
    params: Any = PARAMS if draws else SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(str(folder), attention_backend=backend, **common, **options) as llm:
        return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    ("changes", "kv_cache_dtype", "variant"),
    [
        ({}, "auto", None),
        ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}, "auto", None),
        ({}, "int8", None),
        ({"num_attention_heads": 2}, "auto", AttentionVariant(9, 2.0, torch.tensor([0.5, -1.0]))),
    ],
)
def test_tokens_on_triton_are_those_on_torch(
    tmp_path: Path, changes: dict[str, int], kv_cache_dtype: str, variant: AttentionVariant | None
) -> None:
    """In float32, so that the two differ by a few units in the last place, far less than the gaps between logits.
    So does a code that is the next one, in int8. The sampler is the same in all cases.
    """
    save_random(tmp_path, seed=1, **changes)
    options: dict[str, Any] = {"kv_cache_dtype": kv_cache_dtype}
    options["draws"] = not changes and kv_cache_dtype == "auto"
    with give_variant(variant):
        tokens = generate(tmp_path, "torch", **options)
        assert generate(tmp_path, "triton", **options) == tokens
    if variant is not None:
        assert tokens != generate(tmp_path, "torch", **options)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_quantised_tokens_on_triton_are_those_on_torch(tmp_path: Path, quantization: str) -> None:
    """The first layer is dense, and the second one has experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    save_random(tmp_path, seed=1, model_class=Qwen3MoeForCausalLM, **experts)
    options = {"quantization": quantization}
    assert generate(tmp_path, "triton", **options) == generate(tmp_path, "torch", **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["awq", "gptq desc_act", "gptq 8 bits"])
def test_tokens_of_quantised_checkpoints_on_triton_are_those_on_torch(tmp_path: Path, name: str) -> None:
    """Groups with zeros, and columns that are sorted by their group. Qwen2's projections have a bias."""
    save_random(tmp_path / "whole", seed=1, model_class=Qwen2ForCausalLM, num_hidden_layers=1)
    quantised, means = save_quantised(tmp_path / "whole", tmp_path, *CHECKPOINTS[name])
    assert generate(quantised, "triton") == generate(means, "torch")


def test_scores_on_triton_are_those_on_torch(tmp_path: Path) -> None:
    save_random(tmp_path, seed=1, num_hidden_layers=1)
    options = {"device": DEVICE.type, "dtype": "float32", "max_model_len": 128, "num_kvcache_blocks": 40}
    found = []
    for backend in ("torch", "triton"):
        with LLM(str(tmp_path), attention_backend=backend, max_num_batched_tokens=24, **options) as llm:
            found.append(llm.score_arrays(PROMPTS[:2], 5, use_tqdm=False))
    for one, other in zip(*found, strict=True):
        assert (one.ids == other.ids).all() and abs(one.logprobs[1:] - other.logprobs[1:]).max() < 1e-3
        assert abs(one.token_logprobs - other.token_logprobs).max() < 1e-3
