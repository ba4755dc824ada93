"""Multiplies rounded activations by weights whose scales belong to groups, on the tensor cores, in Triton.

Both are int8; or both are fp8, for scripts/gpu_products.py alone.

The reference is `multiply_rounded_groups` in features/quantized/dynamic.py. As in rounded_linear.py, a tile of any
shape gives the same bits.
"""

from math import gcd

import torch
from torch import Tensor

from nanovllm.backends.gpu.grouped_linear import locate_tile
from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.quantized_linear import MIN_BLOCK_K
from nanovllm.backends.gpu.round_groups import Rounded, find_rounded
from nanovllm.backends.gpu.round_to_fp8 import round_to_fp8
from nanovllm.backends.gpu.rounded_linear import (
    BAND,
    LARGE_TILE,
    SMALL_TILE,
    TILE,
    grouped_config,
    round_inputs,
    tile_config,
)
from nanovllm.backends.gpu.tiles import place_pairs, place_tile, store_tile
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.features.families.qwen3_moe.ops import Routing
from nanovllm.features.quantized.codes import Codes
from nanovllm.features.quantized.dynamic import GROUP
from nanovllm.utils.integers import ceil_div


@triton.jit
def _multiply_groups(
    x_rows, matrix, column, sizes, STEP: tl.constexpr, GROUP: tl.constexpr, WEIGHT_GROUP: tl.constexpr
):
    """Return rows of x times columns of W^T, float32 [rows, columns].

    Args:
        x_rows: pointers to codes and scales of x, how many rows x has, and the numbers of the tile's, which all exist.
        matrix: pointers to codes and scales, and how many columns W^T has.
        column: the columns' numbers, which all exist.
        sizes: the length of a row of codes, of x and W alike, and the number of steps along it.
    """
    x_ptr, x_scales_ptr, num_rows, row = x_rows
    codes_ptr, scales_ptr, out_size = matrix
    row_size, num_steps = sizes
    k = tl.arange(0, STEP)
    x_at = x_ptr + row.to(tl.int64)[:, None] * row_size + k[None, :]
    codes_at = codes_ptr + column.to(tl.int64)[:, None] * row_size + k[None, :]
    total = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for step in range(num_steps):
        start = step * STEP
        x = tl.load(x_at + start)
        codes = tl.load(codes_at + start)
        x_scale = tl.load(x_scales_ptr + start // GROUP * num_rows + row)
        scale = tl.load(scales_ptr + start // WEIGHT_GROUP * out_size + column)
        if x.dtype == tl.int8:
            sums = tl.dot(x, tl.trans(codes), out_dtype=tl.int32).to(tl.float32)
        else:
            sums = tl.dot(x, tl.trans(codes))
        total += sums * x_scale[:, None] * scale[None, :]
    return total


@triton.jit(do_not_specialize=["num_rows", "num_steps"])
def _rounded_groups_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    bias_ptr,
    y_ptr,
    out_size,
    row_size,
    num_rows,
    num_steps,
    HAS_BIAS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHT_GROUP: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid, tiles and padding as in _rounded_linear_kernel.
    wait_for_predecessor(PDL)
    row, column = place_tile(num_rows, out_size, BAND, BLOCK_M, BLOCK_N)
    x_rows = (x_ptr, x_scales_ptr, num_rows, row % num_rows)
    matrix = (codes_ptr, scales_ptr, out_size)
    y = _multiply_groups(x_rows, matrix, column % out_size, (row_size, num_steps), STEP, GROUP, WEIGHT_GROUP)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=column < out_size, other=0.0).to(tl.float32)[None, :]
    store_tile(y_ptr, y, row, num_rows, column, out_size)


@triton.jit(do_not_specialize=["num_rows", "num_steps", "num_groups", "num_experts"])
def _grouped_rounded_groups_kernel(
    x_ptr,
    x_scales_ptr,
    codes_ptr,
    scales_ptr,
    y_ptr,
    tokens_ptr,
    offsets_ptr,
    out_size,
    row_size,
    num_rows,
    num_steps,
    num_groups,
    num_experts,
    GATHER: tl.constexpr,
    EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHT_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid, tiles and padding as in _grouped_rounded_kernel. An expert has num_groups scales for each column.
    wait_for_predecessor(PDL)
    num_columns = tl.cdiv(out_size, BLOCK_N)
    expert, begin, end = locate_tile(offsets_ptr, tl.program_id(0) // num_columns, num_experts, EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    pair, row, column = place_pairs(tokens_ptr, begin, end, out_size, GATHER, BLOCK_M, BLOCK_N)
    first = expert.to(tl.int64) * out_size
    matrix = (codes_ptr + first * row_size, scales_ptr + first * num_groups, out_size)
    x_rows = (x_ptr, x_scales_ptr, num_rows, row)
    y = _multiply_groups(x_rows, matrix, column % out_size, (row_size, num_steps), STEP, GROUP, WEIGHT_GROUP)
    store_tile(y_ptr, y, pair, end, column, out_size)


def group_config(group_size: int) -> dict[str, int]:
    """Return the constants of the steps along the inputs. A step lies in one group of the inputs and of the weights.

    Raises:
        ValueError: steps would be too short.
    """
    step = gcd(GROUP, group_size)
    if step < MIN_BLOCK_K:
        raise ValueError(
            f"the Triton kernel of rounded inputs needs groups of a multiple of {MIN_BLOCK_K} weights, and these have "
            f"{group_size}: leave quantization out"
        )
    return {"STEP": step, "WEIGHT_GROUP": group_size}


def _round_like(x: Tensor, weight: Codes) -> tuple[Rounded, Tensor]:
    """Return x rounded to the type of the weights' codes, and these codes in their type."""
    if weight.has_floats:
        return round_to_fp8(x.contiguous()), weight.codes.view(torch.float8_e4m3fn)
    return find_rounded(x) or round_inputs(x.contiguous()), weight.codes


def rounded_groups(x: Tensor, weight: Codes, in_size: int, bias: Tensor | None, row_limits: tuple[int, int]) -> Tensor:
    """Do what `multiply_rounded_groups` does: x [n, in] -> x W^T + bias [n, out], in x's dtype.

    Args:
        x: contiguous, with its columns in the order of the codes'.
        weight: int8 or fp8, with rows that are padded with zeros to a multiple of GROUP. In memory the scales of one
            group lie together.
        in_size: the length of a row without padding.
        row_limits: what `limit_rows` returns.
    """
    num_rows = x.shape[0]
    out_size, row_size = weight.codes.shape
    rounded, codes = _round_like(x, weight)
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    few, some = row_limits
    tile = SMALL_TILE if num_rows <= few else TILE if num_rows <= some else LARGE_TILE
    config = {"HAS_BIAS": bias is not None, "BAND": BAND} | group_config(weight.group_size) | tile_config(tile)
    grid = (ceil_div(num_rows, config["BLOCK_M"]) * ceil_div(out_size, config["BLOCK_N"]),)
    scales = weight.scales.mT
    # If there is no bias, the scales take its place as argument. The kernel does not read it there.
    pointers = (*rounded, codes, scales, scales if bias is None else bias, y)
    sizes = (out_size, row_size, num_rows, ceil_div(in_size, config["STEP"]))
    launch(_rounded_groups_kernel, grid, (*pointers, *sizes), config)
    return y


def grouped_rounded_groups(x: Tensor, weight: Codes, in_size: int, routing: Routing, gather: bool) -> Tensor:
    """Do what `DynamicExperts.multiply` does. The grid of the product needs no length from the device.

    Args:
        x: contiguous.
        weight: as `rounded_groups` takes it, of several experts.
        in_size: the length of a row without padding.
    """
    num_experts, out_size, row_size = weight.codes.shape
    num_tokens, k = routing.weights.shape
    pairs = num_tokens * k
    rounded, codes = _round_like(x, weight)
    y = torch.empty(pairs, out_size, dtype=x.dtype, device=x.device)
    config = grouped_config(num_tokens, num_experts, gather) | group_config(weight.group_size)
    most_tiles = min(pairs, ceil_div(pairs, config["BLOCK_M"]) + num_experts)
    grid = (most_tiles * ceil_div(out_size, config["BLOCK_N"]),)
    pointers = (*rounded, codes, weight.scales.mT, y, routing.tokens, routing.offsets)
    num_steps = ceil_div(in_size, config["STEP"])
    sizes = (out_size, row_size, len(x), num_steps, weight.scales.shape[2], num_experts)
    launch(_grouped_rounded_groups_kernel, grid, (*pointers, *sizes), config)
    return y
