"""Quantised matrices on a GPU: the Triton kernels multiply by their codes as they are."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.backends.gpu.dequantize import multiply_dequantized
from nanovllm.backends.gpu.product import (
    MOST_CODES_ROWS,
    Laid,
    LaidScales,
    choose_step,
    limit_rows,
    make_arrivals,
    pack_numbers,
    product,
)
from nanovllm.features.quantized.codes import Codes, InputScales, Scales
from nanovllm.features.quantized.dynamic import MOST_INPUTS
from nanovllm.features.quantized.formats import Format
from nanovllm.features.quantized.torch_matrix import MatrixOperators, TorchMatrix

if TYPE_CHECKING:
    from nanovllm.backends.gpu.triton_backend import TritonKernels
    from nanovllm.features.families.qwen3_moe.ops import Routing


class TritonMatrix(TorchMatrix):
    """A quantised matrix [out, in], or the matrices [num_experts, out, in] of one projection of all experts.

    Attributes:
        row_limits: see `limit_rows`.
        form: what decides which variants of the kernels it needs.
    """

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """
        Args:
            dtype: the type of the model, which rows of an embedding have.

        Raises:
            ValueError: the kernel cannot take groups of this size, experts' columns that were sorted by their group, or
                rows that are too long for exact sums.
        """
        refuse_codes(codes)
        # Each of these tensors is there once: `rows` reads it in the order of `Codes`, the kernel in that of columns.
        by_column = replace(
            codes,
            codes=codes.codes.contiguous(),
            scales=codes.scales.map(_lay_by_column),
            zeros=None if codes.zeros is None else _lay_by_column(codes.zeros.to(torch.int32)),
            minima=None if codes.minima is None else codes.minima.map(_lay_by_column),
        )
        super().__init__(by_column, dtype)
        self._laid = Laid(
            by_column.codes,
            bits=4 if codes.bits == 4 else 8,
            group_size=codes.group_size,
            scales=_transpose(by_column.scales),
            zeros=None if by_column.zeros is None else by_column.zeros.mT,
            rounds=codes.input_scales is not None,
            minima=_transpose(by_column.minima),
            numbers=None if codes.numbers is None else pack_numbers(codes.numbers.tolist()),
        )
        if codes.codes.dim() == 2:
            self._laid = self._laid._replace(arrivals=make_arrivals(self._laid))
        self.row_limits = limit_rows(self._laid.tiles)
        self.form = codes.describe_form()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]. The codes' columns may have another order than those of x."""
        if self._codes.order is not None:
            x = x.index_select(1, self._codes.order)
        if len(x) > MOST_CODES_ROWS and not self._laid.rounds:
            return multiply_dequantized(x, self._laid, bias)
        return product(x, self._laid, bias)

    def multiply_pairs(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        """Do what `grouped_linear_reference` does."""
        return product(x, self._laid, routing=routing, gather=gather)


def refuse_codes(codes: Codes) -> None:
    """Raise a ValueError if the kernel cannot take a matrix, or those of experts."""
    if codes.order is not None and codes.codes.dim() > 2:
        raise ValueError(
            "these experts' columns are sorted by their group (desc_act), which the grouped Triton kernel does not "
            "take: use a checkpoint that was made with desc_act=False"
        )
    if codes.input_scales is not None and codes.in_features > MOST_INPUTS:
        raise ValueError(
            f"a matrix has {codes.in_features} inputs, and int32 adds the products of at most {MOST_INPUTS} codes "
            'exactly: use quantization="int8"'
        )
    choose_step(codes.bits, codes.in_features, codes.group_size)


def _lay_by_column(values: Tensor) -> Tensor:
    """Return a copy of the values [..., m, n] in which the elements of a column are neighbours in memory."""
    return values.mT.clone(memory_format=torch.contiguous_format).mT


def _transpose(scales: Scales | None) -> LaidScales:
    """Return scales, or minima, that `_lay_by_column` has laid as the kernel reads them."""
    if scales is None:
        return LaidScales()
    return LaidScales(scales.values.mT, None if scales.factors is None else scales.factors.mT, scales.groups_per_value)


class Operators(MatrixOperators):
    """Lays matrices for the Triton kernels.

    All matrices of a model round their inputs, or none does. If they do, the backend's norms and SiLU round what they
    write, so that no kernel must do it later.
    """

    def __init__(self, backend: "TritonKernels") -> None:
        super().__init__(backend)
        self._kernels = backend

    def lay(self, codes: Codes, dtype: torch.dtype) -> TritonMatrix:
        self._kernels.rounds_inputs = codes.input_scales is not None
        return TritonMatrix(codes, dtype)

    def keep_place(self, old: Any, new: Any) -> Any:
        """Write new codes into the memory of the old ones, which CUDA graphs read. They have the same shapes."""
        if old is None:
            return new
        old._codes.codes.copy_(new._codes.codes)
        old._codes.scales.values.copy_(new._codes.scales.values)
        # Zeros and orders are a checkpoint's, which is never replaced.
        return old

    def why_cannot(self, format: Format) -> str | None:
        if format.input_scales is InputScales.GROUP:
            return (
                "this form is for CPUs. On a GPU inputs are rounded with one scale for each token: use "
                'quantization="w8a8", or "int8", whose products are exact'
            )
        return None

    def warn(self, format: Format) -> None:
        pass
