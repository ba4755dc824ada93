"""Multiplies activations by a matrix, both int8 with one scale a row, on the tensor cores, in Triton.

The reference is `multiply_rounded_tokens` in features/quantized/dynamic.py. A sum is one of whole numbers, and exact.
So it may be split among programs in any way, and a row has the same bits in every tile and with any number of parts.

Nobody has timed this on a GPU. The numbers below are arithmetic, for an H100.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.quantized_linear import add_parts
from nanovllm.backends.gpu.round_groups import find_rounded
from nanovllm.backends.gpu.rounded_linear import BAND, TOKEN_ROUNDING, round_inputs, sum_codes
from nanovllm.backends.gpu.tiles import place_tile, store_tile
from nanovllm.backends.gpu.triton_shim import num_multiprocessors, tl, triton
from nanovllm.features.quantized.codes import Codes
from nanovllm.features.quantized.dynamic import GROUP
from nanovllm.utils.integers import ceil_div


class Tile(NamedTuple):
    """A program's share of a product.

    Attributes:
        rows, columns, stages, warps: its size, and how it is computed.
        programs: sums are split until a multiprocessor has so many programs.
    """

    rows: int
    columns: int
    stages: int
    warps: int
    programs: int


TILES = (Tile(16, 64, 5, 4, 3), Tile(64, 128, 4, 4, 2), Tile(128, 128, 3, 8, 1))
"""Each is taken up to as many rows as it has, and the last one for more."""

ROW_LIMITS = (TILES[0].rows, TILES[1].rows)
"""The numbers of rows up to which each variant of the kernel is taken."""

MIN_GROUPS = 4
"""The fewest groups of GROUP inputs that a part of a sum has, if it is split. The last part may have fewer."""


@triton.jit(do_not_specialize=["num_rows", "num_groups", "part_groups"])
def _token_linear_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    arrivals_ptr,
    out_size,
    num_rows,
    num_groups,
    part_groups,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (tiles, parts), tiles as in _rounded_linear_kernel. A program owns part_groups groups of a tile's inputs.
    # The last program of a tile to arrive adds the parts, and leaves arrivals as it found them: zero.
    # In the place of rows and columns beyond the last ones it computes others once more. No input is padding.
    wait_for_predecessor(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row, column = place_tile(num_rows, out_size, BAND, BLOCK_M, BLOCK_N)
    k = tl.arange(0, GROUP)
    row_size = num_groups * GROUP
    x_row = row % num_rows
    x_at = x_ptr + x_row.to(tl.int64)[:, None] * row_size + k[None, :]
    codes_at = codes_ptr + (column % out_size).to(tl.int64)[:, None] * row_size + k[None, :]
    first = part * part_groups
    end = min(first + part_groups, num_groups)
    sums = sum_codes(x_at, codes_at, first, end, BLOCK_M, BLOCK_N, GROUP)
    sums, is_last = add_parts(sums, partial_ptr, arrivals_ptr, tile, part)
    if is_last:
        y = sums.to(tl.float32) * tl.load(x_scales_ptr + x_row)[:, None]
        y *= tl.load(scales_ptr + column % out_size)[None, :]
        if HAS_BIAS:
            y += tl.load(bias_ptr + column % out_size).to(tl.float32)[None, :]
        store_tile(y_ptr, y, row, num_rows, column, out_size)


def find_tile(num_rows: int) -> Tile:
    """Return the tile of a product of so many rows."""
    return next((tile for tile in TILES if num_rows <= tile.rows), TILES[-1])


def token_linear_config(tile: Tile, has_bias: bool) -> dict[str, int]:
    """Return the constants to compile with."""
    return {
        "HAS_BIAS": has_bias,
        "GROUP": GROUP,
        "BAND": BAND,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": False,
    }


def count_places(device: torch.device) -> int:
    """Return the most tiles of a product whose sums are split: no more than there are places for."""
    return num_multiprocessors(device) * max(tile.programs for tile in TILES)


def split_sums(num_tiles: int, num_groups: int, places: int) -> int:
    """Return how many groups a program sums, so that all programs together have about so many places."""
    parts = max(1, min(places // max(num_tiles, 1), num_groups // MIN_GROUPS))
    return ceil_div(num_groups, parts)


def token_linear(x: Tensor, weight: Codes, bias: Tensor | None, arrivals: Tensor) -> Tensor:
    """Do what `multiply_rounded_tokens` does: x [n, in] -> x W^T + bias [n, out], in x's dtype.

    Args:
        x: it may carry its rounded form.
        weight: int8, with rows that are padded with zeros to a multiple of GROUP, and one scale a row.
        arrivals: int32, all zero, as many as `count_places` says. The matrix needs some of its own.
    """
    num_rows = x.shape[0]
    out_size, row_size = weight.codes.shape
    num_groups = row_size // GROUP
    rounded = find_rounded(x) or round_inputs(x.contiguous(), TOKEN_ROUNDING)
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    tile = find_tile(num_rows)
    num_tiles = ceil_div(num_rows, tile.rows) * ceil_div(out_size, tile.columns)
    part_groups = split_sums(num_tiles, num_groups, num_multiprocessors(x.device) * tile.programs)
    parts = ceil_div(num_groups, part_groups)
    num_partial = num_tiles * parts * tile.rows * tile.columns if parts > 1 else 0
    partial = torch.empty(num_partial, dtype=torch.int32, device=x.device)
    # If there is no bias, the scales take its place as argument. The kernel does not read it there.
    scales = weight.scales
    pointers = (*rounded, weight.codes, scales, scales if bias is None else bias, y, partial, arrivals)
    config = token_linear_config(tile, bias is not None)
    launch(_token_linear_kernel, (num_tiles, parts), (*pointers, out_size, num_rows, num_groups, part_groups), config)
    return y
