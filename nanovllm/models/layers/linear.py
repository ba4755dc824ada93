"""Linear layers, sharded by output (column) or by input (row) features (Shoeybi et al. 2019, Megatron-LM)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import NamedTargets, ShardedLayer, WeightTarget


class PackedMatrix(Protocol):
    """A matrix [out, in] in the form that its backend multiplies fastest."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]."""

    def rows(self, indices: Tensor) -> Tensor | None:
        """Return the matrix's rows [n, in] at indices [n]; None if this form cannot give them."""


class MatrixModule(ShardedLayer):
    """A layer with one matrix `weight` [out, in]. A backend may pack it after loading; then `weight` may be empty."""

    weight: nn.Parameter
    packed: PackedMatrix | None = None

    def list_matrices(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,)

    def list_packed(self) -> Sequence[PackedMatrix]:
        return () if self.packed is None else (self.packed,)

    def set_packed(self, packed: Sequence[PackedMatrix], empty: nn.Parameter) -> None:
        (self.packed,) = packed
        self.weight = empty

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]."""
        return F.linear(x, self.weight, bias) if self.packed is None else self.packed.multiply(x, bias)

    def lookup(self, indices: Tensor) -> Tensor:
        """Return the matrix's rows [n, in] at indices [n]."""
        rows = None if self.packed is None else self.packed.rows(indices)
        return F.embedding(indices, self.weight) if rows is None else rows


@dataclass(frozen=True)
class Part:
    """One matrix of the checkpoint, of several that are stacked in a column-parallel layer.

    Attributes:
        name: its name in the checkpoint, such as "q_proj".
        size: its output features. This rank holds `length` of them from `start`.
    """

    name: str
    size: int
    start: int
    length: int


class ColumnParallelLinear(MatrixModule):
    """y = x W^T + b for several matrices at once. Each rank computes its share of the output features of each."""

    def __init__(self, in_features: int, parts: list[Part], bias: bool) -> None:
        super().__init__()
        self.parts = parts
        out_features = sum(part.length for part in parts)
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        parent = path.rpartition(".")[0]  # in a checkpoint, the parts are children of this layer's parent
        offset = 0
        for part in self.parts:
            rows = slice(offset, offset + part.length)
            source = slice(part.start, part.start + part.length)
            shape = (part.size, self.weight.shape[1])
            yield f"{parent}.{part.name}.weight", WeightTarget(self.weight[rows], shape, (source, slice(None)))
            if self.bias is not None:
                yield f"{parent}.{part.name}.bias", WeightTarget(self.bias[rows], (part.size,), (source,))
            offset += part.length


class RowParallelLinear(MatrixModule):
    """y = x W^T + b. Each rank holds its share of the input features, and the ranks' partial results are summed."""

    def __init__(self, in_features: int, out_features: int, bias: bool, parallel: Parallel, name: str) -> None:
        super().__init__()
        self.in_features = in_features
        self.parallel = parallel
        self.start, length = parallel.shard(in_features, f"{name}'s input size")
        self.weight = nn.Parameter(torch.empty(out_features, length), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        # The bias is added once, by rank 0, before the sum.
        return self.parallel.all_reduce(self.multiply(x, self.bias if self.parallel.share == 0 else None))

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        out_features, length = self.weight.shape
        source = (slice(None), slice(self.start, self.start + length))
        yield f"{path}.weight", WeightTarget(self.weight, (out_features, self.in_features), source)
        if self.bias is not None:
            yield f"{path}.bias", WeightTarget(self.bias, (out_features,), (slice(None),))
