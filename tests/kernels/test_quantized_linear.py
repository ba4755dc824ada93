"""The Triton kernels of quantised matrices are their references: in the interpreter, or on a GPU where there is one."""

import pytest
import torch
from helpers.kernel_cases import DEVICE, HALF, poisoned_memory, randn
from helpers.quantized_cases import FORMATS, make_codes

pytest.importorskip("triton")

from nanovllm.backends.gpu import quantized_linear
from nanovllm.backends.gpu.quantized import TritonExperts, TritonMatrix, transpose_scales
from nanovllm.backends.gpu.quantized_linear import format_config, grouped_quantized, split_steps
from nanovllm.features.families.qwen3_moe.ops import Routing, grouped_linear_reference, route_reference

FORMATS_AND_TYPES = [(*form, (torch.float32, HALF)[i % 2]) for i, form in enumerate(FORMATS)]


@pytest.fixture(autouse=True)
def no_memory_is_zero_by_luck():
    with poisoned_memory():
        yield


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding. Both sum in float32, in another order: some hundred products of about one."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), expected.float(), rtol=2 * eps, atol=2 * eps + 1e-4)


@pytest.mark.parametrize(("bits", "group_size", "has_zeros", "dtype"), FORMATS_AND_TYPES)
def test_products_are_those_of_the_dequantised_matrix(
    bits: int, group_size: int, has_zeros: bool, dtype: torch.dtype
) -> None:
    in_size = 256 if group_size else 200
    codes = make_codes((70, in_size), bits, group_size, has_zeros)
    bias = randn(70, dtype=dtype) if has_zeros else None
    x = randn(5, in_size, dtype=dtype)
    expected = x.float() @ codes.dequantize().T + (0 if bias is None else bias.float())
    assert_close(TritonMatrix(codes, dtype).multiply(x, bias), expected.to(dtype))


