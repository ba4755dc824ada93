"""Products of few rows are torch's, with what follows them: in the interpreter, or on a GPU where there is one."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.kernel_cases import DEVICE, HALF, poisoned_memory, randn
from torch import Tensor

pytest.importorskip("triton")

from nanovllm.backends.gpu import few_rows, product
from nanovllm.backends.gpu.few_rows import AHEAD, MAX_ROWS, FewRowsMatrix, cut_matrix
from nanovllm.backends.gpu.triton_shim import INTERPRETED
from nanovllm.ops.silu_and_mul import silu_and_mul_reference

SHAPES = [(70, 64), (96, 1024), (8, 3072), (32, 16)]
"""[out, in]: columns that are no multiple of a tile's, sums in two parts and in six, and the shortest sum."""


@pytest.fixture(autouse=True)
def no_memory_is_zero_by_luck():
    with poisoned_memory():
        yield


def draw(*shape: int, seed: int) -> Tensor:
    """Return numbers whose products and sums are exact in float32, so that the order of a sum makes no difference."""
    return (randn(*shape, seed=seed) * 4).round().clamp(-8, 8).div(8).to(HALF)


def multiply_reference(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight.float())


@pytest.mark.parametrize("num_rows", [1, 5, MAX_ROWS])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_products_are_torch_s_bit_for_bit(out_size: int, in_size: int, num_rows: int) -> None:
    """With a bias; with a residual, which is added to the rounded product; and alone. The counts are left at zero."""
    weight = draw(out_size, in_size, seed=1)
    x = draw(num_rows, in_size, seed=2)
    bias = draw(out_size, seed=3)
    residual = draw(num_rows, out_size, seed=4)
    matrix = FewRowsMatrix(weight)
    expected = multiply_reference(x, weight)
    assert torch.equal(matrix.multiply(x), expected.to(HALF))
    biased = (expected + bias.float()).to(HALF)
    assert torch.equal(matrix.multiply(x, bias), biased)
    assert torch.equal(matrix.multiply(x, bias, residual), (biased.float() + residual.float()).to(HALF))
    assert not matrix.arrivals.any()


