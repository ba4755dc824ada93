"""A softmax whose scores come a tile at a time (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867).

Scores are base-2 logarithms: those of the reference, times log2(e). The reference is `attend_reference` in
ops/attention.py.
"""

import math

from torch import Tensor

from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.ops.attention import AttentionVariant

_LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def start_softmax(sinks_ptr, head, has_sink):
    """Return the highest score and the sum of all weights of each row before its first key.

    Args:
        sinks_ptr: one number for each query head, or None. A sink is one more score, without a value.
        head, has_sink: the query head of each row, and whether its sink is added here.
    """
    highest = tl.full([has_sink.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([has_sink.shape[0]], tl.float32)
    if sinks_ptr is not None:
        highest = tl.load(sinks_ptr + head, mask=has_sink, other=float("-inf")) * _LOG2_E
        total = has_sink.to(tl.float32)
    return highest, total


@triton.jit
def cap_scores(scores, SOFTCAP: tl.constexpr):
    """Return scores under a soft cap, which is SOFTCAP * tanh(score / SOFTCAP); or scores as they are without a cap.

    tanh(x) is 1 - 2 / (exp(2x) + 1). Where exp overflows, that is 1. Where x is small, it would be a difference of
    numbers near 1, so the first terms of the series are taken: x - x^3 / 3 + 2x^5 / 15. They multiply the score itself.
    """
    if SOFTCAP is not None:
        x = scores * (1.0 / (SOFTCAP * _LOG2_E))
        square = x * x
        small = scores * (1.0 - square * (1.0 / 3 - square * (2.0 / 15)))
        large = (1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0)) * SOFTCAP * _LOG2_E
        scores = tl.where(square < 0.01, small, large)
    return scores


@triton.jit
def update_softmax(scores, highest, total, MAY_LACK_KEYS: tl.constexpr):
    """Add a tile of scores [ROWS, KEYS]; masked ones are -infinity.

    Args:
        MAY_LACK_KEYS: whether some row may have no key yet, and no sink. Otherwise `highest` is finite after each tile.

    Returns:
        The highest score so far and the sum of all weights, each [ROWS]; the tile's weights; and by how much all
        that was weighted before must be multiplied, [ROWS].
    """
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    origin = new_highest
    if MAY_LACK_KEYS:
        origin = tl.where(new_highest > float("-inf"), new_highest, 0.0)
    weights = tl.exp2(scores - origin[:, None])
    shrink = tl.exp2(highest - origin)
    return new_highest, total * shrink + tl.sum(weights, 1), weights, shrink


def read_variant(variant: AttentionVariant | None) -> tuple[dict[str, float | None], Tensor | None]:
    """Return a layer's variant as kernels take it: constexprs, and the sinks.

    If one of them is None, its code is not compiled.
    """
    window, softcap, sinks = AttentionVariant() if variant is None else variant
    return {"WINDOW": window, "SOFTCAP": softcap}, sinks
