"""The Triton kernels of int8-dynamic and w8a8 have the bits of plain torch: in the interpreter, or on a GPU."""

import pytest
import torch
from helpers.dynamic_checks import draw_inputs
from helpers.kernel_cases import DEVICE, HALF, poisoned_memory, randn
from helpers.quantized_cases import make_codes
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from helpers.pretend_cuda import noted

from nanovllm.backends.gpu import gate_and_mul, rounded_linear, token_linear
from nanovllm.backends.gpu.gate_and_mul import sigmoid_and_mul, silu_and_mul
from nanovllm.backends.gpu.gated_rms_norm import gated_rms_norm
from nanovllm.backends.gpu.quantized import (
    Operators,
    RoundedTritonExperts,
    RoundedTritonMatrix,
    TokenTritonMatrix,
    pad_rows,
)
from nanovllm.backends.gpu.rms_norm import add_rms_norm, rms_norm
from nanovllm.backends.gpu.round_groups import Rounded, Rounding, find_rounded
from nanovllm.backends.gpu.rounded_linear import (
    LARGE_TILE,
    ROUNDING,
    TILE,
    TOKEN_ROUNDING,
    grouped_rounded,
    limit_rows,
    round_inputs,
)
from nanovllm.backends.gpu.token_linear import split_sums
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.features.families.qwen3_moe.ops import Routing, route_reference
from nanovllm.features.quantized import dynamic
from nanovllm.features.quantized.codes import Codes
from nanovllm.features.quantized.formats import InputScales
from nanovllm.features.quantized.torch_matrix import DynamicExperts, DynamicMatrix, TokenExperts, TokenMatrix

EACH_ROUNDING = pytest.mark.parametrize("rounding", [ROUNDING, TOKEN_ROUNDING], ids=["by group", "by token"])
MATRICES = {
    InputScales.GROUP: (RoundedTritonMatrix, DynamicMatrix),
    InputScales.TOKEN: (TokenTritonMatrix, TokenMatrix),
}


@pytest.fixture(autouse=True)
def no_memory_is_zero_by_luck():
    with poisoned_memory():
        yield


def int8_codes(*shape: int) -> Codes:
    return make_codes(shape, 8, 0, False)


