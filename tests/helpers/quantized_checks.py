"""Checks of the C++ kernels for quantised matrices against their dequantised weights, for any build of them."""

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from helpers.cpu_checks import rounding
from nanovllm.backends.cpu.quantized import CpuMatrix
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.features.families.qwen3_moe.ops import Routing, grouped_linear_reference
from nanovllm.features.quantized.codes import Codes, Scales, pack_int4, quantize_int8
from nanovllm.utils.integers import ceil_div

FORMATS = {
    "int8 at load": (8, None, False),
    "int8 with -128": (8, 10**6, False),
    "int8, groups and zeros": (8, 32, True),
    "int4": (4, 32, False),
    "int4, zeros": (4, 128, True),
    "int4, one scale a row": (4, 10**6, True),
    "int8, groups of 36": (8, 36, False),
    "int4, groups of 300 and zeros": (4, 300, True),
}
"""bits, group_size (None: quantize_int8 makes the codes; more than a row has: the whole row), whether with zeros"""


def draw_codes(shape: tuple[int, ...], name: str, generator: torch.Generator) -> Codes:
    """Draw a matrix [out, in] or experts [num_experts, out, in] in a format of `FORMATS`."""
    bits, group_size, has_zeros = FORMATS[name]
    *outer, size = shape
    if group_size is None:
        return quantize_int8(torch.randn(shape, generator=generator))
    group_size = min(group_size, size)
    groups = (*outer, ceil_div(size, group_size))
    smallest = 0 if bits == 4 else -128
    codes = torch.randint(smallest, smallest + 2**bits, shape, generator=generator)
    codes.view(-1)[0] = smallest
    zeros = torch.randint(smallest, smallest + 2**bits + 1, groups, generator=generator).to(torch.int16)
    return Codes(
        bits,
        pack_int4(codes) if bits == 4 else codes.to(torch.int8),
        Scales(torch.rand(groups, generator=generator) / 2**bits),
        zeros if has_zeros else None,
        group_size,
    )


def assert_products_alike(found: Tensor, x: Tensor, weights: Tensor, bias: Tensor | None = None) -> None:
    """Compare with products in float64, relative to the scale of their terms."""
    expected = x.double() @ weights.double().T
    if bias is not None:
        expected += bias.double()
    terms = x.double().square() @ weights.double().square().T
    tolerance = 4 * rounding(found.dtype) * (expected.abs() + terms.sqrt()) + 1e-6
    assert ((found.double() - expected).abs() <= tolerance).all()


def assert_rows_keep_their_bits(matrix: CpuMatrix, x: Tensor) -> None:
    """The products of x [520, in] have the same bits with fewer rows and with any number of threads."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = matrix.multiply(x, None)
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for rows in (1, 8, 33, 520):
                assert torch.equal(matrix.multiply(x[-rows:], None), whole[-rows:])
    finally:
        torch.set_num_threads(threads)


def check_quantized_products(name: str, dtype: torch.dtype, in_features: int, out_features: int) -> None:
    """Products are those of the dequantised weights, with the same bits for a row alone; rows are the weights."""
    generator = torch.Generator().manual_seed(in_features)
    codes = draw_codes((out_features, in_features), name, generator)
    if "zeros" in name:
        codes = replace(codes, order=torch.randperm(in_features, generator=generator))
    weights = codes.dequantize()
    matrix = CpuMatrix(codes, dtype, Scratch())
    assert torch.equal(matrix.rows(torch.arange(out_features)), weights.to(dtype))
    x = torch.randn(300, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    matrix.multiply(torch.full_like(x, torch.nan), None)  # it must leave nothing where smaller products have padding
    whole = matrix.multiply(x, None)
    assert_products_alike(whole, x, weights)
    for rows in (1, 2, 3, 6, 7, 12, 13, 17, 25, 33, 65):
        assert torch.equal(matrix.multiply(x[:rows], None), whole[:rows])
    assert_products_alike(matrix.multiply(x[:5], bias), x[:5], weights, bias)


def check_quantized_experts(name: str, dtype: torch.dtype, in_features: int, out_features: int) -> None:
    """Each pair is multiplied by the matrix of its expert, with the bits of that expert's matrix alone."""
    generator = torch.Generator().manual_seed(in_features)
    counts = [0, 3, 1, 0, 14, 17, 33, 300]
    codes = draw_codes((len(counts), out_features, in_features), name, generator)
    if "zeros" in name:
        codes = replace(codes, order=torch.rand(len(counts), in_features, generator=generator).argsort(1))
    pairs = sum(counts)
    offsets = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    tokens = torch.randint(0, 9, (pairs,), generator=generator).to(torch.int32)
    routing = Routing(torch.ones(pairs, 1), torch.arange(pairs).int().view(pairs, 1), tokens, offsets)
    x = torch.randn(9, in_features, generator=generator).to(dtype)
    experts = CpuMatrix(codes, dtype, Scratch())
    y = experts.multiply_pairs(x, routing, gather=True)
    assert torch.equal(experts.multiply_pairs(x[tokens], routing, gather=False), y)
    expected = grouped_linear_reference(x.double(), codes.dequantize().double(), routing, gather=True)
    torch.testing.assert_close(y.double(), expected, rtol=rounding(dtype), atol=rounding(dtype) * in_features)
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        matrix = CpuMatrix(codes.take_expert(expert), dtype, Scratch())
        assert torch.equal(matrix.multiply(x[tokens[begin:end]], None), y[begin:end])
