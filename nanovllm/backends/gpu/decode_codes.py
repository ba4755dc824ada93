"""Decode attention over a cache of codes of one byte: the split of paged_decode.py, with codes taken in pairs.

A code becomes a number in registers. With one query token a sequence this can take longer than reading the cache. The
product of weights and V sums over keys, so tensor cores want the V of two neighbouring keys in one register. In memory
the neighbour of a code is the next dimension of the same key. The hardware transposes elements of two bytes on their
way from shared memory, but not elements of one byte. So this kernel reads two codes as one int16, and multiplies the
even and the odd dimensions apart. It reads K likewise. In bfloat16 each instruction of `_unpack_int8` and `_unpack_fp8`
works on two codes.

In their assembly $2 is a register with two pairs, $0 gets their low bytes, and $1 their high bytes. `lop3` with 0xEA is
(a & b) | c.

The references are `attend_reference` in ops/attention.py and ops/kv_codes.py.
"""

from nanovllm.backends.gpu.decode_chunks import find_chunk, finish_chunk, prefetch_following
from nanovllm.backends.gpu.launch import wait_for_predecessor
from nanovllm.backends.gpu.online_softmax import cap_scores, start_softmax, update_softmax
from nanovllm.backends.gpu.triton_shim import INTERPRETED, tl, triton

