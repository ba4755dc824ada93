"""The gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464): attention with a state of constant size.

Each value head of a row has a matrix S [key dim, value dim], its state. It maps keys to values. A token first lets S
fade by its decay. Then it replaces a share `beta` of what S has for its key by its value:

    S = decay S;  d = beta (v - k S);  S = S + k d;  out = q S
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.attention import AttentionMetadata
from nanovllm.kernels.causal_conv import list_sequences

L2_EPS = 1e-6
"""Added to the sum of squares when q and k are normalised."""


class RowState(NamedTuple):
    """What one layer keeps of each row between steps. The last row is the padding's.

    Attributes:
        conv: [rows, width - 1, channels] in the model's dtype, the last inputs of the convolution.
        recurrent: float32 [rows, value heads, key dim, value dim], S of each value head. Each backend chooses the order
            of the elements within a head.
    """

    conv: Tensor
    recurrent: Tensor


def gated_delta_reference(
    qkv: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Apply the gated delta rule to each sequence of a step, token after token, in float32.

    q and k are L2-normalised, and q is scaled by key_dim^-0.5. beta is sigmoid(b), and the decay is
    exp(-exp(a_log) softplus(a + dt_bias)). A new sequence begins with S = 0, others with the state of their row. Each
    key head serves a group of value heads.

    Args:
        qkv: [num_tokens, (2 * key heads * key dim) + value heads * value dim]: all heads of q, then of k, then of v.
        gates: [num_tokens, 2 * value heads]: b, then a. Its rows may lie apart in memory.
        a_log, dt_bias: float32 [value heads].
        state: float32 [rows, value heads, key dim, value dim], rewritten in place.

    Returns:
        [num_tokens, value heads, value dim] in qkv's dtype.
    """
    value_heads, key_dim, value_dim = state.shape[1:]
    key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    sizes = (key_heads * key_dim, key_heads * key_dim, value_heads * value_dim)
    q, k, v = qkv.to(torch.float32).split(sizes, dim=1)
    q, k = (_normalise(x.view(-1, key_heads, 1, key_dim), value_heads) for x in (q, k))
    q = q * key_dim**-0.5
    v = v.view(-1, value_heads, 1, value_dim)
    b, a = gates.to(torch.float32)[..., None, None].chunk(2, dim=1)
    beta = b.sigmoid()
    decay = torch.exp(-a_log.exp()[:, None, None] * F.softplus(a + dt_bias[:, None, None]))
    out = torch.empty_like(v)
    for tokens, row, is_new in list_sequences(metadata):
        s = torch.zeros_like(state[row]) if is_new else state[row]
        for t in range(tokens.start, tokens.stop):
            s = s * decay[t]
            d = beta[t] * (v[t] - k[t] @ s)
            s = s + k[t].transpose(1, 2) * d
            out[t] = q[t] @ s
        state[row] = s
    return out.squeeze(2).to(qkv.dtype)


def _normalise(heads: Tensor, value_heads: int) -> Tensor:
    """Divide each head [tokens, key heads, 1, key dim] by its length, and repeat it for its group of value heads."""
    normed = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
    return normed.repeat_interleave(value_heads // heads.shape[1], dim=1)
