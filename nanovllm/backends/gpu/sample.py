"""Samples one token per row in three kernels. The reference is `sample_reference` in ops/sample.py."""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.sample_filter import (
    PART,
    drop_filtered,
    filter_rows,
    is_broken,
    is_filtered,
    load_sampling,
    weigh,
)
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.ops.sample import CHUNK, Sampled
from nanovllm.utils.integers import ceil_div

# The Triton path has three kernels. None of them sorts, and none waits for the host.
#   stats   reads the logits once. For each chunk, and for each part of it, it writes two numbers: the maximum, and the
#           sum of exp((logit - maximum) / temperature). For a chunk it also writes where the maximum is.
#   filter  handles rows with a filter only (sample_filter.py). It writes their threshold, and the weight of the kept
#           tokens of each of their chunks.
#   draw    chooses the chunk by the weights of the chunks, then the token inside it.


@triton.jit
def draw_uniform(seed, position):
    """Do what `uniform_reference` does for one row, with the same bits."""
    counter = position.to(tl.uint32)
    zero = counter * 0
    word, _, _, _ = tl.philox(seed, counter, zero, zero, zero)
    return ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23


@triton.jit
def _stats_kernel(
    logits_ptr,
    table_ptr,
    rows_ptr,
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
    # Grid (num_rows, num_chunks). CUDA allows at most 65535 in the second dimension, and there may be more rows.
    # A program owns one chunk of one row, as CHUNK / PART parts of PART tokens.
    # Padding rows are computed like any other. Places beyond the vocabulary count as -inf.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    part = tl.arange(0, CHUNK // PART)
    # If vocab_size is a multiple of 16, Triton compiles a faster version of this kernel, which loads several logits
    # with one instruction. So vocab_size is not in do_not_specialize.
    token = chunk * CHUNK + part[:, None] * PART + tl.arange(0, PART)[None, :]
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x < float("inf"), x, float("inf"))  # NaN becomes inf: the row's maximum then shows that it is broken
    temperature, _, _ = load_sampling(table_ptr, rows_ptr, row)
    scale = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)  # less exact than a division, but enough for sums
    part_max = tl.max(x, 1)
    origin = tl.where(part_max > float("-inf"), part_max, 0.0)  # -inf - -inf would be NaN
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
def _find_first_above_target(weights, target, SIZE: tl.constexpr):
    """Do what `_find_first_above` does, for one row."""
    index = tl.arange(0, SIZE)
    cumulative = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0.0, index, 0), 0)
    found = tl.minimum(tl.min(tl.where(cumulative > target, index, SIZE), 0), last)
    return found, tl.sum(tl.where(index == found - 1, cumulative, 0.0), 0)


@triton.jit(do_not_specialize=["num_chunks"])
def _draw_kernel(
    logits_ptr,
    table_ptr,
    rows_ptr,
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
    # A program owns one row and writes its token twice: as it is, and checked.
    # Padding rows get some token.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    exists = chunks < num_chunks
    maxima = tl.load(chunk_max_ptr + row * num_chunks + chunks, mask=exists, other=float("-inf"))
    row_max = tl.max(maxima, 0)
    temperature, filters, seed = load_sampling(table_ptr, rows_ptr, row)
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
    filtered = is_filtered(filters, vocab_size)
    chunk_weights = tl.load(chunk_weight_ptr + row * num_chunks + chunks, mask=exists, other=0.0)
    # The stats kernel weighed a chunk relative to the chunk's maximum, the filter kernel relative to the row's.
    _, shrink = weigh(maxima, row_max, temperature)
    chunk_weights = tl.where(filtered, chunk_weights, chunk_weights * shrink)
    target = draw_uniform(seed, tl.load(positions_ptr + row)) * tl.sum(chunk_weights, 0)
    chunk, before = _find_first_above_target(chunk_weights, target, CHUNKS)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    z, weight = weigh(x, row_max, temperature)
    threshold = tl.load(threshold_ptr + row, mask=filtered, other=float("-inf"))
    weight = drop_filtered(z, weight, threshold, filters)
    inside, _ = _find_first_above_target(weight, target - before, CHUNK)
    tl.store(token_ptr + row, chunk * CHUNK + inside)
    tl.store(checked_ptr + row, chunk * CHUNK + inside)


def stats_config() -> dict[str, int]:
    return {"CHUNK": CHUNK, "PART": PART, "num_warps": 8}


def draw_config(num_chunks: int) -> dict[str, int]:
    return {"CHUNK": CHUNK, "CHUNKS": next_power_of_2(num_chunks), "num_warps": 8}


def sample(logits: Tensor, table: Tensor, rows: Tensor, positions: Tensor) -> Sampled:
    """Do what `sample_reference` does, in three kernels. Tokens are the same up to rounding in the sums of weights."""
    n, vocab_size = logits.shape
    num_chunks = ceil_div(vocab_size, CHUNK)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(n, *shape, dtype=dtype, device=logits.device)

    sampled = Sampled(empty(torch.int32), empty(torch.int32))
    num_parts = num_chunks * (CHUNK // PART)
    chunk_max = empty(torch.float32, num_chunks)
    chunk_argmax = empty(torch.int32, num_chunks)
    chunk_weight = empty(torch.float32, num_chunks)
    chunk_stats = (chunk_max, chunk_argmax, chunk_weight)
    part_stats = (empty(logits.dtype, num_parts), empty(torch.float32, num_parts))  # maximum and weight of each part
    threshold = empty(torch.float32)
    stride = logits.stride(0)
    inputs = (logits, table, rows, *chunk_stats, *part_stats, stride, vocab_size)
    launch(_stats_kernel, (n, num_chunks), inputs, stats_config())
    filter_rows(logits, table, rows, part_stats, chunk_weight, threshold)
    args = (logits, table, rows, positions, *chunk_stats, threshold, *sampled, stride, vocab_size, num_chunks)
    launch(_draw_kernel, (n,), args, draw_config(num_chunks))
    return sampled
