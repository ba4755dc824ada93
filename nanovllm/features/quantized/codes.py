"""The one form of quantised weights: codes, scales, zeros and minima. All formats are converted to it at load."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from nanovllm.ops.kv_codes import divide_by_scales

ELEMENTS_AT_A_TIME = 2**22
"""Elements that are quantised at a time, so that float32 copies stay small."""

SMALLEST_GROUP = 16
"""Columns of the smallest group that a rank's share of a matrix may have."""


FROM_ZERO = tuple(range(16))
"""The numbers that codes of 4 bits mean whose least number is 0."""

IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that the codes of GGUF's IQ4_NL and IQ4_XS mean."""


class InputScales(Enum):
    """Which inputs of a product share a scale, where they are rounded while it runs: see dynamic.py."""

    GROUP = "group"
    """As many inputs of a token as dynamic.GROUP says."""

    TOKEN = "token"
    """All inputs of a token."""


@dataclass(frozen=True)
class Scales:
    """A number for each group of a matrix [out, groups]: a float, or a float of several groups times a whole number.

    Experts have a leading dimension [num_experts] in every tensor.

    Attributes:
        values: float32 or float16 [out, n]. Without factors n is the number of groups. With them each value belongs to
            groups / n neighbouring groups.
        factors: None, or int8 [out, groups].
    """

    values: Tensor
    factors: Tensor | None = None

    @property
    def num_groups(self) -> int:
        """The number of groups of a row."""
        return (self.values if self.factors is None else self.factors).shape[-1]

    @property
    def groups_per_value(self) -> int:
        """The number of neighbouring groups that share a value."""
        return self.num_groups // self.values.shape[-1]

    def float32(self) -> Tensor:
        """Return the numbers, float32 [out, groups]. Each is rounded once."""
        values = self.values.to(torch.float32)
        if self.factors is None:
            return values
        return values.repeat_interleave(self.groups_per_value, -1) * self.factors

    def map(self, change: Callable[[Tensor], Tensor]) -> "Scales":
        """Return the scales with changed tensors. A change keeps the columns."""
        return Scales(change(self.values), None if self.factors is None else change(self.factors))

    def take_groups(self, groups: Tensor) -> "Scales":
        """Return the numbers of the groups at indices [n], which ascend.

        A value stays shared by as many groups as its neighbours allow.
        """
        if self.factors is None:
            return Scales(self.values[..., groups])
        owners = groups // self.groups_per_value
        runs = torch.unique_consecutive(owners, return_counts=True)[1].tolist()
        shared = math.gcd(*runs)  # each run can be cut into pieces of so many groups
        return Scales(self.values[..., owners[::shared]], self.factors[..., groups])


