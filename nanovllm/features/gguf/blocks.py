"""Turns GGUF's blocks into codes: whole numbers, scales and minima, as they are in the file.

A block holds the weights of 32 or 256 neighbours in a row. ggml-common.h of llama.cpp has their layouts.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.features.quantized.codes import FROM_ZERO, IQ4_NUMBERS, Codes, Scales, pack_int4


class Blocks(NamedTuple):
    """Some blocks of one type, taken apart. Their numbers are int8 or uint8 [n, weights].

    Attributes:
        codes: from 0 to 15 where `bits` is 4, else the numbers themselves.
        scales, minima: those of the groups of each block.
        numbers: see `Codes.numbers`.
    """

    bits: int
    codes: Tensor
    scales: Scales
    minima: Scales | None = None
    numbers: tuple[int, ...] | None = None


def read_codes(data: Tensor, type_name: str, rows: int) -> Codes:
    """Return the codes of a matrix that is stored in blocks.

    `Codes.dequantize` gives the float32 bits that the `gguf` package and llama.cpp dequantise to.

    Args:
        data: uint8, the bytes of all blocks, row by row. Its shape does not count.
        type_name: one of `BLOCK_TYPES`.
        rows: the number of rows.

    Raises:
        ValueError: the bytes are not so many rows of whole blocks.
    """
    block = BLOCK_TYPES[type_name]
    blocks = data.reshape(-1)
    if rows < 1 or blocks.numel() % (rows * block.num_bytes):
        raise ValueError(f"{blocks.numel()} bytes are not {rows} rows of {type_name}'s blocks of {block.num_bytes}")
    bits, codes, scales, minima, numbers = block.read(blocks.view(-1, block.num_bytes))
    group_size = block.num_weights // scales.num_groups
    packed = pack_int4(codes) if bits == 4 else codes.view(torch.int8)
    table = None if numbers is None else torch.tensor(numbers, dtype=torch.int8, device=data.device)
    of_blocks = Codes(bits, packed, scales, None, group_size, minima=minima, numbers=table)
    return of_blocks.map(lambda values: values.reshape(rows, -1))


def _floats(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 number at byte `start` of each block, [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _fields(stored: Tensor, run: int, shifts: Sequence[int], mask: int) -> Tensor:
    """Unpack numbers of a few bits from bytes [n, m]: of each `run` bytes those at the first shift, then the next ones.

    Returns:
        uint8 [n, m * len(shifts)].
    """
    runs = stored.reshape(len(stored), -1, run)
    return torch.stack([runs >> shift & mask for shift in shifts], 2).view(len(stored), -1)


def _halves(stored: Tensor, run: int) -> Tensor:
    """Unpack numbers of 4 bits: first the low halves of `run` bytes, then their high halves."""
    return _fields(stored, run, (0, 4), 15)


def _single_bits(stored: Tensor) -> Tensor:
    """Unpack the bits of bytes [n, m] in their order, the lowest first: uint8 [n, 8 m]."""
    return torch.stack([stored >> shift & 1 for shift in range(8)], 2).view(len(stored), -1)


def _signed(numbers: Tensor, less: int) -> Tensor:
    """Return numbers less a constant, int8."""
    return numbers.to(torch.int8) - less


def _read_six_bits(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 8 scales and 8 minima of 6 bits, which Q4_K and Q5_K have in 12 bytes: int8 [n, 8] each."""
    first = stored[:, :4]
    second = stored[:, 4:8]
    rest = stored[:, 8:]
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), 1)
    minima = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), 1)
    return scales.to(torch.int8), minima.to(torch.int8)


def _q4_0(blocks: Tensor) -> Blocks:
    return Blocks(4, _halves(blocks[:, 2:], 16), Scales(_floats(blocks, 0)))


def _q4_1(blocks: Tensor) -> Blocks:
    codes = _halves(blocks[:, 4:], 16)
    return Blocks(4, codes, Scales(_floats(blocks, 0)), Scales(-_floats(blocks, 2)), FROM_ZERO)


