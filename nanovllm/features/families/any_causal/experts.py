"""Mixtures of experts of transformers' models, by the engine's grouped products."""

import copy
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.backends import Backend
from nanovllm.features.families.qwen3_moe.decoder import Experts
from nanovllm.features.families.qwen3_moe.ops import ExpertOperators, sort_pairs
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import NamedTargets, make_whole_target


class GroupedExperts(Experts):
    """Experts behind a router of transformers'. Their gate, and biases if they have some, stay transformers' code.

    Attributes:
        gate_up, down: see `Experts`. Where transformers stores [in, out] of each expert, they are read transposed.
    """

    def __init__(self, like: Any, backend: Backend) -> None:
        num_experts = int(like.num_experts)
        shapes = [getattr(like, name).shape[1:] for name in ("gate_up_proj", "down_proj")]
        (two_sizes, hidden), (_, size) = (shape[::-1] if like.is_transposed else shape for shape in shapes)
        assert two_sizes == 2 * size
        super().__init__(num_experts, hidden, size, Parallel())
        self.num_experts = num_experts
        self.is_transposed = bool(like.is_transposed)
        self.gate_up_proj_bias: nn.Parameter | None = None
        self.down_proj_bias: nn.Parameter | None = None
        if like.has_bias:
            self.gate_up_proj_bias = nn.Parameter(torch.empty(num_experts, two_sizes), requires_grad=False)
            self.down_proj_bias = nn.Parameter(torch.empty(num_experts, hidden), requires_grad=False)
        self.k = 1
        self.backend = backend
        theirs = copy.copy(like)
        theirs._parameters = {}
        self._apply_gate: Callable[[Tensor], Tensor] = theirs._apply_gate

    @cached_property
    def operators(self) -> ExpertOperators:
        """The backend's products of experts. The model is copied for another backend before they are asked for."""
        return self.backend.find_operators(ExpertOperators, "experts")

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [num_tokens, hidden]; the experts that the router has chosen, and their weights, [num_tokens, k]."""
        if x.is_meta:
            self.k = experts.shape[1]
            return torch.empty_like(x)
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        routing = sort_pairs(experts, weights, self.num_experts)
        gate_up = self.multiply_gate_up(x, routing, self.operators)
        owners = self._find_owners(experts) if self.gate_up_proj_bias is not None else None
        if owners is not None and self.gate_up_proj_bias is not None:
            gate_up = gate_up + self.gate_up_proj_bias[owners]
        hidden = self._apply_gate(gate_up)
        y = self.multiply_down(hidden.contiguous(), routing, self.operators)
        if owners is not None and self.down_proj_bias is not None:
            y = y + self.down_proj_bias[owners]
        return self.operators.combine(y, routing).view(shape)

    def _find_owners(self, experts: Tensor) -> Tensor:
        """Return the expert of each sorted pair."""
        return experts.flatten().sort(stable=True).values.clamp(max=self.num_experts - 1)

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        for name, weight in (("gate_up_proj", self.gate_up), ("down_proj", self.down)):
            yield f"{path}.{name}", make_whole_target(weight.transpose(1, 2) if self.is_transposed else weight)
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            if (bias := getattr(self, name)) is not None:
                yield f"{path}.{name}", make_whole_target(bias)


def is_mixture(module: Any) -> bool:
    """Return whether our experts compute what a module computes: tried on random numbers, with small matrices."""
    if not module.has_gate or module.has_post_expert_norm:
        return False
    generator = torch.Generator().manual_seed(0)
    num_experts = 4
    hidden = 16
    size = 24
    sizes = {"gate_up_proj": (2 * size, hidden), "down_proj": (hidden, size)}
    trial = copy.copy(module)
    trial.num_experts = num_experts
    trial._parameters = {}
    for name, (rows, columns) in sizes.items():
        shape = (columns, rows) if module.is_transposed else (rows, columns)
        values = {name: torch.randn(num_experts, *shape, generator=generator)}
        if module.has_bias:
            values[f"{name}_bias"] = torch.randn(num_experts, rows, generator=generator)
        for own, value in values.items():
            trial._parameters[own] = nn.Parameter(value, requires_grad=False)
    ours = GroupedExperts(trial, Backend())
    for (_, target), theirs in zip(ours.weight_targets("", ()), _in_order(trial), strict=True):
        target.view.copy_(theirs)
    x = torch.randn(5, hidden, generator=generator) * torch.logspace(-1, 1, 5)[:, None]
    experts = torch.tensor([[0, 1], [1, 3], [3, 0], [1, 0], [3, 1]])  # expert 2 has no token
    weights = torch.rand(5, 2, generator=generator)
    original = type(module).forward.__wrapped__
    return torch.allclose(original(trial, x, experts, weights), ours(x, experts, weights), rtol=1e-4, atol=1e-4)


def _in_order(module: Any) -> list[Tensor]:
    """Return a module's parameters in the order of `GroupedExperts.weight_targets`."""
    names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
    return [module._parameters[name] for name in names if name in module._parameters]
