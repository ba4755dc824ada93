"""A softmax whose scores come a tile at a time (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867).

The reference is `attend_reference` in ops/attention.py.
"""

from nanovllm.backends.gpu.triton_shim import tl, triton


@triton.jit
def update_softmax(scores, highest, total):
    """Add a tile of scores [ROWS, KEYS], which are base-2 logarithms; masked ones are -infinity.

    The first tile has a key for every row, so `highest` is finite after it.

    Returns:
        The highest score so far and the sum of all weights, each [ROWS]; the tile's weights; and by how much all
        that was weighted before must be multiplied, [ROWS].
    """
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    return new_highest, total * shrink + tl.sum(weights, 1), weights, shrink
