"""Rounded inputs times weights with scales for groups: the bits of plain torch, in the interpreter or on a GPU."""

from dataclasses import replace

import pytest
import torch
from helpers.kernel_cases import DEVICE, HALF, poisoned_memory, randn
from helpers.pretend_cuda import noted
from helpers.quantized_cases import make_codes, make_floats

pytest.importorskip("triton")

from nanovllm.backends.gpu.quantized import (
    GroupedTritonExperts,
    GroupedTritonMatrix,
    Operators,
    RoundedTritonExperts,
    RoundedTritonMatrix,
    lay_groups,
)
from nanovllm.backends.gpu.round_to_fp8 import round_to_fp8
from nanovllm.backends.gpu.rounded_groups import grouped_rounded_groups, rounded_groups
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.features.families.qwen3_moe.ops import Routing, route_reference
from nanovllm.features.quantized.dynamic import round_inputs_to_fp8
from nanovllm.features.quantized.formats import InputScales
from nanovllm.features.quantized.torch_matrix import DynamicExperts, DynamicMatrix

BACKEND = TritonKernels(DEVICE)
OPERATORS = Operators(BACKEND)
FORMS = [(4, 128, True), (4, 32, False), (4, 64, True), (8, 128, False), (4, 256, False)]
"""Bits, group size, whether there are zeros."""


@pytest.fixture(autouse=True)
def no_memory_is_zero_by_luck():
    with poisoned_memory():
        yield


def test_products_take_the_rounded_form_that_their_inputs_carry() -> None:
    """They launch no rounding. Columns that were sorted by their group need inputs in that order, rounded anew."""
    routing = route_reference(randn(9, 3, seed=3), 2, True, torch.arange(9, device=DEVICE))
    codes = make_codes((20, 256), 4, 64, True)
    matrix = OPERATORS.make_matrix(codes, HALF, InputScales.GROUP)
    mixed = OPERATORS.make_matrix(replace(codes, order=torch.randperm(256).to(DEVICE)), HALF, InputScales.GROUP)
    experts = OPERATORS.make_experts(make_codes((3, 20, 256), 4, 64, True), HALF, InputScales.GROUP)
    normed = BACKEND.rms_norm(randn(9, 256, dtype=HALF), randn(256, dtype=HALF), 1e-6)
    with noted() as launches:
        matrix.multiply(normed, None)
        experts.multiply(normed, routing, True)
        mixed.multiply(normed, None)
    own = ["_rounded_groups_kernel", "_grouped_rounded_groups_kernel", "_round_inputs_kernel", "_rounded_groups_kernel"]
    assert [one.kernel.__name__ for one in launches] == own
    assert torch.equal(matrix.multiply(normed, None), matrix.multiply(normed.clone(), None))
    count = int(routing.offsets[-1])
    found = [experts.multiply(form, routing, True)[:count] for form in (normed, normed.clone())]
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("bits", "group_size", "has_zeros"), FORMS)
def test_products_have_the_bits_of_the_reference_in_every_tile(
    bits: int, group_size: int, has_zeros: bool, dtype: torch.dtype
) -> None:
    """So a row has the same bits whatever is beside it: each tile multiplies some of the same rows."""
    codes = make_codes((130, 512 if group_size > 128 else 320), bits, group_size, has_zeros)
    bias = randn(130, dtype=dtype)
    x = randn(70, codes.in_features, dtype=dtype)
    x[3] = 0
    expected = DynamicMatrix(codes, dtype).multiply(x, bias)
    matrix = OPERATORS.make_matrix(codes, dtype, InputScales.GROUP)
    assert isinstance(matrix, GroupedTritonMatrix) and matrix.row_limits == (16, 64)
    for num_rows in (1, 16, 17, 70):
        assert torch.equal(matrix.multiply(x[:num_rows], bias), expected[:num_rows])
    assert torch.equal(matrix.multiply(x[:2], None), DynamicMatrix(codes, dtype).multiply(x[:2], None))


@pytest.mark.parametrize("group_size", [0, 128])
def test_the_reference_is_near_the_dequantised_product(group_size: int) -> None:
    """Inputs are rounded to 127 steps of the largest of their group: here an error of 0.5 % of the product's size."""
    codes = make_codes((40, 512), 4, group_size, True)
    x = randn(9, 512)
    exact = x @ codes.dequantize().T
    assert 0 < (DynamicMatrix(codes, torch.float32).multiply(x, None) - exact).norm() < 0.01 * exact.norm()


def test_one_scale_a_row_is_multiplied_by_at_the_end() -> None:
    """As int8 at load is, by the kernel that exists for it."""
    codes = make_codes((40, 200), 4, 0, True)
    matrix = OPERATORS.make_matrix(codes, HALF, InputScales.GROUP)
    assert type(matrix) is RoundedTritonMatrix
    x = randn(5, 200, dtype=HALF)
    assert torch.equal(matrix.multiply(x, None), DynamicMatrix(codes, HALF).multiply(x, None))
    assert (
        type(OPERATORS.make_experts(make_codes((2, 40, 200), 4, 0, True), HALF, InputScales.GROUP))
        is RoundedTritonExperts
    )


def test_codes_are_kept_in_a_byte_without_their_zero() -> None:
    codes = make_codes((24, 256), 4, 64, True)
    wide = codes.widen()
    assert wide.codes.dtype == torch.int8 and wide.zeros is None and wide.widen() is wide
    assert torch.equal(wide.dequantize(), codes.dequantize())
    experts = make_codes((3, 24, 256), 4, 64, True)
    assert torch.equal(experts.widen().dequantize(), experts.dequantize())
    with pytest.raises(ValueError, match="fit no byte less their zero"):
        make_codes((24, 256), 8, 64, True).widen()


