"""Attention of one query token a sequence over the paged cache, split along the keys (flash-decoding, Dao et al. 2023,
https://pytorch.org/blog/flash-decoding/).

Two kernels run. For neither must the host know a length, so a CUDA graph replays them for any lengths:

    share    once a step: gives every program of the other kernel the same number of tiles of keys, and lists its chunks
    split    once a layer: a program attends its chunks, one after another, with one KV head's group of query heads.
             Where a sequence has several chunks, the program that ends last merges them. A cache may have numbers or
             codes of one byte, see decode_codes.py

The split has as many programs as the device runs at once, and all start together. If there are enough keys, they have
the same work, and so they end at about the same time, whatever the lengths are. With few keys, some have no chunk.

All layers share the list of chunks, and a layer may have a sliding window. Then its programs skip tiles before the
window, and a chunk that ends before the window gives a partial output without weight.

The reference is `attend_reference` in ops/attention.py.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.backends.gpu.decode_chunks import find_chunk, finish_chunk, prefetch_following
from nanovllm.backends.gpu.decode_codes import read_tile
from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.online_softmax import cap_scores, read_variant, start_softmax, update_softmax
from nanovllm.backends.gpu.paged_cache import list_elements
from nanovllm.backends.gpu.triton_shim import next_power_of_2, num_multiprocessors, shared_memory_kib, tl, triton
from nanovllm.ops.attention import AttentionVariant, KVCache

MIN_SHARE = 128
"""Keys of a share at least: with fewer, a program's start costs more than its reading. The start of a sequence counts
as a tile of keys."""


@triton.jit(do_not_specialize=["num_seqs", "num_kv_heads", "num_programs"])
def _share_kernel(
    seq_lens_ptr,
    items_ptr,
    first_item_ptr,
    share_begins_ptr,
    arrivals_ptr,
    num_seqs,
    num_kv_heads,
    num_programs,
    MIN_TILES: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SEQS: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (1,).
    # The program owns the lists of chunks (items) and of programs' shares. It lays the sequences end to end, and cuts
    # the row at multiples of `share`. Sequences of length 0 are padding: they get an empty chunk.
    wait_for_predecessor(PDL)
    seq = tl.arange(0, MAX_SEQS)
    exists = seq < num_seqs
    lens = tl.load(seq_lens_ptr + seq, mask=exists, other=0)
    # In units of a tile. A sequence has one unit more than tiles, its first, for what it costs beside them.
    units = tl.where(exists, tl.cdiv(lens, TILE) + 1, 0)
    end = tl.cumsum(units, 0)
    begin = end - units
    total = tl.sum(units, 0)
    share = tl.maximum(tl.cdiv(total, num_programs), MIN_TILES)
    first_program = begin // share
    count = tl.where(exists, (end - 1) // share - first_program + 1, 0)
    first = tl.cumsum(count, 0) - count
    num_items = tl.sum(count, 0)
    tl.store(first_item_ptr + seq, first, mask=exists)
    tl.store(first_item_ptr + num_seqs, num_items)
    for part in range(0, tl.max(count, 0)):
        program = first_program + part
        part_begin = tl.maximum(program * share, begin)
        part_end = tl.minimum(program * share + share, end)
        item = items_ptr + (first + part) * 4
        has_part = part < count
        tl.store(item, seq, mask=has_part)
        tl.store(item + 1, tl.maximum(part_begin - begin - 1, 0) * TILE, mask=has_part)
        tl.store(item + 2, tl.minimum((part_end - begin - 1) * TILE, lens), mask=has_part)
        tl.store(item + 3, count, mask=has_part)
        # Wherever a share begins, a chunk begins.
        tl.store(share_begins_ptr + program, first + part, mask=has_part & (part_begin == program * share))
    program = tl.arange(0, MAX_PROGRAMS)
    is_idle = (program >= tl.cdiv(total, share)) & (program <= num_programs)
    tl.store(share_begins_ptr + program, tl.zeros([MAX_PROGRAMS], tl.int32) + num_items, mask=is_idle)
    for head in range(0, num_kv_heads):
        tl.store(arrivals_ptr + head * num_seqs + seq, tl.zeros([MAX_SEQS], tl.int32), mask=exists)


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["sinks_ptr"])
def _split_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    out_ptr,
    block_tables_ptr,
    items_ptr,
    first_item_ptr,
    share_begins_ptr,
    arrivals_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    sinks_ptr,
    scale_log2,
    num_seqs,
    q_stride,
    table_stride,
    page_stride,
    token_stride,
    head_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_kv_heads, num_programs).
    # A program owns a share of the chunks and one KV head, whose GROUP query heads (padded to ROWS) are one tile.
    # A cache of codes has scales. Its elements are pairs of codes: of an even dimension, and the odd one after it.
    # Chunks of padding are empty, and give zeros; table entries beyond a sequence's blocks are never read.
    wait_for_predecessor(PDL)
    head = tl.program_id(0)
    program = tl.program_id(1)
    num_heads = (tl.num_programs(0) * GROUP).to(tl.int64)
    ROWS: tl.constexpr = 16  # tl.dot takes no fewer, and a group has no more
    HAS_CODES: tl.constexpr = k_scales_ptr is not None
    NUMBERS: tl.constexpr = 2 if HAS_CODES else 1  # in an element of the cache
    WIDTH: tl.constexpr = HEAD_DIM // NUMBERS
    TYPE: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)
    element = tl.arange(0, WIDTH)
    key = tl.arange(0, TILE)
    is_query = (row < GROUP)[:, None]
    offset = (head * GROUP + row)[:, None] * HEAD_DIM + NUMBERS * element[None, :]
    # Offsets take 4 bytes, pointers 8. These are kept through the whole loop, and every register counts.
    k_offset = key[None, :] * token_stride + element[:, None]
    v_offset = key[:, None] * token_stride + element[None, :]
    end_item = tl.load(share_begins_ptr + program + 1)
    for item in tl.range(tl.load(share_begins_ptr + program), end_item):
        seq, begin, end, num_parts, visible = find_chunk(items_ptr, first_item_ptr, item, TILE, WINDOW)
        q = tl.load(q_ptr + seq * q_stride + offset, mask=is_query, other=0.0)
        if HAS_CODES:
            q_odd = tl.load(q_ptr + seq * q_stride + offset + 1, mask=is_query, other=0.0)
        table_ptr = block_tables_ptr + seq * table_stride
        num_sinks = tl.where(tl.load(first_item_ptr + seq) == item, GROUP, 0)  # the first chunk has them
        highest, total = start_softmax(sinks_ptr, head * GROUP + row, row < num_sinks)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        acc_odd = tl.zeros([ROWS, WIDTH], tl.float32)
        # The page's number is loaded one tile ahead. A load whose address depends on a load of the same iteration would
        # take the pipeline's stages for itself and leave none to K and V.
        page = tl.load(table_ptr + begin // BLOCK_SIZE)
        for start in tl.range(begin, end, TILE):
            place = page.to(tl.int64) * page_stride + head * head_stride + (start % BLOCK_SIZE) * token_stride
            scale_place = (page.to(tl.int64) * tl.num_programs(0) + head) * BLOCK_SIZE + start % BLOCK_SIZE + key
            page = tl.load(table_ptr + (start + TILE) // BLOCK_SIZE, mask=start + TILE < end, other=0)
            valid = start + key < end
            if WINDOW is not None:
                valid &= start + key >= visible
            k = tl.load(k_cache_ptr + place + k_offset)
            # Masked, because 0 * NaN from a stale slot would be NaN.
            v = tl.load(v_cache_ptr + place + v_offset, mask=valid[:, None], other=0)
            # Each tile is unpacked, and each scale loaded, where it is used: every register counts.
            k, k_odd = read_tile(k, TYPE, IS_FP8)
            scores = tl.dot(q, k, input_precision="ieee")
            if HAS_CODES:
                scores = tl.dot(q_odd, k_odd, scores, input_precision="ieee")
                k_scales = tl.load(k_scales_ptr + scale_place, mask=valid, other=0.0)
                scores *= (k_scales * scale_log2)[None, :]
            else:
                scores *= scale_log2
            scores = tl.where(valid[None, :], cap_scores(scores, SOFTCAP), float("-inf"))
            # The first tile of a chunk has a visible key.
            highest, total, weights, shrink = update_softmax(scores, highest, total, MAY_LACK_KEYS=False)
            if HAS_CODES:
                weights *= tl.load(v_scales_ptr + scale_place, mask=valid, other=0.0)[None, :]
            weights = weights.to(TYPE)
            v, v_odd = read_tile(v, TYPE, IS_FP8)
            acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
            if HAS_CODES:
                acc_odd = tl.dot(weights, v_odd, acc_odd * shrink[:, None], input_precision="ieee")

        if AHEAD:
            caches = (k_cache_ptr, v_cache_ptr, page_stride, token_stride, head_stride)
            lists = (items_ptr, first_item_ptr, block_tables_ptr, table_stride)
            prefetch_following(caches, lists, item, end_item, head, BLOCK_SIZE, TILE, WIDTH, WINDOW)
        if HAS_CODES:
            acc = tl.interleave(acc, acc_odd)
        merge_pointers = (first_item_ptr, arrivals_ptr + head * num_seqs, partial_out_ptr, partial_lse_ptr)
        numbers = (item, seq, num_parts, head, num_heads)
        finish_chunk(out_ptr, acc, highest, total, merge_pointers, *numbers, GROUP, MAY_LACK_KEYS=WINDOW is not None)


def key_tile(head_dim: int, block_size: int, itemsize: int) -> int:
    """Return the keys in a tile: a power of two that divides a block, with up to 16 KiB of K, and at most 64.

    128 keys of codes take as long, and spill registers with large groups.
    """
    most = min(64, 128 // itemsize)
    return min(most if head_dim <= 128 else most // 2, block_size & -block_size)


def share_config(num_seqs: int, num_programs: int, head_dim: int, block_size: int, itemsize: int) -> dict[str, int]:
    """MAX_SEQS takes few values, so few batch sizes compile anything."""
    tile = key_tile(head_dim, block_size, itemsize)
    return {
        "MIN_TILES": MIN_SHARE // tile,
        "TILE": tile,
        "MAX_SEQS": max(256, next_power_of_2(num_seqs)),
        "MAX_PROGRAMS": next_power_of_2(num_programs + 1),
        "num_warps": 4,
    }


def split_config(group: int, head_dim: int, block_size: int, itemsize: int, shared_kib: int) -> dict[str, int]:
    """64 keys, 3 stages and 4 warps: two buffers of K and V in 72 KiB, so three programs share a Hopper's memory.

    At most 168 registers a thread let three programs share its registers, too. Codes of heads of 256 need more, so two
    programs do. Where memory has room for fewer programs, a thread may have more registers. AHEAD: a program asks for
    the next chunk's first tile before it stores the output of a chunk. No GPU has timed that, so it is off, and
    scripts/gpu_sweep.py times both.

    Args:
        itemsize: the bytes of an element of the cache.
        shared_kib: the shared memory that a program may use.
    """
    config = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE": key_tile(head_dim, block_size, itemsize),
        "AHEAD": False,
        "num_warps": 4,
        "num_stages": 2 if itemsize == 4 else 3,
        "maxnreg": 255 if itemsize == 1 and head_dim > 128 else 168,
    }
    if programs_at_once(config, itemsize, shared_kib) < 3:
        config["maxnreg"] = 255  # enough for two programs
    return config


def programs_at_once(config: dict[str, int], itemsize: int, shared_kib: int) -> int:
    """Return how many programs of the split one multiprocessor runs at once.

    Its shared memory limits them (all buffers of K and V but one are in use, and 8 KiB beside them), or its 65,536
    registers.
    """
    buffers = 2 * (config["num_stages"] - 1) * config["TILE"] * config["HEAD_DIM"] * itemsize
    registers = 32 * config["num_warps"] * config["maxnreg"]
    return min(max(shared_kib * 1024 // (buffers + 8192), 1), 65536 // registers)


class DecodeMetadata(NamedTuple):
    """The work of the split kernel in one step. A sequence's keys are cut into chunks, and GPU programs share the
    chunks.

    Attributes:
        items: int32 [max_items, 4]. Each row is a chunk: (sequence, first key, end key, number of chunks of the
            sequence). Chunks are in the order of sequences and keys.
        first_item: int32 [num_seqs + 1]. Sequence i has the chunks from first_item[i] to first_item[i + 1].
        share_begins: int32 [num_programs + 1]. Program p has the chunks from share_begins[p] to share_begins[p + 1].
        arrivals: int32 [num_kv_heads, num_seqs], how many chunks are done. The program that finishes the last chunk of
            a sequence merges the outputs of all of them. All are zero before and after a layer.
        partial_out: float32 [max_items, num_heads, head_dim], the normalised output of a chunk, for sequences with
            several chunks.
        partial_lse: float32 [max_items, num_heads], log2(sum(2**scores)) of a chunk. 2**partial_lse is the weight of
            the chunk's output when chunks are merged.
    """

    items: Tensor
    first_item: Tensor
    share_begins: Tensor
    arrivals: Tensor
    partial_out: Tensor
    partial_lse: Tensor


def decode_metadata(seq_lens: Tensor, cache: KVCache, num_heads: int) -> DecodeMetadata:
    """Share this step's decodes among programs, on the device.

    seq_lens int32 [num_seqs]; block_tables int32 [num_seqs, max_blocks] (its width bounds the lengths).
    """
    num_seqs = seq_lens.shape[0]
    device = seq_lens.device
    block_size, num_kv_heads, head_dim = cache.keys.shape[1:]
    itemsize = cache.keys.element_size()
    shared_kib = shared_memory_kib(device)
    split = split_config(num_heads // num_kv_heads, head_dim, block_size, itemsize, shared_kib)
    places = num_multiprocessors(device) * programs_at_once(split, itemsize, shared_kib)
    num_programs = max(places // num_kv_heads, 1)
    max_items = num_seqs + num_programs
    made = DecodeMetadata(
        items=torch.empty(max_items, 4, dtype=torch.int32, device=device),
        first_item=torch.empty(num_seqs + 1, dtype=torch.int32, device=device),
        share_begins=torch.empty(num_programs + 1, dtype=torch.int32, device=device),
        arrivals=torch.empty(num_kv_heads, num_seqs, dtype=torch.int32, device=device),
        partial_out=torch.empty(max_items, num_heads, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(max_items, num_heads, dtype=torch.float32, device=device),
    )
    config = share_config(num_seqs, num_programs, head_dim, block_size, itemsize)
    lists = (made.items, made.first_item, made.share_begins, made.arrivals)
    launch(_share_kernel, (1,), (seq_lens, *lists, num_seqs, num_kv_heads, num_programs), config)
    return made


def paged_decode(
    q: Tensor,
    cache: KVCache,
    block_tables: Tensor,
    metadata: DecodeMetadata,
    scale: float,
    out: Tensor,
    variant: AttentionVariant | None = None,
) -> None:
    """Attend row i of q to the keys of sequence i, for the sequences of metadata; sequences of length 0 get zeros.

    q [num_seqs, num_heads, head_dim], the heads of a token adjacent; a cache of any equal strides with head_dim
    contiguous; out like q, contiguous; the sinks of variant float32 [num_heads], contiguous.
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = cache.keys.shape[1:3]
    constants, sinks = read_variant(variant)
    shape = (num_heads // num_kv_heads, head_dim, block_size, cache.keys.element_size())
    config = split_config(*shape, shared_memory_kib(q.device)) | constants
    sizes = (scale * math.log2(math.e), num_seqs, q.stride(0), block_tables.stride(0))
    grid = (num_kv_heads, len(metadata.share_begins) - 1)
    pointers, strides = list_elements(cache)
    args = (q, *pointers, out, block_tables, *metadata, sinks, *sizes, *strides)
    launch(_split_kernel, grid, args, config | {"IS_FP8": cache.keys.dtype == torch.float8_e4m3fn})
