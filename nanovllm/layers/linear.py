"""Linear layers, sharded by output (column) or by input (row) features (Shoeybi et al. 2019, Megatron-LM)."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanovllm.layers.matrix import MatrixModule
from nanovllm.layers.parallel import Parallel
from nanovllm.layers.weights import NamedTargets, WeightTarget


@dataclass(frozen=True)
class Part:
    """One of the checkpoint's matrices that are packed into a column-parallel layer.

    Attributes:
        name: as in the checkpoint, "q_proj".
        size: its output features; this rank holds `length` of them from `start`.
    """

    name: str
    size: int
    start: int
    length: int


class ColumnParallelLinear(MatrixModule):
    """y = x W^T + b for several matrices at once; each rank computes its share of every one's output features."""

    def __init__(self, in_features: int, parts: list[Part], bias: bool) -> None:
        super().__init__()
        self.parts = parts
        out_features = sum(part.length for part in parts)
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        parent, offset = path.rpartition(".")[0], 0  # under which the parts are named, beside each other
        for part in self.parts:
            rows, source = slice(offset, offset + part.length), slice(part.start, part.start + part.length)
            shape = (part.size, self.weight.shape[1])
            yield f"{parent}.{part.name}.weight", WeightTarget(self.weight[rows], shape, (source, slice(None)))
            if self.bias is not None:
                yield f"{parent}.{part.name}.bias", WeightTarget(self.bias[rows], (part.size,), (source,))
            offset += part.length


class RowParallelLinear(MatrixModule):
    """y = x W^T + b; each rank holds its share of the input features, and the partial results are summed."""

    def __init__(self, in_features: int, out_features: int, bias: bool, parallel: Parallel, name: str) -> None:
        super().__init__()
        self.in_features, self.parallel = in_features, parallel
        self.start, length = parallel.shard(in_features, f"{name}'s input size")
        self.weight = nn.Parameter(torch.empty(out_features, length), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        # The bias is added once, by rank 0, before the sum.
        return self.parallel.all_reduce(self.multiply(x, self.bias if self.parallel.rank == 0 else None))

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        out_features, length = self.weight.shape
        source = (slice(None), slice(self.start, self.start + length))
        yield f"{path}.weight", WeightTarget(self.weight, (out_features, self.in_features), source)
        if self.bias is not None:
            yield f"{path}.bias", WeightTarget(self.bias, (out_features,), (slice(None),))