@pytest.mark.parametrize("num_rows", [1, 17])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_a_gated_product_is_the_activation_of_the_product(out_size: int, in_size: int, num_rows: int) -> None:
    """All but the exponential, which the two compute with a rounding of their own, is the same."""
    weight = draw(out_size, in_size, seed=1)
    x = draw(num_rows, in_size, seed=2)
    expected = silu_and_mul_reference(multiply_reference(x, weight).to(HALF))
    found = FewRowsMatrix(weight).multiply_gated(x)
    assert found.shape == (num_rows, out_size // 2)
    eps = torch.finfo(HALF).eps
    torch.testing.assert_close(found.float(), expected.float(), rtol=2 * eps, atol=eps)


@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_a_row_has_the_same_bits_whatever_the_other_rows_are(out_size: int, in_size: int) -> None:
    """Alone, among few, and among as many as there can be. These sums are not exact: their order shows.

    Rows keep their places, because numpy, which multiplies in the interpreter, rounds by place.
    """
    matrix = FewRowsMatrix((randn(out_size, in_size, seed=1) * in_size**-0.5).to(HALF))
    x = randn(MAX_ROWS, in_size, dtype=HALF, seed=2)
    residual = randn(MAX_ROWS, out_size, dtype=HALF, seed=3)
    whole = matrix.multiply(x, None, residual)
    gated = matrix.multiply_gated(x)
    for num_rows in (1, 2, 16, 31):
        assert torch.equal(matrix.multiply(x[:num_rows], None, residual[:num_rows]), whole[:num_rows])
        assert torch.equal(matrix.multiply_gated(x[:num_rows]), gated[:num_rows])


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel shows no addresses")
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize(("out_size", "in_size"), SHAPES)
def test_what_is_asked_for_ahead_is_the_program_s_first_weights(
    out_size: int, in_size: int, silu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each program asks for lines of its part of its rows of W, and waits. Together they ask for all first steps."""
    done: list[np.ndarray | None] = []
    monkeypatch.setattr(product, "prefetch_lines", lambda pointers: done.append(pointers.handle.data.flatten()))
    monkeypatch.setattr(product, "wait_for_predecessor", lambda PDL: done.append(None))

    def launch(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], config: dict[str, Any]) -> None:
        kernel[grid](*args, **config, PDL=True)

    monkeypatch.setattr(few_rows, "launch", launch)
    weight = draw(out_size, in_size, seed=1)
    matrix = FewRowsMatrix(weight)
    x = draw(3, in_size, seed=2)
    expected = multiply_reference(x, weight)
    found = matrix.multiply_gated(x) if silu else matrix.multiply(x)
    assert silu or torch.equal(found, expected.to(HALF))
    cut = cut_matrix(out_size, in_size)
    assert done[1::2] == [None] * (len(done) // 2), "each program asks once, before it waits"
    asked = np.unique(np.concatenate(done[::2])) - weight.data_ptr()
    assert asked.min() >= 0 and asked.max() < weight.nbytes
    row, byte = np.divmod(asked.astype(np.int64), 2 * in_size)
    part, offset = np.divmod(byte, 2 * cut.part_steps * cut.block_k)
    ahead = 2 * min(AHEAD, cut.part_steps) * cut.block_k
    assert offset.max() < max(ahead, 2 * cut.block_k)
    lines = {(r, p) for r in range(out_size) for p in range(cut.parts)}
    assert {*zip(row.tolist(), part.tolist(), strict=True)} == lines
    assert len(asked) >= len(lines) * max(1, ahead // 128)


def test_new_weights_may_be_written_in_place() -> None:
    weight = draw(40, 64, seed=1)
    matrix = FewRowsMatrix(weight)
    x = draw(3, 64, seed=2)
    matrix.multiply(x)
    weight.copy_(draw(40, 64, seed=5))
    assert torch.equal(matrix.multiply(x), multiply_reference(x, weight).to(HALF))


def test_no_rows_make_no_product_and_too_many_are_refused() -> None:
    matrix = FewRowsMatrix(draw(8, 32, seed=1))
    none = draw(0, 32, seed=2)
    assert matrix.multiply(none).shape == (0, 8)
    assert matrix.multiply_gated(none).shape == (0, 4)
    with pytest.raises(AssertionError, match="33 rows, and a tile has 32"):
        matrix.multiply(draw(MAX_ROWS + 1, 32, seed=2))


def test_other_types_and_widths_are_not_taken() -> None:
    assert FewRowsMatrix.is_supported(torch.empty(8, 48, dtype=torch.bfloat16, device=DEVICE))
    assert not FewRowsMatrix.is_supported(torch.empty(8, 40, dtype=HALF, device=DEVICE))
    assert not FewRowsMatrix.is_supported(torch.empty(8, 32, device=DEVICE))
    assert not FewRowsMatrix.is_supported(torch.empty(32, 8, dtype=HALF, device=DEVICE).T)


def test_the_order_of_a_sum_follows_from_the_matrix_alone() -> None:
    """Columns of a tile, inputs of a step, parts and their steps: of the products of 0.6B, of 8B, and of the tests."""
    for sizes, found in {
        (4096, 1024): (32, 128, 1, 8),
        (1024, 2048): (32, 128, 4, 4),
        (6144, 1024): (32, 128, 1, 8),
        (1024, 3072): (32, 128, 4, 6),
        (151936, 1024): (64, 128, 1, 8),
        (6144, 4096): (32, 128, 1, 32),
        (4096, 4096): (32, 128, 1, 32),
        (24576, 4096): (64, 128, 1, 32),
        (4096, 12288): (32, 128, 1, 96),
        (96, 1024): (32, 128, 2, 4),
        (8, 3072): (32, 128, 6, 4),
        (70, 64): (32, 64, 1, 1),
    }.items():
        cut = cut_matrix(*sizes)
        assert (cut.columns, cut.block_k, cut.parts, cut.part_steps) == found