def hostile_rows(count: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of ordinary numbers, of zeros, of very large, tiny and broken ones."""
    x = draw_inputs(count, size, torch.float32, torch.Generator().manual_seed(1))
    x = x if dtype == torch.float32 else x.clamp(-6e4, 6e4)
    if count > 9:
        x[7, -1] = torch.inf
        x[8, size // 2] = -torch.inf
        x[9, 0] = torch.nan
    return x.to(DEVICE, dtype)


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """The same numbers, and NaN in the same places."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def assert_rounded(got: Rounded | None, x: torch.Tensor, rounding: Rounding) -> None:
    """got is the rounded form of x: the reference's codes, then zeros, and its scales."""
    size = x.shape[1]
    codes, scales = dynamic.round_inputs(x, size if rounding.by_token else rounding.group)
    assert got is not None and got.codes.shape[1] == -(-size // rounding.group) * rounding.group
    padded = torch.nn.functional.pad(codes.flatten(1)[:, :size], (0, -size % rounding.group))
    assert torch.equal(got.codes.float(), padded)
    assert_equal(got.scales.T, scales)


@EACH_ROUNDING
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("size", [1, 128, 300, 1024, 1100])
def test_inputs_are_rounded_to_the_codes_and_scales_of_the_reference(
    size: int, dtype: torch.dtype, rounding: Rounding
) -> None:
    x = hostile_rows(12, size, dtype)
    assert_rounded(round_inputs(x, rounding), x, rounding)


@EACH_ROUNDING
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("size", [1, 128, 300, 1024, 1100])
def test_norms_and_gates_round_what_they_write_as_the_reference_does(
    size: int, dtype: torch.dtype, rounding: Rounding
) -> None:
    """Their results are those of the same kernels without rounding; on a GPU, but for products that are fused there."""
    x = hostile_rows(12, 2 * size, dtype)
    y = randn(12, size, dtype=dtype)
    apart = x[:, :size]  # its rows lie apart in memory
    weight = randn(size, dtype=dtype)
    wide = weight.float()
    made = {
        "norm": [rms_norm(apart, weight, 1e-6, how) for how in (None, rounding)],
        "sum": [add_rms_norm(apart, y, wide, 1e-6, how)[0] for how in (None, rounding)],
        "gate": [silu_and_mul(x, how) for how in (None, rounding)],
        "sigmoid": [sigmoid_and_mul(apart.contiguous(), y, how) for how in (None, rounding)],
    }
    check_rounded(made, rounding)


@pytest.mark.parametrize("dim", [128, 256])
def test_a_gated_norm_rounds_its_heads(dim: int) -> None:
    """A head has whole groups, and the last program has fewer heads than the others."""
    x = hostile_rows(12, 6 * dim, HALF).view(12, 6, dim)
    args = (x, randn(12, 6 * dim, dtype=HALF), randn(dim, dtype=HALF), 1e-6)
    check_rounded({"norm": [gated_rms_norm(*args, how) for how in (None, ROUNDING)]}, ROUNDING)
    assert find_rounded(gated_rms_norm(*args, TOKEN_ROUNDING)) is None  # a program has some heads of a row
    args = (x[:, :5, :80].contiguous(), randn(12, 400, dtype=HALF), randn(80, dtype=HALF), 1e-6)
    assert find_rounded(gated_rms_norm(*args, ROUNDING)) is None


def test_a_gate_of_long_rows_leaves_their_rounding_by_token_to_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_and_mul, "LARGEST_BLOCK", 1024)
    x = randn(2, 2 * 1025, dtype=HALF)
    assert find_rounded(silu_and_mul(x, TOKEN_ROUNDING)) is None
    assert find_rounded(silu_and_mul(x, ROUNDING)) is not None


def check_rounded(made: dict[str, list[torch.Tensor]], rounding: Rounding) -> None:
    """By name: what a kernel writes without rounding, and with it."""
    for name, (plain, got) in made.items():
        torch.testing.assert_close(got, plain, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
        assert plain.isnan().any() and not plain.isnan().all(), name
        assert find_rounded(plain) is None
        assert_rounded(find_rounded(got), got, rounding)


@pytest.mark.parametrize("input_scales", InputScales)
def test_products_take_the_rounded_form_that_their_inputs_carry(input_scales: InputScales) -> None:
    """They launch no rounding. A view, or a part of the rows, carries none."""
    backend = TritonKernels(DEVICE)
    operators = Operators(backend)
    routing = route_reference(randn(9, 3, seed=3), 2, True, torch.arange(9, device=DEVICE))
    matrix = operators.make_matrix(int8_codes(20, 200), HALF, input_scales)
    experts = operators.make_experts(int8_codes(3, 20, 200), HALF, input_scales)
    x = randn(9, 200, dtype=HALF)
    normed = backend.rms_norm(x, randn(200, dtype=HALF), 1e-6)
    with noted() as launches:
        matrix.multiply(normed, None)
        experts.multiply(normed, routing, True)
        matrix.multiply(normed[:4], None)
        matrix.multiply(normed.view_as(x), None)
    product = "_token_linear_kernel" if input_scales is InputScales.TOKEN else "_rounded_linear_kernel"
    own = ["_round_inputs_kernel", product]
    assert [one.kernel.__name__ for one in launches] == [own[1], "_grouped_rounded_kernel", *own, *own]
    assert_equal(matrix.multiply(normed, None), matrix.multiply(normed.clone(), None))
    count = int(routing.offsets[-1])
    found = [experts.multiply(form, routing, True)[:count] for form in (normed, normed.clone())]
    assert_equal(*found)


def test_inputs_that_keep_their_type_are_not_rounded_for_nothing() -> None:
    backend = TritonKernels(DEVICE)
    Operators(backend).make_matrix(int8_codes(20, 64), HALF, None)
    assert find_rounded(backend.silu_and_mul(randn(3, 64, dtype=HALF))) is None


@EACH_ROUNDING
def test_ties_go_to_even_codes(rounding: Rounding) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], device=DEVICE)
    assert round_inputs(x, rounding).codes[0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@pytest.mark.parametrize("input_scales", InputScales)
@pytest.mark.parametrize(
    ("in_size", "out_size", "dtype"), [(64, 70, HALF), (300, 33, torch.float32), (200, 130, torch.float32)]
)
def test_products_have_the_bits_of_the_reference_in_every_tile(
    in_size: int, out_size: int, dtype: torch.dtype, input_scales: InputScales, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a row has the same bits whatever is beside it: each tile multiplies some of the same rows."""
    ours, reference = MATRICES[input_scales]
    codes = int8_codes(out_size, in_size)
    bias = randn(out_size, dtype=dtype)
    x = hostile_rows(130, in_size, dtype)
    expected = reference(codes, dtype).multiply(x, bias)
    matrix = ours(codes, dtype)
    assert matrix.row_limits == (16, 64)
    for num_rows in (1, 16, 17, 65):
        assert_equal(matrix.multiply(x[:num_rows], bias), expected[:num_rows])
    monkeypatch.setattr(rounded_linear, "BAND", 1)  # a tile of rows after another
    assert_equal(matrix.multiply(x, None), reference(codes, dtype).multiply(x, None))


@pytest.mark.parametrize("num_rows", [3, 20, 70])
def test_split_sums_have_the_bits_of_whole_ones(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products, one after the other: the first leaves the counters of arrivals as it found them."""
    codes = int8_codes(150, 1700)
    x = hostile_rows(num_rows, 1700, torch.float32)
    matrix = TokenTritonMatrix(codes, torch.float32)
    expected = TokenMatrix(codes, torch.float32).multiply(x, None)
    parts = {}
    for places in (2, 9):
        monkeypatch.setattr(token_linear, "num_multiprocessors", lambda device, places=places: places)
        matrix._arrivals = torch.zeros(token_linear.count_places(DEVICE), dtype=torch.int32, device=DEVICE)
        for _ in range(2):
            with noted() as launches:
                matrix.multiply(x, None)
            parts[places] = launches[-1].grid[1]
            assert_equal(matrix.multiply(x, None), expected)
        assert not matrix._arrivals.any()
    assert parts[2] < parts[9] <= 1700 // 128 // token_linear.MIN_GROUPS + 1


@given(num_tiles=st.integers(1, 5000), num_groups=st.integers(1, 1100), multiprocessors=st.integers(1, 200))
def test_a_split_has_a_counter_for_each_tile_and_no_empty_part(
    num_tiles: int, num_groups: int, multiprocessors: int
) -> None:
    for tile in token_linear.TILES:
        share = split_sums(num_tiles, num_groups, multiprocessors * tile.programs)
        parts = -(-num_groups // share)
        assert parts >= 1 and (parts - 1) * share < num_groups <= parts * share
        if parts > 1:
            assert share >= token_linear.MIN_GROUPS
            assert num_tiles <= multiprocessors * max(one.programs for one in token_linear.TILES)


@pytest.mark.parametrize("input_scales", InputScales)
def test_the_largest_sums_are_exact(input_scales: InputScales) -> None:
    """All inputs are 127 or -127, in all groups, and checkpoints have codes of -128: a sum of 1,280 needs 25 bits."""
    ours, reference = MATRICES[input_scales]
    codes = Codes(8, torch.full((40, 1280), 127, dtype=torch.int8, device=DEVICE), randn(40, 1).abs(), None, 1280)
    codes.codes[20:] = -128
    codes.codes[0, -1] = 126
    x = torch.ones(20, 1280, device=DEVICE)
    x[::2] = -1
    assert torch.equal(ours(codes, HALF).multiply(x, None), reference(codes, HALF).multiply(x, None))


def test_a_matrix_whose_sums_would_not_be_exact_is_refused() -> None:
    """Codes are -128 to 127, and those of inputs -127 to 127."""
    most = dynamic.MOST_INPUTS
    assert most * 127 * 128 < 2**31 <= (most + 1) * 127 * 128
    codes = Codes(8, torch.zeros(1, 1, most + 1, dtype=torch.int8), torch.ones(1, 1, 1), None, most + 1)
    message = rf"{most + 1} inputs, and int32 adds the products of at most {most} codes exactly"
    with pytest.raises(ValueError, match=message):
        TokenTritonMatrix(codes.take_expert(0), HALF)
    with pytest.raises(ValueError, match=message):
        RoundedTritonExperts(codes, TOKEN_ROUNDING)
    RoundedTritonExperts(codes, ROUNDING)


@pytest.mark.parametrize("input_scales", InputScales)
@pytest.mark.parametrize(("num_rows", "out_size"), [(0, 8), (3, 0), (129, 0)])
def test_no_rows_make_no_product(num_rows: int, out_size: int, input_scales: InputScales) -> None:
    matrix = MATRICES[input_scales][0](int8_codes(out_size, 32), HALF)
    assert matrix.multiply(randn(num_rows, 32, dtype=HALF), None).shape == (num_rows, out_size)


@pytest.mark.parametrize("in_size", [128, 200])
def test_rows_are_those_of_the_dequantised_matrix(in_size: int) -> None:
    codes = int8_codes(24, in_size)
    indices = torch.tensor([23, 1, 1, 0], device=DEVICE)
    assert torch.equal(RoundedTritonMatrix(codes, HALF).rows(indices), codes.dequantize()[indices].to(HALF))


def test_new_codes_come_into_the_memory_of_the_old_ones() -> None:
    """CUDA graphs read it."""
    operators = Operators(TritonKernels(DEVICE))
    old, new = (operators.make_matrix(int8_codes(9, size), HALF, InputScales.GROUP) for size in (100, 100))
    new._codes.codes.neg_()
    x = randn(3, 100, dtype=HALF)
    expected = new.multiply(x, None)
    assert not torch.equal(old.multiply(x, None), expected)
    assert operators.keep_place(old, new) is old
    assert torch.equal(old.multiply(x, None), expected)


def test_few_rows_of_a_wide_matrix_take_large_tiles_when_these_occupy_a_third_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rounded_linear, "num_multiprocessors", lambda device: 132)
    for out_size, most in {24576: TILE[0], 6144: 0, 4096: 128, 1024: 5 * 128, 1: 43 * 128, 0: 43 * 128}.items():
        found = limit_rows(out_size, DEVICE)
        assert found == (16, max(most, TILE[0]))
        rows, columns, _ = LARGE_TILE
        assert -(-(found[1] + 1) // rows) * -(-out_size // columns) * 3 >= 132 or out_size == 0


@EACH_ROUNDING
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "in_size", "gather"),
    [(1, 5, 64, True), (40, 3, 256, False), (130, 2, 200, True), (130, 3, 40, False), (513, 2, 40, True)],
)
def test_experts_products_have_the_bits_of_the_reference(
    num_tokens: int, num_experts: int, in_size: int, gather: bool, rounding: Rounding
) -> None:
    """Padding is in no expert, and some experts have no token."""
    codes = int8_codes(num_experts, 40, in_size)
    slots = torch.arange(num_tokens, device=DEVICE)
    slots[num_tokens // 2 :: 7] = -1
    routing: Routing = route_reference(randn(num_tokens, num_experts, seed=3), 2, True, slots)
    x = randn(num_tokens if gather else num_tokens * 2, in_size)
    count = int(routing.offsets[-1])
    experts = (TokenExperts if rounding.by_token else DynamicExperts)(codes, torch.float32)
    expected = experts.multiply(x, routing, gather)
    assert_equal(grouped_rounded(x, pad_rows(codes), routing, gather, rounding)[:count], expected[:count])
