"""Multiplies many rows by a matrix of codes: Triton dequantises rows of the matrix, and torch multiplies by them.

The reference is `TorchMatrix` in features/quantized/torch_matrix.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.product import Laid, choose_step, read_codes, read_config, read_numbers, read_scale
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.utils.integers import ceil_div

MAX_SCRATCH = 2**26
"""The most weights that are dequantised at a time: 128 MiB in 16 bits."""

BLOCK_N = 32
"""The rows of a program."""


@triton.jit(do_not_specialize=["first", "num_rows"])
def _dequantize_kernel(
    weight_ptr,
    scales_ptr,
    factors_ptr,
    minima_ptr,
    minima_factors_ptr,
    zeros_ptr,
    y_ptr,
    in_size,
    row_size,
    out_size,
    first,
    num_rows,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    MINIMA_SHARED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows / BLOCK_N, in_size / BLOCK_K).
    # A program owns BLOCK_N rows and BLOCK_K columns of the result, whose row 0 is the matrix's row `first`.
    # No input is padding.
    wait_for_predecessor(PDL)
    step = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    k = step * BLOCK_K + tl.arange(0, BLOCK_K)
    unit = tl.arange(0, BLOCK_K * BITS // 8)
    exists = is_row[:, None] & (step * (BLOCK_K * BITS // 8) + unit < row_size)[None, :]
    weight_at = weight_ptr + (first + row).to(tl.int64)[:, None] * row_size + unit[None, :]
    codes = read_codes(weight_at, step, exists, BITS, True)
    column = first + row
    y = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.static_range(GROUPS):
        group = step * BLOCK_K // GROUP + i if GROUP else 0
        is_there = is_row
        if GROUPS > 1:
            is_there = row < tl.where(group * GROUP < in_size, num_rows, 0)
        zero = column
        if zeros_ptr is not None:
            zero = tl.load(zeros_ptr + (group * out_size + column), mask=is_there, other=0)
        weight = read_numbers(codes, zero, BITS, NUMBERS, zeros_ptr is not None, tl.float32)
        weight *= read_scale(scales_ptr, factors_ptr, group, column, is_there, out_size, SHARED)[:, None]
        if minima_ptr is not None:
            least = read_scale(minima_ptr, minima_factors_ptr, group, column, is_there, out_size, MINIMA_SHARED)
            weight -= least[:, None]
        y = tl.where((k // GROUP == group)[None, :], weight, y) if GROUPS > 1 else weight
    y_at = y_ptr + row.to(tl.int64)[:, None] * in_size + k[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & (k < in_size)[None, :])


def dequantize_config(laid: Laid) -> dict[str, int | None]:
    """Return the constants to compile with. A weight's product is rounded before its minimum is subtracted."""
    return {**read_config(laid), "BLOCK_N": BLOCK_N, "num_warps": 4, "enable_fp_fusion": laid.minima.values is None}


def multiply_dequantized(x: Tensor, laid: Laid, bias: Tensor | None) -> Tensor:
    """x [n, in] -> x W^T + bias [n, out], with weights that are rounded to x's type."""
    out_size, row_size = laid.weight.shape
    height = max(1, MAX_SCRATCH // laid.in_size)
    config = dequantize_config(laid)
    step = choose_step(laid.bits, laid.in_size, laid.group_size)
    parts = []
    for first in range(0, max(out_size, 1), height):
        num_rows = min(height, out_size - first)
        scratch = torch.empty(num_rows, laid.in_size, dtype=x.dtype, device=x.device)
        grid = (ceil_div(num_rows, BLOCK_N), ceil_div(laid.in_size, step))
        sizes = (laid.in_size, row_size, out_size, first, num_rows)
        launch(_dequantize_kernel, grid, (*laid.tensors, scratch, *sizes), config)
        parts.append(F.linear(x, scratch, None if bias is None else bias[first : first + height]))
        del scratch  # its memory is free for the next rows
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
