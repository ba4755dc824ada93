"""The Triton kernels of int8 weights in pairs are the dequantised matrix: in the interpreter, or on a GPU."""

import pytest
import torch
from helpers.kernel_cases import DEVICE, HALF, poisoned_memory, randn
from helpers.quantized_cases import make_codes

pytest.importorskip("triton")

from nanovllm.backends.gpu import quantized, quantized_linear
from nanovllm.backends.gpu.paired_linear import TILES, pair_codes, paired_linear
from nanovllm.backends.gpu.quantized import Operators, PairedTritonMatrix, TritonMatrix
from nanovllm.backends.gpu.quantized_linear import split_steps
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.features.quantized.codes import Codes


@pytest.fixture(autouse=True)
def no_memory_is_zero_by_luck():
    with poisoned_memory():
        yield


def int8_codes(*shape: int) -> Codes:
    return make_codes(shape, 8, 0, False)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding. Both sum in float32, in another order: some hundred products of about one."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), expected.float(), rtol=2 * eps, atol=2 * eps + 1e-4)


@pytest.mark.parametrize("in_size", [64, 128, 200, 1024, 1100])
def test_products_are_those_of_the_dequantised_matrix_in_every_tile(in_size: int) -> None:
    """Sums of 1,024 inputs and more have two parts. Each leaves the counts as it found them."""
    codes = int8_codes(70, in_size)
    assert split_steps(in_size, 70, 128)[0] == (1 if in_size < 1024 else 2 if in_size == 1024 else 3)
    bias = randn(70, dtype=HALF)
    x = randn(TILES[-1][0], in_size, dtype=HALF)
    expected = (x.float() @ codes.dequantize().T).to(HALF)
    matrix = PairedTritonMatrix(codes, HALF)
    for num_rows in (1, 16, 17, 65, 129):
        assert_close(matrix.multiply(x[:num_rows], None), expected[:num_rows])
        assert not matrix._arrivals.any()
    assert_close(matrix.multiply(x, bias), (x.float() @ codes.dequantize().T + bias.float()).to(HALF))


def test_every_code_is_exact() -> None:
    """Each input is 1 in one place, so each product is one code."""
    codes = torch.arange(-128, 128, dtype=torch.int8, device=DEVICE).view(2, 128)
    matrix = PairedTritonMatrix(Codes(8, codes, torch.ones(2, 1, device=DEVICE), None, 128), HALF)
    x = torch.eye(128, dtype=HALF, device=DEVICE)
    for rows in (x[:16], x[60:100], x):
        assert torch.equal(matrix.multiply(rows, None), (rows @ codes.to(HALF).T))


def test_many_rows_meet_the_dequantised_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix is dequantised 48 rows at a time, and has the weights that code by code has."""
    monkeypatch.setattr(quantized_linear, "MAX_SCRATCH", 48 * 200)
    codes = int8_codes(70, 200)
    bias = randn(70, dtype=HALF)
    x = randn(TILES[-1][0] + 1, 200, dtype=HALF)
    found = PairedTritonMatrix(codes, HALF).multiply(x, bias)
    assert torch.equal(found, TritonMatrix(codes, HALF).multiply(x, bias))


@pytest.mark.parametrize(("num_rows", "out_size"), [(0, 8), (3, 0), (193, 0)])
def test_no_rows_make_no_product(num_rows: int, out_size: int) -> None:
    matrix = PairedTritonMatrix(int8_codes(out_size, 32), HALF)
    assert matrix.multiply(randn(num_rows, 32, dtype=HALF), None).shape == (num_rows, out_size)


@pytest.mark.parametrize("in_size", [128, 200])
def test_rows_are_those_of_the_dequantised_matrix(in_size: int) -> None:
    codes = int8_codes(24, in_size)
    indices = torch.tensor([23, 1, 1, 0], device=DEVICE)
    assert torch.equal(PairedTritonMatrix(codes, HALF).rows(indices), codes.dequantize()[indices].to(HALF))


def test_a_pair_is_a_code_with_that_of_64_places_later() -> None:
    codes = int8_codes(3, 300)
    paired = pair_codes(codes)
    assert paired.codes.shape == (3, 384)
    first = paired.codes[:, :128].unflatten(1, (64, 2))
    assert torch.equal(first[..., 0], codes.codes[:, :64])
    assert torch.equal(first[..., 1], codes.codes[:, 64:128])


def test_the_switch_is_off_and_takes_what_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = Operators(TritonKernels(DEVICE))
    codes = int8_codes(9, 100)
    assert type(operators.make_matrix(codes, HALF, False)) is TritonMatrix
    monkeypatch.setattr(quantized, "TAKES_PAIRS", True)
    old, new = (operators.make_matrix(codes, HALF, False) for _ in "on")
    assert type(old) is PairedTritonMatrix
    for others, dtype in (
        (codes, torch.float32),
        (make_codes((9, 256), 8, 128, False), HALF),
        (make_codes((9, 256), 4, 128, True), HALF),
        (make_codes((9, 256), 8, 0, True), HALF),
    ):
        assert type(operators.make_matrix(others, dtype, False)) is TritonMatrix
    # New codes come into the memory of the old ones, which CUDA graphs read.
    new._codes.codes.neg_()
    x = randn(3, 100, dtype=HALF)
    expected = new.multiply(x, None)
    assert operators.keep_place(old, new) is old
    assert torch.equal(paired_linear(x, old._codes, None, old._arrivals), expected)
