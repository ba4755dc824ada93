"""The one Triton kernel of products has its references' numbers: in the interpreter, or on a GPU where there is one.

By codes and by numbers of 16 bits; of a matrix and of experts; of inputs that keep their type and of rounded ones.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from helpers.kernel_cases import DEVICE, HALF, hostile_rows, poisoned_memory, randn
from helpers.quantized_cases import FORMATS, make_codes
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from helpers.pretend_cuda import noted

from nanovllm.backends.gpu import dequantize, product
from nanovllm.backends.gpu.dequantize import multiply_dequantized
from nanovllm.backends.gpu.experts import Operators as ExpertKernels
from nanovllm.backends.gpu.product import (
    CODES_TILES,
    ROUNDED_TILES,
    Laid,
    choose_step,
    count_places,
    split_steps,
)
from nanovllm.backends.gpu.quantized import Operators, TritonMatrix
from nanovllm.backends.gpu.tiles import MIN_STEPS
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.features.families.qwen3_moe.ops import Routing, grouped_linear_reference, route_reference
from nanovllm.features.quantized import dynamic
from nanovllm.features.quantized.codes import Codes, InputScales, Scales
from nanovllm.features.quantized.formats import INT8, INT8_DYNAMIC
from nanovllm.features.quantized.torch_matrix import TorchMatrix

ROUNDED = (8, 0, False)
"""The format of matrices that round their inputs."""
FORMATS_AND_TYPES = [(form, (torch.float32, HALF)[i % 2]) for i, form in enumerate(FORMATS)]
ROWS = (1, 16, 17, 64, 65, 128, 200)
"""Numbers of rows around the limits of tiles. More than 128 meet a matrix of codes that was dequantised."""
Form = tuple[int, int, bool]


@pytest.fixture(autouse=True)
def no_memory_is_zero_by_luck() -> Iterator[None]:
    with poisoned_memory():
        yield


def rounding_codes(*shape: int) -> Codes:
    """Codes by which rounded inputs are multiplied."""
    return replace(make_codes(shape, *ROUNDED), input_scales=InputScales.TOKEN)


def make_routing(num_tokens: int, num_experts: int, k: int = 2) -> Routing:
    """Routing of random logits, with padding in between."""
    slots = torch.arange(num_tokens, device=DEVICE)
    slots[num_tokens // 2 :: 7] = -1
    return route_reference(randn(num_tokens, num_experts, seed=3), k, True, slots)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding. Both sum in float32, in another order: some hundred products of about one."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.float(), expected.float(), rtol=2 * eps, atol=2 * eps + 1e-4)


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    """The same numbers, and NaN in the same places."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


# ---- inputs that keep their type


@pytest.mark.parametrize(("form", "dtype"), FORMATS_AND_TYPES)
def test_products_are_those_of_the_dequantised_matrix(form: Form, dtype: torch.dtype) -> None:
    """Of many rows the weights are rounded to the dtype first."""
    in_size = 256 if form[1] else 200
    codes = make_codes((70, in_size), *form)
    matrix = TritonMatrix(codes, dtype)
    for num_rows in ROWS:
        bias = randn(70, dtype=dtype) if num_rows % 2 else None
        x = randn(num_rows, in_size, dtype=dtype, seed=num_rows)
        weights = codes.dequantize()
        if num_rows > CODES_TILES[-1][0]:
            weights = weights.to(dtype).float()
        expected = x.float() @ weights.T + (0 if bias is None else bias.float())
        assert_close(matrix.multiply(x, bias), expected.to(dtype))


