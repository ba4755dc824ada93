"""Quantised matrices in plain torch: dequantise some rows, multiply, go on. It is slow, and runs everywhere."""

import logging
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.features.quantized.codes import ELEMENTS_AT_A_TIME, Codes
from nanovllm.features.quantized.dynamic import multiply_rounded, multiply_rounded_groups, multiply_rounded_tokens
from nanovllm.features.quantized.formats import Format, InputScales
from nanovllm.models.layers.linear import PackedMatrix

if TYPE_CHECKING:
    from nanovllm.features.families.qwen3_moe.decoder import PackedExperts
    from nanovllm.features.families.qwen3_moe.ops import Routing

logger = logging.getLogger(__name__)


class TorchMatrix:
    """A `PackedMatrix` that keeps the codes as they are. Other forms are compared with it."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """dtype is that of the activations, which the weights are rounded to."""
        self._codes = codes
        self._dtype = dtype
        self._height = max(1, ELEMENTS_AT_A_TIME // codes.in_features)
        """Rows that are dequantised at a time, so that float32 copies stay small."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.empty(x.shape[0], self._codes.out_features, dtype=x.dtype, device=x.device)
        for start in range(0, self._codes.out_features, self._height):
            rows = slice(start, start + self._height)
            weights = self._codes.take_rows(rows).dequantize().to(self._dtype)
            y[:, rows] = F.linear(x, weights, None if bias is None else bias[rows])
        return y

    def rows(self, indices: Tensor) -> Tensor:
        return self._codes.take_rows(indices.long()).dequantize().to(self._dtype)


class DynamicMatrix(TorchMatrix):
    """A `PackedMatrix` of whole numbers, which is multiplied in whole numbers. It keeps them in int8."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        super().__init__(codes.widen(), dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        codes = self._codes
        if codes.scales.shape[1] == 1:
            return multiply_rounded(x, codes.codes, codes.scales[:, 0], bias)
        return multiply_rounded_groups(x if codes.order is None else x[:, codes.order], codes, bias)


class TokenMatrix(DynamicMatrix):
    """A `DynamicMatrix` with one scale a row, whose inputs have one scale a token."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return multiply_rounded_tokens(x, self._codes.codes, self._codes.scales[:, 0], bias)


class TorchExperts:
    """`PackedExperts` that keep the codes as they are."""

    matrix: ClassVar[type[TorchMatrix]] = TorchMatrix

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        self._codes = codes
        self._matrices = [self.matrix(codes.take_expert(i), dtype) for i in range(len(codes.codes))]

    def multiply(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        rows = x[routing.tokens.long()] if gather else x
        y = rows.new_zeros(len(rows), self._codes.out_features)
        for matrix, (begin, end) in zip(self._matrices, pairwise(routing.offsets.tolist()), strict=True):
            if begin < end:
                y[begin:end] = matrix.multiply(rows[begin:end], None)
        return y


class DynamicExperts(TorchExperts):
    """`PackedExperts` of whole numbers, which are multiplied in whole numbers."""

    matrix = DynamicMatrix

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        super().__init__(codes.widen(), dtype)


class TokenExperts(DynamicExperts):
    """`DynamicExperts` whose inputs have one scale a token."""

    matrix = TokenMatrix


_MATRICES = {None: TorchMatrix, InputScales.GROUP: DynamicMatrix, InputScales.TOKEN: TokenMatrix}
_EXPERTS = {None: TorchExperts, InputScales.GROUP: DynamicExperts, InputScales.TOKEN: TokenExperts}


class MatrixOperators:
    """Makes quantised matrices in the form that plain torch multiplies. A subclass makes those of a backend's kernels.

    In each method dtype is the type of the activations. Nobody else keeps the codes.
    """

    def __init__(self, backend: object) -> None:
        """Plain torch needs nothing of the backend."""

    def make_matrix(self, codes: Codes, dtype: torch.dtype, input_scales: InputScales | None) -> PackedMatrix:
        """Return a matrix. If it rounds its inputs, it is multiplied in whole numbers. Else they keep their type."""
        return _MATRICES[input_scales](codes, dtype)

    def make_experts(self, codes: Codes, dtype: torch.dtype, input_scales: InputScales | None) -> "PackedExperts":
        """Return the matrices of one projection of all experts, which round their inputs or not, as a matrix does."""
        return _EXPERTS[input_scales](codes, dtype)

    def keep_place(self, old: Any, new: Any) -> Any:
        """Return what takes the place of a packed form: `new`, or `old` with the codes of `new`.

        Args:
            old: the form of the same matrix with other weights; None if there is none.
        """
        return new

    def why_cannot(self, format: Format) -> str | None:
        """Return why matrices of this format cannot be multiplied, and what to use instead; None if they can."""
        return None

    def warn(self, format: Format) -> None:
        """Log it if matrices of this format are multiplied slowly."""
        logger.warning(
            "plain torch multiplies quantised weights slowly: it converts each matrix in every step. The backend "
            '"triton" has kernels for all of them, and "cpu" for most'
        )
