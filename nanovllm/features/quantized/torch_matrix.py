"""Quantised matrices in plain torch: dequantise some rows, multiply, go on. It is slow, and runs everywhere."""

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.features.quantized.codes import ELEMENTS_AT_A_TIME, Codes, InputScales
from nanovllm.features.quantized.dynamic import multiply_rounded, multiply_rounded_tokens
from nanovllm.features.quantized.formats import Format

if TYPE_CHECKING:
    from nanovllm.backends.base import Backend
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


class FloatMatrix:
    """A matrix [out, in], or experts [num_experts, out, in], of unquantised numbers beside quantised matrices."""

    def __init__(self, weight: Tensor, backend: "Backend") -> None:
        """
        Args:
            weight: in the type of the activations.
            backend: multiplies experts.
        """
        self._weight = weight
        self._backend = backend

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._weight, bias)

    def multiply_pairs(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        from nanovllm.features.families.qwen3_moe.ops import ExpertOperators

        operators = self._backend.find_operators(ExpertOperators, "experts")
        return operators.grouped_linear(x, self._weight, routing, gather)

    def rows(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self._weight)


class SideBySide:
    """Matrices of different forms whose outputs are neighbours: q and k of 4 bits beside v of 6, say.

    It implements `PackedMatrix` and `PackedExperts`. Its results are those of the parts, bit for bit. No embedding has
    several parts, so nobody asks for rows.
    """

    def __init__(self, parts: Sequence[Any], sizes: Sequence[int]) -> None:
        """
        Args:
            parts: the packed matrices.
            sizes: how many outputs each of them has.
        """
        self.parts = parts
        self.sizes = sizes

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        biases = (None,) * len(self.sizes) if bias is None else bias.split(self.sizes)  # type: ignore[no-untyped-call]
        return torch.cat([part.multiply(x, own) for part, own in zip(self.parts, biases, strict=True)], 1)

    def multiply_pairs(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        return torch.cat([part.multiply_pairs(x, routing, gather) for part in self.parts], 1)

    def rows(self, indices: Tensor) -> Tensor:
        raise NotImplementedError("a matrix of several forms is no embedding")


def product(x: Tensor, codes: Codes, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """x [n, in] -> x W^T + bias [n, out]. Inputs keep their type, which is `dtype`, or are rounded as the codes say."""
    if codes.input_scales is not None:
        multiply = multiply_rounded_tokens if codes.input_scales is InputScales.TOKEN else multiply_rounded
        return multiply(x, codes.codes, codes.scales.values[:, 0], bias)
    y = torch.empty(x.shape[0], codes.out_features, dtype=x.dtype, device=x.device)
    height = max(1, ELEMENTS_AT_A_TIME // codes.in_features)  # rows at a time, so that float32 copies stay small
    for start in range(0, codes.out_features, height):
        rows = slice(start, start + height)
        weights = codes.take_rows(rows).dequantize().to(dtype)
        y[:, rows] = F.linear(x, weights, None if bias is None else bias[rows])
    return y


class MatrixOperators:
    """Lays quantised matrices as plain torch multiplies them. A subclass lays them for a backend's kernels."""

    def __init__(self, backend: "Backend") -> None:
        """
        Args:
            backend: the matrices' own.
        """
        self._backend = backend

    def lay(self, codes: Codes, dtype: torch.dtype) -> Any:
        """Return a matrix, or those of experts, in the form that is multiplied: a `PackedMatrix`, or `PackedExperts`.

        Args:
            codes: nobody else keeps them.
            dtype: the type of the activations.
        """
        return TorchMatrix(codes, dtype)

    def lay_floats(self, weight: Tensor) -> Any:
        """Return the same for numbers in the type of the activations, which a checkpoint has beside quantised ones."""
        return FloatMatrix(weight, self._backend)

    def lay_beside(self, parts: Sequence["Codes | Tensor"], dtype: torch.dtype) -> Any:
        """Return a packed form of matrices that lie side by side: see `join_parts`."""
        laid = [self.lay(part, dtype) if isinstance(part, Codes) else self.lay_floats(part) for part in parts]
        sizes = [part.out_features if isinstance(part, Codes) else part.shape[-2] for part in parts]
        return laid[0] if len(laid) == 1 else self.put_beside(laid, sizes)

    def put_beside(self, laid: Sequence[Any], sizes: Sequence[int]) -> Any:
        """Return the form of several packed matrices, which have so many outputs each."""
        return SideBySide(laid, sizes)

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
