"""Multiplies few rows by a matrix of 16 bits in Triton, with what follows the product in the same launch.

cuBLAS starts each product when the kernel before it has ended, and its first weights are then still in memory. These
programs start while that kernel runs, and ask for their first weights before they wait for it: weights do not depend on
it. Sums along K are split among programs where a matrix has few columns.

A row has the same bits whatever the other rows are and however many they are. There is one tile for all numbers of
rows, the split of a sum follows from the matrix alone, and its parts are added in their order.

few_rows_layer.py says which layers use it.

The product is torch's F.linear. Of the activation after it, the reference is `silu_and_mul_reference` in
ops/silu_and_mul.py; of the sum with the residual, the reference is `add_rms_norm_reference` in ops/rms_norm.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.backends.gpu.l2_cache import LINE_BYTES, prefetch_lines
from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.tiles import add_parts, choose_part_steps
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.utils.integers import ceil_div

MAX_ROWS = 32
"""The most rows of a product: those of the one tile."""

MIN_PROGRAMS = 128
"""A product has at least about so many programs: one for each multiprocessor of an H100, if its sums can be split."""

MANY_COLUMNS = 16384
"""From so many columns on a tile has twice as many, because each tile reads all rows of x again."""

MAX_BLOCK_K = 128

MIN_BLOCK_K = 16
"""Tensor cores take no fewer numbers at a time."""

AHEAD = 4
"""Steps along K whose weights a program asks for before it waits for its predecessor."""


@triton.jit(do_not_specialize=["num_rows", "part_steps"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    partial_ptr,
    arrivals_ptr,
    in_size,
    out_size,
    num_rows,
    part_steps,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SILU: tl.constexpr,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (out_size / BLOCK_N, PARTS). A program owns part_steps steps along K of all rows and BLOCK_N columns, a tile.
    # The last program of a tile to arrive adds the parts in their order, and leaves arrivals as it found them: zero.
    # Of columns beyond the last one it computes others once more, and stores nothing. No input is padding.
    # Before it waits, a program touches nothing that its predecessor could write, and it loads nothing.
    tile = tl.program_id(0)
    part = tl.program_id(1)
    TYPE: tl.constexpr = y_ptr.dtype.element_ty
    element = tl.arange(0, BLOCK_N)
    column = tile * BLOCK_N + element
    if SILU:
        # Neighbours are a column of the gate and the same one of what it multiplies, which begins in the middle.
        column = tile * (BLOCK_N // 2) + element // 2 + element % 2 * (out_size // 2)
    weight_at = weight_ptr + (column % out_size).to(tl.int64)[:, None] * in_size
    first = part * part_steps
    end = min(first + part_steps, in_size // BLOCK_K)
    if AHEAD and PDL:
        LINE: tl.constexpr = LINE_BYTES * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
        line = tl.arange(0, max(AHEAD * BLOCK_K // LINE, 1)) * LINE
        prefetch_lines(weight_at + tl.minimum(first * BLOCK_K + line, end * BLOCK_K - 1)[None, :])
    wait_for_predecessor(PDL)
    row = tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row[:, None] * in_size + k[None, :]
    weight_at += k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first, end):
        x = tl.load(x_at + step * BLOCK_K, mask=is_row[:, None], other=0.0)
        weight = tl.load(weight_at + step * BLOCK_K)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    acc, is_last = add_parts(acc, partial_ptr, arrivals_ptr, tile, part, PARTS, is_row[:, None])
    if is_last:
        if SILU:
            size = out_size // 2
            place = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            gate, up = tl.split(tl.reshape(acc.to(TYPE).to(tl.float32), (BLOCK_M, BLOCK_N // 2, 2)))
            activated = gate / (1.0 + tl.exp(-gate))
            y = activated.to(TYPE).to(tl.float32) * up
        else:
            size = out_size
            place = column
            if HAS_BIAS:
                acc += tl.load(bias_ptr + column, mask=column < out_size, other=0.0).to(tl.float32)[None, :]
            y = acc
        at = row.to(tl.int64)[:, None] * size + place[None, :]
        exists = is_row[:, None] & (place < size)[None, :]
        if HAS_RESIDUAL:
            residual = tl.load(residual_ptr + at, mask=exists, other=0.0)
            y = y.to(TYPE).to(tl.float32) + residual.to(tl.float32)
        tl.store(y_ptr + at, y.to(TYPE), mask=exists)


class Cut(NamedTuple):
    """A matrix, cut into the shares of programs.

    Attributes:
        columns, stages: of a tile, and of its loop.
        block_k: the inputs of a step along K.
        parts: into how many parts a sum is split.
        part_steps: the steps along K of a part.
    """

    columns: int
    stages: int
    block_k: int
    parts: int
    part_steps: int


def choose_columns(out_size: int) -> tuple[int, int]:
    """Return the columns of a tile, and the stages of its loop."""
    return (64, 4) if out_size >= MANY_COLUMNS else (32, 6)


def cut_matrix(out_size: int, in_size: int) -> Cut:
    """Cut a matrix [out_size, in_size]. No number of rows is asked for, so the order of a sum depends on none."""
    columns, stages = choose_columns(out_size)
    block_k = min(MAX_BLOCK_K, in_size & -in_size)
    num_steps = in_size // block_k
    part_steps = choose_part_steps(num_steps, ceil_div(out_size, columns), MIN_PROGRAMS)
    return Cut(columns, stages, block_k, ceil_div(num_steps, part_steps), part_steps)


def few_rows_config(cut: Cut, has_bias: bool, has_residual: bool, silu: bool) -> dict[str, int]:
    """Return the constants to compile with.

    The shared memory of a multiprocessor has room for two programs, so a thread may have 128 registers. If it is not
    told, the compiler takes 48, and then spends more instructions on addresses.
    """
    return {
        "HAS_BIAS": has_bias,
        "HAS_RESIDUAL": has_residual,
        "SILU": silu,
        "PARTS": cut.parts,
        "AHEAD": AHEAD,
        "BLOCK_M": MAX_ROWS,
        "BLOCK_N": cut.columns,
        "BLOCK_K": cut.block_k,
        "num_warps": 4,
        "num_stages": cut.stages,
        "maxnreg": 128,
    }


class FewRowsMatrix:
    """A matrix [out, in] for products of at most MAX_ROWS rows."""

    def __init__(self, weight: Tensor) -> None:
        """
        Args:
            weight: [out, in], contiguous. It is read where it is, so new values may be written there.
        """
        self.weight = weight
        self.cut = cut_matrix(*weight.shape)
        num_tiles = ceil_div(weight.shape[0], self.cut.columns)
        self.arrivals = torch.zeros(num_tiles, dtype=torch.int32, device=weight.device)

    @staticmethod
    def is_supported(weight: Tensor) -> bool:
        """Return whether the kernel takes a matrix [out, in] of this type and width."""
        fits = weight.numel() > 0 and weight.shape[1] % MIN_BLOCK_K == 0
        return weight.dtype.itemsize == 2 and fits and weight.is_contiguous()

    def multiply(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """x [n, in] -> x W^T + bias + residual [n, out], in x's dtype. The product is rounded, and so is the sum.

        Args:
            residual: [n, out], contiguous.
        """
        return few_rows_linear(x, self, bias, residual, silu=False)

    def multiply_gated(self, x: Tensor) -> Tensor:
        """x [n, in] -> silu_and_mul(x W^T) [n, out / 2]: the first half of W's rows are the gate's."""
        return few_rows_linear(x, self, None, None, silu=True)


def few_rows_linear(
    x: Tensor, matrix: FewRowsMatrix, bias: Tensor | None, residual: Tensor | None, silu: bool
) -> Tensor:
    """Launch the product of x [n, in], and what follows it, in one kernel.

    Args:
        silu: do what `multiply_gated` does, in place of what `multiply` does.
    """
    num_rows = len(x)
    assert num_rows <= MAX_ROWS, f"{num_rows} rows, and a tile has {MAX_ROWS}"
    out_size, in_size = matrix.weight.shape
    cut = matrix.cut
    num_tiles = len(matrix.arrivals)
    y = torch.empty(num_rows, out_size // 2 if silu else out_size, dtype=x.dtype, device=x.device)
    num_partial = num_tiles * cut.parts * MAX_ROWS * cut.columns if cut.parts > 1 else 0
    partial = torch.empty(num_partial, dtype=torch.float32, device=x.device)
    x = x.contiguous()
    # Where there is no bias and no residual, x takes their place as argument. The kernel does not read it there.
    pointers = (x, matrix.weight, x if bias is None else bias, x if residual is None else residual, y)
    sizes = (in_size, out_size, num_rows, cut.part_steps)
    config = few_rows_config(cut, bias is not None, residual is not None, silu)
    grid = (num_tiles if num_rows else 0, cut.parts)
    launch(_few_rows_kernel, grid, (*pointers, partial, matrix.arrivals, *sizes), config)
    return y
