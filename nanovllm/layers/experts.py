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
        is_fused = f"{path}.gate_up_proj" in names
        for expert in range(num_experts):
            gate, up = self.gate_up[expert].view(2, length, hidden)
            down, one = self.down[expert], slice(expert, expert + 1)
            if is_fused:
                up_rows = slice(size + self.start, size + self.start + length)
                for view, rows in ((gate, mine), (up, up_rows)):
                    target = WeightTarget(view.unsqueeze(0), (num_experts, 2 * size, hidden), (one, rows, everything))
                    yield f"{path}.gate_up_proj", target
                target = WeightTarget(down.unsqueeze(0), (num_experts, hidden, size), (one, everything, mine))
                yield f"{path}.down_proj", target
            else:
                for name, view in (("gate_proj", gate), ("up_proj", up)):
                    yield f"{path}.{expert}.{name}.weight", WeightTarget(view, (size, hidden), (mine, everything))
                yield f"{path}.{expert}.down_proj.weight", WeightTarget(down, (hidden, size), (everything, mine))
