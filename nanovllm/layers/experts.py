"""The matrices of a layer's experts, of each of which every rank holds its share (Shoeybi et al. 2019)."""

from collections.abc import Collection

import torch
from torch import nn

from nanovllm.layers.parallel import Parallel
from nanovllm.layers.weights import NamedTargets, ShardedLayer, WeightTarget


class Experts(ShardedLayer):
    """E SwiGLU MLPs. Once they are packed, the matrices' elements lie in the backend's own order.

    Attributes:
        gate_up: [num_experts, 2 * intermediate, hidden], gate first; of this rank's share of the intermediate features.
        down: [num_experts, hidden, intermediate].
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int, parallel: Parallel) -> None:
        super().__init__()
        self.intermediate = intermediate
        self.start, length = parallel.shard(intermediate, "moe_intermediate_size")
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * length, hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(num_experts, hidden, length), requires_grad=False)

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        """names: of the checkpoint's tensors, of which one may hold all experts (gate above up) instead of one each."""
        (num_experts, hidden, length), size = self.down.shape, self.intermediate
        mine, everything = slice(self.start, self.start + length), slice(None)
        gates, ups = self.gate_up.view(num_experts, 2, length, hidden).unbind(1)
        if (fused := f"{path}.gate_up_proj") in names:
            of_up = slice(size + self.start, size + self.start + length)
            for view, rows in ((gates, mine), (ups, of_up)):
                yield fused, WeightTarget(view, (num_experts, 2 * size, hidden), (everything, rows, everything))
            shape = (num_experts, hidden, size)
            yield f"{path}.down_proj", WeightTarget(self.down, shape, (everything, everything, mine))
            return
        for i, (gate, up, down) in enumerate(zip(gates, ups, self.down, strict=True)):
            for name, view in (("gate_proj", gate), ("up_proj", up)):
                yield f"{path}.{i}.{name}.weight", WeightTarget(view, (size, hidden), (mine, everything))
            yield f"{path}.{i}.down_proj.weight", WeightTarget(down, (hidden, size), (everything, mine))
