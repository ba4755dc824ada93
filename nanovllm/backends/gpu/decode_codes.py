"""The tiles of keys and values that decode attention reads: numbers, or codes of one byte, which are taken in pairs.

A code becomes a number in registers. With one query token a sequence this can take longer than reading the cache. The
product of weights and V sums over keys, so tensor cores want the V of two neighbouring keys in one register. In memory
the neighbour of a code is the next dimension of the same key. The hardware transposes elements of two bytes on their
way from shared memory, but not elements of one byte. So two codes are read as one int16, and the even and the odd
dimensions are multiplied apart. K is read likewise. In bfloat16 each instruction of `_unpack_int8` and `_unpack_fp8`
works on two codes.

In their assembly $2 is a register with two pairs, $0 gets their low bytes, and $1 their high bytes. `lop3` with 0xEA is
(a & b) | c.

The references are `attend_reference` in ops/attention.py and ops/kv_codes.py.
"""

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


@triton.jit
def read_tile(tile, TYPE: tl.constexpr, IS_FP8: tl.constexpr):
    """Return the even and the odd dimensions of codes in pairs, int16, as TYPE; or numbers as they are, twice."""
    even = tile
    odd = tile
    if tl.int16 == tile.dtype:
        even, odd = unpack_codes(tile, TYPE, IS_FP8)
    return even, odd
