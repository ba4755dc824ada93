"""Filters by top-k, top-p and min-p without a sort: a search finds the lowest value that is kept.

The reference is `filter_reference` in ops/sample.py. The kept tokens are those whose z is at least a threshold, which
is the z of some token. The search works on integers: the bits of a float, read as an integer (with those of negatives
flipped), have the order of the floats. It narrows an interval of such integers. Each pass counts or weighs the tokens
above several marks at once. So the threshold is exact, and ties are kept.

Of 150,000 tokens few are near the threshold. A row is cut into parts of PART tokens, whose maxima and weights are known
from the stats kernel. They alone give a lower bound of the threshold. The search looks only into parts whose maximum
reaches that bound: about k of them for top-k, and all of them only if the distribution is flat.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.engine.plan import SAMPLING_COLUMNS

PART = 64
TOKENS = tl.constexpr(PART)
"""Tokens of a part."""

SAMPLING_VALUES = ("temperature", "top_k", "top_p", "min_p", "seeds")
"""The fields of `SamplingValues` that these kernels read, and those of sample.py."""

WIDTH = tl.constexpr(len(SAMPLING_COLUMNS))
TEMPERATURE = tl.constexpr(SAMPLING_COLUMNS["temperature"])
TOP_K = tl.constexpr(SAMPLING_COLUMNS["top_k"])
TOP_P = tl.constexpr(SAMPLING_COLUMNS["top_p"])
MIN_P = tl.constexpr(SAMPLING_COLUMNS["min_p"])
SEED_LOW = tl.constexpr(SAMPLING_COLUMNS["seed_low"])
SEED_HIGH = tl.constexpr(SAMPLING_COLUMNS["seed_high"])

_UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""How many low bits are zero in every float32 that was converted from this dtype."""


@triton.jit
def load_sampling(table_ptr, rows_ptr, i):
    """Do what `unpack_sampling` does, for row i of the logits: return temperature, filters and seed.

    The compiler drops the values that a kernel ignores.
    """
    packed_ptr = table_ptr + tl.load(rows_ptr + i).to(tl.int64) * WIDTH
    temperature = tl.load(packed_ptr + TEMPERATURE).to(tl.float32, bitcast=True)
    top_k = tl.load(packed_ptr + TOP_K)
    top_p = tl.load(packed_ptr + TOP_P).to(tl.float32, bitcast=True)
    min_p = tl.load(packed_ptr + MIN_P).to(tl.float32, bitcast=True)
    seed_low = tl.load(packed_ptr + SEED_LOW).to(tl.int64) & 0xFFFFFFFF
    seed = (tl.load(packed_ptr + SEED_HIGH).to(tl.int64) << 32) | seed_low
    return temperature, (top_k, top_p, min_p), seed


@triton.jit
def weigh(x, row_max, temperature):
    """Return z and exp(z) of logits. The division is exact (IEEE), so that the same logits tie as in the reference."""
    z = tl.div_rn(x - row_max, temperature)
    return z, tl.exp(z)


@triton.jit
def is_broken(row_max):
    """Return whether a row is no distribution. `_stats_kernel` has turned NaN into +inf."""
    return (row_max == float("inf")) | (row_max == float("-inf"))


@triton.jit
def is_filtered(filters, vocab_size):
    """Return whether a row has any filter."""
    top_k, top_p, min_p = filters
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def drop_filtered(z, weight, threshold, filters):
    """Return the weights of tokens, 0 for those that the filters drop: all below the threshold or below min-p."""
    _, _, min_p = filters
    return tl.where((z >= threshold) & (weight >= min_p), weight, 0.0)


