"""Rows are rounded to int8 as plain torch rounds them: by a kernel of its own, and by those that write the rows."""

from collections.abc import Iterator

import pytest
import torch
from helpers.kernel_cases import DEVICE, HALF, hostile_rows, poisoned_memory, randn

pytest.importorskip("triton")

from nanovllm.backends.gpu import gate_and_mul
from nanovllm.backends.gpu.gate_and_mul import sigmoid_and_mul, silu_and_mul
from nanovllm.backends.gpu.rms_norm import add_rms_norm, rms_norm
from nanovllm.backends.gpu.round_inputs import Rounded, find_rounded, round_inputs
from nanovllm.features.quantized import dynamic


@pytest.fixture(autouse=True)
def no_memory_is_zero_by_luck() -> Iterator[None]:
    with poisoned_memory():
        yield


def assert_rounded(got: Rounded | None, x: torch.Tensor) -> None:
    """got is the rounded form of x: the reference's codes and scales, and NaN in the same places."""
    codes, scales = dynamic.round_inputs(x, x.shape[1])
    assert got is not None and torch.equal(got.codes.float(), codes.flatten(1))
    torch.testing.assert_close(got.scales, scales[:, 0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("size", [1, 128, 300, 1024, 1100])
def test_inputs_are_rounded_to_the_codes_and_scales_of_the_reference(size: int, dtype: torch.dtype) -> None:
    x = hostile_rows(12, size, dtype)
    assert_rounded(round_inputs(x), x)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("size", [1, 128, 300, 1024, 1100])
def test_norms_and_gates_round_what_they_write_as_the_reference_does(size: int, dtype: torch.dtype) -> None:
    """Their results are those of the same kernels without rounding; on a GPU, but for products that are fused there."""
    x = hostile_rows(12, 2 * size, dtype)
    y = randn(12, size, dtype=dtype)
    apart = x[:, :size]  # its rows lie apart in memory
    weight = randn(size, dtype=dtype)
    made = {
        "norm": [rms_norm(apart, weight, 1e-6, rounds) for rounds in (False, True)],
        "sum": [add_rms_norm(apart, y, weight.float(), 1e-6, rounds)[0] for rounds in (False, True)],
        "gate": [silu_and_mul(x, rounds) for rounds in (False, True)],
        "sigmoid": [sigmoid_and_mul(apart.contiguous(), y, rounds) for rounds in (False, True)],
    }
    for name, (plain, got) in made.items():
        torch.testing.assert_close(got, plain, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
        assert plain.isnan().any() and not plain.isnan().all(), name
        assert find_rounded(plain) is None
        assert_rounded(find_rounded(got), got)


def test_a_gate_of_long_rows_leaves_their_rounding_to_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_and_mul, "LARGEST_BLOCK", 1024)
    assert find_rounded(silu_and_mul(randn(2, 2 * 1025, dtype=HALF), True)) is None
    assert find_rounded(silu_and_mul(randn(2, 2 * 1024, dtype=HALF), True)) is not None


def test_ties_go_to_even_codes() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], device=DEVICE)
    assert round_inputs(x).codes[0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]
