"""Writes a checkpoint of random weights that every engine can load, for bench.py --compare."""

import json
import os
from pathlib import Path
from typing import Any

import torch

from nanovllm.models.model_config import load_model_config
from nanovllm.models.sizes import Sizes
from nanovllm.models.weight_names import find_weight_targets


def write_checkpoint(config: dict[str, Any], dtype: torch.dtype, folder: Path, seed: int = 0) -> None:
    """Write a checkpoint of random weights as transformers would save it, unless the folder has one.

    Matrices are normal with standard deviation 0.02, norms are one and biases zero. There is no end-of-sequence id.
    """
    from safetensors.torch import save_file

    if (folder / "model.safetensors").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    model = Sizes(load_model_config(config, "the shape")).model
    tensors = {
        name: (torch.zeros if name.endswith(".bias") else torch.ones)(target.shape, dtype=dtype)
        if len(target.shape) == 1
        else torch.randn(target.shape, generator=generator).mul_(0.02).to(dtype)
        for name, target in find_weight_targets(model)
    }
    name = str(dtype).removeprefix("torch.")
    config = {**config, "torch_dtype": name, "dtype": name, "eos_token_id": None, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 0, "top_p": 1.0}))
    partial = folder / f"partial-{os.getpid()}"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")  # comes last, so an interrupted write leaves no checkpoint
