"""Checks of the C++ kernels that multiply in whole numbers, for any build of them: bit for bit against plain torch."""

from dataclasses import replace

import torch
from torch import Tensor

from nanovllm.backends.cpu.quantized import CpuMatrix
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.features.families.qwen3_moe.ops import Routing
from nanovllm.features.quantized.codes import Codes, InputScales, quantize_int8
from nanovllm.features.quantized.torch_matrix import TorchMatrix

ROWS = (1, 2, 3, 6, 7, 12, 13, 25, 65)
"""Numbers of rows around the sizes of tiles."""


def draw_inputs(rows: int, size: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw activations with rows of zeros, of outliers, and of magnitudes near the ends of float32's range."""
    x = torch.randn(rows, size, generator=generator)
    x[:, 0] *= 50
    for row, factor in enumerate((1e30, 0.0, 1e-28, 1.0, 1e-33, 1e-42)):
        x[row::7] *= factor
    return x.to(dtype)


def quantize_for_rounded(weight: Tensor) -> Codes:
    """Quantise weights to the codes by which inputs that are rounded in groups are multiplied."""
    return replace(quantize_int8(weight), input_scales=InputScales.GROUP)


def check_dynamic_products(
    in_features: int, out_features: int, dtype: torch.dtype, rows: tuple[int, ...] = ROWS, seed: int = 0
) -> None:
    """Products and rows have the bits of plain torch, whatever the number of rows beside a row."""
    generator = torch.Generator().manual_seed(seed)
    codes = quantize_for_rounded(torch.randn(out_features, in_features, generator=generator))
    x = draw_inputs(max(rows), in_features, dtype, generator)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    plain = TorchMatrix(codes, dtype)
    packed = CpuMatrix(codes, dtype, Scratch())
    indices = torch.arange(0, out_features, 1 + out_features // 40)
    assert torch.equal(packed.rows(indices), plain.rows(indices))
    assert torch.equal(packed.multiply(x[: rows[0]], None), plain.multiply(x[: rows[0]], None))
    expected = plain.multiply(x, bias)
    for count in rows:
        assert torch.equal(packed.multiply(x[:count], bias), expected[:count])


def check_dynamic_experts(
    in_features: int, out_features: int, dtype: torch.dtype, seed: int = 0, gather: bool = False
) -> None:
    """Pairs of each expert have the bits of plain torch. Some experts have none, and one has too many to share them."""
    generator = torch.Generator().manual_seed(seed)
    counts = [0, 3, 1, 0, 17, 300, 0, 40, 2]
    pairs = sum(counts)
    codes = quantize_for_rounded(torch.randn(len(counts), out_features, in_features, generator=generator))
    tokens = torch.randint(0, 9, (pairs,), generator=generator).to(torch.int32)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    routing = Routing(torch.ones(pairs, 1), torch.arange(pairs).int().view(pairs, 1), tokens, offsets)
    x = draw_inputs(9 if gather else pairs, in_features, dtype, generator)
    expected = TorchMatrix(codes, dtype).multiply_pairs(x, routing, gather)
    assert torch.equal(CpuMatrix(codes, dtype, Scratch()).multiply_pairs(x, routing, gather), expected)