@triton.jit
def _order_key(x, SHIFT: tl.constexpr):
    """Return an int32 that has the order of the float32 x. SHIFT drops the low bits that a 16-bit dtype leaves zero."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _from_order_key(key, SHIFT: tl.constexpr):
    """Return the float32 whose order key this is."""
    ordered = key.to(tl.int32) << SHIFT
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return ((bits >> SHIFT) << SHIFT).to(tl.float32, bitcast=True)


# Both searches below look for the largest order key in [low, high) such that the tokens at or above it weigh (or
# number) at least `goal`. If by rounding not even the tokens at or above low do, the result is low. low and high are
# int64, because an interval of float32 keys is wider than int32. Each pass keeps one of MARKS + 1 parts of the
# interval, so the whole range takes 7 passes for bfloat16 and 14 for float32. Counts are exact in float32, because a
# vocabulary is far below 2**24.


@triton.jit
def _place_marks(low, high, MARKS: tl.constexpr):
    """Return the keys to try, at even distances above low, and the distance."""
    step = tl.maximum((high - low) // (MARKS + 1), 1)
    return low + step * (tl.arange(0, MARKS) + 1), step


@triton.jit
def _narrow(low, high, tried, step, above, goal, MARKS: tl.constexpr):
    """Return the interval between the last mark that has enough above it, and the next mark."""
    enough = (above >= goal) & (tried < high)  # higher marks have less above them: the marks with enough come first
    passed = tl.sum(enough.to(tl.int64), 0)
    high = tl.where(passed < MARKS, tl.minimum(high, low + step * (passed + 1)), high)
    return low + step * passed, high


@triton.jit
def _find_bound(facts, low, high, goal, BY_WEIGHT: tl.constexpr, SHIFT: tl.constexpr, MARKS: tl.constexpr):
    """Return a lower bound of the threshold's key, from facts about whole parts.

    In a part whose maximum reaches a mark, the tokens at or above the mark weigh at least as much as the maximum. They
    also weigh at least as much as the whole part without TOKENS - 1 tokens just below the mark.

    Args:
        facts: the largest logit of each part, the weights of those, the weights of whole parts; then the largest logit
            and the temperature of the row.
    """
    maxima, most, weights, row_max, temperature = facts
    keys = _order_key(maxima, SHIFT)
    while high - low > 1:
        tried, step = _place_marks(low, high, MARKS)
        tried_key = tl.minimum(tried, high).to(tl.int32)
        if BY_WEIGHT:
            _, at_mark = weigh(_from_order_key(tried_key, SHIFT), row_max, temperature)
            worth = tl.maximum(most[None, :], weights[None, :] - (TOKENS - 1) * at_mark[:, None])
        else:
            worth = tl.full([1, 1], 1.0, tl.float32)
        above = tl.sum(tl.where(keys[None, :] >= tried_key[:, None], worth, 0.0), 1)
        low, high = _narrow(low, high, tried, step, above, goal, MARKS)
    return low


@triton.jit
def _load_parts(parts, start, PARTS: tl.constexpr):
    """Load PARTS of the listed parts, from `start` on. Returns their numbers and their logits [PARTS, TOKENS].

    Where there is no token, the logit is -inf.

    Args:
        parts: pointers to the row's logits and to the numbers of parts, how many these are, and the row's length.
    """
    row_ptr, listed_ptr, num_listed, vocab_size = parts
    place = start + tl.arange(0, PARTS)
    part = tl.load(listed_ptr + place, mask=place < num_listed, other=0)
    token = part[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    exists = (place < num_listed)[:, None] & (token < vocab_size)
    return part, tl.load(row_ptr + token, mask=exists, other=float("-inf")).to(tl.float32)


@triton.jit
def _find_threshold(
    parts, row, low, high, goal, BY_WEIGHT: tl.constexpr, SHIFT: tl.constexpr, MARKS: tl.constexpr, PARTS: tl.constexpr
):
    """Return the threshold's key, searched among the tokens of listed parts: see `_load_parts`.

    Args:
        row: its largest logit and its temperature.
    """
    num_listed = parts[2]
    row_max, temperature = row
    while high - low > 1:
        tried, step = _place_marks(low, high, MARKS)
        tried_key = tl.minimum(tried, high).to(tl.int32)
        above = tl.zeros([MARKS, PARTS * TOKENS], tl.float32)
        for start in range(0, num_listed, PARTS):
            _, x = _load_parts(parts, start, PARTS)
            x = tl.reshape(x, [PARTS * TOKENS])
            if BY_WEIGHT:
                _, worth = weigh(x, row_max, temperature)
            else:
                worth = tl.full([PARTS * TOKENS], 1.0, tl.float32)
            above += tl.where(_order_key(x, SHIFT)[None, :] >= tried_key[:, None], worth[None, :], 0.0)
        low, high = _narrow(low, high, tried, step, tl.sum(above, 1), goal, MARKS)
    return low


@triton.jit
def _weigh_kept(parts, row, floor, min_p, kept_ptr, STORE: tl.constexpr, PARTS: tl.constexpr):
    """Return the weight of the listed parts' tokens that floor and min_p keep. If STORE, write each part's, too."""
    num_listed = parts[2]
    row_max, temperature = row
    total = tl.zeros([PARTS, TOKENS], tl.float32)
    for start in range(0, num_listed, PARTS):
        part, x = _load_parts(parts, start, PARTS)
        z, weight = weigh(x, row_max, temperature)
        weight = tl.where((z >= floor) & (weight >= min_p), weight, 0.0)
        total += weight
        if STORE:
            tl.store(kept_ptr + part, tl.sum(weight, 1), mask=start + tl.arange(0, PARTS) < num_listed)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit(do_not_specialize=["num_chunks"])
def _filter_kernel(
    logits_ptr,
    table_ptr,
    rows_ptr,
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
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows,).
    # A program owns one row: it finds the lowest z that top-k and top-p keep, and weighs each chunk's kept tokens.
    # Rows that are greedy, broken or without a filter end at once. Padding may be filtered, which only costs time.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature, filters, _ = load_sampling(table_ptr, rows_ptr, row)
    if (temperature <= 0.0) | (is_filtered(filters, vocab_size) == 0):
        return
    top_k, top_p, min_p = filters
    IN_CHUNK: tl.constexpr = CHUNK // TOKENS
    num_parts = num_chunks * IN_CHUNK
    row_ptr = logits_ptr + row * row_stride
    listed_ptr += row * num_parts
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
    facts = (maxima, most, weights, row_max, temperature)
    if by_count:
        low = _find_bound(facts, low, high, count, False, SHIFT, MARKS)
    elif top_p < 1.0:  # the goal is a little higher than needed, because these sums are rounded
        goal = (top_p + 1e-5) * total
        low = _find_bound(facts, low, high, goal, True, SHIFT, MARKS)

    # Parts below the bound do not count. Nor do parts that min-p drops, except with top-k: then top-p weighs all tokens
    # that top-k keeps.
    # Parts are compared by z, because different logits may have the same z.
    z_low = tl.div_rn(_from_order_key(low, SHIFT) - row_max, temperature)
    least = tl.where(by_count, 0.0, min_p * 0.9999)
    chosen = exists & (z_max >= z_low) & (most >= least)
    num_listed = tl.sum(chosen.to(tl.int32), 0)
    tl.store(listed_ptr + tl.cumsum(chosen.to(tl.int32), 0) - 1, part, mask=chosen)
    tl.store(part_weight_ptr + part, tl.zeros_like(most), mask=exists)
    tl.debug_barrier()  # every thread reads the whole list

    listed = (row_ptr, listed_ptr, num_listed, vocab_size)
    facts_of_row = (row_max, temperature)
    if by_count:
        low = _find_threshold(listed, facts_of_row, low, high, count, False, SHIFT, MARKS, PARTS)
        floor = tl.div_rn(_from_order_key(low, SHIFT) - row_max, temperature)
    if top_p < 1.0:
        if by_count:
            total = _weigh_kept(listed, facts_of_row, floor, 0.0, part_weight_ptr, False, PARTS)
        low = _find_threshold(listed, facts_of_row, low, high, top_p * total, True, SHIFT, MARKS, PARTS)
        floor = tl.maximum(floor, tl.div_rn(_from_order_key(low, SHIFT) - row_max, temperature))
    tl.store(threshold_ptr + row, floor)
    _weigh_kept(listed, facts_of_row, floor, min_p, part_weight_ptr, True, PARTS)
    tl.debug_barrier()
    chunk = tl.arange(0, CHUNKS)
    inside = chunk[:, None] * IN_CHUNK + tl.arange(0, IN_CHUNK)[None, :]
    kept = tl.load(part_weight_ptr + inside, mask=(chunk < num_chunks)[:, None], other=0.0)
    tl.store(chunk_weight_ptr + row * num_chunks + chunk, tl.sum(kept, 1), mask=chunk < num_chunks)


def filter_config(num_chunks: int, chunk: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the constants to compile with. A small top-k looks into about 64 parts, so PARTS is 64."""
    return {
        "SHIFT": _UNUSED_BITS[dtype],
        "MARKS": 4,
        "PARTS": 64,
        "CHUNKS": next_power_of_2(num_chunks),
        "CHUNK": chunk,
        "num_warps": 16,
    }


def filter_rows(
    logits: Tensor,
    table: Tensor,
    rows: Tensor,
    parts: Sequence[Tensor],
    chunk_weight: Tensor,
    threshold: Tensor,
) -> None:
    """Write the threshold of each row with a filter, and the weights of its chunks without the tokens that it drops.

    Args:
        logits: [n, vocab].
        table, rows: the values that `sample_reference` explains.
        parts: the maximum of each part [n, all parts], in the logits' dtype; and its weight relative to
            its maximum, float32 of the same shape, which is overwritten.
        chunk_weight: float32 [n, num_chunks], written.
        threshold: float32 [n], written: the lowest z that is kept.
    """
    num_chunks = chunk_weight.shape[1]
    listed = torch.empty(parts[0].shape, dtype=torch.int32, device=logits.device)
    sizes = (logits.stride(0), logits.shape[1], num_chunks)
    config = filter_config(num_chunks, PART * parts[0].shape[1] // num_chunks, logits.dtype)
    args = (logits, table, rows, *parts, listed, chunk_weight, threshold, *sizes)
    launch(_filter_kernel, (logits.shape[0],), args, config)
