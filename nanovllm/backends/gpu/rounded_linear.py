"""Multiplies activations that are rounded to int8 by int8 weights, on the tensor cores, in Triton.

The reference is `multiply_rounded` in features/quantized/dynamic.py. The kernels compute its bits: a group's sum is
exact in int32, so a tile of any shape gives the same one. The operations that follow are each rounded by themselves, in
one order; for this the kernels are compiled with enable_fp_fusion=False.

Products of a matrix with one scale for all inputs of a token are in token_linear.py. Those of experts are here.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.grouped_linear import locate_tile
from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.round_groups import (
    Rounded,
    Rounding,
    find_rounded,
    make_rounded,
    rounding_config,
    store_rounded,
)
from nanovllm.backends.gpu.tiles import place_pairs, place_tile, store_tile
from nanovllm.backends.gpu.triton_shim import next_power_of_2, num_multiprocessors, tl, triton
from nanovllm.features.families.qwen3_moe.ops import Routing
from nanovllm.features.quantized.codes import Codes
from nanovllm.features.quantized.dynamic import GROUP, TINY
from nanovllm.utils.integers import ceil_div

FEW_ROWS = 16
"""The most rows of x that take a tile of SMALL_TILE's height."""

SMALL_TILE = (16, 32, 6)
"""Rows, columns and stages. Few rows wait for memory alone: six stages have five steps' codes under way."""

TILE = (64, 64, 4)

LARGE_TILE = (128, 128, 3)
"""It reads the fewest codes for each product. Every GPU that is supported has room for three stages of 32 KiB."""

GROUPED_TILES = ((128, (16, 64, 4)), (512, TILE))
"""Tiles of experts, each after the most tokens for which it is taken. More tokens take LARGE_TILE.

A start compiles them, because kernels of experts with 16 bits change at these numbers, too.
"""

BAND = 16
"""Tiles of rows that meet the same columns before the next columns come, so that what they read stays in L2."""

ROUNDED_AT_A_TIME = 8
"""Groups that a program rounds: eight elements a thread. By token it rounds all of them."""

ROUNDING = Rounding(GROUP, TINY)

TOKEN_ROUNDING = Rounding(GROUP, TINY, by_token=True)


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def _round_inputs_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    in_size,
    num_rows,
    num_groups,
    GROUP: tl.constexpr,
    LEAST: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows, num_groups / GROUPS). A program owns GROUPS groups of one row: BY_TOKEN, all of them.
    # Rows of padding are like any other; their values stay in them.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    column = first * GROUP + tl.arange(0, GROUPS * GROUP)
    x = tl.load(x_ptr + row * in_size + column, mask=column < in_size, other=0.0).to(tl.float32)
    store_rounded(x, (codes_ptr, scales_ptr, num_rows, num_groups), row, first, GROUP, LEAST, BY_TOKEN)


