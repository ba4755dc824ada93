"""The gate of a hybrid's attention, x * sigmoid(gate), as a Triton kernel.

The reference is `sigmoid_and_mul_reference` in models/qwen3_5/ops.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.utils.integers import ceil_div


@triton.jit
def _sigmoid_and_mul_kernel(x_ptr, gate_ptr, out_ptr, gate_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # Grid (num_tokens, size / BLOCK).
    # A program owns BLOCK columns of one row. It computes in float32 and rounds after the sigmoid, as the reference.
    # Rows of padding are like any other; their values stay in them.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * size + column, (sigmoid.to(dtype).to(tl.float32) * x).to(dtype), mask=inside)


def sigmoid_and_mul_config() -> dict[str, int]:
    """Eight elements of each input a thread."""
    return {"BLOCK": 1024, "num_warps": 4}


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """sigmoid_and_mul_reference in one kernel. x is contiguous."""
    num_tokens, size = x.shape
    out = torch.empty_like(x)
    config = sigmoid_and_mul_config()
    grid = (num_tokens, ceil_div(size, config["BLOCK"]))
    launch(_sigmoid_and_mul_kernel, grid, (x, gate, out, gate.stride(0), size), config)
    return out
