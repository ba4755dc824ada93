"""Multiplies by a matrix of whole numbers with scales, 8 or 4 bits a weight, in Triton. Activations keep their type.

The references are in quantized/torch_matrix.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.grouped_linear import locate_tile
from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.models.qwen3_moe.ops import Routing
from nanovllm.quantized.codes import Codes
from nanovllm.utils.integers import ceil_div

TILES = ((16, 16, 32), (64, 64, 64))
"""Rows and columns of a tile, each after the most rows of x for which it is taken. More rows take (128, 64)."""


GROUPED_TILES = ((128, 16, 64), (512, 32, 64))
"""The same for experts, each after the most tokens for which it is taken."""


MAX_BLOCK_K = 128


MIN_BLOCK_K = 16


@triton.jit
def _multiply_tile(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    row,
    is_row,
    column,
    is_column,
    in_size,
    packed_size,
    out_size,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return rows of x times columns of W^T, float32 [BLOCK_M, BLOCK_N].

    Codes become x's type, which is exact. A group's sum gets its scale, and sums go along K by BLOCK_K, so every
    element has one order of summing.
    """
    k = tl.arange(0, BLOCK_K)
    byte = tl.arange(0, BLOCK_K * BITS // 8)
    x_at = x_ptr + row.to(tl.int64)[:, None] * in_size + k[None, :]
    codes_at = codes_ptr + column.to(tl.int64)[:, None] * packed_size + byte[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, tl.cdiv(in_size, BLOCK_K)):
        start = step * BLOCK_K
        first_byte = step * (BLOCK_K * BITS // 8)
        group = start // GROUP if GROUP else 0
        x = tl.load(x_at + start, mask=is_row[:, None] & (start + k < in_size)[None, :], other=0.0)
        inside = is_column[:, None] & (first_byte + byte < packed_size)[None, :]
        codes = tl.load(codes_at + first_byte, mask=inside, other=0)
        if BITS == 4:
            codes = tl.interleave(codes & 15, codes >> 4)
        codes = codes.to(tl.int32)
        if HAS_ZEROS:
            codes -= tl.load(zeros_ptr + group * out_size + column, mask=is_column, other=0)[:, None]
        elif BITS == 4:
            codes -= 8
        weight = tl.trans(codes.to(x.dtype))
        if GROUP:
            scale = tl.load(scales_ptr + group * out_size + column, mask=is_column, other=0.0)
            acc += tl.dot(x, weight, input_precision="ieee") * scale[None, :]
        else:
            acc = tl.dot(x, weight, acc, input_precision="ieee")
    if not GROUP:
        acc *= tl.load(scales_ptr + column, mask=is_column, other=0.0)[None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_linear_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    y_ptr,
    in_size,
    packed_size,
    out_size,
    num_rows,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows / BLOCK_M x out_size / BLOCK_N,), rows fastest: programs that read the same weights run together.
    # A program owns BLOCK_M rows and BLOCK_N columns of the product. No input is padding.
    wait_for_predecessor(PDL)
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    row = tl.program_id(0) % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) // num_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    is_column = column < out_size
    pointers = (x_ptr, codes_ptr, scales_ptr, zeros_ptr)
    tile = (row, is_row, column, is_column)
    sizes = (in_size, packed_size, out_size)
    acc = _multiply_tile(*pointers, *tile, *sizes, BITS, GROUP, HAS_ZEROS, BLOCK_M, BLOCK_N, BLOCK_K)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + row.to(tl.int64)[:, None] * out_size + column[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_groups", "num_experts"])
def _grouped_quantized_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    y_ptr,
    tokens_ptr,
    offsets_ptr,
    in_size,
    packed_size,
    out_size,
    num_groups,
    num_experts,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GATHER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid, tiles and padding as in _grouped_linear_kernel.
    wait_for_predecessor(PDL)
    num_columns = tl.cdiv(out_size, BLOCK_N)
    expert, begin, end = locate_tile(offsets_ptr, tl.program_id(0) // num_columns, num_experts, EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    pair = begin + tl.arange(0, BLOCK_M)
    is_pair = pair < end
    row = tl.load(tokens_ptr + pair, mask=is_pair, other=0) if GATHER else pair
    column = tl.program_id(0) % num_columns * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < out_size
    matrix = expert.to(tl.int64) * out_size
    codes_ptr += matrix * packed_size
    scales_ptr += matrix * num_groups
    zeros_ptr += matrix * num_groups
    pointers = (x_ptr, codes_ptr, scales_ptr, zeros_ptr)
    tile = (row, is_pair, column, is_column)
    sizes = (in_size, packed_size, out_size)
    acc = _multiply_tile(*pointers, *tile, *sizes, BITS, GROUP, HAS_ZEROS, BLOCK_M, BLOCK_N, BLOCK_K)
    y_at = y_ptr + pair.to(tl.int64)[:, None] * out_size + column[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


def format_config(bits: int, in_size: int, group_size: int, has_zeros: bool) -> dict[str, int]:
    """Return the constexprs that follow from a matrix alone. So the order of a sum does, too.

    Raises:
        ValueError: groups have a size that the kernel cannot cut into its steps along K.
    """
    block = MAX_BLOCK_K
    is_grouped = group_size < in_size
    while is_grouped and group_size % block:
        block //= 2
    if block < MIN_BLOCK_K:
        raise ValueError(
            f"the Triton kernel needs groups of a multiple of {MIN_BLOCK_K} weights, and these have {group_size}: "
            'use attention_backend="torch"'
        )
    return {"BITS": bits, "GROUP": group_size if is_grouped else 0, "HAS_ZEROS": has_zeros, "BLOCK_K": block}


def tile_config(num_rows: int, tiles: tuple[tuple[int, int, int], ...], itemsize: int) -> dict[str, int]:
    """Return the tile for a number of rows, and how it is computed.

    float32 is multiplied without tensor cores, from registers: larger tiles, or fewer warps, spill kilobytes.
    """
    if itemsize == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3}
    rows, columns = next(((m, n) for most, m, n in tiles if num_rows <= most), (128, 64))
    return {"BLOCK_M": rows, "BLOCK_N": columns, "num_warps": 8 if rows == 128 else 4, "num_stages": 3}


def quantized_linear(x: Tensor, weight: Codes, bias: Tensor | None) -> Tensor:
    """x [n, in] -> x W^T + bias [n, out], summed in float32, in x's dtype.

    Args:
        x: contiguous, with its columns in the order of the codes'.
        weight: what `transpose_scales` returns.
    """
    num_rows = x.shape[0]
    out_size = weight.codes.shape[0]
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    config = format_config(weight.bits, weight.in_features, weight.group_size, weight.zeros is not None)
    config |= {"HAS_BIAS": bias is not None} | tile_config(num_rows, TILES, x.element_size())
    grid = (ceil_div(num_rows, config["BLOCK_M"]) * ceil_div(out_size, config["BLOCK_N"]),)
    # If zeros or a bias are missing, another tensor takes their place as argument. The kernel does not read it.
    scales = weight.scales.mT
    zeros = scales if weight.zeros is None else weight.zeros.mT
    pointers = (x, weight.codes, scales, zeros, x if bias is None else bias, y)
    sizes = (weight.in_features, weight.codes.shape[1], out_size, num_rows)
    launch(_quantized_linear_kernel, grid, (*pointers, *sizes), config)
    return y


def grouped_quantized(x: Tensor, weight: Codes, routing: Routing, gather: bool) -> Tensor:
    """Do what `grouped_linear_reference` does, in one kernel. Its grid needs no length from the device.

    Args:
        weight: what `transpose_scales` returns.
    """
    num_experts, out_size, packed_size = weight.codes.shape
    num_tokens, k = routing.weights.shape
    pairs = num_tokens * k
    y = torch.empty(pairs, out_size, dtype=x.dtype, device=x.device)
    config = format_config(weight.bits, weight.in_features, weight.group_size, weight.zeros is not None)
    config |= {"GATHER": gather, "EXPERTS": next_power_of_2(num_experts)}
    config |= tile_config(num_tokens, GROUPED_TILES, x.element_size())
    most_tiles = min(pairs, ceil_div(pairs, config["BLOCK_M"]) + num_experts)
    grid = (most_tiles * ceil_div(out_size, config["BLOCK_N"]),)
    scales = weight.scales.mT
    zeros = scales if weight.zeros is None else weight.zeros.mT
    pointers = (x, weight.codes, scales, zeros, y, routing.tokens, routing.offsets)
    sizes = (weight.in_features, packed_size, out_size, weight.scales.shape[2], num_experts)
    launch(_grouped_quantized_kernel, grid, (*pointers, *sizes), config)
    return y
