"""Turns the packed words of checkpoints into codes: what the formats of checkpoints.py have in common."""

from collections.abc import Mapping

import torch
from torch import Tensor

from nanovllm.features.quantized.codes import Codes, Scales, pack_int4, unpack_int4

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's order of outputs within a word: bits 4i to 4i + 3 of word j hold output 8j + AWQ_ORDER[i]."""


def unpack(
    stored: Tensor, axes: str, sizes: Mapping[str, int], bits: int, word_order: tuple[int, ...] | None = None
) -> Tensor:
    """Return a tensor of a checkpoint with each number for itself, and with the outputs first.

    Args:
        axes: what its axes are: see `Stored.axes`. Words are int32, with the first number in their lowest bits.
        sizes: how many numbers an axis has.
        word_order: where the numbers of a word go: the i-th is number word_order[i].

    Returns:
        uint8 if there were words: 0 to 15 or 0 to 255.
    """
    for place, axis in enumerate(axes.split()):
        if axis.endswith("*"):
            words = stored.movedim(place, -1).contiguous()
            per_word = 32 // bits
            numbers = torch.empty(*words.shape, per_word, dtype=torch.uint8, device=words.device)
            for i in range(per_word):
                numbers[..., i if word_order is None else word_order[i]] = (words >> bits * i) & (2**bits - 1)
            stored = numbers.flatten(-2)[..., : sizes[axis[:-1]]].movedim(-1, place)
    return stored.T if axes.endswith((" out", " out*")) else stored


def make_codes(
    numbers: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group_size: int, groups: Tensor | None = None
) -> Codes:
    """Return the codes for numbers as a checkpoint has them. Bytes without a sign are shifted by 128, zeros included.

    Args:
        numbers: uint8 [out, in], or int8.
        scales: [out, groups].
        zeros: [out, groups]; None if they are the middle of the range.
        groups: [in], the group of each input; None if they are in order.

    Raises:
        ValueError: groups have other sizes.
    """
    order = None if groups is None else find_order(groups, group_size)
    if order is not None:
        numbers = numbers[:, order]
    if zeros is not None:
        zeros = zeros.to(torch.int16) - (128 if bits == 8 and zeros.dtype == torch.uint8 else 0)
    if bits == 4:
        codes = pack_int4(numbers)
    else:
        codes = numbers if numbers.dtype == torch.int8 else (numbers ^ 128).view(torch.int8)
    return Codes(bits, codes, Scales(scales.to(torch.float32)), zeros, group_size, order)


def find_order(g_idx: Tensor, group_size: int) -> Tensor | None:
    """Return the order of the columns that sorts them by group, int64 [in]; None if they are sorted.

    Args:
        g_idx: int32 [in], the group of each column.

    Raises:
        ValueError: a group has another number of columns than group_size.
    """
    sorted_groups, order = torch.sort(g_idx.long(), stable=True)
    expected = torch.arange(len(g_idx), device=g_idx.device) // group_size
    if not torch.equal(sorted_groups, expected):
        raise ValueError(f"g_idx has groups of other sizes than {group_size}, which is not supported")
    return None if torch.equal(g_idx.long(), expected) else order


FLOATS4 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
"""The sixteen numbers of four bits: a sign, two bits of exponent, one of mantissa (e2m1)."""
PAIRS = FLOATS4[unpack_int4(torch.arange(256, dtype=torch.uint8)[:, None]).long()].view(torch.int64).flatten()
"""int64 [256]: for each byte its two numbers as float32, the low half first. Whole words are looked up fastest."""
POWERS = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
"""float32 [256]: the power of two that a byte of scales means."""


class Floats4:
    """MXFP4 matrices of experts, [num_experts, in, out]. An expert is dequantised when it is asked for."""

    def __init__(self, blocks: Tensor, scales: Tensor) -> None:
        """
        Args:
            blocks: uint8 [num_experts, out, in / 32, 16], two numbers in each byte.
            scales: uint8 [num_experts, out, in / 32], exponents of two plus 127, one for 32 numbers.
        """
        self._blocks = blocks
        self._scales = scales

    def __getitem__(self, slices: tuple[int, slice, slice]) -> Tensor:
        """Return some inputs and outputs of one expert, float32 [in, out]. They lie output by output in memory."""
        expert, inputs, outputs = slices
        blocks = self._blocks[expert, outputs]
        scales = self._scales[expert, outputs]
        numbers = PAIRS.to(blocks.device).index_select(0, blocks.flatten().int()).view(torch.float32)
        powers = POWERS.to(scales.device).index_select(0, scales.flatten().int())
        numbers.view(-1, 32).mul_(powers[:, None])
        return numbers.view(len(blocks), -1).T[inputs]


class ScaledFloats:
    """FP8 weights times their scales, [out, in]. Rows are dequantised when they are asked for."""

    def __init__(self, weight: Tensor, scales: Tensor, block: tuple[int, int]) -> None:
        """
        Args:
            weight: float8 [out, in].
            scales: [ceil(out / block[0]), ceil(in / block[1])], of any floating type.
            block: rows and columns that share a scale.
        """
        self._weight = weight
        self._scales = scales.to(torch.float32)
        self._block = block

    def __getitem__(self, slices: tuple[slice, slice]) -> Tensor:
        """Return some rows and columns, float32."""
        part = self._weight[slices].to(torch.float32)
        index = []
        for places, size, block in zip(slices, self._weight.shape, self._block, strict=True):
            index.append(torch.arange(*places.indices(size), device=part.device) // block)
        return part.mul_(self._scales[index[0]][:, index[1]])
