"""The format of GGUF's quantised matrices: each matrix has a type of blocks of its own."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.gguf.blocks import BLOCK_TYPES, read_codes
from nanovllm.features.quantized.codes import Codes
from nanovllm.features.quantized.formats import Format, RawTensors

WEIGHTS_AT_A_TIME = 2**20
"""Taking blocks apart needs several copies of so many weights. The matrix itself is there once."""


@dataclass(frozen=True)
class GgufFormat(Format):
    """The format of a GGUF file.

    Attributes:
        types: {name of a matrix: its type}, of those that become codes. "*" stands for an expert's number.
        num_bytes: those of all tensors in the file.
        widened: {type: weights and bytes of all matrices of it}, of the types that are dequantised while they are read.
    """

    types: Mapping[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    widened: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def find_tensors(self, prefix: str, names: Collection[str], *shape: int) -> RawTensors:
        kind = next((kind for kind in BLOCK_TYPES if f"{prefix}.{kind}" in names), None)
        if kind is None or len(shape) != 2:
            return {}
        block = BLOCK_TYPES[kind]
        if shape[1] % block.num_weights:
            raise ValueError(f"{prefix} has blocks of {block.num_weights} inputs, and the model's metadata {shape[1]}")
        return {kind: ((shape[0], shape[1] // block.num_weights * block.num_bytes), ("U8",))}

    def convert(self, tensors: Mapping[str, Tensor], out: int, size: int) -> Codes:
        ((kind, data),) = tensors.items()
        height = max(1, WEIGHTS_AT_A_TIME // size)
        whole = read_codes(data[:1], kind, 1).map(lambda values: values.new_empty(len(data), values.shape[-1]))
        for start in range(0, len(data), height):
            rows = slice(start, start + height)
            part = read_codes(data[rows], kind, len(data[rows]))
            for values, own in zip(whole.list_tensors(), part.list_tensors(), strict=True):
                values[rows] = own
        return whole

    def count_row_bytes(self, size: int, itemsize: int, name: str) -> int:
        kind = self.types.get(name) or self.types.get(star_expert(name))
        if kind is None:
            return size * itemsize
        return size // BLOCK_TYPES[kind].num_weights * count_block_bytes(kind)

    def describe(self, dtype: str) -> str:
        found = Counter(self.types.values()).most_common()
        kinds = ", ".join(kind for kind, _ in found) or "no quantised matrix"
        return f"GGUF's types ({kinds}; {self.num_bytes / 2**30:.3f} GiB in the file), the rest in {dtype}"

    def describe_cost(self, dtype: str) -> str:
        if not self.widened:
            return ""
        weights, num_bytes = (sum(sizes) for sizes in zip(*self.widened.values(), strict=True))
        here = weights * getattr(torch, dtype).itemsize
        return (
            f"the matrices of {', '.join(self.widened)} become {dtype} while they are read, and take "
            f"{here / 2**30:.2f} GiB in place of {num_bytes / 2**30:.2f} in the file; Q4_K and IQ4_XS stay as they are"
        )


def star_expert(name: str) -> str:
    """Return a matrix's name with a star in the place of an expert's number."""
    before, experts, after = name.partition(".experts.")
    return f"{before}{experts}*.{after.partition('.')[2]}" if experts else name


@cache
def count_block_bytes(kind: str) -> int:
    """Return the memory of the codes, scales and minima of one block, as the C++ kernels have them."""
    codes = read_codes(torch.zeros(BLOCK_TYPES[kind].num_bytes, dtype=torch.uint8), kind, 1)
    _, *others = codes.list_tensors()
    return codes.in_features * codes.bits // 8 + sum(tensor.nbytes for tensor in others)


def read_format(data: Mapping[str, Any]) -> GgufFormat:
    """Return the format that the quantization_config of a `GgufModel` describes."""
    own = {name: data[name] for name in ("types", "num_bytes", "widened")}
    return GgufFormat("gguf", bits=8, group_size=16, quantizes_head=True, **own)
