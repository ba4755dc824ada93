"""The decoder of Qwen3.5-MoE, 3.6 and 3.8: Qwen3.5's layers, in which mixtures of experts take the place of MLPs.

It computes the same numbers as transformers' modeling_qwen3_5_moe. Beside the experts that a router chooses, each token
has a shared one, whose output is scaled by the sigmoid of a gate.
"""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nanovllm.backends import Backend
from nanovllm.features.families.qwen3_5.decoder import HybridDecoder, HybridLayer, check_hybrid
from nanovllm.features.families.qwen3_moe.decoder import SparseMLP, check_experts
from nanovllm.features.families.qwen3_moe.ops import SharedOutput
from nanovllm.models.decoder import MLP
from nanovllm.models.layers.parallel import Parallel
from nanovllm.ops.step_inputs import StepInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SharedExpert(MLP):
    """The MLP that every token has. The ranks share it as they share the other experts."""

    size_name = "shared_expert_intermediate_size"


class SharedSparseMLP(SparseMLP):
    """Mixture of experts, one of which every token has. The gate of that one is a row of the router's matrix."""

    def __init__(self, config: "PretrainedConfig", backend: Backend, parallel: Parallel) -> None:
        super().__init__(config, backend, parallel, normalize=True, gates=("shared_expert_gate",))
        self.num_experts: int = config.num_experts
        self.shared_expert = SharedExpert(config, backend, parallel)

    def forward(self, x: Tensor, inputs: StepInputs) -> Tensor:
        """x [num_tokens, hidden] -> the same shape."""
        logits, gate = self.gate(x).split([self.num_experts, 1], dim=1)
        y, routing = self.multiply(x, logits, inputs)
        mlp = self.shared_expert
        shared = mlp.down_proj.multiply(self.backend.silu_and_mul(mlp.gate_up_proj(x)))  # this rank's part of the sum
        return self.parallel.all_reduce(self.operators.combine(y, routing, SharedOutput(shared, gate)))

    def count_activations(self) -> int:
        """Return how many numbers it holds for each token: those of all its experts, and the shared one's output."""
        hidden = self.experts.down.shape[1]
        return super().count_activations() + self.shared_expert.count_activations() + hidden


class SparseHybridLayer(HybridLayer):
    """A DeltaNet or gated attention, and a mixture of experts."""

    def make_mlp(self, config: "PretrainedConfig", index: int, parallel: Parallel) -> nn.Module:
        return SharedSparseMLP(config, self.backend, parallel)


class SparseHybridDecoder(HybridDecoder):
    """The model of one rank."""

    layer_class = SparseHybridLayer


def check_sparse_hybrid(config: "PretrainedConfig", source: str) -> None:
    """Check the values that `SparseHybridDecoder` limits: see `Family.check`."""
    check_hybrid(config, source)
    check_experts(config, source, ("moe_intermediate_size", SharedExpert.size_name))
