"""Stands in for the flash-attn package: the documented meaning of the two functions that we call, in plain torch.

From flash-attn 2.8's documentation: k_cache and v_cache are (num_blocks, page_block_size, nheads_k, headdim) when there
is a block_table, int32 (batch_size, max_num_blocks_per_seq), and page_block_size is a multiple of 256; cu_seqlens are
int32 (batch_size + 1); "if causal=True, the causal mask is aligned to the bottom right corner of the attention matrix";
rows without a key are zeros.
"""

import torch
from torch import Tensor


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, batch_size: int) -> None:
    for tensor in (q, k_cache, v_cache):
        assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
        assert tensor.dtype == q.dtype
    assert q.dtype in (torch.float16, torch.bfloat16), "flash-attn takes 16-bit types only"
    assert k_cache.shape == v_cache.shape and k_cache.ndim == 4
    assert k_cache.shape[1] % 256 == 0, "the page size must be a multiple of 256"
    assert q.shape[-1] == k_cache.shape[-1] and q.shape[-2] % k_cache.shape[-2] == 0
    assert block_table.dtype == torch.int32 and block_table.shape[0] == batch_size and block_table.stride(-1) == 1


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [m, heads, dim], k and v [n, kv_heads, dim]; causal, bottom-right aligned; in float32."""
    m = q.shape[0]
    n = k.shape[0]
    if n == 0:
        return torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(group, 1)
    v = v.float().repeat_interleave(group, 1)
    scores = torch.einsum("mhd,nhd->hmn", q.float(), k) * scale
    hidden = torch.arange(n)[None, :] > torch.arange(m)[:, None] + n - m
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", weights, v).to(q.dtype)


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    return cache[blocks.long()].flatten(0, 1)[:length]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """q (batch_size, seqlen_q, nheads, headdim) -> the same shape."""
    assert q.ndim == 4 and k is None and v is None and causal
    _check(q, k_cache, v_cache, block_table, q.shape[0])
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (q.shape[0],)
    out = torch.empty(q.shape, dtype=q.dtype)
    for i, length in enumerate(cache_seqlens.tolist()):
        keys, values = (_gather(cache, block_table[i], length) for cache in (k_cache, v_cache))
        out[i] = _attend(q[i], keys, values, softmax_scale)
    return out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
) -> Tensor:
    """q (total_q, nheads, headdim) -> the same shape."""
    batch_size = cu_seqlens_q.shape[0] - 1
    assert q.ndim == 3 and causal
    _check(q, k, v, block_table, batch_size)
    for cu_seqlens in (cu_seqlens_q, cu_seqlens_k):
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous() and int(cu_seqlens[0]) == 0
    assert cu_seqlens_k.shape == cu_seqlens_q.shape and int(cu_seqlens_q[-1]) == q.shape[0]
    assert isinstance(max_seqlen_q, int) and max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert isinstance(max_seqlen_k, int) and max_seqlen_k >= int(cu_seqlens_k.diff().max())
    out = torch.empty(q.shape, dtype=q.dtype)
    for i in range(batch_size):
        mine = slice(int(cu_seqlens_q[i]), int(cu_seqlens_q[i + 1]))
        length = int(cu_seqlens_k[i + 1] - cu_seqlens_k[i])
        keys, values = (_gather(cache, block_table[i], length) for cache in (k, v))
        out[mine] = _attend(q[mine], keys, values, softmax_scale)
    return out
