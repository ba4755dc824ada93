"""Reads codes of fp8 (e4m3) as numbers of 16 or 32 bits, in Triton. No GPU needs to know the format for it.

Sign, exponent and mantissa move to where the wider type has them. Its exponent has another bias than that of fp8,
which is 7. So the moved bits are too small by a power of two, by which they are multiplied. This is exact for every
code, the subnormal ones too. NaN would become 480, but `Codes` never have it.
"""

from nanovllm.backends.gpu.triton_shim import INTERPRETED, tl, triton

_IS_COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def _read_fours(codes):
    """Return codes, uint8, in bfloat16, four at a time: five instructions for two codes.

    $2 has four codes. `prmt` puts each of them into the high byte of 16 bits. `lop3` with 0xEA is (a & b) | c.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 codes, bits, scale, minus_0;
        mov.b32 scale, 0x7B807B80;
        mov.b32 minus_0, 0x80008000;
        prmt.b32 codes, $2, 0, 0x1404;
        shr.b32 bits, codes, 4;
        and.b32 bits, bits, 0x07F007F0;
        lop3.b32 bits, codes, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $0, bits, scale, minus_0;
        prmt.b32 codes, $2, 0, 0x3424;
        shr.b32 bits, codes, 4;
        and.b32 bits, bits, 0x07F007F0;
        lop3.b32 bits, codes, 0x80008000, bits, 0xEA;
        fma.rn.bf16x2 $1, bits, scale, minus_0;
        }""",
        "=r,=r,r",
        [codes],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def read_fp8(codes, TYPE: tl.constexpr):
    """Return codes of fp8, uint8, as numbers of TYPE."""
    if _IS_COMPILED and tl.bfloat16 == TYPE:
        return _read_fours(codes)
    if tl.float16 == TYPE:
        wide = codes.to(tl.int16)
        bits = (wide & 0x80) << 8 | (wide & 0x7F) << 7
        return bits.to(tl.float16, bitcast=True) * 256.0
    wide = codes.to(tl.int32)
    bits = (wide & 0x80) << 24 | (wide & 0x7F) << 20
    return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(TYPE)  # 2^120
