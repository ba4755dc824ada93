"""The C++ kernels that multiply in whole numbers compute the bits of plain torch, for any rows, threads and processor.

tests/kernels/test_processors.py does the same for builds for other processors.
"""

from pathlib import Path

import pytest
import torch
from helpers.cpu_checks import BF16, FP32
from helpers.dynamic_checks import check_dynamic_experts, check_dynamic_products, draw_inputs, quantize_for_rounded
from helpers.quantized_checks import assert_rows_keep_their_bits
from helpers.warm import WarmPython

from nanovllm.backends.cpu.dynamic import dynamic_library
from nanovllm.backends.cpu.quantized import CpuMatrix
from nanovllm.backends.cpu.scratch import Scratch


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    try:
        dynamic_library()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (50, 70), (1056, 33), (7, 3), (384, 130)])
def test_products_and_rows_have_the_bits_of_plain_torch(
    in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    check_dynamic_products(in_features, out_features, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("gather", [True, False])
def test_experts_have_the_bits_of_plain_torch(gather: bool, dtype: torch.dtype) -> None:
    check_dynamic_experts(200, 70, dtype, gather=gather)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_row_has_the_same_bits_whatever_the_threads_and_the_rows_beside_it(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    matrix = CpuMatrix(quantize_for_rounded(torch.randn(2080, 1536, generator=generator)), dtype, Scratch())
    x = draw_inputs(520, 1536, dtype, generator)
    assert_rows_keep_their_bits(matrix, x)


def test_the_largest_sums_are_exact() -> None:
    """All codes are 127, with equal and with opposite signs: no instruction may saturate."""
    x = torch.ones(4, 512)
    weight = torch.ones(64, 512)
    x[1] = weight[1] = -1
    x[2, ::2] = weight[2, ::2] = -1
    y = CpuMatrix(quantize_for_rounded(weight), FP32, Scratch()).multiply(x, None)
    expected = x.double() @ weight.double().T
    assert torch.allclose(y.double(), expected, rtol=1e-5, atol=0)
    assert torch.equal(y.round().double(), expected)


def test_a_row_of_zeros_gives_zeros_and_a_broken_one_reaches_no_other_row() -> None:
    weight = torch.randn(40, 300)
    weight[3] = 0
    weight[5, 7] = torch.nan
    x = torch.randn(30, 300)
    x[2, 290] = torch.inf
    x[9, 3] = torch.nan
    x[20] = 0
    y = CpuMatrix(quantize_for_rounded(weight), FP32, Scratch()).multiply(x, None)
    assert y[[2, 9]].isnan().all() and y[:, 5].isnan().all()
    rest = y[[row for row in range(30) if row not in (2, 9)]][:, [*range(5), *range(6, 40)]]
    assert rest.isfinite().all() and not rest[:, 3].any() and not rest[18].any()


def test_no_rows() -> None:
    matrix = CpuMatrix(quantize_for_rounded(torch.randn(100, 64)), FP32, Scratch())
    assert matrix.multiply(torch.empty(0, 64), None).shape == (0, 100)
    assert matrix.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 64)


def test_without_a_compiler_the_error_says_what_to_choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "CXX": ""}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r'no C\+\+ compiler is found.*attention_backend="torch"'):
        dynamic_library.__wrapped__()


def test_nobody_else_waits_for_this_library(warm_python: WarmPython) -> None:
    imports = "import sys, nanovllm.llm, nanovllm.features.quantized.loading; "
    code = imports + "print('nanovllm.backends.cpu.dynamic' in sys.modules)"
    assert warm_python.run(code).stdout.strip() == "False"
