"""What attention reads: the paged KV cache and a step's metadata; and its meaning, in plain torch.

The kernels are paged_decode.py (one query token a sequence) and paged_prefill.py (several).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache(NamedTuple):
    """Keys and values of one layer, each with the logical shape [num_blocks, block_size, num_kv_heads, head_dim].

    The strides (the storage order) belong to the backend. A slot is `block * block_size + offset`.
    """

    keys: Tensor
    values: Tensor


class DecodeMetadata(NamedTuple):
    """How paged_decode.py cuts a step's decodes into chunks of keys, and room for what it makes of them.

    items [max_items, 4] int32 holds a chunk's (sequence, first key, end key, chunks of the sequence); those of sequence
    i are first_item[i]..first_item[i + 1], int32 [num_seqs + 1], and lie in order. arrivals int32 [num_kv_heads,
    num_seqs] counts the chunks that are done; it is all zeros before and after a layer.
    partial_out float32 [max_items, num_heads, head_dim] and partial_lse float32 [max_items, num_heads] are what the
    chunks of one sequence leave for each other: normalised outputs, base-2 logarithms of the sums of exponentials.
    """

    items: Tensor
    first_item: Tensor
    arrivals: Tensor
    partial_out: Tensor
    partial_lse: Tensor


class PrefillMetadata(NamedTuple):
    """Lengths of a step's prefills alone, as flash-attn wants them; cu_seqlens int32 [num_prefills + 1], from 0."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's attention: num_seqs sequences, those with a single query token (decodes) first.

    Within a step every layer stores K and V before it attends, so a sequence attends to its own new tokens, and to
    those of another sequence of the same step with which it shares a block, through the cache.

    Attributes:
        num_decodes: how many of the sequences, from the first, have exactly one query token.
        cu_seqlens_q: int32 [num_seqs + 1], the running sum of query tokens.
        seq_lens: int32 [num_seqs], tokens in the cache once this step has stored its own.
        block_tables: int32 [num_seqs, max_blocks]; entries beyond a sequence's blocks are arbitrary but in range.
        slot_mapping: int64 [num_tokens]; -1 for padding.
        query_lens_cpu, seq_lens_cpu: int32 [num_seqs] on the host (NumPy), for the size of launches; absent (None)
            when the step is captured in a CUDA graph, in which every sequence is a decode.
        decodes, prefills: what a backend derives from the rest for all the layers of the step: `Backend.complete`.
    """

    num_decodes: int
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    query_lens_cpu: np.ndarray | None
    seq_lens_cpu: np.ndarray | None
    decodes: DecodeMetadata | None = None
    prefills: PrefillMetadata | None = None


def attend_reference(q: Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Causal attention of q [num_tokens, num_heads, head_dim] over the cache; same shape.

    One scaled_dot_product_attention a sequence. The query heads that share a KV head are folded into rows of one matrix
    (head-major), so that K and V are read once and never repeated.
    """
    block_size, num_kv_heads, head_dim = cache.keys.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    seq_lens = metadata.seq_lens if metadata.seq_lens_cpu is None else metadata.seq_lens_cpu
    query_lens = [1] * len(seq_lens) if metadata.query_lens_cpu is None else metadata.query_lens_cpu.tolist()
    start = 0
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens.tolist(), strict=True)):
        if query_len == 0:
            continue
        blocks = metadata.block_tables[i, : -(-seq_len // block_size)]
        # [blocks, offset, head, dim] -> [head, token, dim]; heads-before-tokens storage makes each gather one run
        k, v = (c.transpose(1, 2)[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim) for c in cache)
        k, v = k[:, :seq_len], v[:, :seq_len]
        rows = q[start : start + query_len].view(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        mask = None
        if query_len > 1:
            mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=q.device).tril(seq_len - query_len)
            mask = mask.repeat(group, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(
            rows.reshape(1, num_kv_heads, group * query_len, head_dim), k[None], v[None], attn_mask=mask, scale=scale
        )
        attended = attended.view(num_kv_heads, group, query_len, head_dim).permute(2, 0, 1, 3)
        out[start : start + query_len] = attended.reshape(query_len, -1, head_dim)
        start += query_len
    return out
