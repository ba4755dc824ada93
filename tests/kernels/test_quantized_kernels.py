"""The C++ kernels for quantised matrices compute what the dequantised weights give, with the same bits in any batch."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cpu_checks import BF16, FP32
from helpers.quantized_checks import (
    FORMATS,
    assert_products_alike,
    assert_rows_keep_their_bits,
    check_quantized_experts,
    check_quantized_products,
    check_side_by_side,
    draw_codes,
)
from helpers.warm import WarmPython

from nanovllm.backends.cpu.huge_pages import BLOCK, HUGE_PAGE, LINE, HugePages
from nanovllm.backends.cpu.quantized import CpuMatrix, quantized_library
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.features.quantized.codes import quantize_int8


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    try:
        quantized_library()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (50, 70), (1056, 33)])
def test_products_and_rows_are_those_of_the_weights(
    name: str, dtype: torch.dtype, in_features: int, out_features: int
) -> None:
    check_quantized_products(name, dtype, in_features, out_features)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_matrices_of_their_own(name: str, dtype: torch.dtype) -> None:
    check_quantized_experts(name, dtype, 96, 72)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", ["int8 at load", "int4, zeros", "Q4_K", "Q6_K, cut", "Q8_0"])
def test_a_row_has_the_same_bits_whatever_the_threads_and_the_rows_beside_it(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    matrix = CpuMatrix(draw_codes((2080, 1536), name, generator), dtype, Scratch())
    x = torch.randn(520, 1536, generator=generator).to(dtype)
    assert_rows_keep_their_bits(matrix, x)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_matrices_of_other_forms_beside_each_other_keep_their_bits(dtype: torch.dtype) -> None:
    check_side_by_side(dtype)


def test_a_row_of_zeros_gives_zeros_and_a_broken_one_reaches_no_other_row() -> None:
    weight = torch.randn(40, 64)
    weight[3] = 0
    weight[5, 7] = torch.nan
    y = CpuMatrix(quantize_int8(weight), FP32, Scratch()).multiply(torch.randn(4, 64), None)
    assert not y[:, 3].any() and y[:, 5].isnan().all() and y[:, [*range(5), *range(6, 40)]].isfinite().all()


def test_no_rows_and_a_bias_wider_than_a_panel() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = draw_codes((100, 64), "int4", generator)
    matrix = CpuMatrix(codes, FP32, Scratch())
    assert matrix.multiply(torch.empty(0, 64), None).shape == (0, 100)
    x = torch.randn(1, 64)
    bias = torch.randn(100)
    assert_products_alike(matrix.multiply(x, bias), x, codes.dequantize(), bias)


def test_groups_that_the_kernels_cannot_cut_are_refused() -> None:
    codes = draw_codes((32, 64), "int4", torch.Generator())
    with pytest.raises(ValueError, match="a multiple of 4 inputs, not 6"):
        CpuMatrix(replace(codes, group_size=6), FP32, Scratch())


def test_packed_matrices_share_blocks_that_end_with_them() -> None:
    pages = HugePages()
    sizes = [100, 64, 0, 3 * 2**20, BLOCK, 1, BLOCK + 5, 2**20]
    lent = [pages.empty(size) for size in sizes]
    for i, tensor in enumerate(lent):
        assert tensor.shape == (sizes[i],) and tensor.data_ptr() % LINE == 0
        tensor.fill_(i)
    assert all(bool((tensor == i).all()) for i, tensor in enumerate(lent)), "two of them overlap"
    assert lent[1].data_ptr() == lent[0].data_ptr() + 2 * LINE
    assert lent[0].data_ptr() % HUGE_PAGE == 0
    values = torch.randn(3, 70, 5).transpose(1, 2)
    assert torch.equal(pages.copy(values), values)
    assert pages._block is not None
    block = pages._block()
    assert block is not None
    freed = weakref.ref(block)
    del block, lent, tensor
    gc.collect()
    assert freed() is None
    assert pages.empty(10).shape == (10,)


def test_without_a_compiler_the_error_says_what_to_choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "CXX": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r'no C\+\+ compiler is found.*attention_backend="torch"'):
        quantized_library.__wrapped__()


def test_nobody_else_waits_for_this_library(warm_python: WarmPython) -> None:
    code = "import sys, nanovllm.llm; print('nanovllm.backends.cpu.quantized' in sys.modules)"
    assert warm_python.run(code).stdout.strip() == "False"
