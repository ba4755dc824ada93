"""The paged KV cache, a step's metadata, and attention over them in plain torch.

The kernels are in paged_decode.py (one query token a sequence) and paged_prefill.py (several).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.utils.integers import ceil_div


class KVCache(NamedTuple):
    """Keys and values of one layer, each with the logical shape [num_blocks, block_size, num_kv_heads, head_dim].

    The strides (the storage order) belong to the backend. A slot is `block * block_size + offset`.
    """

    keys: Tensor
    values: Tensor


class DecodeMetadata(NamedTuple):
    """How paged_decode.py shares a step's decodes among programs, in chunks of keys; and memory for their results.

    items int32 [max_items, 4]: a chunk's (sequence, first key, end key, number of chunks of the sequence), in order.
    first_item int32 [num_seqs + 1]: sequence i has the chunks from first_item[i] to first_item[i + 1].
    share_begins int32 [num_programs + 1]: program p has the chunks from share_begins[p] to share_begins[p + 1].
    arrivals int32 [num_kv_heads, num_seqs]: how many chunks are done. It is all zeros before and after a layer.
    partial_out float32 [max_items, num_heads, head_dim]: a chunk's normalised output, where a sequence has several.
    partial_lse float32 [max_items, num_heads]: the base-2 logarithm of a chunk's sum of exponentials.
    """

    items: Tensor
    first_item: Tensor
    share_begins: Tensor
    arrivals: Tensor
    partial_out: Tensor
    partial_lse: Tensor


class PrefillMetadata(NamedTuple):
    """Lengths of a step's prefills, in the form that flash-attn takes; cu_seqlens int32 [num_prefills + 1], from 0."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The inputs of attention in one step of num_seqs sequences. Those with a single query token (decodes) come first.

    In every layer K and V are stored before attention. So a sequence reads its own new tokens from the cache, and those
    of another sequence of the same step with which it shares a block.

    Attributes:
        num_decodes: number of decodes, from the first sequence on.
        cu_seqlens_q: int32 [num_seqs + 1], the running sum of query tokens.
        seq_lens: int32 [num_seqs], tokens in the cache once this step has stored its own.
        block_tables: int32 [num_seqs, max_blocks]; entries beyond a sequence's blocks are arbitrary but in range.
        slot_mapping: int64 [num_tokens], where K and V of each token are stored; -1 for padding.
        query_lens_cpu, seq_lens_cpu: int32 [num_seqs] on the host (NumPy), for the size of launches. None when the step
            is captured in a CUDA graph, in which every sequence is a decode.
        decodes, prefills: what `Backend.prepare_attention` derives from the rest, for all layers of the step.
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
    """Return the causal attention of q [num_tokens, num_heads, head_dim] over the cache, of the same shape.

    It calls scaled_dot_product_attention once for each sequence. The query heads that share a KV head become rows of
    one matrix (heads first), so that K and V are read once and not repeated.
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
        blocks = metadata.block_tables[i, : ceil_div(seq_len, block_size)]
        # [blocks, offset, head, dim] -> [head, token, dim]. With heads before tokens in storage, each piece that is
        # gathered is contiguous.
        sides = (side.transpose(1, 2)[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim) for side in cache)
        k, v = (side[:, :seq_len] for side in sides)
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
