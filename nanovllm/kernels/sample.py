"""Sampling by inversion: one uniform number a row, then the inverse of the cumulative distribution in token order.

The rule, the same in every backend:

1. temperature 0 takes the most likely token (the lowest id of equals); otherwise z = (logits - max) / temperature.
2. top-k keeps the tokens whose z is at least the k-th largest (ties are kept); 0 is off.
3. top-p, over the mass that top-k left, keeps the tokens whose z is at least that of the token at which the mass,
   summed from the most likely down, first reaches p (that token and its ties are kept); 1 is off.
4. min-p keeps the tokens of which exp(z) is at least min_p: the probability relative to the most likely token.
5. u in (0, 1) comes from Philox4x32-10, keyed by the request's seed, with the position of the sampled token as the
   counter (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): no state, so a request draws the same
   numbers whatever else is in its batch, preempted or not.
6. The token is the first whose cumulative weight exceeds u * total, found in two levels: CHUNK tokens at a time, then
   inside one chunk.

A row whose logits hold a NaN, +inf or nothing finite is no distribution: before any of this it is flagged as
broken, and gets some token of the vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.launch import launch, wait_for_predecessor
from nanovllm.kernels.sample_filter import PART, filter_rows, is_broken, is_filtered, weigh
from nanovllm.kernels.triton_shim import next_power_of_2, tl, triton

CHUNK = 4096

_MASK = 0xFFFFFFFF


class SamplingValues(NamedTuple):
    """How each of n rows is sampled.

    temperature, top_p, min_p float32 [n]; top_k int32 [n]; seeds int64 [n]; positions [n], the index in its sequence of
    the token to be sampled.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    def of_rows(self, rows: Tensor) -> "SamplingValues":
        """Those at indices rows."""
        return SamplingValues(*(values[rows] for values in self))

    def filters(self, vocab_size: int) -> Tensor:
        """Whether each row has a filter, bool [n]."""
        return ((self.top_k > 0) & (self.top_k < vocab_size)) | (self.top_p < 1) | (self.min_p > 0)


class Sampled(NamedTuple):
    """A token a row, int32 [n]: always one of the vocabulary, for the next step; and -1 where the row is broken."""

    token_ids: Tensor
    checked: Tensor


def uniform_reference(seeds: Tensor, positions: Tensor) -> Tensor:
    """One float32 in (0, 1) a row: the first word of Philox4x32-10, its upper 23 bits centred in their interval.

    seeds int64 [n] (the 64 key bits), positions int64 [n] (the low counter word). 23 bits and a half are exact in
    float32, so neither 0 nor 1 can come out.
    """
    counter = [positions & _MASK, *(torch.zeros_like(positions) for _ in range(3))]
    key0, key1 = seeds & _MASK, (seeds >> 32) & _MASK
    for _ in range(10):
        product0, product1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57  # wraps in int64: the bits are right
        counter = [
            ((product1 >> 32) & _MASK) ^ counter[1] ^ key0,
            product1 & _MASK,
            ((product0 >> 32) & _MASK) ^ counter[3] ^ key1,
            product0 & _MASK,
        ]
        key0, key1 = (key0 + 0x9E3779B9) & _MASK, (key1 + 0xBB67AE85) & _MASK
    return ((counter[0] >> 9).to(torch.float32) + 0.5) * 2.0**-23


def filter_reference(z: Tensor, values: SamplingValues) -> Tensor:
    """The mask of kept tokens, bool [n, vocab], for scaled logits z float32 [n, vocab] with maximum 0 in each row."""
    vocab_size, top_p = z.shape[1], values.top_p
    k = torch.where((values.top_k > 0) & (values.top_k < vocab_size), values.top_k, vocab_size)
    # Sorting 150,000 values is 10 ms a row: where every row has a small k, the largest k values are all that counts.
    # One more than k would not do for ties, so tied values beyond the k-th are summed by `count` below.
    descending = z.topk(int(k.max()), dim=1).values
    kth = descending.gather(1, (k - 1).unsqueeze(1).long())
    threshold = kth
    if bool((top_p < 1).any()):
        weights = torch.where(descending >= kth, descending, -math.inf).exp()
        cumulative = weights.cumsum(1)
        total = torch.where(z >= kth, z, -math.inf).exp().sum(1, keepdim=True)
        crossing = (cumulative < top_p.unsqueeze(1) * total).sum(1, keepdim=True)
        crossing = crossing.clamp(max=descending.shape[1] - 1)
        at_crossing = descending.gather(1, crossing)
        threshold = torch.where(top_p.unsqueeze(1) < 1, torch.maximum(kth, at_crossing), kth)
    return (z >= threshold) & (z.exp() >= values.min_p.unsqueeze(1))


