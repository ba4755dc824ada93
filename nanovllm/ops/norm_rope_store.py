"""Norms of q and k, rotary embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864), and storing k and v."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.ops.attention import KVCache
from nanovllm.ops.rms_norm import rms_norm_reference


class NormRope(NamedTuple):
    """The weights and angles with which a layer norms and rotates its heads.

    Attributes:
        q_weight, k_weight: [head_dim], the norms' weights, as `rms_norm` takes them. Both are None in models without
            norms of heads.
        eps: is added to the mean of squares in each norm.
        cos_sin: float32 [max_position, head_dim]: head_dim/2 cosines, then head_dim/2 sines.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos_sin: Tensor


def rope_reference(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate x [num_tokens, num_heads, head_dim] by its positions [num_tokens], in float32.

    Element i is paired with element i + head_dim/2, as transformers' `rotate_half` does.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def store_kv_reference(key: Tensor, value: Tensor, cache: KVCache, slots: Tensor) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] into their slots (int64 [num_tokens]; -1: nowhere)."""
    block_size = cache.keys.shape[1]
    if (slots < 0).any():
        kept = slots >= 0
        key = key[kept]
        value = value[kept]
        slots = slots[kept]
    blocks = slots // block_size
    offsets = slots % block_size
    if cache.key_scales is not None:
        from nanovllm.ops.kv_codes import store_codes

        return store_codes(key, value, cache, blocks, offsets)
    cache.keys[blocks, offsets] = key
    cache.values[blocks, offsets] = value


def norm_rope_store_reference(qkv: Tensor, norms: NormRope, positions: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
    """Norm and rotate q and k, store k and v; return q [num_tokens, num_heads, head_dim].

    qkv is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: all query heads, then keys, then values. positions
    [num_tokens]; slots int64 [num_tokens].
    """
    num_kv_heads, head_dim = cache.keys.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms.q_weight is not None and norms.k_weight is not None:
        q = rms_norm_reference(q, norms.q_weight, norms.eps)
        k = rms_norm_reference(k, norms.k_weight, norms.eps)
    q, k = (rope_reference(x, norms.cos_sin, positions) for x in (q, k))
    store_kv_reference(k, v, cache, slots)
    return q
