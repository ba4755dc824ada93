"""Multiplies many rows by a matrix of codes: Triton dequantises rows of the matrix, and torch multiplies by them.

The reference is `TorchMatrix` in features/quantized/torch_matrix.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.product import Laid, choose_step, read_weight
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.utils.integers import ceil_div

MAX_SCRATCH = 2**26
"""The most weights that are dequantised at a time: 128 MiB in 16 bits."""


@triton.jit(do_not_specialize=["first", "num_rows"])
def _dequantize_kernel(
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    numbers_ptr,
    in_size,
    row_size,
    out_size,
    first,
    num_rows,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
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
    group = (step * BLOCK_K // GROUP if GROUP else 0) * out_size + first + row
    zero = tl.load(zeros_ptr + group, mask=is_row, other=0) if zeros_ptr is not None else row
    weight_at = weight_ptr + (first + row).to(tl.int64)[:, None] * row_size + unit[None, :]
    weight = read_weight(weight_at, step, zero, exists, BITS, zeros_ptr is not None, True, tl.float32)
    numbers = (weight * tl.load(scales_ptr + group, mask=is_row, other=0.0)[:, None]).to(numbers_ptr.dtype.element_ty)
    numbers_at = numbers_ptr + row.to(tl.int64)[:, None] * in_size + k[None, :]
    tl.store(numbers_at, numbers, mask=is_row[:, None] & (k < in_size)[None, :])


def dequantize_config(laid: Laid) -> dict[str, int]:
    """Return the constants to compile with."""
    is_grouped = laid.group_size < laid.in_size
    return {
        "BITS": laid.bits,
        "GROUP": laid.group_size if is_grouped else 0,
        "BLOCK_N": 32,
        "BLOCK_K": choose_step(laid.bits, laid.in_size, laid.group_size),
        "num_warps": 4,
    }


def multiply_dequantized(x: Tensor, laid: Laid, bias: Tensor | None) -> Tensor:
    """x [n, in] -> x W^T + bias [n, out], with weights that are rounded to x's type."""
    out_size, row_size = laid.weight.shape
    height = max(1, MAX_SCRATCH // laid.in_size)
    config = dequantize_config(laid)
    parts = []
    for first in range(0, max(out_size, 1), height):
        num_rows = min(height, out_size - first)
        scratch = torch.empty(num_rows, laid.in_size, dtype=x.dtype, device=x.device)
        grid = (ceil_div(num_rows, config["BLOCK_N"]), ceil_div(laid.in_size, config["BLOCK_K"]))
        sizes = (laid.in_size, row_size, out_size, first, num_rows)
        launch(_dequantize_kernel, grid, (laid.weight, laid.scales, laid.zeros, scratch, *sizes), config)
        parts.append(F.linear(x, scratch, None if bias is None else bias[first : first + height]))
        del scratch  # its memory is free for the next rows
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
