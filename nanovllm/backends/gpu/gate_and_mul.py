"""Products with an activated gate as a Triton kernel: SwiGLU's silu(gate) * up, and a hybrid's x * sigmoid(gate).

The reference is `silu_and_mul_reference` in ops/silu_and_mul.py; a hybrid's reference is `sigmoid_and_mul_reference` in
features/families/qwen3_5/ops.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.round_inputs import give_rounded, store_rounded
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.utils.integers import ceil_div

BLOCK = 1024
"""Columns of a program: eight elements of each input a thread."""

LARGEST_BLOCK = 16384
"""The most columns of a program that rounds a whole row."""


@triton.jit
def _gate_and_mul_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    x_start,
    gate_stride,
    size,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_tokens, size / BLOCK).
    # A program owns BLOCK columns of one row. It computes in float32 and rounds the activated gate, as the references.
    # If there is a place for codes, the row is one block, and it rounds the products to int8, too.
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
    if codes_ptr is not None:
        store_rounded(out.to(tl.float32), codes_ptr, scales_ptr, row, size)


def gate_and_mul_config(silu: bool, size: int, rounds: bool) -> dict[str, int]:
    """Return the constants to compile with, for rows of `size` products."""
    block = max(BLOCK, next_power_of_2(size)) if rounds else BLOCK
    config = {"SILU": silu, "BLOCK": block, "num_warps": min(16, 4 * block // BLOCK)}
    return config | {"enable_fp_fusion": False} if rounds else config


def _gate_and_mul(x: Tensor, x_start: int, gate: Tensor, size: int, silu: bool, rounds: bool) -> Tensor:
    """Multiply x[:, x_start : x_start + size] by the activated gate[:, :size]."""
    num_tokens = len(x)
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    rounds = rounds and size <= LARGEST_BLOCK
    config = gate_and_mul_config(silu, size, rounds)
    args = (x, gate, out, *give_rounded(out, rounds), x.stride(0), x_start, gate.stride(0), size)
    launch(_gate_and_mul_kernel, (num_tokens, ceil_div(size, config["BLOCK"])), args, config)
    return out


def silu_and_mul(gate_up: Tensor, rounds: bool = False) -> Tensor:
    """silu_and_mul_reference in one kernel.

    Args:
        rounds: whether the result is rounded to int8. Then it carries that form, too, if its rows are short enough.
    """
    size = gate_up.shape[1] // 2
    return _gate_and_mul(gate_up, size, gate_up, size, True, rounds)


def sigmoid_and_mul(x: Tensor, gate: Tensor, rounds: bool = False) -> Tensor:
    """sigmoid_and_mul_reference in one kernel.

    Args:
        rounds: as in `silu_and_mul`.
    """
    return _gate_and_mul(x, 0, gate, x.shape[1], False, rounds)
