"""The form of quantised weights, beside straightforward loops."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nanovllm.backends import make_backend
from nanovllm.features.quantized import codes as module
from nanovllm.features.quantized.codes import Codes, Scales, pack_int4, quantize_int8, unpack_int4
from nanovllm.features.quantized.joining import join_parts
from nanovllm.features.quantized.torch_matrix import MatrixOperators


def draw_codes(seed: int, bits: int, out: int, num_groups: int, group_size: int, zeros: bool, order: bool) -> Codes:
    generator = torch.Generator().manual_seed(seed)
    size = num_groups * group_size

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if bits == 8:
        packed = integers(-128, 128, out, size).to(torch.int8)
        zero = integers(-128, 128, out, num_groups).to(torch.int16)
    else:
        packed = pack_int4(integers(0, 16, out, size))
        zero = integers(0, 17, out, num_groups).to(torch.int16)
    scales = torch.rand((out, num_groups), generator=generator)
    permutation = torch.randperm(size, generator=generator) if order else None
    return Codes(bits, packed, Scales(scales), zero if zeros else None, group_size, permutation)


def loop(codes: Codes) -> np.ndarray:
    """The formula of `Codes`, element by element."""
    weights = np.zeros((codes.out_features, codes.in_features), np.float32)
    for o in range(codes.out_features):
        for i in range(codes.in_features):
            if codes.bits == 8:
                code = int(codes.codes[o, i])
            else:
                byte = int(codes.codes[o, i // 2])
                code = byte >> 4 if i % 2 else byte & 15
            group = i // codes.group_size
            zero = (0 if codes.bits == 8 else 8) if codes.zeros is None else int(codes.zeros[o, group])
            column = i if codes.order is None else int(codes.order[i])
            weights[o, column] = np.float32(code - zero) * np.float32(codes.scales.values[o, group])
    return weights


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from((8, 4)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from((2, 4, 6)),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_weights_are_those_of_the_formula(
    seed: int, bits: int, out: int, num_groups: int, group_size: int, zeros: bool, order: bool
) -> None:
    codes = draw_codes(seed, bits, out, num_groups, group_size, zeros, order)
    expected = loop(codes)
    assert np.array_equal(codes.dequantize().numpy(), expected)
    index = torch.tensor([out - 1, 0])
    assert np.array_equal(codes.take_rows(index).dequantize().numpy(), expected[index.numpy()])
    assert np.array_equal(codes.take_rows(slice(1, out)).dequantize().numpy(), expected[1:])
    orders = None if codes.order is None else codes.order.unsqueeze(0).expand(2, -1)
    experts = replace(codes.map(lambda values: values.unsqueeze(0).expand(2, -1, -1)), order=orders)
    for expert in experts.dequantize():
        assert np.array_equal(expert.numpy(), expected)


@given(st.integers(0, 2**32 - 1), st.sampled_from((8, 4)), st.integers(1, 3), st.sampled_from((64, 96)), st.booleans())
@settings(max_examples=30, deadline=None)
def test_slices_of_columns_keep_their_scales(seed: int, bits: int, num_groups: int, size: int, zeros: bool) -> None:
    codes = draw_codes(seed, bits, 3, num_groups, size, zeros, False)
    weights = codes.dequantize()
    total = codes.in_features
    for ranks in (1, 2, 3):
        if total % (ranks * 32):
            continue
        length = total // ranks
        parts = [codes.take_columns(slice(rank * length, (rank + 1) * length)) for rank in range(ranks)]
        assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), weights)
        assert len({part.group_size for part in parts}) == 1
    if num_groups > 1:
        with pytest.raises(ValueError, match="into groups of 8"):
            codes.take_columns(slice(8, 16))
    shuffled = draw_codes(seed, bits, 3, num_groups, size, zeros, True)
    assert shuffled.take_columns(slice(0, total)) is shuffled
    with pytest.raises(ValueError, match="columns are in an order of their own"):
        shuffled.take_columns(slice(0, total // 2))


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15)), min_size=1))
def test_two_codes_share_a_byte(pairs: list[tuple[int, int]]) -> None:
    flat = torch.tensor(pairs).flatten()
    packed = pack_int4(flat)
    assert packed.tolist() == [low + 16 * high for low, high in pairs]
    assert torch.equal(unpack_int4(packed), flat.to(torch.uint8))


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 40), st.integers(-150, 120))
@settings(max_examples=50, deadline=None)
def test_int8_follows_its_rule(seed: int, out: int, size: int, exponent: int) -> None:
    weight = np.random.default_rng(seed).normal(size=(out, size)).astype(np.float32)
    weight = np.ldexp(weight, exponent)
    weight[0] = 0
    codes = quantize_int8(torch.from_numpy(weight))
    for o in range(out):
        scale = np.float32(np.abs(weight[o]).max()) / np.float32(127)
        assert float(codes.scales.values[o]) == scale
        for i in range(size):
            exact = float(np.rint(weight[o, i] / scale)) if scale > 0 else 0.0  # rint: ties to even
            assert int(codes.codes[o, i]) == max(-127, min(127, exact))


def test_ties_go_to_even() -> None:
    codes = quantize_int8(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]], dtype=torch.bfloat16))
    assert codes.codes.tolist() == [[127, 0, 2, 2, 0, -2]]
    assert codes.scales.values.tolist() == [[1.0]]


def test_a_matrix_is_quantised_row_by_row_whatever_the_chunk(monkeypatch) -> None:
    weight = torch.randn(3, 7, 10, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = quantize_int8(weight)
    assert whole.codes.shape == weight.shape
    assert whole.scales.values.shape == (3, 7, 1)
    monkeypatch.setattr(module, "ELEMENTS_AT_A_TIME", 20)
    parts = quantize_int8(weight)
    assert torch.equal(whole.codes, parts.codes)
    assert torch.equal(whole.scales.values, parts.scales.values)
    for expert, codes in zip(weight, whole.codes, strict=True):
        assert torch.equal(quantize_int8(expert).codes, codes)


def test_a_broken_row_stays_broken_and_harms_no_other() -> None:
    weight = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0], [0.0, 0.0], [3.0, -1.5]])
    weights = quantize_int8(weight).dequantize()
    assert weights[:2].isnan().all()
    assert weights[2].tolist() == [0.0, 0.0]
    assert torch.allclose(weights[3], weight[3], atol=3 / 127)


def test_the_codes_of_parts_are_joined_to_those_of_the_whole() -> None:
    """Of rows with padding after them, and of experts whose parts come as those of gate and up do."""
    torch.manual_seed(0)
    matrix = quantize_int8(torch.randn(10, 64))
    parameter = nn.Parameter(torch.empty(12, 64, device="meta"))
    parameter.padding = 2 * 64  # type: ignore[attr-defined]
    (joined,) = join_parts([matrix.take_rows(slice(0, 7)), matrix.take_rows(slice(7, 10))], parameter)
    assert isinstance(joined, Codes)
    assert torch.equal(joined.dequantize()[:10], matrix.dequantize()) and not joined.dequantize()[10:].any()
    with pytest.raises(RuntimeError, match="5 rows of a quantised matrix have not been filled"):
        join_parts([matrix.take_rows(slice(0, 7))], parameter)
    experts = quantize_int8(torch.randn(4, 6, 32))
    parameter = nn.Parameter(torch.empty(4, 6, 32, device="meta"))
    halves = (slice(0, 3), slice(3, 6))
    of_each = [experts.take_expert(i).take_rows(half) for i in range(4) for half in halves]
    for parts in (of_each, [experts.take_rows(half) for half in halves], [experts]):
        (joined,) = join_parts(parts, parameter)
        assert isinstance(joined, Codes)
        assert torch.equal(joined.dequantize(), experts.dequantize())


@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_that_change_no_weight_are_left_out(bits: int) -> None:
    matrix = draw_codes(0, bits, 6, 2, 8, zeros=True, order=False)
    parameter = nn.Parameter(torch.empty(6, 16, device="meta"))
    assert matrix.zeros is not None
    middle = torch.full_like(matrix.zeros, 8 if bits == 4 else 0)
    one_differs = middle.clone()
    one_differs[-1, -1] += 1
    for zeros, are_kept in ((middle, False), (one_differs, True), (8 - middle, True), (matrix.zeros, True)):
        whole = replace(matrix, zeros=zeros)
        (joined,) = join_parts([whole.take_rows(slice(0, 2)), whole.take_rows(slice(2, 6))], parameter)
        assert isinstance(joined, Codes)
        assert (joined.zeros is not None) == are_kept
        assert torch.equal(joined.dequantize(), whole.dequantize())


def test_parts_with_other_forms_are_not_joined_and_each_expert_keeps_its_order() -> None:
    parameter = nn.Parameter(torch.empty(2, 4, 32, device="meta"))
    orders = [torch.randperm(32), torch.randperm(32)]
    experts = [replace(quantize_int8(torch.randn(4, 32)), order=order) for order in orders]
    parts = [expert.take_rows(half) for expert in experts for half in (slice(0, 2), slice(2, 4))]
    (joined,) = join_parts(parts, parameter)
    assert isinstance(joined, Codes)
    for i, expert in enumerate(experts):
        assert torch.equal(joined.take_expert(i).dequantize(), expert.dequantize())
    for other in (replace(parts[1], order=None), replace(parts[1], group_size=16)):
        with pytest.raises(ValueError, match="its form differs from that of the same matrix in another expert"):
            join_parts([parts[0], other, *parts[2:]], parameter)
    assert len(join_parts([parts[0], replace(parts[1], order=orders[1]), *parts[2:]], parameter)) == 2
    assert [len(join_parts([*parts[:2]] * count, nn.Parameter(torch.empty(4 * count, 32)))) for count in (1, 2)] == [
        1,
        1,
    ]


def test_neighbours_of_other_forms_keep_their_own_and_their_bits() -> None:
    """q and k of 4 bits, v of 8, and numbers that are not quantised; and the same for experts."""
    from nanovllm.features.families.qwen3_moe.ops import Routing

    small = draw_codes(0, 4, 4, 2, 32, True, False)
    wide = quantize_int8(torch.randn(3, 64))
    floats = torch.randn(2, 64)
    parameter = nn.Parameter(torch.empty(13, 64, device="meta"))
    joined = join_parts([small, small, wide, floats], parameter)
    assert [type(one) for one in joined] == [Codes, Codes, torch.Tensor]
    assert [one.bits for one in joined if isinstance(one, Codes)] == [4, 8]
    operators = MatrixOperators(make_backend("torch", "cpu"))
    matrix = operators.lay_beside(joined, torch.float32)
    x = torch.randn(5, 64)
    bias = torch.randn(13)
    weights = torch.cat((small.dequantize(), small.dequantize(), wide.dequantize(), floats))
    torch.testing.assert_close(matrix.multiply(x, bias), x @ weights.T + bias)
    experts = [[quantize_int8(torch.randn(3, 64)), torch.randn(2, 64)] for _ in range(4)]
    parts = [part for expert in experts for part in expert]
    matrix = operators.lay_beside(join_parts(parts, nn.Parameter(torch.empty(4, 5, 64, device="meta"))), torch.float32)
    offsets = torch.tensor([0, 2, 2, 3, 5], dtype=torch.int32)
    routing = Routing(torch.ones(5, 1), torch.arange(5).view(5, 1), torch.arange(5), offsets)
    for expert, (begin, end) in enumerate(pairwise(offsets.tolist())):
        codes, numbers = experts[expert]
        own = torch.cat((codes.dequantize(), numbers))  # type: ignore[union-attr]
        torch.testing.assert_close(matrix.multiply_pairs(x, routing, True)[begin:end], x[begin:end] @ own.T)
