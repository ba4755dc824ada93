"""RMSNorm, alone or after adding the residual (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467)."""

import torch
from torch import Tensor


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x in float32, round to x's dtype, then scale by weight (transformers' order).

    A float32 weight beside an x of fewer bits scales before the rounding, as families do whose norms multiply by
    1 + weight.
    """
    x32 = x.to(torch.float32)  # this may be x itself, so nothing below works in place
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if weight.dtype != x.dtype:
        return (normed * weight).to(x.dtype)
    return normed.to(x.dtype) * weight


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual), both [num_tokens, hidden] in x's dtype."""
    residual = x + residual
    return rms_norm_reference(residual, weight, eps), residual
