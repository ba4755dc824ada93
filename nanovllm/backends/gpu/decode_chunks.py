"""The beginning and the end of a chunk in decode attention. At its end its output is stored, and the last program of a
sequence merges the sequence's chunks.

The reference is `attend_reference` in ops/attention.py.
"""

from nanovllm.backends.gpu.l2_cache import LINE_BYTES, prefetch_lines
from nanovllm.backends.gpu.triton_shim import tl, triton


@triton.jit
def find_chunk(items_ptr, first_item_ptr, item, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return a chunk's sequence, its first and end key, the number of the sequence's chunks, and the first visible key.

    With a WINDOW, tiles before the first visible key are left out. A chunk that ends before it has no keys then.
    """
    seq = tl.load(items_ptr + item * 4).to(tl.int64)
    begin = tl.load(items_ptr + item * 4 + 1)
    end = tl.load(items_ptr + item * 4 + 2)
    num_parts = tl.load(items_ptr + item * 4 + 3)
    visible = 0
    if WINDOW is not None:
        last_item = tl.load(first_item_ptr + seq + 1) - 1
        seq_len = tl.load(items_ptr + last_item * 4 + 2)
        visible = tl.maximum(seq_len - WINDOW, 0)
        begin = tl.maximum(begin, visible // TILE * TILE)
    return seq, begin, end, num_parts, visible


@triton.jit
def prefetch_following(
    caches,
    lists,
    item,
    end_item,
    head,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Ask for the first tile of K and V of a program's next chunk, so that it is in the L2 cache at the chunk's turn.

    It is called while the output of `item` is still to be stored. Nothing waits for it, and the numbers that it loads
    to find the tile are in the L1 cache when they are loaded again. After the last chunk it asks for that one again.

    Args:
        caches: pointers to keys and values, of HEAD_DIM elements a head; strides of pages, tokens and heads, in
            elements.
        lists: pointers to items, first_item and block_tables, and the stride of the tables.
        end_item: the number after the program's last chunk.
    """
    k_cache_ptr, v_cache_ptr, page_stride, token_stride, head_stride = caches
    items_ptr, first_item_ptr, block_tables_ptr, table_stride = lists
    following = tl.minimum(item + 1, end_item - 1)
    seq, begin, end, _, _ = find_chunk(items_ptr, first_item_ptr, following, TILE, WINDOW)
    # Padding has a chunk without keys: block 0 stands for a table's entry, which is not written there.
    page = tl.load(block_tables_ptr + seq * table_stride + begin // BLOCK_SIZE, mask=begin < end, other=0)
    place = page.to(tl.int64) * page_stride + head * head_stride + (begin % BLOCK_SIZE) * token_stride
    ELEMENTS: tl.constexpr = LINE_BYTES * 8 // k_cache_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = max(HEAD_DIM // ELEMENTS, 1)
    line = tl.arange(0, TILE)[:, None] * token_stride + tl.arange(0, LINES)[None, :] * ELEMENTS
    prefetch_lines(k_cache_ptr + place + line)
    prefetch_lines(v_cache_ptr + place + line)


@triton.jit
def _merge(
    out_row_ptr,
    partials,
    first,
    num_parts,
    head,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAY_LACK_KEYS: tl.constexpr,
):
    """Merge a sequence's chunks, PARTS at a time, in their order: it makes no difference which program ended last.

    At most the first of several chunks has no keys, so `new_highest` is finite (PARTS is at least 2). With a window,
    however, more of them MAY_LACK_KEYS.
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
        origin = tl.where(new_highest > float("-inf") if MAY_LACK_KEYS else is_query, new_highest, 0.0)
        weights = tl.exp2(lse - origin[None, :])
        shrink = tl.exp2(highest - origin)
        acc = acc * shrink[:, None] + tl.sum(out * weights[:, :, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = new_highest
    merged = (acc / tl.where(is_query, total, 1.0)[:, None]).to(out_row_ptr.dtype.element_ty)
    tl.store(out_row_ptr + member[:, None] * HEAD_DIM + dim[None, :], merged, mask=is_query[:, None])


@triton.jit
def finish_chunk(
    out_ptr,
    acc,
    highest,
    total,
    merge_pointers,
    item,
    seq,
    num_parts,
    head,
    num_heads,
    GROUP: tl.constexpr,
    MAY_LACK_KEYS: tl.constexpr,
):
    """Norm and store a chunk's output. The last program of a sequence to get here merges the sequence's chunks.

    Args:
        out_ptr: the output of all sequences.
        acc: float32 [ROWS, HEAD_DIM], the sum of values by weights.
        highest, total: the highest score and the sum of the weights of each row, as `update_softmax` returns them.
        merge_pointers: pointers to first_item, arrivals, partial_out and partial_lse of `DecodeMetadata`. That to
            arrivals points to this KV head's row.
    """
    ROWS: tl.constexpr = acc.shape[0]
    HEAD_DIM: tl.constexpr = acc.shape[1]
    first_item_ptr, arrivals_ptr, partial_out_ptr, partial_lse_ptr = merge_pointers
    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]  # zeros where there are no keys
    out_row_ptr = out_ptr + seq * num_heads * HEAD_DIM
    row = tl.arange(0, ROWS)
    is_query = row < GROUP
    offset = (head * GROUP + row)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    if num_parts == 1:
        tl.store(out_row_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=is_query[:, None])
    else:
        partial_row = item * num_heads
        tl.store(partial_out_ptr + partial_row * HEAD_DIM + offset, out, mask=is_query[:, None])
        lse = highest + tl.log2(total)
        tl.store(partial_lse_ptr + partial_row + head * GROUP + row, lse, mask=is_query)
        tl.debug_barrier()  # whoever sees this program's arrival sees what all its threads have stored
        if tl.atomic_add(arrivals_ptr + seq, 1, sem="acq_rel") == num_parts - 1:
            tl.store(arrivals_ptr + seq, 0)
            first = tl.load(first_item_ptr + seq)
            partials = (partial_out_ptr, partial_lse_ptr)
            _merge(out_row_ptr, partials, first, num_parts, head, num_heads, GROUP, HEAD_DIM, MAY_LACK_KEYS)
