"""Top-k, top-p and min-p without a sort: the lowest value that is kept, found by search in the order of the floats.

The rule and its reference are in `sample.py`. A kept set is "all tokens whose z is at least a threshold", and the
threshold is the z of a token. Read as an integer, a float's bits (those of negatives flipped) are in the order of its
value, so the threshold is found exactly, ties and all, by narrowing an interval of such integers: each pass counts or
weighs what lies above several marks at once.

Of 150,000 tokens few are ever near the threshold. A row is cut into parts of PART tokens, of which the maxima and the
weights are known; they alone give a bound that the threshold cannot be below. Only the parts whose maximum reaches the
bound are looked into: about k of them for top-k, and all only where a distribution is flat.
"""

import torch
from torch import Tensor

from nanovllm.kernels.launch import launch, wait_for_predecessor
from nanovllm.kernels.triton_shim import next_power_of_2, tl, triton

PART = 64

_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Low bits that are zero in every float32 that was one of these."""


@triton.jit
def weigh(x, row_max, temperature):
    """z and exp(z) of logits. The division is IEEE's, so that the same logits tie as in the reference."""
    z = tl.div_rn(x - row_max, temperature)
    return z, tl.exp(z)


@triton.jit
def is_broken(row_max):
    """Whether a row is no distribution: `_stats_kernel` took NaN for +inf."""
    return (row_max == float("inf")) | (row_max == float("-inf"))


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


# Both searches below look for the largest order key in [low, high) such that what lies at or above it weighs (or
# numbers) at least goal; if even what lies at low does not, by rounding, it is low. low and high are int64, for the
# width of an interval of float32 keys. A pass leaves one of MARKS + 1 parts of the interval, so a whole range of keys
# takes 7 passes for bfloat16 and 14 for float32. Counts are exact in float32: a vocabulary is far below 2**24.


