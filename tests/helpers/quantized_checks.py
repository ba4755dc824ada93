"""Checks of the C++ kernels for quantised matrices against their dequantised weights, for any build of them."""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from helpers.cpu_checks import rounding
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.quantized import CpuMatrix, CpuSideBySide, Operators
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.features.families.qwen3_moe.ops import Routing, grouped_linear_reference
from nanovllm.features.quantized.codes import FROM_ZERO, IQ4_NUMBERS, Codes, Scales, pack_int4, quantize_int8
from nanovllm.utils.integers import ceil_div


class Form(NamedTuple):
    """A format of random codes.

    Attributes:
        group_size: None: quantize_int8 makes the codes; more than a row has: the whole row.
        shared: how many groups share a float16, beside a factor for each; None: each has a float32, and 1: a float16.
    """

    bits: int
    group_size: int | None
    has_zeros: bool = False
    shared: int | None = None
    has_minima: bool = False
    numbers: tuple[int, ...] | None = None


FORMATS = {
    "int8 at load": Form(8, None),
    "int8 with -128": Form(8, 10**6),
    "int8, groups and zeros": Form(8, 32, True),
    "int4": Form(4, 32),
    "int4, zeros": Form(4, 128, True),
    "int4, one scale a row": Form(4, 10**6, True),
    "int8, groups of 36": Form(8, 36),
    "int4, groups of 300 and zeros": Form(4, 300, True),
    "Q4_0": Form(4, 32, shared=1),
    "Q8_0": Form(8, 32, shared=1),
    "Q5_1": Form(6, 32, shared=1, has_minima=True),
    "Q4_K": Form(4, 32, shared=8, has_minima=True, numbers=FROM_ZERO),
    "Q2_K": Form(4, 16, shared=16, has_minima=True, numbers=FROM_ZERO),
    "Q6_K": Form(6, 16, shared=16),
    "Q6_K, cut": Form(6, 16, shared=3),
    "IQ4_XS": Form(4, 32, shared=8, numbers=IQ4_NUMBERS),
}


def draw_codes(shape: tuple[int, ...], name: str, generator: torch.Generator) -> Codes:
    """Draw a matrix [out, in] or experts [num_experts, out, in] in a format of `FORMATS`."""
    bits, group_size, has_zeros, shared, has_minima, numbers = FORMATS[name]
    *outer, size = shape
    if group_size is None:
        return quantize_int8(torch.randn(shape, generator=generator))
    group_size = min(group_size, size)
    groups = (*outer, ceil_div(size, group_size))
    smallest = 0 if bits == 4 else -(2 ** (bits - 1))
    codes = torch.randint(smallest, smallest + 2**bits, shape, generator=generator)
    codes.view(-1)[0] = smallest
    if name == "Q8_0":  # as llama.cpp makes it: the kernels have a faster format without -128
        codes.clamp_(min=-127)
    zeros = torch.randint(smallest, smallest + 2**bits + 1, groups, generator=generator).to(torch.int16)

    def draw_scales() -> Scales:
        if shared in (None, 1):
            values = torch.rand(groups, generator=generator) / 2**bits
            return Scales(values if shared is None else values.half())
        count = next(n for n in range(shared, 0, -1) if groups[-1] % n == 0)
        values = torch.rand(*outer, groups[-1] // count, generator=generator) / 2**bits / 64
        return Scales(values.half(), torch.randint(-128, 128, groups, generator=generator).to(torch.int8))

    return Codes(
        bits,
        pack_int4(codes) if bits == 4 else codes.to(torch.int8),
        draw_scales(),
        zeros if has_zeros else None,
        group_size,
        minima=draw_scales() if has_minima else None,
        numbers=None if numbers is None else torch.tensor(numbers, dtype=torch.int8),
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


def check_side_by_side(dtype: torch.dtype) -> None:
    """Matrices of other forms beside each other give the bits of each alone, and so do experts'."""
    generator = torch.Generator().manual_seed(1)
    names = ("Q4_K", "Q6_K", "int8 at load")
    sizes = (70, 33, 32)
    operators = Operators(CpuBackend())
    bias = torch.randn(sum(sizes), generator=generator).to(dtype)
    codes = [draw_codes((size, 512), name, generator) for name, size in zip(names, sizes, strict=True)]
    joined = operators.lay_beside(codes, dtype)
    assert isinstance(joined, CpuSideBySide)
    alone = [CpuMatrix(one, dtype, Scratch()) for one in codes]
    for rows in (1, 7, 70):
        x = torch.randn(rows, 512, generator=generator).to(dtype)
        expected = [one.multiply(x, own) for one, own in zip(alone, bias.split(sizes), strict=True)]
        assert torch.equal(joined.multiply(x, bias), torch.cat(expected, 1))
    experts = [draw_codes((3, size, 512), name, generator) for name, size in zip(names, sizes, strict=True)]
    alone = [CpuMatrix(one, dtype, Scratch()) for one in experts]
    routing = Routing(*(torch.empty(0),) * 2, torch.arange(9).int(), torch.tensor([0, 4, 4, 9]).int())
    x = torch.randn(9, 512, generator=generator).to(dtype)
    expected = [one.multiply_pairs(x, routing, True) for one in alone]
    assert torch.equal(operators.lay_beside(experts, dtype).multiply_pairs(x, routing, True), torch.cat(expected, 1))