@pytest.mark.parametrize("form", FORMATS)
def test_whole_numbers_have_the_bits_of_a_sum_in_float64(form: Form) -> None:
    """Inputs and scales whose products and sums are exact: then no order of a sum plays a part."""
    in_size = 256 if form[1] else 200
    codes = make_codes((70, in_size), *form)
    codes = replace(codes, scales=codes.scales.map(lambda values: values.log2().floor().exp2()))
    weights = codes.dequantize().double()
    matrix = TritonMatrix(codes, torch.float32)
    for num_rows in (1, 17, 65):
        x = (randn(num_rows, in_size, seed=num_rows) * 4).round().clamp(-8, 8) / 8
        assert torch.equal(matrix.multiply(x, None), (x.double() @ weights.T).float())


@pytest.mark.parametrize("num_rows", [1, 16, 17, 65, 128])
def test_a_row_has_the_same_bits_whatever_the_tile(num_rows: int) -> None:
    """In the interpreter numpy multiplies tiles of any height row by row, so what differs could only be our order.

    Two programs sum a part of the five steps each.
    """
    codes = make_codes((20, 320), 4, 64, True)
    matrix = TritonMatrix(codes, torch.float32)
    x = randn(num_rows, 320)
    some = [*range(0, num_rows - 1, 15), num_rows - 1]
    with noted() as launches:
        matrix.multiply(x, None)
    assert launches[0].grid[1] == 2
    expected = torch.cat([matrix.multiply(row, None) for row in x[some].split(1)])
    torch.testing.assert_close(matrix.multiply(x, None)[some], expected, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize(("form", "dtype"), [((8, 0, False), torch.float32), ((4, 128, True), HALF)])
def test_sums_in_parts_are_those_of_the_dequantised_matrix(form: Form, dtype: torch.dtype) -> None:
    """The last of three programs adds their parts and the bias, and leaves the counts as it found them."""
    codes = make_codes((70, 1152 if form[1] else 1100), *form)
    matrix = TritonMatrix(codes, dtype)
    bias = randn(70, dtype=dtype)
    for num_rows in (5, 40):
        x = randn(num_rows, codes.in_features, dtype=dtype, seed=num_rows)
        expected = x.float() @ codes.dequantize().T + bias.float()
        assert_close(matrix.multiply(x, bias), expected.to(dtype))
        assert matrix._laid.arrivals is not None and not matrix._laid.arrivals.any()


def test_a_large_matrix_is_dequantised_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = TritonMatrix(make_codes((70, 256), 4, 128, True), HALF)
    x = randn(129, 256, dtype=HALF)
    whole = matrix.multiply(x, None)
    monkeypatch.setattr(dequantize, "MAX_SCRATCH", 48 * 256)
    with noted() as launches:
        multiply_dequantized(x, matrix._laid, None)
    assert len(launches) == 2
    assert_close(multiply_dequantized(x, matrix._laid, None), whole)


@pytest.mark.parametrize("form", FORMATS[1:5])
def test_sorted_columns_meet_the_inputs_columns(form: Form) -> None:
    codes = make_codes((24, 256), *form, is_sorted=True)
    matrix = TritonMatrix(codes, torch.float32)
    for num_rows in (3, 129):
        x = randn(num_rows, 256)
        assert_close(matrix.multiply(x, None), x @ codes.dequantize().T)
    indices = torch.tensor([5, 0, 5], device=DEVICE)
    assert torch.equal(matrix.rows(indices), codes.dequantize()[indices])


@pytest.mark.parametrize("codes", [*(make_codes((24, 256), *form) for form in FORMATS), rounding_codes(24, 200)])
def test_rows_are_those_of_the_dequantised_matrix(codes: Codes) -> None:
    indices = torch.tensor([23, 1, 1, 0], device=DEVICE)
    assert torch.equal(TritonMatrix(codes, HALF).rows(indices), codes.dequantize()[indices].to(HALF))


@pytest.mark.parametrize("input_scales", [None, InputScales.TOKEN])
@pytest.mark.parametrize(("num_rows", "out_size"), [(0, 8), (3, 0), (129, 0)])
def test_no_rows_make_no_product(num_rows: int, out_size: int, input_scales: InputScales | None) -> None:
    codes = replace(make_codes((out_size, 32), *ROUNDED), input_scales=input_scales)
    found = TritonMatrix(codes, HALF).multiply(randn(num_rows, 32, dtype=HALF), None)
    assert found.shape == (num_rows, out_size)


def test_the_order_of_a_sum_follows_from_the_matrix_alone() -> None:
    """Parts and their steps: o and down of 0.6B, qkv, o and down of 8B, a head, and no rows."""
    for (in_size, out_size), found in {
        (2048, 1024): (4, 4),
        (3072, 1024): (6, 4),
        (4096, 6144): (2, 16),
        (4096, 4096): (3, 11),
        (12288, 4096): (3, 32),
        (4096, 151936): (1, 32),
        (1024, 0): (2, 4),
    }.items():
        laid = Laid(torch.empty(out_size, in_size, dtype=torch.int8, device="meta"), 8, in_size)
        for _, tile in CODES_TILES:
            assert split_steps(laid, tile, num_tiles=7) == found


@pytest.mark.parametrize(("size", "step"), [(1024, 128), (128, 128), (96, 32), (64, 64), (32, 32), (16, 32)])
def test_a_step_is_within_a_group_or_has_two(size: int, step: int) -> None:
    assert choose_step(4, 1152, size) == step if size < 1024 else choose_step(8, size, size) == step


# ---- experts


EXPERTS = [(1, 5, True), (1, 5, False), (40, 3, False), (40, 3, True), (130, 2, False)]
"""How many tokens and experts, and whether tokens are gathered. Some experts have no token."""


@pytest.mark.parametrize(("num_tokens", "num_experts", "gather"), EXPERTS)
@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[1], FORMATS[5], FORMATS[7], None], ids=str)
def test_experts_products_are_their_reference(
    num_tokens: int, num_experts: int, gather: bool, form: Form | None
) -> None:
    """By codes, and by numbers. Padding is in no expert, and each expert's rows are those of its own matrix."""
    routing = make_routing(num_tokens, num_experts)
    num_pairs = int(routing.offsets[-1])
    x = randn(num_tokens if gather else num_tokens * 2, 128)
    if form is None:
        weights = randn(num_experts, 40, 128) / 4
        got = ExpertKernels(None).grouped_linear(x, weights, routing, gather)[:num_pairs]
    else:
        codes = make_codes((num_experts, 40, 128), *form)
        weights = codes.dequantize()
        got = TritonMatrix(codes, torch.float32).multiply_pairs(x, routing, gather)[:num_pairs]
    assert_close(got, grouped_linear_reference(x, weights, routing, gather)[:num_pairs])
    for expert, (begin, end) in enumerate(zip(routing.offsets, routing.offsets[1:], strict=False)):
        rows = x[routing.tokens[begin:end].long()] if gather else x[begin:end]
        assert_close(got[begin:end], rows @ weights[expert].T)


