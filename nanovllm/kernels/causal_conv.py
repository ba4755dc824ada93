"""A short causal convolution of each channel, then silu. It carries the last inputs of a row to its next step.

It comes before the recurrence of gated_delta.py.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.attention import AttentionMetadata


def list_sequences(metadata: AttentionMetadata) -> Iterator[tuple[slice, int, bool]]:
    """Yield each sequence of the step: its tokens, its row, and whether it is new: no token is computed before them."""
    assert metadata.rows is not None
    lists = (metadata.rows, metadata.seq_lens, metadata.cu_seqlens_q)
    rows, seq_lens, bounds = (numbers.tolist() for numbers in lists)
    for (start, end), row, seq_len in zip(pairwise(bounds), rows, seq_lens, strict=True):
        yield slice(start, end), row, seq_len == end - start


def causal_conv_reference(x: Tensor, weight: Tensor, state: Tensor, metadata: AttentionMetadata) -> Tensor:
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
    for tokens, row, is_new in list_sequences(metadata):
        before = torch.zeros_like(state[row]) if is_new else state[row]
        inputs = torch.cat((before, x[tokens]))
        windows = inputs.to(torch.float32).unfold(0, width, 1)  # [tokens, channels, width]
        sums = (windows * weight.t().to(torch.float32)).sum(-1)
        out[tokens] = F.silu(sums.to(x.dtype))
        state[row] = inputs[len(inputs) - (width - 1) :]
    return out
