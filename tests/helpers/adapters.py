"""Random LoRA adapters, as PEFT saves them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(model: PreTrainedModel, folder: Path, seed: int = 1, **changes: Any) -> PreTrainedModel:
    """Write a random adapter of the model, and return the model with the adapter merged by PEFT."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = {"r": 4, "lora_alpha": 12, "target_modules": LINEAR} | changes
    adapted = peft.get_peft_model(model, peft.LoraConfig(**config))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload()
