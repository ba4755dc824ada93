"""Products with an activated gate as a Triton kernel: SwiGLU's silu(gate) * up, and a hybrid's x * sigmoid(gate).

The reference is `silu_and_mul_reference` in ops/silu_and_mul.py; a hybrid's reference is `sigmoid_and_mul_reference` in
features/families/qwen3_5/ops.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.round_groups import Rounding, give_rounded, rounding_config, store_rounded
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.utils.integers import ceil_div

BLOCK = 1024
"""Columns of a program: eight elements of each input a thread."""

LARGEST_BLOCK = 16384
"""The most columns of a program that rounds a whole row."""


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def _gate_and_mul_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    num_groups,
    x_stride,
    x_start,
    gate_stride,
    size,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LEAST: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_tokens, size / BLOCK).
    # A program owns BLOCK columns of one row. It computes in float32 and rounds the activated gate, as the references.
    # With a GROUP it rounds the products to int8, too. BY_TOKEN, the row is one block.
    # Rows of padding are like any other; their values stay in them.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + x_start + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate if SILU else 1.0) / (1.0 + tl.exp(-gate))
    out = (activated.to(dtype).to(tl.float32) * x).to(dtype)
    tl.store(out_ptr + row * size + column, out, mask=inside)
    if GROUP:
        first = tl.program_id(1) * (BLOCK // GROUP)
        places = (codes_ptr, scales_ptr, num_rows, num_groups)
        store_rounded(out.to(tl.float32), places, row, first, GROUP, LEAST, BY_TOKEN)


def gate_and_mul_config(silu: bool, size: int, rounding: Rounding | None) -> dict[str, float]:
    """Return the constants to compile with, for rows of `size` products."""
    block = BLOCK
    if rounding is not None and rounding.by_token:
        block = max(BLOCK, next_power_of_2(size))
    return {"SILU": silu, "BLOCK": block, "num_warps": min(16, 4 * block // BLOCK)} | rounding_config(rounding)


def _gate_and_mul(x: Tensor, x_start: int, gate: Tensor, size: int, silu: bool, rounding: Rounding | None) -> Tensor:
    """Multiply x[:, x_start : x_start + size] by the activated gate[:, :size]."""
    num_tokens = len(x)
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if rounding is not None and rounding.by_token and size > LARGEST_BLOCK:
        rounding = None
    config = gate_and_mul_config(silu, size, rounding)
    args = (x, gate, out, *give_rounded(out, rounding), x.stride(0), x_start, gate.stride(0), size)
    launch(_gate_and_mul_kernel, (num_tokens, ceil_div(size, int(config["BLOCK"]))), args, config)
    return out


def silu_and_mul(gate_up: Tensor, rounding: Rounding | None = None) -> Tensor:
    """silu_and_mul_reference in one kernel.

    Args:
        rounding: how the result is rounded to int8; it carries that form, too, if the kernel can. None: not at all.
    """
    size = gate_up.shape[1] // 2
    return _gate_and_mul(gate_up, size, gate_up, size, True, rounding)


def sigmoid_and_mul(x: Tensor, gate: Tensor, rounding: Rounding | None = None) -> Tensor:
    """sigmoid_and_mul_reference in one kernel.

    Args:
        rounding: as in `silu_and_mul`.
    """
    return _gate_and_mul(x, 0, gate, x.shape[1], False, rounding)
