"""RMSNorm, alone or after adding the residual, as a Triton kernel.

The references are `rms_norm_reference` and `add_rms_norm_reference` in ops/rms_norm.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    x_stride,
    residual_stride,
    size,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (rows,).
    # A program owns one row: it adds the residual (if ADD), norms in float32, rounds, and scales by the weight. A
    # float32 weight scales before the rounding.
    # Rows of padding are like any other; their values stay in them.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        x = x.to(dtype).to(tl.float32)  # the reference norms the sum as it is stored
        tl.store(sum_ptr + row * size + column, x.to(dtype), mask=inside)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if weight_ptr.dtype.element_ty != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + column, (normed * weight).to(dtype), mask=inside)


def rms_norm_config(size: int, add: bool) -> dict[str, int]:
    """One block for a row, with eight elements (16 bytes of bf16) a thread, up to eight warps."""
    block = next_power_of_2(size)
    return {"ADD": add, "BLOCK": block, "num_warps": min(8, max(1, block // 256))}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm_reference in one kernel. x [num_tokens, size], weight [size] -> the shape of x."""
    num_tokens, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    args = (x, x, weight, out, out, x.stride(0), 0, size, eps)
    launch(_rms_norm_kernel, (num_tokens,), args, rms_norm_config(size, add=False))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """add_rms_norm_reference in one kernel. x, residual [num_tokens, size] -> (normed, sum) of the same shape."""
    num_tokens, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    args = (x, residual, weight, out, total, x.stride(0), residual.stride(0), size, eps)
    launch(_rms_norm_kernel, (num_tokens,), args, rms_norm_config(size, add=True))
    return out, total
