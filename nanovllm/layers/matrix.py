"""A weight matrix, as it is loaded or as a backend has packed it."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.weights import ShardedLayer


class PackedMatrix(Protocol):
    """A matrix [out, in] in the form that a backend multiplies fastest."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]."""
        ...

    def rows(self, indices: Tensor) -> Tensor | None:
        """The matrix's rows [n, in] at indices [n]; None if this form cannot give them."""
        ...


class MatrixModule(ShardedLayer):
    """A layer with one matrix `weight` [out, in]. Once it is packed, `weight` may be empty."""

    weight: nn.Parameter
    packed: PackedMatrix | None = None

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, bias) if self.packed is None else self.packed.multiply(x, bias)

    def lookup(self, indices: Tensor) -> Tensor:
        """Rows of the matrix."""
        rows = None if self.packed is None else self.packed.rows(indices)
        return F.embedding(indices, self.weight) if rows is None else rows
