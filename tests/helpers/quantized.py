"""Checkpoints with the values that quantised weights mean: the oracle of engines that run quantised weights."""

import shutil
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.tiny import SMALL, draw_prompts, edit_json
from nanovllm import LLM, SamplingParams
from nanovllm.utils.integers import ceil_div

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
PROMPTS = draw_prompts([3, 17, 40, 70])


def round_rows(weight: Tensor) -> Tensor:
    """int8 by rows, straightforwardly: the float32 values that the codes mean."""
    rows = []
    for row in weight.float().reshape(-1, weight.shape[-1]):
        scale = row.abs().max() / 127
        rows.append(torch.round(row / scale) * scale if scale > 0 else torch.zeros_like(row))
    return torch.stack(rows).view(weight.shape)


def is_quantised(name: str, is_tied: bool) -> bool:
    """Whether int8 at load quantises the tensor of this name."""
    plain = (".bias", ".gate.weight", "shared_expert_gate.weight", ".conv1d.weight", ".A_log", ".dt_bias")
    if "norm" in name or name.endswith(plain):
        return False
    return is_tied if "embed_tokens" in name else True


def save_with(folder: Path, target: Path, change: Callable[[str, Tensor], Mapping[str, Tensor]]) -> Path:
    """Copy a checkpoint; `change` gives the tensors that replace each tensor."""
    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, target)
    tensors = load_file(folder / "model.safetensors")
    changed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        changed |= {key: value.contiguous() for key, value in change(name, tensor).items()}
    save_file(changed, target / "model.safetensors")
    return target


def save_rounded(folder: Path, target: Path) -> Path:
    """Copy a checkpoint with the values that int8 at load gives it."""
    is_tied = "lm_head.weight" not in load_file(folder / "model.safetensors")

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {name: round_rows(tensor) if is_quantised(name, is_tied) else tensor}

    return save_with(folder, target, change)


def run(model: Path | str, **options: object) -> list[list[int]]:
    """The tokens that a small engine generates."""
    with LLM(str(model), **(SMALL | {"attention_backend": "torch", "device": "cpu"} | options)) as llm:
        return [output["token_ids"] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


# ---- quantised checkpoints, packed by straightforward loops


class Grouped(NamedTuple):
    """A matrix as formats store it: numbers [out, in] from 0, scales and zeros [out, groups], the group of a column."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    def mean(self) -> Tensor:
        """The weights, float32 [out, in]."""
        columns = self.groups.long()
        return (self.numbers - self.zeros[:, columns]).float() * self.scales[:, columns].float()


def group(weight: Tensor, bits: int, size: int, symmetric: bool = True, shuffle: bool = False) -> Grouped:
    """Round a matrix; with `shuffle` the columns of a group are anywhere."""
    columns = weight.shape[1]
    groups = torch.arange(columns, dtype=torch.int32) // size
    if shuffle:
        groups = groups[torch.randperm(columns)]
    top = 2**bits - 1
    scales = []
    zeros = []
    for index in range(int(groups.max()) + 1):
        part = weight[:, groups == index].float()
        low = part.amin(1)
        high = part.amax(1)
        scale = 2 * part.abs().amax(1) / top if symmetric else (high - low) / top
        scales.append(scale.half())
        zeros.append(torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale).round().clamp(1, top))
    scale = torch.stack(scales, 1)
    zero = torch.stack(zeros, 1).int()
    index = groups.long()
    numbers = (weight / scale.float()[:, index] + zero[:, index]).round().clamp(0, top).int()
    return Grouped(numbers, scale, zero, groups)


def pack_rows(numbers: Tensor, bits: int, order: Seq[int] | None = None) -> Tensor:
    """int32 words of each row's numbers; the i-th bits of a word hold its number order[i]."""
    per_word = 32 // bits
    table = numbers.tolist()
    packed = []
    for row in table:
        words = []
        for first in range(0, len(row), per_word):
            some = row[first : first + per_word]
            word = 0
            for i in range(len(some)):
                word |= some[i if order is None else order[i]] << (bits * i)
            words.append(word - 2**32 if word >= 2**31 else word)
        packed.append(words)
    return torch.tensor(packed, dtype=torch.int32)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}


def scheme(**weights: object) -> dict[str, object]:
    """The config_groups of compressed-tensors."""
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "int", **weights}}}}


