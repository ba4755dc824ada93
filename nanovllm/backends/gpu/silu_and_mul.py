"""SwiGLU's product with an activated gate as a Triton kernel. The reference is in ops/silu_and_mul.py."""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.utils.integers import ceil_div


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    # Grid (num_tokens, size / BLOCK).
    # A program owns BLOCK columns of one row. It computes in float32 and rounds after silu, as the reference does.
    # Rows of padding are like any other; their values stay in them.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + size + column, mask=inside, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * size + column, (silu.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


def silu_and_mul_config() -> dict[str, int]:
    """Eight elements of each half a thread."""
    return {"BLOCK": 1024, "num_warps": 4}


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu_and_mul_reference in one kernel."""
    num_tokens = gate_up.shape[0]
    size = gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    config = silu_and_mul_config()
    grid = (num_tokens, ceil_div(size, config["BLOCK"]))
    launch(_silu_and_mul_kernel, grid, (gate_up, out, gate_up.stride(0), size), config)
    return out
