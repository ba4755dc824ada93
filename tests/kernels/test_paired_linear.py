"""The Triton kernels of codes in pairs have the bits of those that go code by code: in the interpreter, or on a GPU."""

import pytest
import torch
from helpers.kernel_cases import DEVICE, HALF, poisoned_memory, randn
from helpers.quantized_cases import make_codes

pytest.importorskip("triton")

from nanovllm.backends.gpu import quantized
from nanovllm.backends.gpu.paired_linear import GROUPED_TILES, TILES, grouped_paired, pair_codes, paired_linear
from nanovllm.backends.gpu.quantized import (
    Operators,
    PairedTritonExperts,
    PairedTritonMatrix,
    TritonExperts,
    TritonMatrix,
)
from nanovllm.backends.gpu.quantized_linear import split_steps
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.features.families.qwen3_moe.ops import Routing, route_reference
from nanovllm.features.quantized.codes import Codes, pack_int4

FORMS = [(8, 0, False), (8, 128, False), (4, 0, False), (4, 0, True), (4, 128, True), (4, 256, False)]
"""Bits, group size (0: a row is one group), whether there are zeros."""


@pytest.fixture(autouse=True)
def no_memory_is_zero_by_luck():
    with poisoned_memory():
        yield


def int8_codes(*shape: int) -> Codes:
    return make_codes(shape, 8, 0, False)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Inputs whose products with codes, and the sums of these, are exact in float32. So their order plays no part."""
    return (randn(*shape, seed=seed) * 4).round().clamp(-8, 8).div(8).to(HALF)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding. Both sum in float32, in another order: some hundred products of about one."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), expected.float(), rtol=2 * eps, atol=2 * eps + 1e-4)


@pytest.mark.parametrize(
    ("bits", "group_size", "has_zeros", "in_size"),
    [
        *((8, 0, False, in_size) for in_size in (64, 128, 200, 1024, 1100)),
        (8, 128, False, 256),
        (4, 0, False, 200),
        (4, 0, True, 1100),
        (4, 128, True, 1024),
        (4, 256, False, 512),
    ],
)
def test_products_have_the_bits_of_those_code_by_code_in_every_tile(
    bits: int, group_size: int, has_zeros: bool, in_size: int
) -> None:
    """Sums of 1,024 inputs and more have two parts. Each leaves the counts as it found them."""
    codes = make_codes((70, in_size), bits, group_size, has_zeros)
    assert split_steps(in_size, 70, 128)[0] == (1 if in_size < 1024 else 2 if in_size == 1024 else 3)
    bias = randn(70, dtype=HALF)
    x = draw(129, in_size)
    matrix = PairedTritonMatrix(codes, HALF)
    by_code = TritonMatrix(codes, HALF)
    for num_rows in (1, 16, 17, 65):
        assert torch.equal(matrix.multiply(x[:num_rows], bias), by_code.multiply(x[:num_rows], bias))
        assert not matrix._arrivals.any()
    assert torch.equal(matrix.multiply(x[:128], None), by_code.multiply(x[:128], None))
    # With more rows the other form takes rounded weights.
    assert_close(matrix.multiply(x, bias), (x.float() @ codes.dequantize().T + bias.float()).to(HALF))


@pytest.mark.parametrize("bits", [8, 4])
def test_every_code_is_exact(bits: int) -> None:
    """Each input is 1 in one place, so each product is one code less its zero."""
    values = torch.arange(-128, 128, device=DEVICE) if bits == 8 else torch.arange(256, device=DEVICE) % 16
    stored = values.to(torch.int8) if bits == 8 else pack_int4(values)
    zeros = None if bits == 8 else torch.tensor([[3], [16]], dtype=torch.int16, device=DEVICE)
    codes = Codes(bits, stored.view(2, -1), torch.ones(2, 1, device=DEVICE), zeros, 128)
    matrix = PairedTritonMatrix(codes, HALF)
    x = torch.eye(128, dtype=HALF, device=DEVICE)
    for rows in (x[:16], x[60:100], x):
        assert torch.equal(matrix.multiply(rows, None), rows @ codes.dequantize().to(HALF).T)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (4, 128)])
def test_more_rows_than_a_tile_s_limit_meet_the_codes_themselves(bits: int, group_size: int) -> None:
    """Weights are not rounded. Sums have one part, so no counts are needed. Bands of rows are of unequal heights."""
    codes = make_codes((130, 1024), bits, group_size, bits == 4)
    bias = randn(130, dtype=HALF)
    x = draw(TILES[-1][0] + 80, 1024)
    matrix = PairedTritonMatrix(codes, HALF)
    found = matrix.multiply(x, bias)
    assert_close(found, (x.float() @ codes.dequantize().T + bias.float()).to(HALF))
    matrix._arrivals = torch.empty(0, dtype=torch.int32, device=DEVICE)
    assert torch.equal(matrix.multiply(x, bias), found)


@pytest.mark.parametrize(("num_rows", "out_size"), [(0, 8), (3, 0), (193, 0)])
def test_no_rows_make_no_product(num_rows: int, out_size: int) -> None:
    matrix = PairedTritonMatrix(int8_codes(out_size, 32), HALF)
    assert matrix.multiply(randn(num_rows, 32, dtype=HALF), None).shape == (num_rows, out_size)


@pytest.mark.parametrize("in_size", [256, 200])
@pytest.mark.parametrize(("bits", "group_size", "has_zeros"), FORMS)
def test_rows_are_those_of_the_dequantised_matrix(bits: int, group_size: int, has_zeros: bool, in_size: int) -> None:
    codes = make_codes((24, in_size if group_size == 0 else 256), bits, group_size, has_zeros)
    indices = torch.tensor([23, 1, 1, 0], device=DEVICE)
    assert torch.equal(PairedTritonMatrix(codes, HALF).rows(indices), codes.dequantize()[indices].to(HALF))


def test_sorted_columns_meet_the_inputs_columns() -> None:
    codes = make_codes((24, 256), 4, 128, True, is_sorted=True)
    matrix = PairedTritonMatrix(codes, HALF)
    x = draw(3, 256)
    assert torch.equal(matrix.multiply(x, None), TritonMatrix(codes, HALF).multiply(x, None))
    indices = torch.tensor([5, 0, 5], device=DEVICE)
    assert torch.equal(matrix.rows(indices), codes.dequantize()[indices].to(HALF))


def test_an_element_has_codes_that_are_as_far_apart_as_a_part_of_a_step() -> None:
    codes = int8_codes(3, 300)
    paired = pair_codes(codes)
    assert paired.codes.shape == (3, 384)
    first = paired.codes[:, :128].unflatten(1, (64, 2))
    assert torch.equal(first[..., 0], codes.codes[:, :64])
    assert torch.equal(first[..., 1], codes.codes[:, 64:128])
    values = torch.arange(128, device=DEVICE) // 8
    fours = pair_codes(Codes(4, pack_int4(values)[None], torch.ones(1, 1, device=DEVICE), None, 128)).codes
    for part in range(4):
        assert torch.equal(fours.view(torch.int16)[0] >> 4 * part & 15, values[32 * part : 32 * part + 32].short())


def make_routing(num_tokens: int, num_experts: int) -> Routing:
    """Routing of random logits, with padding in between."""
    slots = torch.arange(num_tokens, device=DEVICE)
    slots[num_tokens // 2 :: 7] = -1
    return route_reference(randn(num_tokens, num_experts, seed=3), 2, True, slots)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "bits", "group_size", "has_zeros", "gather"),
    [
        (1, 5, *FORMS[0], True),
        (1, 5, *FORMS[3], False),
        (40, 3, *FORMS[1], False),
        (40, 3, *FORMS[4], True),
        (150, 2, *FORMS[3], True),
        (150, 2, *FORMS[1], False),
        (520, 2, *FORMS[4], False),
        (520, 2, *FORMS[0], True),
    ],
)
def test_experts_products_have_the_bits_of_those_code_by_code(
    num_tokens: int, num_experts: int, bits: int, group_size: int, has_zeros: bool, gather: bool
) -> None:
    """In each tile; some experts have no token, and rows of one scale are no whole steps."""
    assert [most for most, *_ in GROUPED_TILES[:2]] == [128, 512]
    codes = make_codes((num_experts, 40, 256 if group_size else 200), bits, group_size, has_zeros)
    routing = make_routing(num_tokens, num_experts)
    num_pairs = int(routing.offsets[-1])
    x = draw(num_tokens if gather else num_tokens * 2, codes.in_features)
    found = PairedTritonExperts(codes).multiply(x, routing, gather)[:num_pairs]
    assert torch.equal(found, TritonExperts(codes).multiply(x, routing, gather)[:num_pairs])


def test_experts_with_sorted_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="desc_act"):
        PairedTritonExperts(make_codes((2, 8, 256), 4, 128, False, is_sorted=True))


def test_the_switch_is_off_and_takes_what_has_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = Operators(TritonKernels(DEVICE))
    codes = int8_codes(9, 100)
    experts = int8_codes(3, 9, 100)
    assert type(operators.make_matrix(codes, HALF, None)) is TritonMatrix
    assert type(operators.make_experts(experts, HALF, None)) is TritonExperts
    monkeypatch.setattr(quantized, "TAKES_PAIRS", True)
    old, new = (operators.make_matrix(codes, HALF, None) for _ in "on")
    assert type(old) is PairedTritonMatrix
    for others, dtype in (
        (codes, torch.float32),
        (make_codes((9, 256), 8, 64, False), HALF),
        (make_codes((9, 256), 4, 32, True), HALF),
        (make_codes((9, 256), 8, 0, True), HALF),
    ):
        assert type(operators.make_matrix(others, dtype, None)) is TritonMatrix
    # New codes come into the memory of the old ones, which CUDA graphs read.
    new._codes.codes.neg_()
    x = randn(3, 100, dtype=HALF)
    expected = new.multiply(x, None)
    assert operators.keep_place(old, new) is old
    assert torch.equal(paired_linear(x, old._codes, None, old._arrivals), expected)
    paired = operators.make_experts(experts, HALF, None)
    assert type(paired) is PairedTritonExperts
    routing = make_routing(3, 3)
    num_pairs = int(routing.offsets[-1])
    expected = grouped_paired(x, paired._codes, routing, True)[:num_pairs]
    assert torch.equal(paired.multiply(x, routing, True)[:num_pairs], expected)
