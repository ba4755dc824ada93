"""Quantised matrices in plain torch: dequantise some rows, multiply, go on. It is slow, and runs everywhere."""

import logging
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.features.quantized.codes import ELEMENTS_AT_A_TIME, Codes, InputScales
from nanovllm.features.quantized.dynamic import multiply_rounded, multiply_rounded_tokens
from nanovllm.features.quantized.formats import Format

if TYPE_CHECKING:
    from nanovllm.features.families.qwen3_moe.ops import Routing

logger = logging.getLogger(__name__)


class TorchMatrix:
    """A quantised matrix [out, in], or the matrices [num_experts, out, in] of one projection of all experts.

    It implements `PackedMatrix` and `PackedExperts`, and keeps the codes as they are. Other forms are compared with it.
    """

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """dtype is that of the activations, which the weights are rounded to."""
        self._codes = codes
        self._dtype = dtype

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return product(x, self._codes, self._dtype, bias)

    def multiply_pairs(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        rows = x[routing.tokens.long()] if gather else x
        y = rows.new_zeros(len(rows), self._codes.out_features)
        for expert, (begin, end) in enumerate(pairwise(routing.offsets.tolist())):
            if begin < end:
                y[begin:end] = product(rows[begin:end], self._codes.take_expert(expert), self._dtype, None)
        return y

    def rows(self, indices: Tensor) -> Tensor:
        return self._codes.take_rows(indices.long()).dequantize().to(self._dtype)


def product(x: Tensor, codes: Codes, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """x [n, in] -> x W^T + bias [n, out]. Inputs keep their type, which is `dtype`, or are rounded as the codes say."""
    if codes.input_scales is not None:
        by_token = codes.input_scales is InputScales.TOKEN
        return (multiply_rounded_tokens if by_token else multiply_rounded)(
            x, codes.codes, codes.scales.values[:, 0], bias
        )
    y = torch.empty(x.shape[0], codes.out_features, dtype=x.dtype, device=x.device)
    height = max(1, ELEMENTS_AT_A_TIME // codes.in_features)  # rows at a time, so that float32 copies stay small
    for start in range(0, codes.out_features, height):
        rows = slice(start, start + height)
        weights = codes.take_rows(rows).dequantize().to(dtype)
        y[:, rows] = F.linear(x, weights, None if bias is None else bias[rows])
    return y


class MatrixOperators:
    """Lays quantised matrices as plain torch multiplies them. A subclass lays them for a backend's kernels."""

    def __init__(self, backend: object) -> None:
        """Plain torch needs nothing of the backend."""

    def lay(self, codes: Codes, dtype: torch.dtype) -> Any:
        """Return a matrix, or those of experts, in the form that is multiplied: a `PackedMatrix`, or `PackedExperts`.

        Args:
            codes: nobody else keeps them.
            dtype: the type of the activations.
        """
        return TorchMatrix(codes, dtype)

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
