"""Attention of one query token a sequence over the paged cache, split along the keys (flash-decoding, Dao et al. 2023,
https://pytorch.org/blog/flash-decoding/).

There are two kernels. For neither must the host know a length, so a CUDA graph replays them for any lengths:

    share    once a step: gives every program of the other kernel the same number of tiles of keys, and lists its chunks
    split    once a layer: a program attends its chunks, one after another, with one KV head's group of query heads.
             Where a sequence has several chunks, the program that ends last merges them

The split has as many programs as the device runs at once. All start at once, and as they have the same work, they end
at about the same time, whatever the lengths are: no place of a multiprocessor is left to a program without work.

The reference is `attend_reference` in ops/attention.py.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.paged_cache import list_parts
from nanovllm.backends.gpu.triton_shim import next_power_of_2, num_multiprocessors, shared_memory_kib, tl, triton
from nanovllm.ops.attention import KVCache

MIN_SHARE = 128
"""Keys that a program attends at least: with fewer, its start costs more than its reading."""


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


@triton.jit
def _merge(out_row, partials, first, num_parts, head, num_heads, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Merge a sequence's chunks, PARTS at a time, in their order: it makes no difference which program ended last.

    At most the first of several chunks has no keys, so `new_highest` is finite (PARTS is at least 2).
    """
    partial_out_ptr, partial_lse_ptr = partials
    MEMBERS: tl.constexpr = triton.next_power_of_2(GROUP)
    PARTS: tl.constexpr = 2 if MEMBERS > 8 else 16 // MEMBERS
    member = head * GROUP + tl.arange(0, MEMBERS)
    is_query = tl.arange(0, MEMBERS) < GROUP
    dim = tl.arange(0, HEAD_DIM)
    highest = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    acc = tl.zeros([MEMBERS, HEAD_DIM], tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        row = (first + part).to(tl.int64)[:, None] * num_heads + member[None, :]
        exists = (part < num_parts)[:, None] & is_query[None, :]
        # Other multiprocessors wrote these: they are in the L2 cache, which .cg reads, and not in this one's L1.
        lse = tl.load(partial_lse_ptr + row, mask=exists, other=float("-inf"), cache_modifier=".cg")
        offset = row[:, :, None] * HEAD_DIM + dim[None, None, :]
        out = tl.load(partial_out_ptr + offset, mask=exists[:, :, None], other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        origin = tl.where(is_query, new_highest, 0.0)
        weights = tl.exp2(lse - origin[None, :])
        shrink = tl.exp2(highest - origin)
        acc = acc * shrink[:, None] + tl.sum(out * weights[:, :, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = new_highest
    merged = (acc / tl.where(is_query, total, 1.0)[:, None]).to(out_row.dtype.element_ty)
    tl.store(out_row + member[:, None] * HEAD_DIM + dim[None, :], merged, mask=is_query[:, None])


@triton.jit
def accumulate(q, k, v, scales, scale_log2, allowed, highest, total, acc, MASKED: tl.constexpr):
    """Add one tile of keys to the online softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867).

    The first tile has a key for every row, so `highest` is finite after it. Codes become q's type, which is exact.
    scales are pointers to those of keys and of values, and which keys have some. Without CODES nothing reads them.
    """
    CODES: tl.constexpr = k.dtype.primitive_bitwidth == 8
    k_scales_ptr, v_scales_ptr, has_scale = scales
    if CODES:
        k_scales = tl.load(k_scales_ptr, mask=has_scale, other=0.0)
        v_scales = tl.load(v_scales_ptr, mask=has_scale, other=0.0)
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if CODES:
        scores *= (k_scales * scale_log2)[None, :]
    else:
        scores *= scale_log2
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_highest[:, None])
    shrink = tl.exp2(highest - new_highest)
    total = total * shrink + tl.sum(weights, 1)
    if CODES:
        weights *= v_scales[None, :]
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return new_highest, total, acc


@triton.jit(do_not_specialize=["num_seqs"])
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
    PDL: tl.constexpr,
):
    # Grid (num_kv_heads, num_programs).
    # A program owns a share of the chunks and one KV head, whose GROUP query heads (padded to ROWS) are one tile.
    # Chunks of padding are empty, and give zeros; table entries beyond a sequence's blocks are never read.
    wait_for_predecessor(PDL)
    head = tl.program_id(0)
    program = tl.program_id(1)
    num_heads = (tl.num_programs(0) * GROUP).to(tl.int64)
    ROWS: tl.constexpr = 16  # tl.dot takes no fewer, and a group has no more
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    key = tl.arange(0, TILE)
    is_query = row < GROUP
    offset = (head * GROUP + row)[:, None] * HEAD_DIM + dim[None, :]
    # Offsets take 4 bytes, pointers 8. These are kept through the whole loop, and every register counts.
    k_offset = key[None, :] * token_stride + dim[:, None]
    v_offset = key[:, None] * token_stride + dim[None, :]
    for item in tl.range(tl.load(share_begins_ptr + program), tl.load(share_begins_ptr + program + 1)):
        seq = tl.load(items_ptr + item * 4).to(tl.int64)
        begin = tl.load(items_ptr + item * 4 + 1)
        end = tl.load(items_ptr + item * 4 + 2)
        num_parts = tl.load(items_ptr + item * 4 + 3)
        q = tl.load(q_ptr + seq * q_stride + offset, mask=is_query[:, None], other=0.0)
        table_ptr = block_tables_ptr + seq * table_stride
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        # The page's number is loaded one tile ahead. A load whose address depends on a load of the same iteration would
        # take the pipeline's stages for itself and leave none to K and V.
        page = tl.load(table_ptr + begin // BLOCK_SIZE)
        for start in tl.range(begin, end, TILE):
            place = page.to(tl.int64) * page_stride + head * head_stride + (start % BLOCK_SIZE) * token_stride
            scale_place = (page.to(tl.int64) * tl.num_programs(0) + head) * BLOCK_SIZE + start % BLOCK_SIZE + key
            page = tl.load(table_ptr + (start + TILE) // BLOCK_SIZE, mask=start + TILE < end, other=0)
            valid = start + key < end
            k = tl.load(k_cache_ptr + place + k_offset)
            # Masked, because 0 * NaN from a stale slot would be NaN.
            v = tl.load(v_cache_ptr + place + v_offset, mask=valid[:, None], other=0.0)
            scales = (k_scales_ptr + scale_place, v_scales_ptr + scale_place, valid)
            highest, total, acc = accumulate(
                q, k, v, scales, scale_log2, valid[None, :], highest, total, acc, MASKED=True
            )

        out = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # zeros where there are no keys
        out_row = out_ptr + seq * num_heads * HEAD_DIM
        if num_parts == 1:
            tl.store(out_row + offset, out.to(out_ptr.dtype.element_ty), mask=is_query[:, None])
        else:
            partial_row = item * num_heads
            tl.store(partial_out_ptr + partial_row * HEAD_DIM + offset, out, mask=is_query[:, None])
            lse = highest + tl.log2(total)
            tl.store(partial_lse_ptr + partial_row + head * GROUP + row, lse, mask=is_query)
            tl.debug_barrier()  # whoever sees this program's arrival sees what all its threads have stored
            arrival_ptr = arrivals_ptr + head * num_seqs + seq
            if tl.atomic_add(arrival_ptr, 1, sem="acq_rel") == num_parts - 1:
                tl.store(arrival_ptr, 0)
                first = tl.load(first_item_ptr + seq)
                partials = (partial_out_ptr, partial_lse_ptr)
                _merge(out_row, partials, first, num_parts, head, num_heads, GROUP, HEAD_DIM)


def key_tile(head_dim: int, block_size: int, itemsize: int) -> int:
    """Return the keys in a tile: a power of two within a block, and up to 16 KiB of K (64 keys at head_dim 128).

    Codes of one byte need more registers than elements of two, so their tiles have half as many keys.
    """
    most = 64 if itemsize == 2 else 32
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


def split_config(group: int, head_dim: int, block_size: int, itemsize: int) -> dict[str, int]:
    """64 keys, 3 stages and 4 warps: two buffers of K and V in 72 KiB, so three programs share a Hopper's memory.

    At most 168 registers a thread let three programs share its registers, too. With codes some variants need more, so
    there are two. itemsize is that of the cache.
    """
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE": key_tile(head_dim, block_size, itemsize),
        "num_warps": 4,
        "num_stages": {1: 4, 2: 3, 4: 2}[itemsize],
        "maxnreg": 255 if itemsize == 1 else 168,
    }


def programs_at_once(config: dict[str, int], itemsize: int, shared_kib: int) -> int:
    """Return how many programs of the split one multiprocessor runs at once.

    Its shared memory limits them (all buffers of K and V but one are in use, and 8 KiB beside them), or its 65,536
    registers.
    """
    buffers = 2 * (config["num_stages"] - 1) * config["TILE"] * config["HEAD_DIM"] * itemsize
    return min(max(shared_kib * 1024 // (buffers + 8192), 1), 65536 // (128 * config["maxnreg"]))


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
        partial_lse: float32 [max_items, num_heads], log2(sum(exp(scores))) of a chunk. 2**partial_lse is the weight of
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
    split = split_config(num_heads // num_kv_heads, head_dim, block_size, itemsize)
    places = num_multiprocessors(device) * programs_at_once(split, itemsize, shared_memory_kib(device))
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
    q: Tensor, cache: KVCache, block_tables: Tensor, metadata: DecodeMetadata, scale: float, out: Tensor
) -> None:
    """Attend row i of q to the keys of sequence i, for the sequences of metadata; sequences of length 0 get zeros.

    q [num_seqs, num_heads, head_dim], the heads of a token adjacent; a cache of any equal strides with head_dim
    contiguous; out like q, contiguous.
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = cache.keys.shape[1:3]
    config = split_config(num_heads // num_kv_heads, head_dim, block_size, cache.keys.element_size())
    pointers, strides = list_parts(cache)
    sizes = (scale * math.log2(math.e), num_seqs, q.stride(0), block_tables.stride(0))
    args = (q, *pointers, out, block_tables, *metadata, *sizes, *strides)
    num_programs = len(metadata.share_begins) - 1
    launch(_split_kernel, (num_kv_heads, num_programs), args, config)
