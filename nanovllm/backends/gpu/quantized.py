"""Quantised matrices on a GPU: the Triton kernel multiplies by their codes as they are."""

import torch
from torch import Tensor

from nanovllm.backends.gpu.quantized_linear import TILES, format_config, grouped_quantized, quantized_linear
from nanovllm.models.qwen3_moe.ops import Routing
from nanovllm.quantized.coded_weight import CodedWeight
from nanovllm.quantized.codes import Codes
from nanovllm.quantized.formats import Format
from nanovllm.quantized.torch_matrix import MatrixOperators


class TritonMatrix:
    """A quantised matrix [out, in]. It implements `PackedMatrix`.

    Attributes:
        row_limits: the numbers of rows up to which each variant of the kernel is taken. At start-up each is compiled.
    """

    row_limits = tuple(most for most, _, _ in TILES)

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """
        Args:
            dtype: the type of the model, which rows of an embedding have.

        Raises:
            ValueError: the kernel cannot take groups of this size.
        """
        self.weight = transpose_scales(codes)
        self.order = codes.order
        self.dtype = dtype
        self._inverse = None if codes.order is None else codes.order.argsort()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]. The codes' columns may have another order than those of x."""
        x = x.contiguous() if self.order is None else x.index_select(1, self.order)
        return quantized_linear(x, self.weight, bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Return the matrix's rows [n, in] at indices [n], rounded once, from float32 to the type of the model."""
        codes = self.weight.codes.index_select(0, indices)
        scales = self.weight.scales.index_select(1, indices)
        zeros = None if self.weight.zeros is None else self.weight.zeros.index_select(1, indices)
        rows = self.weight._replace(codes=codes, scales=scales, zeros=zeros).dequantize()
        return (rows if self._inverse is None else rows.index_select(1, self._inverse)).to(self.dtype)


class TritonExperts:
    """The quantised matrices [num_experts, out, in] of one projection of all experts."""

    def __init__(self, codes: Codes) -> None:
        """
        Raises:
            ValueError: the kernel cannot take groups of this size, or columns that were sorted by their group.
        """
        if codes.order is not None:
            raise ValueError(
                "these experts' columns are sorted by their group (desc_act), which the grouped Triton kernel does not "
                "take: use a checkpoint that was made with desc_act=False"
            )
        self.weight = transpose_scales(codes)

    def multiply(self, x: Tensor, routing: Routing, gather: bool) -> Tensor:
        """Do what `grouped_linear_reference` does."""
        return grouped_quantized(x, self.weight, routing, gather)


def transpose_scales(codes: Codes) -> CodedWeight:
    """Return a matrix in the kernel's form: the scales and zeros of one group lie together.

    Raises:
        ValueError: the kernel cannot take groups of this size.
    """
    format_config(codes.bits, codes.in_features, codes.group_size, codes.zeros is not None)
    zeros = None if codes.zeros is None else _copy_transposed(codes.zeros.to(torch.int32))
    scales = _copy_transposed(codes.scales)
    return CodedWeight(codes.codes.contiguous(), scales, zeros, codes.bits, codes.in_features, codes.group_size)


def _copy_transposed(values: Tensor) -> Tensor:
    """Return values [..., m, n] as a contiguous copy [..., n, m]."""
    return values.mT.clone(memory_format=torch.contiguous_format)


class TritonMatrixOperators(MatrixOperators):
    """Makes matrices for the Triton kernels. None of them multiplies in whole numbers."""

    def make_matrix(self, codes: Codes, dtype: torch.dtype) -> TritonMatrix:
        return TritonMatrix(codes, dtype)

    def make_experts(self, codes: Codes, dtype: torch.dtype) -> TritonExperts:
        return TritonExperts(codes)

    def warn(self, format: Format) -> None:
        pass


def make_operators(backend: object) -> TritonMatrixOperators:
    """Return what makes the matrices of Triton."""
    return TritonMatrixOperators()
