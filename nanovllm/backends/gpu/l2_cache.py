"""Asks for lines of memory before they are loaded, so that they are in the L2 cache then."""

from nanovllm.backends.gpu.triton_shim import INTERPRETED, tl, triton

LINE_BYTES = tl.constexpr(128)
"""The bytes that one prefetch brings into the L2 cache."""

_IS_COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def prefetch_lines(pointers):
    """Ask for the line of each pointer. Nothing waits for it, and it changes no value that a later load finds."""
    if _IS_COMPILED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
