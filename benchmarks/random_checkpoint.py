"""Writes a checkpoint of random weights in the shape of a published model, in bfloat16 or quantised already.

    python benchmarks/random_checkpoint.py qwen3-4b FOLDER --format awq

It needs the memory of one file, a gigabyte, and not that of the model. A quantised checkpoint has random codes, and
scales that make weights as large as those of a real model. What the model says is noise; its speed and its memory are
those of the real checkpoint.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from nanovllm.features.quantized.checkpoints import ScaledFloat8, find_format
from nanovllm.features.quantized.formats import Format
from nanovllm.features.shapes import PRESETS, preset_config
from nanovllm.models.model_config import load_model_config
from nanovllm.models.sizes import Sizes
from nanovllm.models.weight_names import find_weight_targets

SHARD = 1 << 30
"""Bytes of a file."""

DEVIATION = 0.02
"""Of the weights, about."""


def _compressed(layout: str, bits: int, group_size: int | None) -> dict[str, Any]:
    strategy = "group" if group_size else "channel"
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": strategy, "group_size": group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "bfloat16": None,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": _GPTQ,
    "gptq-8": _GPTQ | {"bits": 8},
    "w4a16": _compressed("pack-quantized", 4, 128),
    "w8a16": _compressed("pack-quantized", 8, None),
    "w8a8": _compressed("int-quantized", 8, None),
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
"""The quantization_config of each format."""


def write_random_checkpoint(config: dict[str, Any], format_name: str, folder: Path) -> Format | None:
    """Write the checkpoint of a model with this config.json. Embedding, LM head, norms and routers are in bfloat16.

    Returns:
        The format of the matrices; None for bfloat16.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # No token ends a sequence.
    config = config | {"torch_dtype": "bfloat16", "dtype": "bfloat16", "eos_token_id": None, "bos_token_id": None}
    if CONFIGS[format_name] is not None:
        config["quantization_config"] = CONFIGS[format_name]
    hf_config = load_model_config(config, "the shape")
    format = find_format(None, hf_config)
    torch.manual_seed(0)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shard: dict[str, Tensor] = {}
    size = 0
    num_files = 0
    model = Sizes(hf_config).model
    for name, tensor in _draw_tensors({name: target.shape for name, target in find_weight_targets(model)}, format):
        if size + tensor.nbytes > SHARD and shard:
            save_file(shard, folder / f"model-{num_files}.safetensors")
            shard = {}
            size = 0
            num_files += 1
        shard[name] = tensor
        size += tensor.nbytes
    save_file(shard, folder / f"model-{num_files}.safetensors")
    return format


def _draw_tensors(shapes: dict[str, tuple[int, ...]], format: Format | None) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of all tensors of a checkpoint whose matrices have these names and shapes."""
    for name, shape in shapes.items():
        prefix = name.removesuffix(".weight")
        if format is None or len(shape) != 2 or prefix.endswith(("gate", "embed_tokens", "lm_head")):
            value = torch.empty(shape, dtype=torch.bfloat16)
            yield name, value.fill_(1) if len(shape) == 1 else value.normal_(0, DEVIATION)
            continue
        names = {f"{prefix}.{suffix}" for suffix in (format.suffixes[0], "g_idx")}
        for suffix, (own, dtypes) in format.list_tensors(prefix, names, *shape).items():
            yield f"{prefix}.{suffix}", _draw(suffix, own, dtypes, format, shape)


def _draw(suffix: str, own: tuple[int, ...], dtypes: tuple[str, ...], format: Format, shape: tuple[int, ...]) -> Tensor:
    """Return random values, in their own shape, for one of the tensors that make a matrix of this shape, [out, in]."""
    if suffix == "weight_shape":
        return torch.tensor(shape)
    if suffix == "g_idx":
        return torch.arange(shape[1], dtype=torch.int32) // (format.group_size or shape[1])
    if "scale" in suffix:
        most = 448 if isinstance(format, ScaledFloat8) else 2 ** (format.bits - 1)
        return torch.full(own, DEVIATION * math.sqrt(3) / most).half()  # the deviation of equally likely codes
    if "F8_E4M3" in dtypes:
        return torch.empty(own).uniform_(-448, 448).to(torch.float8_e4m3fn)
    if "I8" in dtypes:
        return torch.randint(-127, 128, own, dtype=torch.int8)
    if suffix == "qzeros" and not format.has_zeros:  # GPTQ stores the middle of the range, less one
        return torch.full(own, 0x77777777 if format.bits == 4 else 0x7F7F7F7F, dtype=torch.int32)
    if suffix == "qzeros":
        return 0x77777777 + (torch.randint(0, 2**31, own, dtype=torch.int32) & 0x11111111)  # each one is 7 or 8
    return torch.randint(-(2**31), 2**31, own).to(torch.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=PRESETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--format", choices=CONFIGS, default="awq")
    args = parser.parse_args()
    write_random_checkpoint(preset_config(args.shape), args.format, args.folder)


if __name__ == "__main__":
    main()
