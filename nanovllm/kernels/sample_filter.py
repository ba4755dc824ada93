"""Top-k, top-p and min-p without a sort: the lowest value that is kept, found by search in the order of the floats.

The rule and its reference are in `sample.py`. A kept set is "all tokens whose z is at least a threshold", and the
threshold is the z of a token. Read as an integer, a float's bits (those of negatives flipped) are in the order of its
value, so the threshold is found exactly, ties and all, by narrowing an interval of such integers: each pass over the
row counts or weighs what lies above several marks at once.
"""

import torch
from torch import Tensor

from nanovllm.kernels.triton_shim import next_power_of_2, tl, triton

_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits that are zero in every float32 that was one of these."""


@triton.jit
def weigh(x, row_max, temperature):
    """z and exp(z) of logits. The division is IEEE's, so that the same logits tie as in the reference."""
    z = tl.div_rn(x - row_max, temperature)
    return z, tl.exp(z)


@triton.jit
def is_filtered(top_k, top_p, min_p, vocab_size):
    """Whether a row has any filter."""
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def _order_key(x, SHIFT: tl.constexpr):
    """An int32 in the order of the float32 x; SHIFT drops the low bits that a 16-bit type leaves zero."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _from_order_key(key, SHIFT: tl.constexpr):
    """The float32 whose order key this is."""
    ordered = key.to(tl.int32) << SHIFT
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return ((bits >> SHIFT) << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    row_ptr,
    vocab_size,
    row_max,
    temperature,
    low,
    high,
    goal,
    BY_WEIGHT: tl.constexpr,
    SHIFT: tl.constexpr,
    MARKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest order key in [low, high) such that the tokens at or above it weigh (or number) at least goal.

    If even those at low do not, by rounding, it is low. low and high are int64, for the width of an interval of float32
    keys. A pass leaves one of MARKS + 1 parts of the interval: 7 passes for bfloat16, 14 for float32. Counts are exact
    in float32: a vocabulary is far below 2**24.
    """
    mark = tl.arange(0, MARKS)
    while high - low > 1:
        step = tl.maximum((high - low) // (MARKS + 1), 1)
        tried = low + step * (mark + 1)
        tried_key = tl.minimum(tried, high).to(tl.int32)
        above = tl.zeros([MARKS, BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            if BY_WEIGHT:
                _, worth = weigh(x, row_max, temperature)
            else:
                worth = tl.where(token < vocab_size, 1.0, 0.0)
            above += tl.where(_order_key(x, SHIFT)[None, :] >= tried_key[:, None], worth[None, :], 0.0)
        # What lies above falls as the marks rise, so those that have enough come first.
        enough = (tl.sum(above, 1) >= goal) & (tried < high)
        passed = tl.sum(enough.to(tl.int64), 0)
        high = tl.where(passed < MARKS, tl.minimum(high, low + step * (passed + 1)), high)
        low = low + step * passed
    return low


@triton.jit(do_not_specialize=["vocab_size", "num_chunks"])
def _filter_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    chunk_max_ptr,
    chunk_weight_ptr,
    threshold_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    SHIFT: tl.constexpr,
    MARKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # Grid (num_rows,).
    # A program owns one row: it finds the lowest z that top-k and top-p keep, and weighs each chunk's kept tokens.
    # Rows that are greedy or have no filter leave at once (padding among them, or it costs time and nothing else).
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if (temperature <= 0.0) | (is_filtered(top_k, top_p, min_p, vocab_size) == 0):
        return
    row_ptr = logits_ptr + row * row_stride
    index = tl.arange(0, CHUNKS)
    maxima = tl.load(chunk_max_ptr + row * num_chunks + index, mask=index < num_chunks, other=float("-inf"))
    row_max = tl.max(maxima, 0)
    floor = tl.full([], float("-inf"), tl.float32)
    low = _order_key(floor, SHIFT).to(tl.int64)
    high = _order_key(row_max, SHIFT).to(tl.int64) + 1
    if (top_k > 0) & (top_k < vocab_size):
        goal = top_k.to(tl.float32)
        low = _search(row_ptr, vocab_size, row_max, temperature, low, high, goal, False, SHIFT, MARKS, CHUNK)
        floor = tl.div_rn(_from_order_key(low, SHIFT) - row_max, temperature)
    if top_p < 1.0:
        kept = tl.zeros([CHUNK], tl.float32)
        for start in range(0, vocab_size, CHUNK):
            token = start + tl.arange(0, CHUNK)
            x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
            z, weight = weigh(x, row_max, temperature)
            kept += tl.where(z >= floor, weight, 0.0)
        goal = top_p * tl.sum(kept, 0)
        low = _search(row_ptr, vocab_size, row_max, temperature, low, high, goal, True, SHIFT, MARKS, CHUNK)
        floor = tl.maximum(floor, tl.div_rn(_from_order_key(low, SHIFT) - row_max, temperature))
    tl.store(threshold_ptr + row, floor)
    for chunk in range(0, num_chunks):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        z, weight = weigh(x, row_max, temperature)
        weight = tl.where((z >= floor) & (weight >= min_p), weight, 0.0)
        tl.store(chunk_weight_ptr + row * num_chunks + chunk, tl.sum(weight, 0))


def filter_config(num_chunks: int, chunk: int, dtype: torch.dtype) -> dict[str, int]:
    """A row a program, on 16 warps: each pass is bound by what one multiprocessor can read from the L2 cache."""
    return {
        "SHIFT": _UNUSED_BITS[dtype],
        "MARKS": 4,
        "CHUNKS": next_power_of_2(num_chunks),
        "CHUNK": chunk,
        "num_warps": 16,
    }


def filter_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    chunk_max: Tensor,
    chunk_weight: Tensor,
    threshold: Tensor,
    config: dict[str, int],
) -> None:
    """For the rows with a filter, write threshold [n] (the lowest kept z) and chunk_weight [n, num_chunks] anew.

    logits [n, vocab]; chunk_max float32 [n, num_chunks]; the rest as in `sample_reference`.
    """
    _filter_kernel[(logits.shape[0],)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        chunk_max,
        chunk_weight,
        threshold,
        logits.stride(0),
        logits.shape[1],
        chunk_max.shape[1],
        **config,
    )
