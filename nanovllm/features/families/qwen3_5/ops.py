"""The operators that only hybrids have, in plain torch: a short convolution, the gated delta rule, gated norms.

A convolution of each channel, which carries the last inputs of a row to its next step, comes before the recurrence: the
gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464), attention with a state of constant size. Each
value head of a row has a matrix S [key dim, value dim], its state. It maps keys to values. A token first lets S fade by
its decay. Then it replaces a share `beta` of what S has for its key by its value:

    S = decay S;  d = beta (v - k S);  S = S + k d;  out = q S
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.rms_norm import rms_norm_reference
from nanovllm.ops.step_inputs import StepInputs


def list_sequences(inputs: StepInputs) -> Iterator[tuple[slice, int, bool]]:
    """Yield each sequence of the step: its tokens, its row, and whether it is new: no token is computed before them."""
    lists = (inputs.rows, inputs.seq_lens, inputs.cu_seqlens)
    rows, seq_lens, bounds = (numbers.tolist() for numbers in lists)
    for (start, end), row, seq_len in zip(pairwise(bounds), rows, seq_lens, strict=True):
        yield slice(start, end), row, seq_len == end - start


def causal_conv_reference(x: Tensor, weight: Tensor, state: Tensor, inputs: StepInputs) -> Tensor:
    """Return silu of the weighted sum of each token's input and of the width - 1 inputs before it, channel by channel.

    Before a new sequence's first token the inputs are zero. Those of others come from the state of their row. Every
    sequence leaves its last width - 1 inputs in the state.

    Args:
        x: [num_tokens, channels]. Its rows may lie apart in memory.
        weight: [width, channels], the oldest input's weights first.
        state: [rows, width - 1, channels] in x's dtype, the oldest input first. Rewritten in place.

    Returns:
        [num_tokens, channels], contiguous. The sum is in float32; it is rounded before silu.
    """
    width = len(weight)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for tokens, row, is_new in list_sequences(inputs):
        before = torch.zeros_like(state[row]) if is_new else state[row]
        history = torch.cat((before, x[tokens]))
        windows = history.to(torch.float32).unfold(0, width, 1)  # [tokens, channels, width]
        sums = (windows * weight.t().to(torch.float32)).sum(-1)
        out[tokens] = F.silu(sums.to(x.dtype))
        state[row] = history[len(history) - (width - 1) :]
    return out


L2_EPS = 1e-6
"""Added to the sum of squares when q and k are normalised."""


class RowState(NamedTuple):
    """Holds what one layer keeps of each row between steps. The last row is the padding's.

    Attributes:
        conv: [rows, width - 1, channels] in the model's dtype, the last inputs of the convolution.
        recurrent: float32 [rows, value heads, key dim, value dim], S of each value head. Each backend chooses the order
            of the elements within a head.
    """

    conv: Tensor
    recurrent: Tensor


def gated_delta_reference(
    qkv: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, inputs: StepInputs
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
    q, k, v = qkv.to(torch.float32).split(sizes, dim=1)  # type: ignore[no-untyped-call]
    q, k = (_normalise(x.view(-1, key_heads, 1, key_dim), value_heads) for x in (q, k))
    q = q * key_dim**-0.5
    v = v.view(-1, value_heads, 1, value_dim)
    b, a = gates.to(torch.float32)[..., None, None].chunk(2, dim=1)
    beta = b.sigmoid()
    decay = torch.exp(-a_log.exp()[:, None, None] * F.softplus(a + dt_bias[:, None, None]))
    out = torch.empty_like(v)
    for tokens, row, is_new in list_sequences(inputs):
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


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rms_norm(x) * silu(gate) as [num_tokens, heads * dim]; silu and its product are in float32.

    Args:
        x: [num_tokens, heads, dim].
        gate: [num_tokens, heads * dim]. Its rows may lie apart in memory.
        weight: [dim] of the norm.
    """
    normed = rms_norm_reference(x, weight, eps).flatten(1)
    return (normed.to(torch.float32) * F.silu(gate.to(torch.float32))).to(x.dtype)


def sigmoid_and_mul_reference(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), all [num_tokens, size]. The rows of gate may lie apart in memory."""
    return x * torch.sigmoid(gate)


class HybridOperators:
    """Computes each operator with its plain-torch reference. A subclass replaces those that it computes faster."""

    def __init__(self, backend: object) -> None:
        """The references need nothing of the backend."""

    causal_conv = staticmethod(causal_conv_reference)
    gated_delta = staticmethod(gated_delta_reference)
    gated_rms_norm = staticmethod(gated_rms_norm_reference)
    sigmoid_and_mul = staticmethod(sigmoid_and_mul_reference)
