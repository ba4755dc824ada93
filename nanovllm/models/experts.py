"""Mixture of experts, as transformers' modeling_qwen3_moe computes it (https://arxiv.org/abs/2505.09388)."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from nanovllm.backends import Backend
from nanovllm.layers.experts import Experts
from nanovllm.layers.linear import ColumnParallelLinear, Part
from nanovllm.layers.parallel import Parallel

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SparseMLP(nn.Module):
    """The weighted sum of those k of E experts that a router chooses for each token."""

    def __init__(self, config: "PretrainedConfig", backend: Backend, parallel: Parallel) -> None:
        super().__init__()
        self.backend, self.parallel = backend, parallel
        self.k, self.normalize = config.num_experts_per_tok, bool(config.norm_topk_prob)
        num_experts, hidden = config.num_experts, config.hidden_size
        parts = [Part("gate", num_experts, 0, num_experts)]  # all of it, on each rank
        self.gate = ColumnParallelLinear(hidden, parts, bias=False)
        self.experts = Experts(num_experts, hidden, config.moe_intermediate_size, parallel)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """x [num_tokens, hidden]; slots [num_tokens], -1 for padding, which no expert computes."""
        routing = self.backend.route(self.gate(x), self.k, self.normalize, slots)
        gate_up = self.backend.grouped_linear(x, self.experts.gate_up, routing, gather=True)
        y = self.backend.grouped_linear(self.backend.silu_and_mul(gate_up), self.experts.down, routing, gather=False)
        return self.parallel.all_reduce(self.backend.combine(y, routing))
