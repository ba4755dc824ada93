"""Causal attention of several query tokens a sequence, to its prefix in the paged cache and to each other.

The reference is `attend_reference` in ops/attention.py.
"""

import math

from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.online_softmax import cap_scores, read_variant, start_softmax, update_softmax
from nanovllm.backends.gpu.paged_cache import list_parts
from nanovllm.backends.gpu.paged_decode import key_tile
from nanovllm.backends.gpu.triton_shim import next_power_of_2, shared_memory_kib, tl, triton
from nanovllm.ops.attention import AttentionVariant, KVCache


@triton.jit
def find_sequence(cu_seqlens_ptr, num_seqs, tile, TOKENS: tl.constexpr, SEARCH: tl.constexpr):
    """Return the sequence that a tile belongs to, and the tile's first token within it.

    Sequence i has the tiles from cu_seqlens[i] // TOKENS + i on. They are always enough, and at most one too many, so
    the host need not make a table.
    """
    origin = tl.load(cu_seqlens_ptr)
    found = tl.zeros([SEARCH], tl.int32)
    for start in range(0, num_seqs, SEARCH):
        seq = start + tl.arange(0, SEARCH)
        first_token = tl.load(cu_seqlens_ptr + seq, mask=seq < num_seqs, other=0) - origin
        found += ((first_token // TOKENS + seq <= tile) & (seq < num_seqs)).to(tl.int32)
    seq = tl.sum(found, 0) - 1
    first_token = tl.load(cu_seqlens_ptr + seq) - origin
    return seq, (tile - first_token // TOKENS - seq) * TOKENS


@triton.jit
def _accumulate(
    q,
    k,
    v,
    scales,
    scale_log2,
    allowed,
    highest,
    total,
    acc,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to one more tile of keys.

    Codes become q's type, which is exact.

    Args:
        scales: pointers to the keys' scales and to the values' scales, and which keys are in the sequence. Without
            CODES nothing reads them.
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
    scores = cap_scores(scores, SOFTCAP)
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    highest, total, weights, shrink = update_softmax(scores, highest, total, MAY_LACK_KEYS=WINDOW is not None)
    if CODES:
        weights *= v_scales[None, :]
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
    return highest, total, acc


@triton.jit(
    do_not_specialize=["num_seqs", "num_kv_heads"],
    # In a mixed step these begin behind the decodes, at any address. Triton must not compile a variant for each.
    do_not_specialize_on_alignment=["cu_seqlens_ptr", "seq_lens_ptr", "block_tables_ptr", "sinks_ptr"],
)
def _prefill_kernel(
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scales_ptr,
    v_scales_ptr,
    out_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    sinks_ptr,
    scale_log2,
    num_seqs,
    num_kv_heads,
    q_stride,
    table_stride,
    page_stride,
    token_stride,
    head_stride,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid ((num_tokens / TOKENS + num_seqs) x num_kv_heads,): one dimension, because the second one ends at 65,535.
    # A program owns TOKENS query tokens of one sequence x the query heads of one KV head: K and V serve all of them.
    # Tiles beyond a sequence's tokens do nothing; rows that pad the group or the last tile are computed, never stored.
    wait_for_predecessor(PDL)
    ROWS: tl.constexpr = TOKENS * PADDED_GROUP
    SEARCH: tl.constexpr = 128
    # Backwards: the last tiles of a long prompt have the most keys, so they start first. The heads of a tile follow
    # each other, because what they read of a page is adjacent.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = program % num_kv_heads
    seq, first_token = find_sequence(cu_seqlens_ptr, num_seqs, program // num_kv_heads, TOKENS, SEARCH)
    query_begin = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - query_begin
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_DIM)
    key = tl.arange(0, TILE)
    token = first_token + row // PADDED_GROUP
    member = row % PADDED_GROUP
    is_query = ((token < query_len) & (member < GROUP))[:, None]
    token_row = (query_begin + token).to(tl.int64)[:, None]
    offset = (head * GROUP + member)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_ptr + token_row * q_stride + offset, mask=is_query, other=0.0)
    position = (seq_len - query_len + token)[:, None]

    k_tile_ptr = k_cache_ptr + head * head_stride + key[None, :] * token_stride + dim[:, None]
    v_tile_ptr = v_cache_ptr + head * head_stride + key[:, None] * token_stride + dim[None, :]
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    highest, total = start_softmax(sinks_ptr, head * GROUP + member, member < GROUP)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)

    # Every query of the tile sees the keys in [inner, diagonal), so they need no mask. Some queries see those in
    # [diagonal, end) and, if there is a window, those in [begin, inner).
    first_position = seq_len - query_len + first_token
    diagonal = (first_position + 1) // TILE * TILE
    end = tl.minimum(first_position + TOKENS, seq_len)
    begin = 0
    inner = 0
    if WINDOW is not None:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // TILE * TILE
        inner = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE, diagonal)
    # The page's number is loaded one tile ahead, as in paged_decode.py.
    page = tl.load(table_ptr + begin // BLOCK_SIZE)
    edges = (begin, inner, diagonal, end)
    for part in tl.static_range(1 if WINDOW is None else 0, 3):
        for start in tl.range(edges[part], edges[part + 1], TILE):
            place = page.to(tl.int64) * page_stride + (start % BLOCK_SIZE) * token_stride
            scale_place = (page.to(tl.int64) * num_kv_heads + head) * BLOCK_SIZE + start % BLOCK_SIZE + key
            page = tl.load(table_ptr + (start + TILE) // BLOCK_SIZE, mask=start + TILE < end, other=0)
            k = tl.load(k_tile_ptr + place)
            if part != 1:
                # Slots beyond the sequence may be stale, and 0 * NaN is NaN.
                is_used = start + key < seq_len
                v = tl.load(v_tile_ptr + place, mask=is_used[:, None], other=0.0)
                allowed = (start + key)[None, :] <= position
                if WINDOW is not None:
                    allowed &= (start + key)[None, :] > position - WINDOW
            else:
                is_used = key >= 0
                v = tl.load(v_tile_ptr + place)
                allowed = True
            scales = (k_scales_ptr + scale_place, v_scales_ptr + scale_place, is_used)
            highest, total, acc = _accumulate(
                q, k, v, scales, scale_log2, allowed, highest, total, acc, WINDOW, SOFTCAP, MASKED=part != 1
            )

    out_row = out_ptr + token_row * (num_kv_heads * GROUP * HEAD_DIM)
    tl.store(out_row + offset, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=is_query)


def prefill_config(
    group: int, head_dim: int, block_size: int, itemsize: int, cache_itemsize: int, shared_kib: int
) -> dict[str, int]:
    """Return 128 rows (tokens x padded group) and 8 warps; fewer rows for float32, or where shared memory is small.

    Heads of 256 take all registers of a thread. Only Hopper and later, which multiply from shared memory, have enough
    for 128 rows of them, or of codes that become q's type; others spill unless there are 32 rows, or 64 with codes.
    float32 is multiplied without tensor cores, and a thread keeps what it multiplies in registers: more than 32 rows
    and 16 keys spill kilobytes.

    Args:
        itemsize: the bytes of an element of q.
        cache_itemsize: the bytes of an element of the cache.
        shared_kib: the shared memory that a program may use.
    """
    is_wide = head_dim > 128
    is_float32 = itemsize == 4
    padded_group = next_power_of_2(group)
    tile = key_tile(head_dim, block_size, cache_itemsize)
    if cache_itemsize == 1:  # codes that become q's type need more registers than elements of two bytes
        tile = min(tile, 16 if is_wide else 32)
    rows = 32 if is_wide or is_float32 else 64
    needs_hopper = is_wide or cache_itemsize == 1
    if not is_float32 and shared_kib >= (200 if needs_hopper else 160):
        rows = 128
    return {
        "GROUP": group,
        "PADDED_GROUP": padded_group,
        "TOKENS": rows // padded_group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "TILE": min(tile, 16) if is_float32 else tile,
        "num_warps": 8 if rows == 128 or is_float32 else 4,
        "num_stages": 2 if is_float32 else 3,
    }


def paged_prefill(
    q: Tensor,
    cache: KVCache,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    num_tokens: int,
    scale: float,
    out: Tensor,
    variant: AttentionVariant | None = None,
) -> None:
    """Attend the last query tokens of each sequence to all of its keys up to themselves.

    q [all_tokens, num_heads, head_dim], the heads of a token adjacent; out like q, contiguous. cu_seqlens_q int32
    [num_seqs + 1] indexes q's tokens and need not begin at 0; num_tokens is its last value less its first. seq_lens
    int32 [num_seqs]; block_tables int32 [num_seqs, max_blocks]; cache as for paged_decode.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = cache.keys.shape[1:3]
    num_seqs = seq_lens.shape[0]
    itemsizes = (q.element_size(), cache.keys.element_size())
    config = prefill_config(num_heads // num_kv_heads, head_dim, block_size, *itemsizes, shared_memory_kib(q.device))
    constants, sinks = read_variant(variant)
    pointers, strides = list_parts(cache)
    sequences = (cu_seqlens_q, seq_lens, block_tables, sinks)
    sizes = (scale * math.log2(math.e), num_seqs, num_kv_heads, q.stride(0), block_tables.stride(0))
    args = (q, *pointers, out, *sequences, *sizes, *strides)
    num_tiles = num_tokens // config["TOKENS"] + num_seqs
    launch(_prefill_kernel, (num_tiles * num_kv_heads,), args, config | constants)