def _first_above(weights: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the first index whose cumulative weight exceeds target [n], and the weight before that index.

    Rounding may leave the target at or above the total: then it is the last index with a weight.
    """
    cumulative = weights.cumsum(1)
    n = weights.shape[1]
    last = n - 1 - (weights > 0).flip(1).to(torch.int8).argmax(1)
    index = torch.minimum((cumulative <= target.unsqueeze(1)).sum(1), last)
    before = cumulative.gather(1, (index - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    return index, torch.where(index > 0, before, torch.zeros_like(before))


def sample_reference(logits: Tensor, values: SamplingValues) -> Sampled:
    """Sample one token a row by the rule above. logits [n, vocab] of any float dtype."""
    highest, greedy = logits.max(1)  # NaN counts as the highest of all
    token_ids, is_finite = greedy.to(torch.int32), highest.isfinite()
    random = ((values.temperature > 0) & is_finite).nonzero().squeeze(1)
    if random.numel() == 0:
        return Sampled(token_ids, torch.where(is_finite, token_ids, -1))
    logits, values = logits[random].float(), values.of_rows(random)
    z = (logits - highest[random].float().unsqueeze(1)) / values.temperature.unsqueeze(1)
    weights = z.exp()
    filtered = values.filters(z.shape[1]).nonzero().squeeze(1)
    if filtered.numel():
        kept = filter_reference(z[filtered], values.of_rows(filtered))
        weights[filtered] = torch.where(kept, weights[filtered], 0.0)
    n, vocab_size = weights.shape
    num_chunks = -(-vocab_size // CHUNK)
    chunks = torch.nn.functional.pad(weights, (0, num_chunks * CHUNK - vocab_size)).view(n, num_chunks, CHUNK)
    sums = chunks.sum(2)
    target = uniform_reference(values.seeds, values.positions.long()) * sums.sum(1)
    chunk, before = _first_above(sums, target)
    inside, _ = _first_above(chunks[torch.arange(n), chunk], target - before)
    token_ids[random] = (chunk * CHUNK + inside).to(torch.int32)
    return Sampled(token_ids, torch.where(is_finite, token_ids, -1))


# The Triton path: three kernels, none of which sorts or waits for the host.
#   stats   maximum and weight (relative to it) of chunks, and of their parts; where a chunk's maximum is: one read
#           of the logits
#   filter  rows with a filter only (sample_filter.py): their threshold, and their chunks' weights of what is kept
#   draw    the token: the chunk by the chunks' weights, then the token within it


@triton.jit
def uniform(seed, position):
    """`uniform_reference` of one row, bit for bit."""
    counter = position.to(tl.uint32)
    zero = counter * 0
    word, _, _, _ = tl.philox(seed, counter, zero, zero, zero)
    return ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23


@triton.jit
def _stats_kernel(
    logits_ptr,
    temperature_ptr,
    chunk_max_ptr,
    chunk_argmax_ptr,
    chunk_weight_ptr,
    part_max_ptr,
    part_weight_ptr,
    row_stride,
    vocab_size,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows, num_chunks): the second dimension of a grid ends at 65535.
    # A program owns one chunk of one row, as CHUNK / PART parts of PART tokens.
    # Padding rows are like any other; places beyond the vocabulary count as -inf.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    part = tl.arange(0, CHUNK // PART)
    # vocab_size is specialised on: a multiple of 16 masks whole vectors, which can then be loaded as such.
    token = chunk * CHUNK + part[:, None] * PART + tl.arange(0, PART)[None, :]
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x < float("inf"), x, float("inf"))  # NaN, too: the row's maximum then says that it is broken
    temperature = tl.load(temperature_ptr + row)
    scale = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)  # the sums need no IEEE division of each
    part_max = tl.max(x, 1)
    origin = tl.where(part_max > float("-inf"), part_max, 0.0)  # not -inf - -inf
    part_weight = tl.sum(tl.exp((x - origin[:, None]) * scale), 1)
    highest = tl.max(part_max, 0)
    origin = tl.where(highest > float("-inf"), highest, 0.0)
    out = row * tl.num_programs(1) + chunk
    tl.store(chunk_max_ptr + out, highest)
    tl.store(chunk_argmax_ptr + out, tl.min(tl.min(tl.where(x == highest, token, 0x7FFFFFFF), 1), 0))
    tl.store(chunk_weight_ptr + out, tl.sum(part_weight * tl.exp((part_max - origin) * scale), 0))
    tl.store(part_max_ptr + out * (CHUNK // PART) + part, part_max.to(part_max_ptr.dtype.element_ty))
    tl.store(part_weight_ptr + out * (CHUNK // PART) + part, part_weight)


@triton.jit
def _first_above_target(weights, target, SIZE: tl.constexpr):
    """`_first_above` of one row."""
    index = tl.arange(0, SIZE)
    cumulative = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0.0, index, 0), 0)
    found = tl.minimum(tl.min(tl.where(cumulative > target, index, SIZE), 0), last)
    return found, tl.sum(tl.where(index == found - 1, cumulative, 0.0), 0)


@triton.jit(do_not_specialize=["num_chunks"])
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    chunk_max_ptr,
    chunk_argmax_ptr,
    chunk_weight_ptr,
    threshold_ptr,
    token_ptr,
    checked_ptr,
    row_stride,
    vocab_size,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows,).
    # A program owns one row and writes its token, twice.
    # Padding rows get some token.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    exists = chunks < num_chunks
    maxima = tl.load(chunk_max_ptr + row * num_chunks + chunks, mask=exists, other=float("-inf"))
    row_max = tl.max(maxima, 0)
    temperature = tl.load(temperature_ptr + row)
    if is_broken(row_max):
        tl.store(token_ptr + row, 0)
        tl.store(checked_ptr + row, -1)
        return
    if temperature <= 0.0:
        places = tl.load(chunk_argmax_ptr + row * num_chunks + chunks, mask=exists, other=0)
        best = tl.min(tl.where(exists & (maxima == row_max), places, 0x7FFFFFFF), 0)
        tl.store(token_ptr + row, best)
        tl.store(checked_ptr + row, best)
        return
    min_p = tl.load(min_p_ptr + row)
    filtered = is_filtered(tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), min_p, vocab_size)
    chunk_weights = tl.load(chunk_weight_ptr + row * num_chunks + chunks, mask=exists, other=0.0)
    # stats weighed a chunk relative to the chunk's maximum, filter relative to the row's
    _, shrink = weigh(maxima, row_max, temperature)
    chunk_weights = tl.where(filtered, chunk_weights, chunk_weights * shrink)
    target = uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row)) * tl.sum(chunk_weights, 0)
    chunk, before = _first_above_target(chunk_weights, target, CHUNKS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    z, weight = weigh(x, row_max, temperature)
    threshold = tl.load(threshold_ptr + row, mask=filtered, other=float("-inf"))
    weight = tl.where((z >= threshold) & (weight >= min_p), weight, 0.0)
    inside, _ = _first_above_target(weight, target - before, CHUNK)
    tl.store(token_ptr + row, chunk * CHUNK + inside)
    tl.store(checked_ptr + row, chunk * CHUNK + inside)


def stats_config() -> dict[str, int]:
    return {"CHUNK": CHUNK, "PART": PART, "num_warps": 8}


def draw_config(num_chunks: int) -> dict[str, int]:
    return {"CHUNK": CHUNK, "CHUNKS": next_power_of_2(num_chunks), "num_warps": 8}


def sample(logits: Tensor, values: SamplingValues) -> Sampled:
    """`sample_reference` in three kernels: same arguments, same tokens up to rounding in the sums of weights."""
    n, vocab_size = logits.shape
    num_chunks = -(-vocab_size // CHUNK)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(n, *shape, dtype=dtype, device=logits.device)

    sampled = Sampled(empty(torch.int32), empty(torch.int32))
    if n == 0:
        return sampled
    num_parts = num_chunks * (CHUNK // PART)
    chunk_max, chunk_weight = (empty(torch.float32, num_chunks) for _ in range(2))
    chunk_argmax, part_max = empty(torch.int32, num_chunks), empty(logits.dtype, num_parts)
    part_weight, threshold = empty(torch.float32, num_parts), empty(torch.float32)
    chunk_stats, part_stats = (chunk_max, chunk_argmax, chunk_weight), (part_max, part_weight)
    stride = logits.stride(0)
    inputs = (logits, values.temperature, *chunk_stats, *part_stats, stride, vocab_size)
    launch(_stats_kernel, (n, num_chunks), inputs, stats_config())
    filter_rows(logits, *values[:4], *part_stats, chunk_weight, threshold, CHUNK)
    args = (logits, *values, *chunk_stats, threshold, *sampled, stride, vocab_size, num_chunks)
    launch(_draw_kernel, (n,), args, draw_config(num_chunks))
    return sampled
