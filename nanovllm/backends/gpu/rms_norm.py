"""RMSNorm, alone or after adding the residual, as a Triton kernel.

The references are `rms_norm_reference` and `add_rms_norm_reference` in ops/rms_norm.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.round_inputs import give_rounded, store_rounded
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    codes_ptr,
    scales_ptr,
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
    # float32 weight scales before the rounding. If there is a place for codes, it rounds the row to int8, too.
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
    out = (normed * weight).to(dtype)
    tl.store(out_ptr + row * size + column, out, mask=inside)
    if codes_ptr is not None:
        store_rounded(out.to(tl.float32), codes_ptr, scales_ptr, row, size)


def rms_norm_config(size: int, add: bool, rounds: bool) -> dict[str, int]:
    """One block for a row, with eight elements (16 bytes of bf16) a thread, up to eight warps."""
    block = next_power_of_2(size)
    config = {"ADD": add, "BLOCK": block, "num_warps": min(8, max(1, block // 256))}
    return config | {"enable_fp_fusion": False} if rounds else config


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounds: bool = False) -> Tensor:
    """rms_norm_reference in one kernel. x [num_tokens, size], weight [size] -> the shape of x.

    Args:
        rounds: whether the result is rounded to int8. Then it carries that form, too.
    """
    num_tokens, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    args = (x, x, weight, out, out, *give_rounded(out, rounds), x.stride(0), 0, size, eps)
    launch(_rms_norm_kernel, (num_tokens,), args, rms_norm_config(size, False, rounds))
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, rounds: bool = False
) -> tuple[Tensor, Tensor]:
    """add_rms_norm_reference in one kernel. x, residual [num_tokens, size] -> (normed, sum) of the same shape.

    Args:
        rounds: as in `rms_norm`, of what is normed.
    """
    num_tokens, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    strides = (x.stride(0), residual.stride(0))
    args = (x, residual, weight, out, total, *give_rounded(out, rounds), *strides, size, eps)
    launch(_rms_norm_kernel, (num_tokens,), args, rms_norm_config(size, True, rounds))
    return out, total
