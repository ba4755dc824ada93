"""Norms of q and k, rotary embedding and storing k and v, in one Triton kernel.

The reference is `norm_rope_store_reference` in ops/norm_rope_store.py.
"""

from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.paged_cache import list_parts, quantize_halves
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.ops.attention import KVCache
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.utils.integers import ceil_div


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads"])
def _norm_rope_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    qkv_stride,
    page_stride,
    token_stride,
    head_stride,
    eps,
    num_heads,
    num_kv_heads,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_tokens, all heads / HEADS).
    # A program owns HEADS heads of one token, any mix of q, k and v: q is rewritten in place, k and v go to the cache.
    # Tokens with slot -1 are padding: they store nothing in the cache, but their position must be in range.
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, HALF)
    dtype = qkv_ptr.dtype.element_ty
    CODES: tl.constexpr = k_cache_ptr.dtype.element_ty.primitive_bitwidth == 8
    is_q = (head < num_heads)[:, None]
    is_v = (head >= num_heads + num_kv_heads)[:, None]
    exists = (head < num_heads + 2 * num_kv_heads)[:, None]

    # The halves of a head stay apart in registers, so that threads need not exchange them for the rotation.
    row = qkv_ptr + token * qkv_stride + head[:, None] * (2 * HALF) + dim[None, :]
    first_in = tl.load(row, mask=exists, other=0.0)
    second_in = tl.load(row + HALF, mask=exists, other=0.0)
    first = first_in.to(tl.float32)
    second = second_in.to(tl.float32)
    if NORM:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        inverse = tl.rsqrt(mean + eps)[:, None]
        q_first = tl.load(q_weight_ptr + dim).to(tl.float32)[None, :]
        q_second = tl.load(q_weight_ptr + HALF + dim).to(tl.float32)[None, :]
        k_first = tl.load(k_weight_ptr + dim).to(tl.float32)[None, :]
        k_second = tl.load(k_weight_ptr + HALF + dim).to(tl.float32)[None, :]
        first *= inverse
        second *= inverse
        if q_weight_ptr.dtype.element_ty != tl.float32:
            first = first.to(dtype).to(tl.float32)
            second = second.to(dtype).to(tl.float32)
        first = (first * tl.where(is_q, q_first, k_first)).to(dtype).to(tl.float32)
        second = (second * tl.where(is_q, q_second, k_second)).to(dtype).to(tl.float32)

    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + dim)[None, :]
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + dim)[None, :]
    new_first = (first * cos - second * sin).to(dtype)
    new_second = (second * cos + first * sin).to(dtype)
    tl.store(row, new_first, mask=is_q)
    tl.store(row + HALF, new_second, mask=is_q)

    if CODES:
        first = tl.where(is_v, first_in, new_first)
        second = tl.where(is_v, second_in, new_second)
        new_first, new_second, scales = quantize_halves(first, second, k_cache_ptr.dtype.element_ty)
        first_in = new_first
        second_in = new_second
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        place = (slot // BLOCK_SIZE) * page_stride + (slot % BLOCK_SIZE) * token_stride
        k_offset = place + (head - num_heads)[:, None].to(tl.int64) * head_stride + dim[None, :]
        is_k = exists & (head >= num_heads)[:, None] & (head < num_heads + num_kv_heads)[:, None]
        tl.store(k_cache_ptr + k_offset, new_first, mask=is_k)
        tl.store(k_cache_ptr + k_offset + HALF, new_second, mask=is_k)
        v_offset = place + (head - num_heads - num_kv_heads)[:, None].to(tl.int64) * head_stride + dim[None, :]
        tl.store(v_cache_ptr + v_offset, first_in, mask=exists & is_v)
        tl.store(v_cache_ptr + v_offset + HALF, second_in, mask=exists & is_v)
        if CODES:
            k_place = (slot // BLOCK_SIZE * num_kv_heads + (head - num_heads)[:, None]) * BLOCK_SIZE + slot % BLOCK_SIZE
            tl.store(k_scales_ptr + k_place, scales, mask=is_k)
            tl.store(v_scales_ptr + k_place - num_kv_heads * BLOCK_SIZE, scales, mask=exists & is_v)


def norm_rope_store_config(all_heads: int, head_dim: int, block_size: int, norm: bool) -> dict[str, int]:
    """Up to 16 heads a program. At head_dim 128 a thread has 8 elements (16 bytes of bf16) of either half."""
    return {
        "BLOCK_SIZE": block_size,
        "HALF": head_dim // 2,
        "HEADS": min(16, next_power_of_2(all_heads)),
        "NORM": norm,
        "num_warps": 4,
    }


def norm_rope_store(qkv: Tensor, norms: NormRope, positions: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
    """norm_rope_store_reference in one kernel. q [num_tokens, num_heads, head_dim] is rewritten in place, in qkv."""
    block_size, num_kv_heads, head_dim = cache.keys.shape[1:]
    num_tokens = qkv.shape[0]
    all_heads = qkv.shape[1] // head_dim
    num_heads = all_heads - 2 * num_kv_heads
    config = norm_rope_store_config(all_heads, head_dim, block_size, norms.q_weight is not None)
    grid = (num_tokens, ceil_div(all_heads, config["HEADS"]))
    pointers, strides = list_parts(cache)
    weights = (qkv if norms.q_weight is None else norms.q_weight, qkv if norms.k_weight is None else norms.k_weight)
    sizes = (norms.eps, num_heads, num_kv_heads)
    args = (qkv, *weights, norms.cos_sin, positions, slots, *pointers, qkv.stride(0), *strides, *sizes)
    launch(_norm_rope_store_kernel, grid, args, config)
    return qkv[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim)