@triton.jit
def sum_codes(x_at, codes_at, first, end, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return the sums of some groups' products of codes, int32 [ROWS, COLUMNS].

    Args:
        x_at, codes_at: pointers to the codes of group 0, of x and of the matrix: [ROWS, GROUP] and [COLUMNS, GROUP].
        first, end: the numbers of the groups.
    """
    sums = tl.zeros([ROWS, COLUMNS], tl.int32)
    for group in range(first, end):
        x = tl.load(x_at + group * GROUP)
        codes = tl.load(codes_at + group * GROUP)
        sums = tl.dot(x, tl.trans(codes), sums, out_dtype=tl.int32)
    return sums


@triton.jit
def _multiply_tile(x_rows, matrix, columns, num_groups, GROUP: tl.constexpr, BY_TOKEN: tl.constexpr):
    """Return rows of x times columns of W^T, float32 [rows, columns].

    Args:
        x_rows: pointers to codes and scales of x, how many rows x has, and the numbers of the tile's, which all exist.
        matrix: pointers to codes and scales, and how many columns W^T has.
        columns: the columns' numbers, some of which may be too large, and which of them exist.
    """
    x_ptr, x_scales_ptr, num_rows, row = x_rows
    codes_ptr, scales_ptr, out_size = matrix
    column, is_column = columns
    k = tl.arange(0, GROUP)
    row_size = num_groups * GROUP
    x_at = x_ptr + row.to(tl.int64)[:, None] * row_size + k[None, :]
    codes_at = codes_ptr + (column % out_size).to(tl.int64)[:, None] * row_size + k[None, :]
    if BY_TOKEN:
        sums = sum_codes(x_at, codes_at, 0, num_groups, row.shape[0], column.shape[0], GROUP)
        total = sums.to(tl.float32) * tl.load(x_scales_ptr + row)[:, None]
    else:
        total = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
        for group in range(num_groups):
            x = tl.load(x_at + group * GROUP)
            codes = tl.load(codes_at + group * GROUP)
            scale = tl.load(x_scales_ptr + group * num_rows + row)
            total += tl.dot(x, tl.trans(codes), out_dtype=tl.int32).to(tl.float32) * scale[:, None]
    return total * tl.load(scales_ptr + column, mask=is_column, other=0.0)[None, :]


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def _rounded_linear_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    out_size,
    num_rows,
    num_groups,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows / BLOCK_M x out_size / BLOCK_N,), by bands of BAND tiles of rows, and within a band rows fastest.
    # A program owns BLOCK_M rows and BLOCK_N columns of the product. In the place of those beyond the last ones it
    # computes others once more, so that no load in its loop has a mask, and stores nothing. No input is padding.
    wait_for_predecessor(PDL)
    row, column = place_tile(num_rows, out_size, BAND, BLOCK_M, BLOCK_N)
    is_column = column < out_size
    x_rows = (x_ptr, x_scales_ptr, num_rows, row % num_rows)
    y = _multiply_tile(x_rows, (codes_ptr, scales_ptr, out_size), (column, is_column), num_groups, GROUP, False)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    store_tile(y_ptr, y, row, num_rows, column, out_size)


@triton.jit(do_not_specialize=["num_rows", "num_groups", "num_experts"])
def _grouped_rounded_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    y_ptr,
    tokens_ptr,
    offsets_ptr,
    out_size,
    num_rows,
    num_groups,
    num_experts,
    GATHER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid, tiles and padding as in _grouped_linear_kernel. Beyond the last pair and column it does what
    # _rounded_linear_kernel does.
    wait_for_predecessor(PDL)
    num_columns = tl.cdiv(out_size, BLOCK_N)
    expert, begin, end = locate_tile(offsets_ptr, tl.program_id(0) // num_columns, num_experts, EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    pair, row, column = place_pairs(tokens_ptr, begin, end, out_size, GATHER, BLOCK_M, BLOCK_N)
    first = expert.to(tl.int64) * out_size
    matrix = (codes_ptr + first * (num_groups * GROUP), scales_ptr + first, out_size)
    x_rows = (x_ptr, x_scales_ptr, num_rows, row)
    y = _multiply_tile(x_rows, matrix, (column, column < out_size), num_groups, GROUP, BY_TOKEN)
    store_tile(y_ptr, y, pair, end, column, out_size)


def round_config(num_groups: int, rounding: Rounding) -> dict[str, float]:
    """Return the constants to compile the rounding of rows of so many groups with."""
    groups = next_power_of_2(num_groups) if rounding.by_token else ROUNDED_AT_A_TIME
    return rounding_config(rounding) | {"GROUPS": groups, "num_warps": min(16, max(4, groups // 2))}


def tile_config(tile: tuple[int, int, int]) -> dict[str, int]:
    """Return the constants of a tile, for products of a matrix and of experts."""
    rows, columns, stages = tile
    return {
        "GROUP": GROUP,
        "BLOCK_M": rows,
        "BLOCK_N": columns,
        "num_warps": 8 if rows == LARGE_TILE[0] else 4,
        "num_stages": stages,
        "enable_fp_fusion": False,
    }


def limit_rows(out_size: int, device: torch.device) -> tuple[int, int]:
    """Return the most rows of x for which SMALL_TILE and TILE are taken. More rows take LARGE_TILE.

    From then on LARGE_TILE gives at least every third multiprocessor a tile. With fewer, more and smaller tiles are
    faster, though together they read more. This is arithmetic: nobody has measured it.
    """
    rows, columns, _ = LARGE_TILE
    num_columns = max(1, ceil_div(out_size, columns))
    enough = ceil_div(num_multiprocessors(device), 3 * num_columns)
    return FEW_ROWS, max(TILE[0], (enough - 1) * rows)


def round_inputs(x: Tensor, rounding: Rounding = ROUNDING) -> Rounded:
    """Do what the function of this name in features/quantized/dynamic.py does for x [n, in], which is contiguous."""
    num_rows, in_size = x.shape
    rounded = make_rounded(num_rows, in_size, rounding, x.device)
    num_groups = rounded.codes.shape[1] // GROUP
    config = round_config(num_groups, rounding)
    grid = (num_rows, ceil_div(num_groups, int(config["GROUPS"])))
    launch(_round_inputs_kernel, grid, (x, *rounded, in_size, num_rows, num_groups), config)
    return rounded


def rounded_linear(x: Tensor, weight: Codes, bias: Tensor | None, row_limits: tuple[int, int]) -> Tensor:
    """Do what `multiply_rounded` does: x [n, in] -> x W^T + bias [n, out], in x's dtype.

    Args:
        x: it may carry its rounded form.
        weight: int8, with rows that are padded with zeros to a multiple of GROUP, and one scale a row.
        row_limits: what `limit_rows` returns.
    """
    num_rows = x.shape[0]
    out_size = weight.out_features
    rounded = find_rounded(x) or round_inputs(x.contiguous())
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    few, some = row_limits
    tile = SMALL_TILE if num_rows <= few else TILE if num_rows <= some else LARGE_TILE
    config = {"HAS_BIAS": bias is not None, "BAND": BAND} | tile_config(tile)
    grid = (ceil_div(num_rows, config["BLOCK_M"]) * ceil_div(out_size, config["BLOCK_N"]),)
    # If there is no bias, the scales take its place as argument. The kernel does not read it there.
    pointers = (*rounded, weight.codes, weight.scales, weight.scales if bias is None else bias, y)
    launch(_rounded_linear_kernel, grid, (*pointers, out_size, num_rows, len(rounded.scales)), config)
    return y


def grouped_config(num_tokens: int, num_experts: int, gather: bool) -> dict[str, int]:
    """Return the constants to compile products of experts with, but for BY_TOKEN."""
    tile = next((tile for most, tile in GROUPED_TILES if num_tokens <= most), LARGE_TILE)
    return {"GATHER": gather, "EXPERTS": next_power_of_2(num_experts)} | tile_config(tile)


def grouped_rounded(x: Tensor, weight: Codes, routing: Routing, gather: bool, rounding: Rounding = ROUNDING) -> Tensor:
    """Do what `DynamicExperts.multiply` does, or that of `TokenExperts`. The grid needs no length from the device.

    Args:
        x: as `rounded_linear` takes it. The form that it carries is that of `rounding`.
        weight: as `rounded_linear` takes it, of several experts.
    """
    num_experts = len(weight.codes)
    out_size = weight.out_features
    num_tokens, k = routing.weights.shape
    pairs = num_tokens * k
    rounded = find_rounded(x) or round_inputs(x.contiguous(), rounding)
    y = torch.empty(pairs, out_size, dtype=x.dtype, device=x.device)
    config = grouped_config(num_tokens, num_experts, gather) | {"BY_TOKEN": rounding.by_token}
    most_tiles = min(pairs, ceil_div(pairs, config["BLOCK_M"]) + num_experts)
    grid = (most_tiles * ceil_div(out_size, config["BLOCK_N"]),)
    pointers = (*rounded, weight.codes, weight.scales, y, routing.tokens, routing.offsets)
    num_groups = rounded.codes.shape[1] // GROUP
    launch(_grouped_rounded_kernel, grid, (*pointers, out_size, len(x), num_groups, num_experts), config)
    return y
