"""Stands in for the flash-attn package 2.8.3: its signatures and checks of the two functions that we call, in torch.

From its documentation: k_cache and v_cache are (num_blocks, page_block_size, nheads_k, headdim) when there is a
block_table, int32 (batch_size, max_num_blocks_per_seq), and page_block_size is a multiple of 256; cu_seqlens are int32
(batch_size + 1); "if causal=True, the causal mask is aligned to the bottom right corner of the attention matrix"; rows
without a key are zeros; "query at position i will only attend to keys between [i + seqlen_k - seqlen_q -
window_size[0], i + seqlen_k - seqlen_q + window_size[1]] inclusive", where -1 stands for no limit; "anything > 0
activates softcapping attention". What we never ask for (dropout, slopes, new keys) is refused here.
"""

import torch
from torch import Tensor


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None, batch_size: int) -> None:
    for tensor in (q, k_cache, v_cache):
        assert tensor.stride(-1) == 1, "the last dimension must be contiguous"
        assert tensor.dtype == q.dtype
    assert q.dtype in (torch.float16, torch.bfloat16), "flash-attn takes 16-bit types only"
    assert batch_size > 0, "batch size must be positive"
    assert k_cache.shape == v_cache.shape and k_cache.ndim == 4
    assert k_cache.shape[1] % 256 == 0, "the page size must be a multiple of 256"
    assert q.shape[-1] % 8 == 0 and q.shape[-1] <= 256, "head dimensions are multiples of 8, up to 256"
    assert q.shape[-1] == k_cache.shape[-1] and q.shape[-2] % k_cache.shape[-2] == 0
    assert block_table is not None
    assert block_table.dtype == torch.int32 and block_table.shape[0] == batch_size and block_table.stride(-1) == 1


def _refuse(*options: bool) -> None:
    assert not any(options), "an option of flash-attn is used that this stand-in does not have"


def _check_variant(window_size: tuple[int, int], softcap: float) -> None:
    left, right = window_size
    assert type(left) is int and type(right) is int and left >= -1, "flash_api.cpp takes two int"
    assert right in (-1, 0), "with causal, no key after the query's own is seen"
    assert isinstance(softcap, float) and softcap >= 0, "flash_api.cpp takes a float"


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window_size: tuple[int, int], softcap: float) -> Tensor:
    """q [m, heads, dim], k and v [n, kv_heads, dim]; causal, bottom-right aligned; in float32."""
    m = q.shape[0]
    n = k.shape[0]
    if n == 0:
        return torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(group, 1)
    v = v.float().repeat_interleave(group, 1)
    scores = torch.einsum("mhd,nhd->hmn", q.float(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(m)[:, None] + n - m
    hidden = torch.arange(n)[None, :] > positions
    if window_size[0] >= 0:
        hidden |= torch.arange(n)[None, :] < positions - window_size[0]
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
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """q (batch_size, seqlen_q, nheads, headdim) -> the same shape."""
    _refuse(k is not None, v is not None, rotary_cos is not None, rotary_sin is not None, not causal)
    _refuse(cache_batch_idx is not None, cache_leftpad is not None)
    _refuse(not rotary_interleaved, alibi_slopes is not None, num_splits != 0, return_softmax_lse)
    _check_variant(window_size, softcap)
    assert q.ndim == 4
    _check(q, k_cache, v_cache, block_table, q.shape[0])
    assert isinstance(cache_seqlens, Tensor) and cache_seqlens.is_contiguous()
    assert cache_seqlens.dtype == torch.int32 and cache_seqlens.shape == (q.shape[0],)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.empty(q.shape, dtype=q.dtype)
    for i, length in enumerate(cache_seqlens.tolist()):
        keys, values = (_gather(cache, block_table[i], length) for cache in (k_cache, v_cache))
        out[i] = _attend(q[i], keys, values, scale, window_size, softcap)
    return out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """q (total_q, nheads, headdim) -> the same shape."""
    _refuse(dropout_p != 0, not causal, alibi_slopes is not None)
    _refuse(deterministic, return_attn_probs)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    batch_size = cu_seqlens_q.shape[0] - 1
    _check_variant(window_size, softcap)
    assert q.ndim == 3
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
        out[mine] = _attend(q[mine], keys, values, scale, window_size, softcap)
    return out
