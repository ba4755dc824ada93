"""The paged KV cache, the metadata of a step, and the plain-torch reference of attention.

The Triton kernels are in paged_decode.py (one query token per sequence) and paged_prefill.py (several).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.utils.integers import ceil_div


class KVCache(NamedTuple):
    """Keys and values of one layer, each of shape [num_blocks, block_size, num_kv_heads, head_dim].

    Each backend chooses the strides, that is the order in memory. A slot is `block * block_size + offset`.
    """

    keys: Tensor
    values: Tensor


class CacheSize(NamedTuple):
    """How much a layer caches: num_blocks blocks of block_size tokens, or a state for each of num_rows rows."""

    num_blocks: int
    block_size: int
    num_rows: int


class DecodeMetadata(NamedTuple):
    """The work of paged_decode.py in one step. A sequence's keys are cut into chunks, and GPU programs share the
    chunks.

    Attributes:
        items: int32 [max_items, 4]. Each row is a chunk: (sequence, first key, end key, number of chunks of the
            sequence). Chunks are in the order of sequences and keys.
        first_item: int32 [num_seqs + 1]. Sequence i has the chunks from first_item[i] to first_item[i + 1].
        share_begins: int32 [num_programs + 1]. Program p has the chunks from share_begins[p] to share_begins[p + 1].
        arrivals: int32 [num_kv_heads, num_seqs], how many chunks are done. The program that finishes the last chunk of
            a sequence merges the outputs of all of them. All are zero before and after a layer.
        partial_out: float32 [max_items, num_heads, head_dim], the normalised output of a chunk, for sequences with
            several chunks.
        partial_lse: float32 [max_items, num_heads], log2(sum(exp(scores))) of a chunk. 2**partial_lse is the weight of
            the chunk's output when chunks are merged.
    """

    items: Tensor
    first_item: Tensor
    share_begins: Tensor
    arrivals: Tensor
    partial_out: Tensor
    partial_lse: Tensor


class PrefillMetadata(NamedTuple):
    """The lengths of a step's prefills, in flash-attn's form: cu_seqlens are int32 [num_prefills + 1] and begin with
    0."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The lengths and places that attention needs in one step of num_seqs sequences. Decodes (one query token) come
    first.

    Every layer stores K and V before attention reads them. So a sequence finds its own new tokens in the cache. If it
    shares a block with another sequence of the same step, it finds that one's tokens, too.

    Attributes:
        num_decodes: number of sequences with one query token.
        cu_seqlens_q: int32 [num_seqs + 1], the running sum of query tokens.
        seq_lens: int32 [num_seqs], tokens in the cache after this step has stored its own.
        block_tables: int32 [num_seqs, max_blocks]; entries after a sequence's blocks are any valid block numbers.
        slot_mapping: int64 [num_tokens], where K and V of each token are stored; -1 for padding.
        query_lens_cpu, seq_lens_cpu: int32 [num_seqs] on the host (NumPy). Backends choose the sizes of their launches
            by them. None when a step is captured or recorded; every sequence is a decode then.
        decodes, prefills: made by `Backend.prepare_attention` from the other attributes.
        rows: int32 [num_seqs], the row of each sequence. Layers of linear attention keep their states in these.
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
    rows: Tensor | None = None


def attend_reference(q: Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Compute causal attention of q over the cached keys and values.

    It calls scaled_dot_product_attention once per sequence. The query heads that share a KV head are stacked as
    rows of one matrix: first all tokens of one head, then of the next. So K and V need no copies for each head.

    Args:
        q: [num_tokens, num_heads, head_dim].

    Returns:
        A tensor of the shape of q.
    """
    block_size, num_kv_heads, head_dim = cache.keys.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    grouped_q = q.view(-1, num_kv_heads, group, head_dim)
    grouped_out = out.view(-1, num_kv_heads, group, head_dim)
    sides = [side.transpose(1, 2) for side in cache]  # [block, head, offset, dim]
    seq_lens = metadata.seq_lens if metadata.seq_lens_cpu is None else metadata.seq_lens_cpu
    query_lens = [1] * len(seq_lens) if metadata.query_lens_cpu is None else metadata.query_lens_cpu.tolist()
    start = 0
    for query_len, seq_len, table in zip(query_lens, seq_lens.tolist(), metadata.block_tables.unbind(0), strict=True):
        blocks = table[: ceil_div(seq_len, block_size)]
        # Small models spend most of a step here, and index_select is faster than indexing with [].
        k, v = [side.index_select(0, blocks).transpose(0, 1).reshape(num_kv_heads, -1, head_dim) for side in sides]
        rows = grouped_q[start : start + query_len].permute(1, 2, 0, 3)
        mask = None
        if query_len > 1:
            # Query j is token seq_len - query_len + j, and sees all tokens up to itself. The same mask is repeated
            # for each head of a group.
            mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=q.device).tril(seq_len - query_len)
            mask = mask.repeat(group, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(
            rows.reshape(1, num_kv_heads, group * query_len, head_dim),
            k[None, :, :seq_len],
            v[None, :, :seq_len],
            attn_mask=mask,
            scale=scale,
        )
        attended = attended.view(num_kv_heads, group, query_len, head_dim).permute(2, 0, 1, 3)
        grouped_out[start : start + query_len] = attended
        start += query_len
    return out
