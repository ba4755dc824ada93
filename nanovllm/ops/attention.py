"""The paged KV cache, and the plain-torch reference of attention.

The fast kernels are in backends/cpu (C++) and backends/gpu (Triton). Tests compare each of them with this reference.
The C++ kernels, also those of matrix products, add numbers in an order that depends only on the model and on the
position of the token. So a request has the same bits in every batch, and with chunks of any size. On a GPU this is not
promised, because there the order also depends on the size of the batch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.step_inputs import StepInputs
from nanovllm.utils.integers import ceil_div


class KVCache(NamedTuple):
    """Keys and values of one layer, each of shape [num_blocks, block_size, num_kv_heads, head_dim].

    Each backend chooses the strides, that is the order in memory. A slot is `block * block_size + offset`.

    If an element takes one byte, keys and values are quantised. Each element is a code, in int8 or in an 8-bit float.
    Each head of a token has one scale: float32 [num_blocks, block_size, num_kv_heads]. The value is code * scale. If
    keys and values are not quantised, the scales are None.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


class CacheSize(NamedTuple):
    """How much a layer caches: num_blocks blocks of block_size tokens, or a state for each of num_rows rows.

    kv_dtype is the type of the keys and values in the blocks.
    """

    num_blocks: int
    block_size: int
    num_rows: int
    kv_dtype: torch.dtype


class AttentionVariant(NamedTuple):
    """How a layer's attention differs from plain causal attention. A layer of plain causal attention has no variant.

    Attributes:
        window: a query sees this many keys, its own token's key included; None for all keys up to its own.
        softcap: each score s becomes softcap * tanh(s / softcap), before keys are masked; None for no cap. (Gemma 2:
            https://arxiv.org/abs/2408.00118)
        sinks: float32 [num_heads]. Each query head has one more score, which takes part in the softmax, and has no
            value. None for no such score. (gpt-oss: https://arxiv.org/abs/2508.10925)
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def attend_reference(
    q: Tensor, cache: KVCache, inputs: StepInputs, scale: float, variant: AttentionVariant | None = None
) -> Tensor:
    """Compute causal attention of q over the cached keys and values.

    This calls scaled_dot_product_attention once per sequence. The query heads that share a KV head are stacked: their
    queries are the rows of one matrix, first all tokens of one head, then all tokens of the next. So K and V need no
    copies for each head.

    Args:
        q: [num_tokens, num_heads, head_dim].
        variant: what the layer does in addition; None for plain causal attention.

    Returns:
        A tensor of the shape of q.
    """
    block_size, num_kv_heads, head_dim = cache.keys.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    # In the loop: k and v are [kv head, token, head_dim], queries [kv head, group, query token, head_dim].
    grouped_q = q.view(-1, num_kv_heads, group, head_dim)
    grouped_out = out.view(-1, num_kv_heads, group, head_dim)
    sides = [side.transpose(1, 2) for side in cache if side is not None]  # [block, head, offset, ...]
    seq_lens = inputs.seq_lens if inputs.seq_lens_cpu is None else inputs.seq_lens_cpu
    query_lens = [1] * len(seq_lens) if inputs.query_lens_cpu is None else inputs.query_lens_cpu.tolist()
    start = 0
    for query_len, seq_len, table in zip(query_lens, seq_lens.tolist(), inputs.block_tables.unbind(0), strict=True):
        blocks = table[: ceil_div(seq_len, block_size)]
        # Put the sequence's blocks one after another: [kv head, token, ...]. Small models spend most of a step here,
        # and index_select is faster than indexing with [].
        k, v, *scales = [side.index_select(0, blocks).transpose(0, 1).flatten(1, 2) for side in sides]
        if scales:
            k, v = (side.float() * scale_of[..., None] for side, scale_of in zip((k, v), scales, strict=True))
        queries = grouped_q[start : start + query_len].permute(1, 2, 0, 3)
        window = variant.window if variant is not None else None
        mask = None
        if query_len > 1 or (window is not None and window < seq_len):
            # Query j is token `first + j`. It sees the tokens up to itself, or the last `window` of them.
            first = seq_len - query_len
            mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=q.device).tril(first)
            mask = mask if window is None else mask.triu(first - window + 1)
            mask = mask.repeat(group, 1).unsqueeze(0)  # the same for each head of a group
        queries = queries.reshape(1, num_kv_heads, group * query_len, head_dim).to(k.dtype)
        k = k[None, :, :seq_len]
        v = v[None, :, :seq_len]
        if variant is None or (variant.softcap is None and variant.sinks is None):
            attended = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale)
        else:
            attended = _attend_variant(queries, k, v, mask, scale, variant)
        attended = attended.view(num_kv_heads, group, query_len, head_dim).permute(2, 0, 1, 3)
        grouped_out[start : start + query_len] = attended
        start += query_len
    return out


def _attend_variant(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, variant: AttentionVariant
) -> Tensor:
    """Compute attention with a cap of scores, or with sinks, for which torch has no function.

    Args:
        q: [1, num_kv_heads, group * query_len, head_dim]; first all tokens of one head, then all of the next.
        k, v: [1, num_kv_heads, seq_len, head_dim].
        mask: bool, True where a query sees a key: [1, group * query_len, seq_len]; None if each query sees all keys.
    """
    scores = q.float() @ k.float().transpose(2, 3) * scale
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if variant.sinks is not None:
        num_kv_heads, num_queries = q.shape[1:3]
        sinks = variant.sinks.float().view(num_kv_heads, -1)
        sinks = sinks.repeat_interleave(num_queries // sinks.shape[1], dim=1)
        scores = torch.cat((scores, sinks[None, :, :, None]), dim=3)
    weights = scores.softmax(dim=3)[..., : k.shape[2]]
    return (weights @ v.float()).to(q.dtype)
