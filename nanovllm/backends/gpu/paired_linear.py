"""Multiplies by int8 weights with one scale a row, whose codes are taken in pairs, in Triton. Inputs keep their type.

quantized_linear.py converts code by code. Here, as in decode_codes.py, an instruction works on two codes. A pair is
code i of 128 with code i + 64, so the inputs of the low bytes are contiguous, and so are those of the high ones.

With few rows x is the left side of the product. With more rows the weights are: y^T = W x^T. Tensor cores may take the
left side from registers, where codes become numbers. The right side must come from shared memory on sm_90.

The reference is `TorchMatrix` in features/quantized/torch_matrix.py.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.backends.gpu.decode_codes import unpack_codes
from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.quantized_linear import add_parts, multiply_dequantized, split_steps
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.features.quantized.codes import Codes
from nanovllm.utils.integers import ceil_div

FEW_ROWS = 16
"""The most rows of a tile whose product has x as its left side."""

TILES = ((16, 16, 32, 6, 4), (64, 64, 128, 3, 8), (192, 128, 128, 3, 8))
"""Rows, columns, stages and warps of a tile, each after the most rows of x for which it is taken. More rows take none
of them."""

BLOCK_K = 128
"""Codes of a step along K, half of which are low bytes."""


@triton.jit
def _multiply_pairs(x_rows, matrix, steps, SWAPS: tl.constexpr, HAS_TAIL: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return rows of x times columns of W^T, float32 [rows, columns], summed over some steps along K.

    Args:
        x_rows: a pointer to x, the length of a row, and the rows' numbers, which all exist.
        matrix: a pointer to the pairs, the pairs of a row, and the columns' numbers, which all exist.
        steps: the number of the first step, and the number after the last one.
    """
    x_ptr, in_size, row = x_rows
    pairs_ptr, row_size, column = matrix
    HALF: tl.constexpr = BLOCK_K // 2
    k = tl.arange(0, HALF)
    x_at = x_ptr + row.to(tl.int64)[:, None] * in_size + k[None, :]
    pairs_at = pairs_ptr + column.to(tl.int64)[:, None] * row_size + k[None, :]
    if SWAPS:
        acc = tl.zeros([column.shape[0], row.shape[0]], tl.float32)
    else:
        acc = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for step in range(steps[0], steps[1]):
        start = step * BLOCK_K
        if HAS_TAIL:
            x_low = tl.load(x_at + start, mask=(start + k < in_size)[None, :], other=0.0)
            x_high = tl.load(x_at + start + HALF, mask=(start + HALF + k < in_size)[None, :], other=0.0)
        else:
            x_low = tl.load(x_at + start)
            x_high = tl.load(x_at + start + HALF)
        low, high = unpack_codes(tl.load(pairs_at + step * HALF), x_low.dtype, False)
        if SWAPS:
            acc = tl.dot(low, tl.trans(x_low), acc)
            acc = tl.dot(high, tl.trans(x_high), acc)
        else:
            acc = tl.dot(x_low, tl.trans(low), acc)
            acc = tl.dot(x_high, tl.trans(high), acc)
    return tl.trans(acc) if SWAPS else acc


