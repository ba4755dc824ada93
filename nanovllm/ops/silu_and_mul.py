"""SwiGLU's product with an activated gate, silu(gate) * up (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up [num_tokens, size] of gate_up [num_tokens, 2 * size], whose first half is the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
