"""Q/K-norm, rotary embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) and the KV-cache store.

The cache of a layer is a pair of tensors with the *logical* shape [num_blocks, block_size, num_kv_heads, head_dim];
their strides (the storage order) belong to the backend. A slot is `block * block_size + offset`; -1 stores nothing.
"""

import torch
from torch import Tensor

from nanovllm.kernels.rms_norm import rms_norm_reference


def rope_reference(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate x [num_tokens, num_heads, head_dim] by its positions [num_tokens], in float32.

    cos_sin is float32 [max_position, head_dim]: head_dim/2 cosines, then head_dim/2 sines. Element i is paired with
    element i + head_dim/2, as transformers' `rotate_half` does.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def store_kv_reference(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] into their slots (int64 [num_tokens])."""
    block_size = k_cache.shape[1]
    if (slot_mapping < 0).any():
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache[blocks, offsets] = key
    v_cache[blocks, offsets] = value


def norm_rope_store_reference(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Norm and rotate q and k, store k and v; return q [num_tokens, num_heads, head_dim].

    qkv is [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: all query heads, then keys, then values.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    q = rope_reference(rms_norm_reference(q, q_weight, eps), cos_sin, positions)
    k = rope_reference(rms_norm_reference(k, k_weight, eps), cos_sin, positions)
    store_kv_reference(k, v, k_cache, v_cache, slot_mapping)
    return q
