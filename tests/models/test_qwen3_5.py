"""Qwen3.5, whose layers are Gated DeltaNets and gated attention, says token for token what transformers says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny import CROWDED, draw_prompts, greedy, save_random
from transformers import PreTrainedModel, Qwen3_5ForCausalLM

from nanovllm import LLM, SamplingParams

TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 512,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "two value heads a key head": {},
    "one, untied": {"linear_num_value_heads": 2, "tie_word_embeddings": False},
    "other layers": {"num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    "odd sizes, half of a head rotates": {
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 3,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        "attention_bias": True,
    },
}
GREEDY = {"temperature": 0, "ignore_eos": True}


def save(folder: Path, **changes: Any) -> PreTrainedModel:
    model = save_random(folder, model_class=Qwen3_5ForCausalLM, **TINY | changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-6, 0.5)  # some heads remember hundreds of tokens, others a few
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_tokens_are_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    model = save(tmp_path, **changes)
    prompts = draw_prompts([1, 2, 3, 4, 5, 15, 16, 17, 70, 100, 90, 80])
    with LLM(tmp_path, **CROWDED | {"num_kvcache_blocks": 12}) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=30, **GREEDY), use_tqdm=False)
        assert llm.stats()["num_preemptions"]
    assert [output["token_ids"] for output in outputs] == [greedy(model, prompt, 30) for prompt in prompts]
