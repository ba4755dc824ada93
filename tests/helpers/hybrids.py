"""Tiny checkpoints of Qwen3.5, whose layers are Gated DeltaNets and gated attention, with MLPs or with experts."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
)

from helpers.tiny import VOCAB_SIZE, save_random

TINY_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 512,
}
TINY_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}


def save_hybrid(
    folder: Path, model_class: type[PreTrainedModel] = Qwen3_5ForCausalLM, **changes: Any
) -> PreTrainedModel:
    """Write a random text model to folder, and return transformers' model of it."""
    model = save_random(folder, model_class=model_class, **TINY_HYBRID | changes)
    _draw_decays(model)
    model.save_pretrained(folder)
    return model


def save_sparse_hybrid(folder: Path, **changes: Any) -> PreTrainedModel:
    """Write a random text model with experts to folder, and return transformers' model of it."""
    return save_hybrid(folder, Qwen3_5MoeForCausalLM, **{"intermediate_size": ...} | TINY_EXPERTS | changes)


def save_hub_form(folder: Path, is_tied: bool = True, has_experts: bool = False) -> PreTrainedModel:
    """Write a random model as the hub has it to folder: the text model beside one for pictures. Return the model."""
    torch.manual_seed(0)
    model_class = Qwen3_5MoeForConditionalGeneration if has_experts else Qwen3_5ForConditionalGeneration
    text = TINY_HYBRID | {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "head_dim": 32, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2} | (TINY_EXPERTS if has_experts else {"intermediate_size": 96})
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = model_class.config_class(text_config=text, vision_config=vision, tie_word_embeddings=is_tied)
    model = model_class(config).float().eval()
    _draw_decays(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(folder)
    return model


def _draw_decays(model: PreTrainedModel) -> None:
    """Let some heads remember hundreds of tokens, and others a few."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-6, 0.5)