def _q5_0(blocks: Tensor) -> Blocks:
    codes = _halves(blocks[:, 6:], 16) | _single_bits(blocks[:, 2:6]) << 4
    return Blocks(6, _signed(codes, 16), Scales(_floats(blocks, 0)))


def _q5_1(blocks: Tensor) -> Blocks:
    codes = _halves(blocks[:, 8:], 16) | _single_bits(blocks[:, 4:8]) << 4
    return Blocks(6, codes, Scales(_floats(blocks, 0)), Scales(-_floats(blocks, 2)))


def _q8_0(blocks: Tensor) -> Blocks:
    return Blocks(8, blocks[:, 2:], Scales(_floats(blocks, 0)))


def _q2_k(blocks: Tensor) -> Blocks:
    codes = _fields(blocks[:, 16:80], 32, (0, 2, 4, 6), 3)
    scales = Scales(_floats(blocks, 80), _signed(blocks[:, :16] & 15, 0))
    minima = Scales(_floats(blocks, 82), _signed(blocks[:, :16] >> 4, 0))
    return Blocks(4, codes, scales, minima, FROM_ZERO)


def _q3_k(blocks: Tensor) -> Blocks:
    factors = _fields(blocks[:, 96:104], 8, (0, 4), 15) | _fields(blocks[:, 104:108], 4, (0, 2, 4, 6), 3) << 4
    high = _fields(blocks[:, :32], 32, range(8), 1)
    codes = _fields(blocks[:, 32:96], 32, (0, 2, 4, 6), 3) + (high << 2) + 4  # 8 more than the number
    return Blocks(4, codes, Scales(_floats(blocks, 108), _signed(factors, 32)))


def _q4_k(blocks: Tensor) -> Blocks:
    scales, minima = _read_six_bits(blocks[:, 4:16])
    codes = _halves(blocks[:, 16:], 32)
    return Blocks(4, codes, Scales(_floats(blocks, 0), scales), Scales(_floats(blocks, 2), minima), FROM_ZERO)


def _q5_k(blocks: Tensor) -> Blocks:
    scales, minima = _read_six_bits(blocks[:, 4:16])
    codes = _halves(blocks[:, 48:], 32) | _fields(blocks[:, 16:48], 32, range(8), 1) << 4
    return Blocks(6, codes, Scales(_floats(blocks, 0), scales), Scales(_floats(blocks, 2), minima))


def _q6_k(blocks: Tensor) -> Blocks:
    codes = _halves(blocks[:, :128], 64) | _fields(blocks[:, 128:192], 32, (0, 2, 4, 6), 3) << 4
    factors = blocks[:, 192:208].contiguous().view(torch.int8)
    return Blocks(6, _signed(codes, 32), Scales(_floats(blocks, 208), factors))


def _iq4_nl(blocks: Tensor) -> Blocks:
    return Blocks(4, _halves(blocks[:, 2:], 16), Scales(_floats(blocks, 0)), numbers=IQ4_NUMBERS)


def _iq4_xs(blocks: Tensor) -> Blocks:
    # The low four bits of each scale, and its upper two.
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).view(-1, 8)
    high = torch.stack([blocks[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], 2).view(-1, 8)
    scales = Scales(_floats(blocks, 0), _signed(low | high << 4, 32))
    return Blocks(4, _halves(blocks[:, 8:], 16), scales, numbers=IQ4_NUMBERS)


class BlockType(NamedTuple):
    """A type of block: how many weights it has, in how many bytes, and what takes blocks uint8 [n, bytes] apart."""

    num_weights: int
    num_bytes: int
    read: Callable[[Tensor], Blocks]


BLOCK_TYPES = {
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q2_K": BlockType(256, 84, _q2_k),
    "Q3_K": BlockType(256, 110, _q3_k),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
    "IQ4_NL": BlockType(32, 18, _iq4_nl),
    "IQ4_XS": BlockType(256, 136, _iq4_xs),
}
"""The types that are whole numbers times scales, by the names that the `gguf` package has for them."""