@pytest.mark.parametrize("num_rows", [1, 16, 17, 65, 128])
def test_a_row_has_the_same_bits_whatever_the_tile(num_rows: int) -> None:
    """In the interpreter numpy multiplies tiles of any height row by row, so what differs could only be our order.

    Two programs sum a part of the five steps each.
    """
    codes = make_codes((20, 320), 4, 64, True)
    assert split_steps(320, 20, 64) == (2, 4)
    matrix = TritonMatrix(codes, torch.float32)
    x = randn(num_rows, 320)
    some = [*range(0, num_rows - 1, 15), num_rows - 1]
    expected = torch.cat([matrix.multiply(row, None) for row in x[some].split(1)])
    torch.testing.assert_close(matrix.multiply(x, None)[some], expected, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize(
    ("bits", "group_size", "has_zeros", "dtype"), [(8, 0, False, torch.float32), (4, 128, True, HALF)]
)
def test_sums_in_parts_are_those_of_the_dequantised_matrix(
    bits: int, group_size: int, has_zeros: bool, dtype: torch.dtype
) -> None:
    """The last of three programs adds their parts and the bias, and leaves the counts as it found them."""
    codes = make_codes((70, 1100 if group_size == 0 else 1152), bits, group_size, has_zeros)
    matrix = TritonMatrix(codes, dtype)
    bias = randn(70, dtype=dtype)
    for num_rows in (5, 40):
        x = randn(num_rows, codes.in_features, dtype=dtype, seed=num_rows)
        expected = x.float() @ codes.dequantize().T + bias.float()
        assert_close(matrix.multiply(x, bias), expected.to(dtype))
        assert not matrix._arrivals.any()


@pytest.mark.parametrize(("bits", "group_size", "has_zeros", "dtype"), FORMATS_AND_TYPES)
def test_many_rows_meet_the_dequantised_matrix(
    bits: int, group_size: int, has_zeros: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix is dequantised 48 rows at a time, and its weights are rounded to the dtype."""
    codes = make_codes((70, 256), bits, group_size, has_zeros)
    monkeypatch.setattr(quantized_linear, "MAX_SCRATCH", 48 * 256)
    bias = randn(70, dtype=dtype)
    x = randn(129, 256, dtype=dtype)
    found = TritonMatrix(codes, dtype).multiply(x, bias)
    assert_close(found, torch.nn.functional.linear(x.float(), codes.dequantize().to(dtype).float(), bias.float()))


@pytest.mark.parametrize(("num_rows", "out_size"), [(0, 8), (3, 0), (129, 0)])
def test_no_rows_make_no_product(num_rows: int, out_size: int) -> None:
    matrix = TritonMatrix(make_codes((out_size, 32), 8, 0, False), HALF)
    assert matrix.multiply(randn(num_rows, 32, dtype=HALF), None).shape == (num_rows, out_size)


@pytest.mark.parametrize(("bits", "group_size", "has_zeros"), FORMATS[1:5])
def test_sorted_columns_meet_the_inputs_columns(bits: int, group_size: int, has_zeros: bool) -> None:
    codes = make_codes((24, 256), bits, group_size, has_zeros, is_sorted=True)
    matrix = TritonMatrix(codes, torch.float32)
    x = randn(3, 256)
    assert_close(matrix.multiply(x, None), x @ codes.dequantize().T)
    indices = torch.tensor([5, 0, 5], device=DEVICE)
    assert torch.equal(matrix.rows(indices), codes.dequantize()[indices])


@pytest.mark.parametrize(("bits", "group_size", "has_zeros"), FORMATS)
def test_rows_are_those_of_the_dequantised_matrix(bits: int, group_size: int, has_zeros: bool) -> None:
    codes = make_codes((24, 256), bits, group_size, has_zeros)
    indices = torch.tensor([23, 1, 1, 0], device=DEVICE)
    assert torch.equal(TritonMatrix(codes, HALF).rows(indices), codes.dequantize()[indices].to(HALF))


def make_routing(num_tokens: int, num_experts: int, k: int) -> Routing:
    """Routing of random logits, with padding in between."""
    slots = torch.arange(num_tokens, device=DEVICE)
    slots[num_tokens // 2 :: 7] = -1
    return route_reference(randn(num_tokens, num_experts, seed=3), k, True, slots)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "bits", "group_size", "has_zeros", "gather"),
    [
        (1, 5, 8, 0, False, True),
        (1, 5, 4, 64, True, False),
        (40, 3, 8, 0, False, False),
        (40, 3, 8, 32, True, True),
        (150, 2, 8, 32, True, False),
        (150, 2, 4, 64, True, True),
    ],
)
def test_experts_products_are_their_reference(
    num_tokens: int, num_experts: int, bits: int, group_size: int, has_zeros: bool, gather: bool
) -> None:
    codes = make_codes((num_experts, 40, 128), bits, group_size, has_zeros)
    routing = make_routing(num_tokens, num_experts, 2)
    num_pairs = int(routing.offsets[-1])
    x = randn(num_tokens if gather else num_tokens * 2, 128)
    got = TritonExperts(codes).multiply(x, routing, gather)[:num_pairs]
    weights = codes.dequantize()
    assert_close(got, grouped_linear_reference(x, weights, routing, gather)[:num_pairs])
    for expert, (begin, end) in enumerate(zip(routing.offsets, routing.offsets[1:], strict=False)):
        rows = x[routing.tokens[begin:end].long()] if gather else x[begin:end]
        assert_close(got[begin:end], rows @ weights[expert].T)


def test_experts_after_an_empty_one_find_their_matrices() -> None:
    routing = make_routing(9, 6, 1)
    assert (routing.offsets.diff() == 0).any()
    codes = make_codes((6, 33, 64), 8, 0, False)
    weight = transpose_scales(codes)
    x = randn(9, 64)
    num_pairs = int(routing.offsets[-1])
    expected = grouped_linear_reference(x, weight.dequantize(), routing, True)
    assert_close(grouped_quantized(x, weight, routing, True)[:num_pairs], expected[:num_pairs])


def test_the_order_of_a_sum_follows_from_the_matrix_alone() -> None:
    assert format_config(8, 1024, 1024, False)["BLOCK_K"] == 128
    # Parts and their steps: o and down of 0.6B, qkv, o and down of 8B, a head, and no rows.
    for sizes, found in {
        (2048, 1024): (4, 4),
        (3072, 1024): (6, 4),
        (4096, 6144): (2, 16),
        (4096, 4096): (3, 11),
        (12288, 4096): (3, 32),
        (4096, 151936): (1, 32),
        (1024, 0): (2, 4),
    }.items():
        assert split_steps(*sizes, 128) == found
    assert format_config(4, 1024, 96, True) == {"BITS": 4, "GROUP": 96, "HAS_ZEROS": True, "BLOCK_K": 32}
    with pytest.raises(ValueError, match="multiple of 32 weights, and these have 16"):
        transpose_scales(make_codes((8, 48), 4, 16, False))


def test_experts_with_sorted_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="desc_act"):
        TritonExperts(make_codes((2, 8, 64), 4, 32, False, is_sorted=True))