def test_sorted_columns_meet_the_inputs_columns() -> None:
    codes = make_codes((24, 320), 4, 64, True, is_sorted=True)
    matrix = OPERATORS.make_matrix(codes, torch.float32, InputScales.GROUP)
    x = randn(3, 320)
    assert torch.equal(matrix.multiply(x, None), DynamicMatrix(codes, torch.float32).multiply(x, None))
    exact = x @ codes.dequantize().T
    assert (matrix.multiply(x, None) - exact).norm() < 0.01 * exact.norm()
    indices = torch.tensor([5, 0, 5], device=DEVICE)
    assert torch.equal(matrix.rows(indices), codes.dequantize()[indices])


@pytest.mark.parametrize(("num_rows", "out_size"), [(0, 8), (3, 0), (129, 0)])
def test_no_rows_make_no_product(num_rows: int, out_size: int) -> None:
    weight = lay_groups(make_codes((out_size, 64), 4, 32, False).widen())
    y = rounded_groups(randn(num_rows, 64, dtype=HALF), weight, 64, None, (16, 64))
    assert y.shape == (num_rows, out_size)


def test_new_codes_come_into_the_memory_of_the_old_ones() -> None:
    """CUDA graphs read it."""
    old, new = (
        OPERATORS.make_matrix(make_codes((9, 128), 4, 64, False, seed), HALF, InputScales.GROUP) for seed in (1, 2)
    )
    x = randn(3, 128, dtype=HALF)
    expected = new.multiply(x, None)
    assert not torch.equal(old.multiply(x, None), expected)
    assert OPERATORS.keep_place(old, new) is old
    assert torch.equal(old.multiply(x, None), expected)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "in_size", "group_size", "gather"),
    [(1, 5, 128, 64, True), (40, 3, 256, 128, False), (130, 2, 192, 32, True), (513, 2, 64, 32, True)],
)
def test_experts_products_have_the_bits_of_the_reference(
    num_tokens: int, num_experts: int, in_size: int, group_size: int, gather: bool
) -> None:
    """Padding is in no expert, and some experts have no token."""
    codes = make_codes((num_experts, 40, in_size), 4, group_size, True)
    slots = torch.arange(num_tokens, device=DEVICE)
    slots[num_tokens // 2 :: 7] = -1
    routing: Routing = route_reference(randn(num_tokens, num_experts, seed=3), 2, True, slots)
    x = randn(num_tokens if gather else num_tokens * 2, in_size)
    count = int(routing.offsets[-1])
    expected = DynamicExperts(codes, torch.float32).multiply(x, routing, gather)
    assert isinstance(OPERATORS.make_experts(codes, torch.float32, InputScales.GROUP), GroupedTritonExperts)
    y = grouped_rounded_groups(x, lay_groups(codes.widen()), in_size, routing, gather)
    assert torch.equal(y[:count], expected[:count])


def test_what_no_step_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32 weights, and these have 48: leave quantization out"):
        OPERATORS.make_matrix(make_codes((8, 96), 4, 48, False), HALF, InputScales.GROUP)
    experts = make_codes((2, 8, 64), 4, 32, False)
    with pytest.raises(ValueError, match="desc_act"):
        OPERATORS.make_experts(replace(experts, order=torch.arange(64).expand(2, 64)), HALF, InputScales.GROUP)


# ---- fp8 by fp8, which the benchmark alone asks for


def has_fp8() -> bool:
    return DEVICE.type != "cuda" or torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not has_fp8(), reason="this GPU has no fp8")
@pytest.mark.parametrize("size", [128, 300, 1100])
def test_inputs_become_fp8_by_the_rule(size: int) -> None:
    x = randn(9, size)
    x[2] = 0
    x[3] *= 1e-33
    x[4, -1] = torch.inf
    x[5, 0] = torch.nan
    numbers, scales = round_inputs_to_fp8(x)
    found = round_to_fp8(x)
    torch.testing.assert_close(found.scales.T, scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(found.codes.float(), numbers.flatten(1))
    for row in (2, 3):
        assert not found.codes[row].float().any() and not scales[row].any()


@pytest.mark.skipif(not has_fp8(), reason="this GPU has no fp8")
@pytest.mark.parametrize(("in_size", "group_size"), [(256, 128), (320, 128), (300, 0)])
def test_fp8_by_fp8_is_the_product_of_the_rounded_inputs(in_size: int, group_size: int) -> None:
    codes = make_floats((70, in_size), group_size)
    matrix = OPERATORS.make_matrix(codes, torch.float32, InputScales.GROUP)
    x = randn(70, in_size)
    found = round_to_fp8(x)
    groups = found.codes.float().view(70, -1, 128) * found.scales.T[:, :, None]
    expected = groups.flatten(1)[:, :in_size] @ codes.dequantize().T
    for num_rows in (1, 17, 70):
        got = matrix.multiply(x[:num_rows], None)
        torch.testing.assert_close(got, expected[:num_rows], rtol=1e-4, atol=1e-3 * float(expected.abs().max()))
    experts = make_floats((2, 70, in_size), group_size)
    routing = route_reference(randn(20, 2, seed=3), 2, True, torch.arange(20, device=DEVICE))
    got = OPERATORS.make_experts(experts, torch.float32, InputScales.GROUP).multiply(x[:20], routing, True)
    for expert, (begin, end) in enumerate(zip(routing.offsets, routing.offsets[1:], strict=False)):
        alone = OPERATORS.make_matrix(experts.take_expert(expert), torch.float32, InputScales.GROUP)
        expected = alone.multiply(x[routing.tokens[begin:end].long()], None)
        torch.testing.assert_close(got[begin:end], expected, rtol=1e-4, atol=1e-3)
