"""Rounds rows of inputs to int8, with a scale each: in the kernel that does only this, and in those that write rows.

The reference is `round_inputs` in features/quantized/dynamic.py. A kernel that calls `store_rounded` has its bits if it
is compiled with enable_fp_fusion=False.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton

MAGIC = tl.constexpr(12582912.0)
"""1.5 x 2^23. Adding it rounds a small number to a whole one, ties to even, in the lowest bits of the sum."""

MAGIC_BITS = tl.constexpr(0x4B400000)

LEAST = tl.constexpr(2.0**-100)
"""A row whose largest magnitude is below this is rounded to zeros: the reference's `TINY`."""


class Rounded(NamedTuple):
    """Rounded inputs: codes, int8 [n, in], and scales, float32 [n]."""

    codes: Tensor
    scales: Tensor


@triton.jit
def store_rounded(x, codes_ptr, scales_ptr, row, size):
    """Round a row, and store its codes and its scale.

    Args:
        x: the row in float32, [a power of two], with zeros beyond the last input.
        row: its number, int64.
        size: how many inputs it has.
    """
    # The bits of magnitudes are in the order of the floats, and those of NaN are the largest.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    most = bits.to(tl.float32, bitcast=True)
    is_finite = bits < 0x7F800000
    has_values = is_finite & (most >= LEAST)
    inverse = tl.where(has_values, tl.div_rn(127.0, tl.where(has_values, most, 1.0)), 0.0)
    scale = tl.where(has_values, tl.div_rn(most, 127.0), tl.where(is_finite, 0.0, float("nan")))
    shifted = tl.where(is_finite, x, 0.0) * inverse + MAGIC
    codes = (shifted.to(tl.int32, bitcast=True) - MAGIC_BITS).to(tl.int8)
    column = tl.arange(0, x.shape[0])
    tl.store(codes_ptr + row * size + column, codes, mask=column < size)
    tl.store(scales_ptr + row, scale)


@triton.jit
def _round_inputs_kernel(x_ptr, codes_ptr, scales_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # Grid (rows,). A program owns a row. Rows of padding are like any other; their values stay in them.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    store_rounded(x, codes_ptr, scales_ptr, row, size)


def round_config(size: int) -> dict[str, int]:
    """Return the constants to compile the rounding of rows of `size` inputs with."""
    block = max(128, next_power_of_2(size))
    return {"BLOCK": block, "num_warps": min(16, max(4, block // 256)), "enable_fp_fusion": False}


def round_inputs(x: Tensor) -> Rounded:
    """Do what the function of this name in features/quantized/dynamic.py does for x [n, in], by token."""
    num_rows, size = x.shape
    rounded = make_rounded(num_rows, size, x.device)
    launch(_round_inputs_kernel, (num_rows,), (x.contiguous(), *rounded, size), round_config(size))
    return rounded


def make_rounded(num_rows: int, size: int, device: torch.device) -> Rounded:
    """Return room for the codes and scales of inputs [num_rows, size]."""
    codes = torch.empty(num_rows, size, dtype=torch.int8, device=device)
    return Rounded(codes, torch.empty(num_rows, dtype=torch.float32, device=device))


def give_rounded(x: Tensor, rounds: bool) -> tuple[Tensor | None, Tensor | None]:
    """Give x [n, size], which a kernel is about to write, its rounded form too. Return the places of that form.

    x carries it as an attribute, and `find_rounded` returns it to whoever multiplies x. So nobody may write to x later:
    in inference mode torch counts no versions of a tensor, so no product could notice. tests/runner/test_launches.py
    looks for such a write. If nothing is rounded, there are no places.
    """
    if not rounds:
        return None, None
    num_rows, size = x.shape
    rounded = make_rounded(num_rows, size, x.device)
    x.rounded = rounded  # type: ignore[attr-defined]
    return rounded


def find_rounded(x: Tensor) -> Rounded | None:
    """Return the rounded form that x carries; None if it carries none, as a view of it, say."""
    return getattr(x, "rounded", None)
