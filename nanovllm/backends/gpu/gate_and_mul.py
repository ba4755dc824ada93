"""Products with an activated gate as a Triton kernel: SwiGLU's silu(gate) * up, and a hybrid's x * sigmoid(gate).

The reference is `silu_and_mul_reference` in ops/silu_and_mul.py; a hybrid's reference is `sigmoid_and_mul_reference` in
features/families/qwen3_5/ops.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.utils.integers import ceil_div

BLOCK = 1024
"""Columns of a program: eight elements of each input a thread."""


@triton.jit
def _gate_and_mul_kernel(
    x_ptr,
    gate_ptr,
    out_ptr,
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
    # Rows of padding are like any other; their values stay in them.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + x_start + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate if SILU else 1.0) / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * size + column, (activated.to(dtype).to(tl.float32) * x).to(dtype), mask=inside)


def gate_and_mul_config(silu: bool) -> dict[str, int]:
    """Return the constants to compile with."""
    return {"SILU": silu, "BLOCK": BLOCK, "num_warps": 4}


def _gate_and_mul(x: Tensor, x_start: int, gate: Tensor, size: int, silu: bool) -> Tensor:
    """Multiply x[:, x_start : x_start + size] by the activated gate[:, :size]."""
    num_tokens = len(x)
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    args = (x, gate, out, x.stride(0), x_start, gate.stride(0), size)
    launch(_gate_and_mul_kernel, (num_tokens, ceil_div(size, BLOCK)), args, gate_and_mul_config(silu))
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu_and_mul_reference in one kernel."""
    size = gate_up.shape[1] // 2
    return _gate_and_mul(gate_up, size, gate_up, size, silu=True)


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """sigmoid_and_mul_reference in one kernel."""
    return _gate_and_mul(x, 0, gate, x.shape[1], silu=False)