def pack_awq(weight: Tensor, size: int) -> tuple[dict[str, Tensor], Tensor]:
    made = group(weight, 4, size, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    qweight = pack_rows(made.numbers.T, 4, order)
    qzeros = pack_rows(made.zeros.T, 4, order)
    return {"qweight": qweight, "qzeros": qzeros, "scales": made.scales.T}, made.mean()


def pack_gptq(
    weight: Tensor, size: int, bits: int = 4, symmetric: bool = True, is_v1: bool = True, shuffle: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    made = group(weight, bits, size, symmetric, shuffle)
    qweight = pack_rows(made.numbers.T.reshape(-1, 32 // bits, len(weight)).transpose(1, 2).flatten(0, 1), bits)
    qzeros = pack_rows(made.zeros.T - int(is_v1), bits)
    tensors = {"qweight": qweight.view(-1, len(weight)), "qzeros": qzeros, "scales": made.scales.T}
    return tensors | {"g_idx": made.groups}, made.mean()


def pack_compressed(
    weight: Tensor, size: int, bits: int = 4, symmetric: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    made = group(weight, bits, size, symmetric)
    tensors = {"weight_packed": pack_rows(made.numbers, bits), "weight_scale": made.scales}
    tensors["weight_shape"] = torch.tensor(weight.shape)
    if not symmetric:
        tensors["weight_zero_point"] = pack_rows(made.zeros.T, bits).T
    return tensors, made.mean()


def pack_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    made = group(weight, 8, weight.shape[1])
    return {"weight": (made.numbers - 128).to(torch.int8), "weight_scale": made.scales}, made.mean()


def pack_int8_matrix(weight: Tensor, zero: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """Pack a matrix with one scale, and one zero if it has any."""
    scale = weight.abs().max().view(1) / 100
    middle = zero or 0
    codes = ((weight / scale).round() + middle).to(torch.int8)
    tensors = {"weight": codes, "weight_scale": scale}
    if zero is not None:
        tensors["weight_zero_point"] = torch.tensor([zero], dtype=torch.int8)
    return tensors, (codes.float() - middle) * scale


def pack_fp8(weight: Tensor, rows: int, columns: int, suffix: str) -> tuple[dict[str, Tensor], Tensor]:
    out, size = weight.shape
    scales = torch.empty(ceil_div(out, rows), ceil_div(size, columns))
    packed = torch.empty(out, size, dtype=torch.float8_e4m3fn)
    mean = torch.empty(out, size)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[place].abs().max() / 448
            packed[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            mean[place] = packed[place].float() * scales[i, j]
    return {"weight": packed, f"weight{suffix}": scales}, mean


Pack = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]

CHECKPOINTS: dict[str, tuple[dict[str, object], Pack]] = {
    "awq": (AWQ, lambda weight: pack_awq(weight, 32)),
    "gptq": (GPTQ, lambda weight: pack_gptq(weight, 32)),
    "gptq whole rows": (GPTQ | {"group_size": -1}, lambda weight: pack_gptq(weight, weight.shape[1])),
    "gptq 8 bits": (GPTQ | {"bits": 8}, lambda weight: pack_gptq(weight, 32, 8)),
    "gptq_v2": (
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
        lambda weight: pack_gptq(weight, 32, symmetric=False, is_v1=False),
    ),
    "gptq desc_act": (
        GPTQ | {"sym": False, "desc_act": True},
        lambda weight: pack_gptq(weight, 32, symmetric=False, shuffle=True),
    ),
    "packed": (
        PACKED | scheme(num_bits=4, strategy="group", group_size=32, symmetric=True),
        lambda weight: pack_compressed(weight, 32),
    ),
    "packed with zeros": (
        PACKED | scheme(num_bits=4, strategy="group", group_size=32, symmetric=False),
        lambda weight: pack_compressed(weight, 32, symmetric=False),
    ),
    "packed 8 bits": (
        PACKED | scheme(num_bits=8, strategy="channel", symmetric=True),
        lambda weight: pack_compressed(weight, weight.shape[1], 8),
    ),
    "int8 w8a8": (
        PACKED | {"format": "int-quantized"} | scheme(num_bits=8, strategy="channel", symmetric=True, group_size=None),
        pack_int8,
    ),
    "int8 matrices": (
        PACKED | {"format": "int-quantized"} | scheme(num_bits=8, strategy="tensor", symmetric=True),
        lambda weight: pack_int8_matrix(weight, None),
    ),
    "int8 matrices with zeros": (
        PACKED | {"format": "int-quantized"} | scheme(num_bits=8, strategy="tensor", symmetric=False),
        lambda weight: pack_int8_matrix(weight, -9),
    ),
    "fp8 blocks": (FP8, lambda weight: pack_fp8(weight, 16, 32, "_scale_inv")),
    "fp8 rows": (
        PACKED | {"format": "float-quantized"} | scheme(type="float", num_bits=8, strategy="channel"),
        lambda weight: pack_fp8(weight, 1, weight.shape[1], "_scale"),
    ),
}
"""{name: (quantization_config, the function that packs a matrix and tells what it means)}."""


PLAIN = ("embed_tokens", "lm_head", "conv1d", "gate.")
"""Parts of the names of matrices that stay as they are: the last is that of routers, and of a shared expert's gate."""


def save_quantised(
    folder: Path, target: Path, config: Mapping[str, object], pack: Pack, plain: Seq[str] = PLAIN
) -> tuple[Path, Path]:
    """Copy a checkpoint twice: quantised, and with the values that this means. Return both folders.

    Norms and `plain` stay as they are.
    """
    means: dict[str, Tensor] = {}

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if tensor.dim() < 2 or any(part in name for part in plain):
            return {name: tensor}
        torch.default_generator.manual_seed(
            crc32(name.rsplit(".", 2)[0].encode())
        )  # matrices of the same inputs are shuffled alike
        tensors, means[name] = pack(tensor)
        return {f"{name.removesuffix('.weight')}.{suffix}": value for suffix, value in tensors.items()}

    quantised = save_with(folder, target / "quantised", change)
    edit_json(quantised / "config.json", quantization_config=dict(config))
    return quantised, save_with(folder, target / "means", lambda name, tensor: {name: means.get(name, tensor)})