_IS_COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def _unpack_int8(pairs):
    """Return the low and the high bytes of pairs, int8 codes, in bfloat16.

    0x4300 is 128 in bfloat16. With the seven low bits of a code it is 128 + these bits. With the sign bit alone it is
    128, or 256 if the code is negative. The difference is the code.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 next, bits, sign, minus_1;
        mov.b32 minus_1, 0xBF80BF80;
        lop3.b32 bits, $2, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 sign, $2, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, sign, minus_1, bits;
        shr.b32 next, $2, 8;
        lop3.b32 bits, next, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 sign, next, 0x00800080, 0x43004300, 0xEA;
        fma.rn.bf16x2 $1, sign, minus_1, bits;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _unpack_fp8(pairs):
    """Return the low and the high bytes of pairs, codes of fp8 (e4m3), in bfloat16.

    Sign, exponent and mantissa move to where bfloat16 has them. bfloat16's exponent has a bias of 127, and fp8's of 7.
    So the moved bits are 2**120 times too small, and are multiplied by that.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 next, bits, scale, minus_0;
        mov.b32 scale, 0x7B807B80;
        mov.b32 minus_0, 0x80008000;
        shl.b32 bits, $2, 4;
        and.b32 bits, bits, 0x07F007F0;
        shl.b32 next, $2, 8;
        lop3.b32 bits, next, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $0, bits, scale, minus_0;
        shr.b32 bits, $2, 4;
        and.b32 bits, bits, 0x07F007F0;
        lop3.b32 bits, $2, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $1, bits, scale, minus_0;
        }""",
        "=r,=r,r",
        [pairs],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def unpack_codes(pairs, TYPE: tl.constexpr, IS_FP8: tl.constexpr):
    """Return the low and the high bytes of pairs, int16, as numbers of TYPE.

    This is exact for every code that `quantize_heads` makes: none of them is fp8's NaN. Other types than bfloat16 are
    rare, and take Triton's own conversions.
    """
    if _IS_COMPILED and tl.bfloat16 == TYPE:
        if IS_FP8:
            low, high = _unpack_fp8(pairs)
        else:
            low, high = _unpack_int8(pairs)
    elif IS_FP8:
        low = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(TYPE)
        high = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(TYPE)
    else:
        low = ((pairs << 8) >> 8).to(TYPE)
        high = (pairs >> 8).to(TYPE)
    return low, high


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["sinks_ptr"])
def split_codes_kernel(
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
    # Grid, chunks and padding as in _split_kernel. The cache's strides count pairs.
    wait_for_predecessor(PDL)
    head = tl.program_id(0)
    program = tl.program_id(1)
    num_heads = (tl.num_programs(0) * GROUP).to(tl.int64)
    ROWS: tl.constexpr = 16
    HALF: tl.constexpr = HEAD_DIM // 2
    TYPE: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.arange(0, ROWS)
    pair = tl.arange(0, HALF)
    key = tl.arange(0, TILE)
    is_query = (row < GROUP)[:, None]
    offset = (head * GROUP + row)[:, None] * HEAD_DIM + 2 * pair[None, :]
    k_offset = key[None, :] * token_stride + pair[:, None]
    v_offset = key[:, None] * token_stride + pair[None, :]
    end_item = tl.load(share_begins_ptr + program + 1)
    for item in tl.range(tl.load(share_begins_ptr + program), end_item):
        seq, begin, end, num_parts, visible = find_chunk(items_ptr, first_item_ptr, item, TILE, WINDOW)
        q_even = tl.load(q_ptr + seq * q_stride + offset, mask=is_query, other=0.0)
        q_odd = tl.load(q_ptr + seq * q_stride + offset + 1, mask=is_query, other=0.0)
        table_ptr = block_tables_ptr + seq * table_stride
        num_sinks = tl.where(tl.load(first_item_ptr + seq) == item, GROUP, 0)  # the first chunk has them
        highest, total = start_softmax(sinks_ptr, head * GROUP + row, row < num_sinks)
        even = tl.zeros([ROWS, HALF], tl.float32)
        odd = tl.zeros([ROWS, HALF], tl.float32)
        page = tl.load(table_ptr + begin // BLOCK_SIZE)  # one tile ahead, as in _split_kernel
        for start in tl.range(begin, end, TILE):
            place = page.to(tl.int64) * page_stride + head * head_stride + (start % BLOCK_SIZE) * token_stride
            scale_place = (page.to(tl.int64) * tl.num_programs(0) + head) * BLOCK_SIZE + start % BLOCK_SIZE + key
            page = tl.load(table_ptr + (start + TILE) // BLOCK_SIZE, mask=start + TILE < end, other=0)
            valid = start + key < end
            if WINDOW is not None:
                valid &= start + key >= visible
            k = tl.load(k_cache_ptr + place + k_offset)
            v = tl.load(v_cache_ptr + place + v_offset, mask=valid[:, None], other=0)
            k_scales = tl.load(k_scales_ptr + scale_place, mask=valid, other=0.0)
            v_scales = tl.load(v_scales_ptr + scale_place, mask=valid, other=0.0)
            k_even, k_odd = unpack_codes(k, TYPE, IS_FP8)
            scores = tl.dot(q_even, k_even, input_precision="ieee")
            scores = tl.dot(q_odd, k_odd, scores, input_precision="ieee")
            scores = cap_scores(scores * (k_scales * scale_log2)[None, :], SOFTCAP)
            scores = tl.where(valid[None, :], scores, float("-inf"))
            # The first tile of a chunk has a visible key.
            highest, total, weights, shrink = update_softmax(scores, highest, total, MAY_LACK_KEYS=False)
            weights = (weights * v_scales[None, :]).to(TYPE)
            v_even, v_odd = unpack_codes(v, TYPE, IS_FP8)
            even = tl.dot(weights, v_even, even * shrink[:, None], input_precision="ieee")
            odd = tl.dot(weights, v_odd, odd * shrink[:, None], input_precision="ieee")

        if AHEAD:
            caches = (k_cache_ptr, v_cache_ptr, page_stride, token_stride, head_stride)
            lists = (items_ptr, first_item_ptr, block_tables_ptr, table_stride)
            prefetch_following(caches, lists, item, end_item, head, BLOCK_SIZE, TILE, HALF, WINDOW)
        merge_pointers = (first_item_ptr, arrivals_ptr + head * num_seqs, partial_out_ptr, partial_lse_ptr)
        acc = tl.interleave(even, odd)
        numbers = (item, seq, num_parts, head, num_heads)
        finish_chunk(out_ptr, acc, highest, total, merge_pointers, *numbers, GROUP, MAY_LACK_KEYS=WINDOW is not None)
