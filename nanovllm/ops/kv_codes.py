"""Keys and values in one byte: codes, and a scale for each head of a token. It loads when something is quantised."""

import torch
from torch import Tensor

from nanovllm.ops.attention import KVCache

LARGEST_CODE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code of each type of one byte."""


def divide_by_scales(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """Divide each row of x [..., n] by a scale of its own, so that its largest element becomes `most` or -`most`.

    A row of zeros has scale 0. A row with an element that is not finite has scale NaN, and its quotients are 0.

    Returns:
        The quotients, float32 [..., n], and the scales, float32 [...]. A scale that is hardly above 0 in float32 is
        inexact: then a quotient may be beyond `most`.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    scales = torch.where(largest.isfinite(), largest / most, torch.nan)
    return torch.where(scales[..., None] > 0, x / scales[..., None], 0.0), scales


def quantize_heads(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise each head of x [..., head_dim] by a scale of its own: see `divide_by_scales`.

    A request with a scale of NaN ends with an error.

    Returns:
        The codes [..., head_dim], and the scales, float32 [...].
    """
    most = LARGEST_CODE[dtype]
    codes, scales = divide_by_scales(x, most)
    if dtype == torch.int8:
        codes = codes.round()  # halves go to the even neighbour
    return codes.clamp(-most, most).to(dtype), scales


def store_codes(key: Tensor, value: Tensor, cache: KVCache, blocks: Tensor, offsets: Tensor) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] as codes and scales, at the offsets of their blocks."""
    for x, side, scales in ((key, cache.keys, cache.key_scales), (value, cache.values, cache.value_scales)):
        assert scales is not None
        side[blocks, offsets], scales[blocks, offsets] = quantize_heads(x, side.dtype)