def test_experts_after_an_empty_one_find_their_matrices() -> None:
    routing = make_routing(9, 6, 1)
    assert (routing.offsets.diff() == 0).any()
    codes = make_codes((6, 33, 64), 8, 0, False)
    x = randn(9, 64)
    num_pairs = int(routing.offsets[-1])
    expected = grouped_linear_reference(x, codes.dequantize(), routing, True)
    got = TritonMatrix(codes, torch.float32).multiply_pairs(x, routing, True)
    assert_close(got[:num_pairs], expected[:num_pairs])


# ---- rounded inputs


@pytest.mark.parametrize(
    ("in_size", "out_size", "dtype"), [(64, 70, HALF), (300, 33, torch.float32), (200, 130, torch.float32)]
)
def test_rounded_products_have_the_bits_of_the_reference_in_every_tile(
    in_size: int, out_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a row has the same bits whatever is beside it: each tile multiplies some of the same rows."""
    codes = rounding_codes(out_size, in_size)
    bias = randn(out_size, dtype=dtype)
    x = hostile_rows(200, in_size, dtype)
    expected = TorchMatrix(codes, dtype).multiply(x, bias)
    matrix = TritonMatrix(codes, dtype)
    assert matrix.row_limits == (16, 64)
    for num_rows in ROWS:
        assert_equal(matrix.multiply(x[:num_rows], bias), expected[:num_rows])
    monkeypatch.setattr(product, "BAND", 1)  # a tile of rows after another
    assert_equal(matrix.multiply(x, None), TorchMatrix(codes, dtype).multiply(x, None))


@pytest.mark.parametrize(("num_tokens", "num_experts", "gather"), EXPERTS)
@pytest.mark.parametrize("in_size", [40, 256])
def test_rounded_products_of_experts_have_the_bits_of_the_reference(
    num_tokens: int, num_experts: int, gather: bool, in_size: int
) -> None:
    codes = rounding_codes(num_experts, 40, in_size)
    routing = make_routing(num_tokens, num_experts)
    x = randn(num_tokens if gather else num_tokens * 2, in_size)
    count = int(routing.offsets[-1])
    expected = TorchMatrix(codes, torch.float32).multiply_pairs(x, routing, gather)
    got = TritonMatrix(codes, torch.float32).multiply_pairs(x, routing, gather)
    assert_equal(got[:count], expected[:count])


@pytest.mark.parametrize("num_rows", [3, 20, 70])
def test_split_sums_have_the_bits_of_whole_ones(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products, one after the other: the first leaves the counters of arrivals as it found them."""
    codes = rounding_codes(150, 1700)
    x = hostile_rows(num_rows, 1700, torch.float32)
    expected = TorchMatrix(codes, torch.float32).multiply(x, None)
    parts = {}
    for places in (2, 9):
        monkeypatch.setattr(product, "num_multiprocessors", lambda device, places=places: places)
        matrix = TritonMatrix(codes, torch.float32)
        for _ in range(2):
            with noted() as launches:
                matrix.multiply(x, None)
            parts[places] = launches[-1].grid[1]
            assert_equal(matrix.multiply(x, None), expected)
        assert matrix._laid.arrivals is not None and not matrix._laid.arrivals.any()
    assert parts[2] < parts[9] <= 1700 // 128 // MIN_STEPS + 1


@given(num_tiles=st.integers(1, 5000), num_steps=st.integers(1, 1100), multiprocessors=st.integers(1, 200))
def test_a_split_has_a_counter_for_each_tile_and_no_empty_part(
    num_tiles: int, num_steps: int, multiprocessors: int
) -> None:
    laid = Laid(torch.empty(1, 128 * num_steps, dtype=torch.int8, device="meta"), 8, 128 * num_steps, rounds=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "num_multiprocessors", lambda device: multiprocessors)
        num_arrivals = len(product.make_arrivals(laid))
        for _, tile in ROUNDED_TILES:
            parts, share = split_steps(laid, tile, num_tiles)
            assert parts >= 1 and (parts - 1) * share < num_steps <= parts * share
            if parts > 1:
                assert share >= MIN_STEPS
                assert num_tiles <= num_arrivals
                assert count_places(tile, laid.weight.device) <= num_arrivals


def test_the_largest_sums_are_exact() -> None:
    """All inputs are 127 or -127, and checkpoints have codes of -128: a sum of 1,280 needs 25 bits."""
    codes = Codes(
        8, torch.full((40, 1280), 127, dtype=torch.int8, device=DEVICE), Scales(randn(40, 1).abs()), None, 1280
    )
    codes.codes[20:] = -128
    codes.codes[0, -1] = 126
    codes = replace(codes, input_scales=InputScales.TOKEN)
    x = torch.ones(20, 1280, device=DEVICE)
    x[::2] = -1
    assert torch.equal(TritonMatrix(codes, HALF).multiply(x, None), TorchMatrix(codes, HALF).multiply(x, None))


def test_products_take_the_rounded_form_that_their_inputs_carry() -> None:
    """They launch no rounding. A view, or a part of the rows, carries none."""
    backend = TritonKernels(DEVICE)
    operators = Operators(backend)
    routing = route_reference(randn(9, 3, seed=3), 2, True, torch.arange(9, device=DEVICE))
    matrix = operators.lay(rounding_codes(20, 200), HALF)
    experts = operators.lay(rounding_codes(3, 20, 200), HALF)
    x = randn(9, 200, dtype=HALF)
    normed = backend.rms_norm(x, randn(200, dtype=HALF), 1e-6)
    with noted() as launches:
        matrix.multiply(normed, None)
        experts.multiply_pairs(normed, routing, True)
        matrix.multiply(normed[:4], None)
        matrix.multiply(normed.view_as(x), None)
    own = ["_round_inputs_kernel", "_product_kernel"]
    assert [one.kernel.__name__ for one in launches] == ["_product_kernel", "_product_kernel", *own, *own]
    assert_equal(matrix.multiply(normed, None), matrix.multiply(normed.clone(), None))
    count = int(routing.offsets[-1])
    found = [experts.multiply_pairs(form, routing, True)[:count] for form in (normed, normed.clone())]
    assert_equal(*found)


def test_inputs_that_keep_their_type_are_not_rounded_for_nothing() -> None:
    backend = TritonKernels(DEVICE)
    Operators(backend).lay(make_codes((20, 64), *ROUNDED), HALF)
    assert not backend.rounds_inputs
    Operators(backend).lay(rounding_codes(20, 64), HALF)
    assert backend.rounds_inputs


# ---- both


@pytest.mark.parametrize("input_scales", [None, InputScales.TOKEN])
def test_new_codes_come_into_the_memory_of_the_old_ones(input_scales: InputScales | None) -> None:
    """CUDA graphs read it."""
    operators = Operators(TritonKernels(DEVICE))
    codes = [replace(make_codes((9, 100), *ROUNDED, seed=i), input_scales=input_scales) for i in range(2)]
    old, new = (operators.lay(one, HALF) for one in codes)
    x = randn(3, 100, dtype=HALF)
    expected = new.multiply(x, None)
    assert not torch.equal(old.multiply(x, None), expected)
    assert operators.keep_place(old, new) is old
    assert torch.equal(old.multiply(x, None), expected)
    indices = torch.arange(9, device=DEVICE)
    assert torch.equal(old.rows(indices), new.rows(indices))


def test_what_the_kernel_cannot_take_is_refused() -> None:
    """Sums of whole numbers must be exact: codes are -128 to 127, and those of inputs -127 to 127."""
    with pytest.raises(ValueError, match="groups of 16 weights, or of a multiple of 32, and these have 8"):
        TritonMatrix(make_codes((8, 48), 4, 8, False), HALF)
    with pytest.raises(ValueError, match="desc_act"):
        TritonMatrix(make_codes((2, 8, 64), 4, 32, False, is_sorted=True), HALF)
    most = dynamic.MOST_INPUTS
    assert most * 127 * 128 < 2**31 <= (most + 1) * 127 * 128
    weight = torch.zeros(1, 1, most + 1, dtype=torch.int8)
    codes = Codes(8, weight, Scales(torch.ones(1, 1, 1)), None, most + 1, input_scales=InputScales.TOKEN)
    for one in (codes, codes.take_expert(0)):
        with pytest.raises(ValueError, match=rf"{most + 1} inputs, and int32 adds the products of at most {most} "):
            TritonMatrix(one, HALF)


def test_int8_dynamic_is_refused_and_w8a8_named() -> None:
    operators = Operators(TritonKernels(DEVICE))
    assert operators.why_cannot(INT8) is None
    assert 'use quantization="w8a8", or "int8"' in str(operators.why_cannot(INT8_DYNAMIC))
