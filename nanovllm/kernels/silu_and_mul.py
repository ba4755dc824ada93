"""SwiGLU's elementwise half: silu(gate) * up (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """gate_up [num_tokens, 2 * size], the gate's half first -> [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
