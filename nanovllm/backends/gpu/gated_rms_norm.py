"""RMSNorm of each head, times silu of a gate, as a Triton kernel.

The reference is `gated_rms_norm_reference` in features/families/qwen3_5/ops.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.utils.integers import ceil_div


@triton.jit(do_not_specialize=["num_heads"])
def _gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    eps,
    num_heads,
    gate_stride,
    size,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_tokens, num_heads / HEADS).
    # A program owns HEADS heads of one token.
    # Rows of padding are like any other; their values stay in them.
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    dim = tl.arange(0, BLOCK)[None, :]
    inside = (head < num_heads) & (dim < size)
    dtype = out_ptr.dtype.element_ty
    at = head * size + dim
    row = token * num_heads * size
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dim, mask=dim < size, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / size + eps)[:, None]
    if weight_ptr.dtype.element_ty != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    normed = (normed * weight).to(dtype).to(tl.float32)
    out = (normed * (gate / (1.0 + tl.exp(-gate)))).to(dtype)
    tl.store(out_ptr + row + at, out, mask=inside)


def gated_rms_norm_config(heads: int, dim: int) -> dict[str, int]:
    """Up to 4 heads and one warp: at 128 elements a head, a thread has 16 of them, and reads 4 of the weight."""
    return {"HEADS": min(4, next_power_of_2(heads)), "BLOCK": next_power_of_2(dim), "num_warps": 1}


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """gated_rms_norm_reference in one kernel. x is contiguous."""
    num_tokens, heads, dim = x.shape
    out = torch.empty(num_tokens, heads * dim, dtype=x.dtype, device=x.device)
    config = gated_rms_norm_config(heads, dim)
    grid = (num_tokens, ceil_div(heads, config["HEADS"]))
    launch(_gated_rms_norm_kernel, grid, (x, gate, weight, out, eps, heads, gate.stride(0), dim), config)
    return out
