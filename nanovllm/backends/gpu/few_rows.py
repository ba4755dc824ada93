"""Multiplies few rows by a matrix of 16 bits by the kernel of product.py, with what follows in the same launch.

cuBLAS starts each product when the kernel before it has ended, and its first weights are then still in memory. These
programs start while that kernel runs, and ask for their first weights before they wait for it: weights do not depend on
it. Before it waits, a program touches nothing that its predecessor could write, and it loads nothing. Sums along K are
split among programs where a matrix has few columns.

A row has the same bits whatever the other rows are and however many they are. There is one tile for all numbers of
rows, the split of a sum follows from the matrix alone, and its parts are added in their order.

few_rows_layer.py says which layers use it.

The product is torch's F.linear. Of the activation after it, the reference is `silu_and_mul_reference` in
ops/silu_and_mul.py; of the sum with the residual, the reference is `add_rms_norm_reference` in ops/rms_norm.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch
from nanovllm.backends.gpu.product import Laid, _product_kernel
from nanovllm.backends.gpu.tiles import choose_part_steps
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


def few_rows_config(cut: Cut, silu: bool) -> dict[str, int | None]:
    """Return the constants of `_product_kernel` to compile with.

    The shared memory of a multiprocessor has room for two programs, so a thread may have 128 registers. If it is not
    told, the compiler takes 48, and then spends more instructions on addresses.
    """
    return {
        "BITS": 16,
        "NUMBERS": None,
        "GROUP": 0,
        "GROUPS": 1,
        "SHARED": 1,
        "MINIMA_SHARED": 1,
        "HAS_TAIL": False,
        "EXPERTS": 0,
        "BAND": 0,
        "PARTS": cut.parts,
        "AHEAD": AHEAD,
        "SILU": silu,
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
        return self._launch(x, bias, residual, silu=False)

    def multiply_gated(self, x: Tensor) -> Tensor:
        """x [n, in] -> silu_and_mul(x W^T) [n, out / 2]: the first half of W's rows are the gate's."""
        return self._launch(x, None, None, silu=True)

    def _launch(self, x: Tensor, bias: Tensor | None, residual: Tensor | None, silu: bool) -> Tensor:
        num_rows = len(x)
        assert num_rows <= MAX_ROWS, f"{num_rows} rows, and a tile has {MAX_ROWS}"
        out_size, in_size = self.weight.shape
        cut = self.cut
        num_tiles = len(self.arrivals)
        y = torch.empty(num_rows, out_size // 2 if silu else out_size, dtype=x.dtype, device=x.device)
        num_partial = num_tiles * cut.parts * MAX_ROWS * cut.columns if cut.parts > 1 else 0
        partial = torch.empty(num_partial, dtype=torch.float32, device=x.device)
        weights = Laid(self.weight, 16, in_size).tensors
        pointers = (x.contiguous(), None, *weights, bias, residual, y, partial, self.arrivals, None, None)
        sizes = (in_size, in_size, out_size, num_rows, cut.part_steps, 0, 0)
        grid = (num_tiles if num_rows else 0, cut.parts)
        launch(_product_kernel, grid, (*pointers, *sizes), few_rows_config(cut, silu))
        return y