@dataclass(frozen=True)
class Codes:
    """A quantised matrix [out, in]: codes, which mean whole numbers, and the scales that make weights of them.

    weight[o, i] = number[o, i] * scale[o, g] - minimum[o, g], where g = i // group_size, and
    number[o, i] = code[o, i] - zero[o, g], or what a table says. Experts have a leading dimension [num_experts] in
    every tensor but `numbers`. A number has at most 9 bits, so it is exact in bfloat16 and in float32.

    Attributes:
        bits: 8, 6 or 4.
        codes: with 8 bits: int8 [out, in]. With 6 bits, too, and all are from -32 to 31. With 4 bits: uint8
            [out, in / 2]; element 2j is the low half of byte j, and the codes are 0 to 15.
        scales: of all groups.
        zeros: None if the zero is 0 for 8 and 6 bits, or 8 for 4 bits. Else int16 [out, groups], in the terms of the
            codes: a format that stores 0 to 255 is shifted by 128, codes and zeros alike.
        group_size: how many elements of a row share a scale; `in` for one scale a row. The last group may be shorter.
        order: None, or int64 [in]: the input's columns in the order of the codes'. The codes multiply x[:, order].
            (GPTQ's desc_act sorts columns by their group.)
        input_scales: None if inputs of a product keep their type. Else they are rounded, too, and the codes are int8
            without zeros and minima, with one scale a row.
        minima: None, or those of all groups.
        numbers: None, or the table of what codes of 4 bits mean, int8 [16]; then there are no zeros.
    """

    bits: int
    codes: Tensor
    scales: Scales
    zeros: Tensor | None
    group_size: int
    order: Tensor | None = None
    input_scales: InputScales | None = None
    minima: Scales | None = None
    numbers: Tensor | None = None

    @property
    def codes_per_byte(self) -> int:
        """How many codes a byte of `codes` has."""
        return 2 if self.bits == 4 else 1

    @property
    def in_features(self) -> int:
        """The length of a row."""
        return self.codes.shape[-1] * self.codes_per_byte

    @property
    def out_features(self) -> int:
        """The number of rows, of one expert if there are several."""
        return self.codes.shape[-2]

    def integers(self) -> Tensor:
        """Return the numbers, int16 [out, in], in the order of the codes' columns."""
        if self.bits == 4:
            codes = unpack_int4(self.codes)
            if self.numbers is not None:
                return self.numbers[codes.int()].to(torch.int16)
            return codes.to(torch.int16) - (8 if self.zeros is None else self._spread(self.zeros))
        codes = self.codes.to(torch.int16)
        return codes if self.zeros is None else codes - self._spread(self.zeros)

    def dequantize(self) -> Tensor:
        """Return the weights, float32 [out, in], with the columns in their original order."""
        weights = self.integers().to(torch.float32) * self._spread(self.scales.float32())
        if self.minima is not None:
            weights -= self._spread(self.minima.float32())
        if self.order is None:
            return weights
        index = self.order.unsqueeze(-2).expand_as(weights)
        return torch.empty_like(weights).scatter_(-1, index, weights)

    def list_tensors(self) -> list[Tensor]:
        """Return the tensors that have rows: those of codes, scales, zeros and minima."""
        minima = () if self.minima is None else (self.minima.values, self.minima.factors)
        tensors = (self.codes, self.scales.values, self.scales.factors, self.zeros, *minima)
        return [tensor for tensor in tensors if tensor is not None]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Codes":
        """Return the matrix with a change of each tensor that has rows. They come in the order of `list_tensors`."""
        codes = change(self.codes)
        scales = self.scales.map(change)
        zeros = None if self.zeros is None else change(self.zeros)
        minima = None if self.minima is None else self.minima.map(change)
        return replace(self, codes=codes, scales=scales, zeros=zeros, minima=minima)

    def describe_form(self) -> tuple[object, ...]:
        """Return what matrices must have in common to be joined by `join_alike`, apart from the order of columns."""
        tensors = tuple((tensor.dtype, tensor.shape[-1]) for tensor in self.list_tensors())
        numbers = None if self.numbers is None else tuple(self.numbers.tolist())
        exist = (self.zeros is None, self.minima is None, self.order is None)
        return (self.bits, self.group_size, self.input_scales, numbers, *exist, *tensors)

    def take_rows(self, index: Tensor | slice) -> "Codes":
        """Return the matrix of some rows only: those of a slice (a view), or those at indices [n] (a copy)."""
        return self.map(lambda values: values[..., index, :])

    def take_expert(self, index: int) -> "Codes":
        """Return the matrix of one expert (a view)."""
        order = None if self.order is None else self.order[index]
        return replace(self.map(lambda values: values[index]), order=order)

    def take_columns(self, columns: slice) -> "Codes":
        """Return the matrix of some columns only.

        A slice that cuts a group keeps its scales: the new groups are smaller, and several have the same scale. It is
        one of several ranks' equal slices.

        Raises:
            ValueError: the smaller groups would have less than SMALLEST_GROUP columns, or the columns are permuted.
        """
        start, stop, _ = columns.indices(self.in_features)
        length = stop - start
        if length == self.in_features:
            return self
        if self.order is not None:
            raise ValueError(
                "its columns are in an order of their own (desc_act or actorder), which ranks cannot share: set "
                "tensor_parallel_size to 1, or use pipeline_parallel_size"
            )
        codes = self.codes[..., start // self.codes_per_byte : stop // self.codes_per_byte]
        if self.scales.num_groups == 1:
            return replace(self, codes=codes, group_size=length)
        size = math.gcd(start, length, self.group_size)  # the same on all ranks: they start at multiples of length
        if size < SMALLEST_GROUP:
            raise ValueError(
                f"ranks with {length} columns each cut its groups of {self.group_size} into groups of {size}, and the "
                f"smallest possible are {SMALLEST_GROUP}: change tensor_parallel_size, or use pipeline_parallel_size"
            )
        groups = torch.arange(start, stop, size, device=codes.device) // self.group_size
        zeros = None if self.zeros is None else self.zeros[..., groups]
        minima = None if self.minima is None else self.minima.take_groups(groups)
        scales = self.scales.take_groups(groups)
        return replace(self, codes=codes, scales=scales, zeros=zeros, group_size=size, minima=minima)

    def _spread(self, values: Tensor) -> Tensor:
        """Repeat values [out, groups] for the elements of each group, [out, in]."""
        if values.shape[-1] == 1:
            return values
        return values.repeat_interleave(self.group_size, -1)[..., : self.in_features]


def join_alike(parts: Sequence[Codes], join: Callable[[Sequence[Tensor]], Tensor]) -> Codes:
    """Return one matrix of several that have the same form.

    Args:
        join: joins the tensors of one kind.
    """
    joined = iter([join(tensors) for tensors in zip(*(part.list_tensors() for part in parts), strict=True)])
    return parts[0].map(lambda _: next(joined))


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes of 0 to 15, [..., in], into uint8 [..., in / 2], the even ones into the low halves. `in` is even."""
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack uint8 [..., n] to codes of 0 to 15, uint8 [..., 2n]. It undoes `pack_int4`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def quantize_int8(weight: Tensor) -> Codes:
    """Quantise each row to int8: scale = max |w| / 127, code = round(w / scale) in float32, ties to even.

    A row of zeros gets zeros, with scale 0. With a NaN or an infinity in a row, all its weights become NaN.

    Args:
        weight: [out, in], or [num_experts, out, in] for experts; any floating type, on any device.
    """
    rows = weight.reshape(-1, weight.shape[-1])
    codes = torch.empty(rows.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows.shape[0], dtype=torch.float32, device=weight.device)
    height = max(1, ELEMENTS_AT_A_TIME // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], height):
        part = slice(start, start + height)
        scaled, scales[part] = divide_by_scales(rows[part], 127)
        codes[part] = scaled.round_().clamp_(-127, 127)
    shape = weight.shape[:-1]
    return Codes(8, codes.view(weight.shape), Scales(scales.view(*shape, 1)), None, weight.shape[-1])
