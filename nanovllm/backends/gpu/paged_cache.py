"""The paged cache as Triton kernels see it: elements of the model's type, or codes of one byte with scales.

A kernel that reads codes one by one has CODES: the cache's pointer has a type of one byte. decode_codes.py reads pairs
of them as int16. The references are in ops/kv_codes.py and ops/attention.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.ops.attention import KVCache


@triton.jit
def quantize_halves(first, second, CODE: tl.constexpr):
    """Quantise heads whose halves are first and second, [HEADS, HALF] each, as `quantize_heads` does.

    It returns the codes of both halves in the type CODE, and the scales, [HEADS, 1].
    """
    LARGEST: tl.constexpr = 127.0 if tl.int8 == CODE else 448.0
    infinity = float("inf")
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    # A maximum ignores NaN, so NaN becomes infinity before.
    first_size = tl.where(tl.abs(first) < infinity, tl.abs(first), infinity)
    second_size = tl.where(tl.abs(second) < infinity, tl.abs(second), infinity)
    largest = tl.max(tl.maximum(first_size, second_size), 1, keep_dims=True)
    # div_rn rounds as the reference does, and / does not.
    scales = tl.where(largest < infinity, tl.div_rn(largest, LARGEST), float("nan"))
    divisor = tl.where(scales > 0.0, scales, infinity)
    first = tl.where(scales > 0.0, tl.div_rn(first, divisor), 0.0)
    second = tl.where(scales > 0.0, tl.div_rn(second, divisor), 0.0)
    if tl.int8 == CODE:
        # A float32 of this size has no fraction, so the sum is rounded to a whole number, and halves to an even one.
        WHOLE: tl.constexpr = 1.5 * 2**23
        first = (first + WHOLE) - WHOLE
        second = (second + WHOLE) - WHOLE
    first = tl.clamp(first, -LARGEST, LARGEST)
    second = tl.clamp(second, -LARGEST, LARGEST)
    return first.to(CODE), second.to(CODE), scales


def list_parts(cache: KVCache) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return a cache's tensors, and the strides of its elements, as kernels take them.

    Scales lie in memory as [num_blocks, num_kv_heads, block_size], which `Backend.allocate_cache` makes of them. If
    there are none, keys and values stand in their places, where no kernel reads.
    """
    key_scales = cache.keys if cache.key_scales is None else cache.key_scales
    value_scales = cache.values if cache.value_scales is None else cache.value_scales
    return (cache.keys, cache.values, key_scales, value_scales), cache.keys.stride()[:3]


def list_elements(cache: KVCache) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Do what `list_parts` does, where an element of a cache of codes is a pair of neighbouring ones, int16.

    A cache without codes has None for its scales.
    """
    keys = cache.keys
    values = cache.values
    if cache.key_scales is not None:
        keys = keys.view(torch.int16)
        values = values.view(torch.int16)
    return (keys, values, cache.key_scales, cache.value_scales), keys.stride()[:3]