@triton.jit(do_not_specialize=["num_rows", "part_steps"])
def _paired_linear_kernel(
    x_ptr,
    pairs_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    arrivals_ptr,
    in_size,
    row_size,
    out_size,
    num_rows,
    part_steps,
    HAS_BIAS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    SWAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid and parts as in _quantized_linear_kernel. In the place of rows and columns beyond the last ones a program
    # computes others once more, and stores nothing. No input is padding.
    wait_for_predecessor(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    row = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < out_size
    first = part * part_steps
    steps = (first, min(first + part_steps, tl.cdiv(in_size, BLOCK_K)))
    x_rows = (x_ptr, in_size, row % num_rows)
    acc = _multiply_pairs(x_rows, (pairs_ptr, row_size, column % out_size), steps, SWAPS, HAS_TAIL, BLOCK_K)
    acc *= tl.load(scales_ptr + column, mask=is_column, other=0.0)[None, :]
    acc, is_last = add_parts(acc, partial_ptr, arrivals_ptr, tile, part)
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        y_at = y_ptr + row.to(tl.int64)[:, None] * out_size + column[None, :]
        tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["first", "num_rows"])
def _dequantize_pairs_kernel(
    pairs_ptr,
    scales_ptr,
    weight_ptr,
    in_size,
    row_size,
    first,
    num_rows,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows / BLOCK_N, in_size / BLOCK_K).
    # A program owns BLOCK_N rows and BLOCK_K columns of the result, whose row 0 is the matrix's row `first`.
    # No input is padding.
    wait_for_predecessor(PDL)
    HALF: tl.constexpr = BLOCK_K // 2
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = (row < num_rows)[:, None]
    k = tl.arange(0, HALF)
    pairs_at = pairs_ptr + (first + row).to(tl.int64)[:, None] * row_size + tl.program_id(1) * HALF + k[None, :]
    low, high = unpack_codes(tl.load(pairs_at, mask=is_row, other=0), tl.float32, False)
    scale = tl.load(scales_ptr + first + row, mask=row < num_rows, other=0.0)[:, None]
    column = (tl.program_id(1) * BLOCK_K + k)[None, :]
    weight_at = weight_ptr + row.to(tl.int64)[:, None] * in_size + column
    dtype = weight_ptr.dtype.element_ty
    tl.store(weight_at, (low * scale).to(dtype), mask=is_row & (column < in_size))
    tl.store(weight_at + HALF, (high * scale).to(dtype), mask=is_row & (column + HALF < in_size))


def tile_config(num_rows: int) -> dict[str, int]:
    """Return the tile for a number of rows, at most that of the last one of TILES, and how it is computed."""
    rows, columns, stages, warps = next(tile for most, *tile in TILES if num_rows <= most)
    shape = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": BLOCK_K}
    return shape | {"SWAPS": rows > FEW_ROWS, "num_warps": warps, "num_stages": stages}


def dequantize_config() -> dict[str, int]:
    """Return the constants to compile the kernel that dequantises with."""
    return {"BLOCK_N": 32, "BLOCK_K": BLOCK_K, "num_warps": 4}


def pair_codes(codes: Codes) -> Codes:
    """Return the same int8 matrix with its codes in pairs, and with zeros at the ends of its rows to whole steps.

    `order` says to which input each code belongs.

    Args:
        codes: int8, with one scale a row, no zeros and no order.
    """
    in_size = codes.in_features
    lacking = -in_size % BLOCK_K
    padded = in_size + lacking
    position = torch.arange(padded, device=codes.codes.device)
    order = position.view(-1, 2, BLOCK_K // 2).mT.flatten()
    values = F.pad(codes.codes, (0, lacking)).index_select(1, order)
    return replace(codes, codes=values, group_size=padded, order=order)


def _dequantize_pairs(weight: Codes, rows: Tensor, first: int) -> None:
    """Fill `rows` [n, in] with the matrix's rows from number `first` on."""
    num_rows, in_size = rows.shape
    pairs = weight.codes.view(torch.int16)
    config = dequantize_config()
    grid = (ceil_div(num_rows, config["BLOCK_N"]), ceil_div(in_size, BLOCK_K))
    sizes = (in_size, pairs.shape[1], first, num_rows)
    launch(_dequantize_pairs_kernel, grid, (pairs, weight.scales, rows, *sizes), config)


def paired_linear(x: Tensor, weight: Codes, bias: Tensor | None, arrivals: Tensor) -> Tensor:
    """x [n, in] -> x W^T + bias [n, out], summed in float32, in x's dtype.

    Args:
        x: contiguous, of 16 bits.
        weight: what `pair_codes` returns. Its rows may be longer than those of x.
        arrivals: what `make_arrivals` returns.
    """
    num_rows, in_size = x.shape
    out_size = weight.out_features
    pairs = weight.codes.view(torch.int16)
    if num_rows > TILES[-1][0]:
        return multiply_dequantized(x, out_size, bias, partial(_dequantize_pairs, weight))
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    config = {"HAS_BIAS": bias is not None, "HAS_TAIL": in_size % BLOCK_K > 0} | tile_config(num_rows)
    num_tiles = ceil_div(num_rows, config["BLOCK_M"]) * ceil_div(out_size, config["BLOCK_N"])
    assert num_tiles <= len(arrivals), f"{num_tiles} tiles, and {len(arrivals)} counters"
    num_parts, part_steps = split_steps(in_size, out_size, BLOCK_K)
    num_partial = num_parts * num_tiles * config["BLOCK_M"] * config["BLOCK_N"] if num_parts > 1 else 0
    sums = torch.empty(num_partial, dtype=torch.float32, device=x.device)
    # If there is no bias, x takes its place as argument. The kernel does not read it there.
    pointers = (x, pairs, weight.scales, x if bias is None else bias, y, sums, arrivals)
    sizes = (in_size, pairs.shape[1], out_size, num_rows, part_steps)
    launch(_paired_linear_kernel, (num_tiles, num_parts), (*pointers, *sizes), config)
    return y
