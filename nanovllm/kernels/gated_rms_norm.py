"""RMSNorm of each head, times silu of a gate: the last operator of a gated DeltaNet before its output projection."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.rms_norm import rms_norm_reference


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) * silu(gate) as [num_tokens, heads * dim]; silu and its product are in float32.

    Args:
        x: [num_tokens, heads, dim].
        gate: [num_tokens, heads * dim]. Its rows may lie apart in memory.
        weight: [dim] of the norm.
    """
    normed = rms_norm_reference(x, weight, eps).flatten(1)
    return (normed.to(torch.float32) * F.silu(gate.to(torch.float32))).to(x.dtype)