@triton.jit
def _marks(low, high, MARKS: tl.constexpr):
    """Keys to try, evenly apart from low up, and their distance."""
    step = tl.maximum((high - low) // (MARKS + 1), 1)
    return low + step * (tl.arange(0, MARKS) + 1), step


@triton.jit
def _narrow(low, high, tried, step, above, goal, MARKS: tl.constexpr):
    """The interval between the last mark above which there is enough, and the next."""
    enough = (above >= goal) & (tried < high)  # what lies above falls as the marks rise: these come first
    passed = tl.sum(enough.to(tl.int64), 0)
    high = tl.where(passed < MARKS, tl.minimum(high, low + step * (passed + 1)), high)
    return low + step * passed, high


@triton.jit
def _bound(
    maxima,
    most,
    weights,
    row_max,
    temperature,
    low,
    high,
    goal,
    BY_WEIGHT: tl.constexpr,
    SHIFT: tl.constexpr,
    MARKS: tl.constexpr,
    PART: tl.constexpr,
):
    """A key that the threshold is not below, from the parts' maxima, the weights of those (most), and of whole parts.

    Of a part whose maximum reaches a mark, what lies at or above the mark weighs at least what the maximum does, and at
    least the part without PART - 1 tokens that are just below the mark.
    """
    keys = _order_key(maxima, SHIFT)
    while high - low > 1:
        tried, step = _marks(low, high, MARKS)
        tried_key = tl.minimum(tried, high).to(tl.int32)
        if BY_WEIGHT:
            _, at_mark = weigh(_from_order_key(tried_key, SHIFT), row_max, temperature)
            worth = tl.maximum(most[None, :], weights[None, :] - (PART - 1) * at_mark[:, None])
        else:
            worth = tl.full([1, 1], 1.0, tl.float32)
        above = tl.sum(tl.where(keys[None, :] >= tried_key[:, None], worth, 0.0), 1)
        low, high = _narrow(low, high, tried, step, above, goal, MARKS)
    return low


@triton.jit
def _load_parts(row_ptr, listed_ptr, start, num_listed, vocab_size, PARTS: tl.constexpr, PART: tl.constexpr):
    """PARTS of the listed parts from start on: their numbers, and their logits [PARTS, PART], -inf where is none."""
    place = start + tl.arange(0, PARTS)
    part = tl.load(listed_ptr + place, mask=place < num_listed, other=0)
    token = part[:, None] * PART + tl.arange(0, PART)[None, :]
    exists = (place < num_listed)[:, None] & (token < vocab_size)
    return part, tl.load(row_ptr + token, mask=exists, other=float("-inf")).to(tl.float32)


@triton.jit
def _search(
    row_ptr,
    listed_ptr,
    num_listed,
    vocab_size,
    row_max,
    temperature,
    low,
    high,
    goal,
    BY_WEIGHT: tl.constexpr,
    SHIFT: tl.constexpr,
    MARKS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """The threshold, among the tokens of the listed parts."""
    while high - low > 1:
        tried, step = _marks(low, high, MARKS)
        tried_key = tl.minimum(tried, high).to(tl.int32)
        above = tl.zeros([MARKS, PARTS * PART], tl.float32)
        for start in range(0, num_listed, PARTS):
            _, x = _load_parts(row_ptr, listed_ptr, start, num_listed, vocab_size, PARTS, PART)
            x = tl.reshape(x, [PARTS * PART])
            if BY_WEIGHT:
                _, worth = weigh(x, row_max, temperature)
            else:
                worth = tl.full([PARTS * PART], 1.0, tl.float32)
            above += tl.where(_order_key(x, SHIFT)[None, :] >= tried_key[:, None], worth[None, :], 0.0)
        low, high = _narrow(low, high, tried, step, tl.sum(above, 1), goal, MARKS)
    return low


@triton.jit
def _kept_weight(
    row_ptr,
    listed_ptr,
    num_listed,
    vocab_size,
    row_max,
    temperature,
    floor,
    min_p,
    kept_ptr,
    STORE: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """The weight of the listed parts' tokens that floor and min_p keep; if STORE, also part by part, at kept_ptr."""
    total = tl.zeros([PARTS, PART], tl.float32)
    for start in range(0, num_listed, PARTS):
        part, x = _load_parts(row_ptr, listed_ptr, start, num_listed, vocab_size, PARTS, PART)
        z, weight = weigh(x, row_max, temperature)
        weight = tl.where((z >= floor) & (weight >= min_p), weight, 0.0)
        total += weight
        if STORE:
            tl.store(kept_ptr + part, tl.sum(weight, 1), mask=start + tl.arange(0, PARTS) < num_listed)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit(do_not_specialize=["num_chunks"])
def _filter_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    part_max_ptr,
    part_weight_ptr,
    listed_ptr,
    chunk_weight_ptr,
    threshold_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    SHIFT: tl.constexpr,
    MARKS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows,).
    # A program owns one row: it finds the lowest z that top-k and top-p keep, and weighs each chunk's kept tokens.
    # Rows that are greedy, broken or without a filter leave at once (padding too, or it costs time and nothing else).
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if (temperature <= 0.0) | (is_filtered(top_k, top_p, min_p, vocab_size) == 0):
        return
    IN_CHUNK: tl.constexpr = CHUNK // PART
    num_parts = num_chunks * IN_CHUNK
    row_ptr, listed_ptr = logits_ptr + row * row_stride, listed_ptr + row * num_parts
    part_weight_ptr += row * num_parts
    part = tl.arange(0, CHUNKS * IN_CHUNK)
    exists = part < num_parts
    maxima = tl.load(part_max_ptr + row * num_parts + part, mask=exists, other=float("-inf")).to(tl.float32)
    row_max = tl.max(maxima, 0)
    if is_broken(row_max):
        return
    z_max, most = weigh(maxima, row_max, temperature)
    weights = tl.load(part_weight_ptr + part, mask=exists, other=0.0) * most
    total = tl.sum(weights, 0)
    by_count = (top_k > 0) & (top_k < vocab_size)
    count = top_k.to(tl.float32)
    floor = tl.full([], float("-inf"), tl.float32)
    low = _order_key(floor, SHIFT).to(tl.int64)
    high = _order_key(row_max, SHIFT).to(tl.int64) + 1
    if by_count:
        low = _bound(maxima, most, weights, row_max, temperature, low, high, count, False, SHIFT, MARKS, PART)
    elif top_p < 1.0:  # a little more than is needed, for the rounding of these sums
        goal = (top_p + 1e-5) * total
        low = _bound(maxima, most, weights, row_max, temperature, low, high, goal, True, SHIFT, MARKS, PART)

    # Below the bound nothing counts; nor, unless a top-k's tokens are to be weighed for top-p, does what min-p drops.
    # Compared by z, because logits that differ may tie as such.
    z_low = tl.div_rn(_from_order_key(low, SHIFT) - row_max, temperature)
    least = tl.where(by_count, 0.0, min_p * 0.9999)
    chosen = exists & (z_max >= z_low) & (most >= least)
    num_listed = tl.sum(chosen.to(tl.int32), 0)
    tl.store(listed_ptr + tl.cumsum(chosen.to(tl.int32), 0) - 1, part, mask=chosen)
    tl.store(part_weight_ptr + part, tl.zeros_like(most), mask=exists)
    tl.debug_barrier()  # every thread reads the list

    listed = (row_ptr, listed_ptr, num_listed, vocab_size, row_max, temperature)
    if by_count:
        low = _search(*listed, low, high, count, False, SHIFT, MARKS, PARTS, PART)
        floor = tl.div_rn(_from_order_key(low, SHIFT) - row_max, temperature)
    if top_p < 1.0:
        if by_count:
            total = _kept_weight(*listed, floor, 0.0, part_weight_ptr, False, PARTS, PART)
        low = _search(*listed, low, high, top_p * total, True, SHIFT, MARKS, PARTS, PART)
        floor = tl.maximum(floor, tl.div_rn(_from_order_key(low, SHIFT) - row_max, temperature))
    tl.store(threshold_ptr + row, floor)
    _kept_weight(*listed, floor, min_p, part_weight_ptr, True, PARTS, PART)
    tl.debug_barrier()
    chunk = tl.arange(0, CHUNKS)
    inside = chunk[:, None] * IN_CHUNK + tl.arange(0, IN_CHUNK)[None, :]
    kept = tl.load(part_weight_ptr + inside, mask=(chunk < num_chunks)[:, None], other=0.0)
    tl.store(chunk_weight_ptr + row * num_chunks + chunk, tl.sum(kept, 1), mask=chunk < num_chunks)


def filter_config(num_chunks: int, chunk: int, dtype: torch.dtype) -> dict[str, int]:
    """A row a program, on 16 warps; 64 parts at a time are all that a small top-k looks into."""
    return {
        "SHIFT": _UNUSED_BITS[dtype],
        "MARKS": 4,
        "PARTS": 64,
        "PART": PART,
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
    part_max: Tensor,
    part_weight: Tensor,
    chunk_weight: Tensor,
    threshold: Tensor,
    chunk: int,
) -> None:
    """For the rows with a filter, write threshold [n] (the lowest kept z) and chunk_weight [n, num_chunks] anew.

    logits [n, vocab]; part_max, of their dtype, and part_weight float32, both [n, num_chunks * chunk / PART]: a part's
    maximum, and its weight relative to that (which is overwritten); the rest as in `sample_reference`.
    """
    num_chunks = chunk_weight.shape[1]
    listed = torch.empty(part_max.shape, dtype=torch.int32, device=logits.device)
    filters = (temperature, top_k, top_p, min_p)
    sizes = (logits.stride(0), logits.shape[1], num_chunks)
    config = filter_config(num_chunks, chunk, logits.dtype)
    args = (logits, *filters, part_max, part_weight, listed, chunk_weight, threshold, *sizes)
    launch(_filter_kernel, (logits.shape[0],), args, config)
