"""The decoder of Qwen3's mixtures of experts: in some layers, or all, each token is computed by a few of many MLPs.

It computes the same numbers as transformers' modeling_qwen3_moe.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from nanovllm.backends import Backend
from nanovllm.features.families.qwen3_moe.ops import ExpertOperators, Routing
from nanovllm.models.decoder import Decoder, Layer
from nanovllm.models.layers.linear import ColumnParallelLinear, Part
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import NamedTargets, ShardedLayer, WeightTarget
from nanovllm.models.model_config import check_dense
from nanovllm.models.weight_names import name_like_llama
from nanovllm.ops.step_inputs import StepInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def find_sparse_layers(config: "PretrainedConfig") -> frozenset[int]:
    """Return the indices of the layers whose MLP is a mixture of experts."""
    if not config.num_experts:
        return frozenset()
    step = config.decoder_sparse_step
    dense = config.mlp_only_layers or ()
    return frozenset(i for i in range(config.num_hidden_layers) if i not in dense and (i + 1) % step == 0)


class PackedExperts(Protocol):
    """The matrices [num_experts, out, in] of experts, in a form of their own."""

    def multiply_pairs(self, x: Tensor, routing: Routing, gather: bool) -> Tensor:
        """See `grouped_linear_reference`, which has the same arguments and result."""


TURNED = ".turned"
"""Stands behind the names of tensors [num_experts, in, out] of all experts. Qwen3-VL is published so."""


def name_experts(names: list[str], config: Any) -> dict[str, str]:
    """Return `name_like_llama`, with `TURNED` behind the tensors of all experts if they are [num_experts, in, out]."""
    renamed = name_like_llama(names, config)
    if not getattr(config, "has_turned_experts", False):
        return renamed
    ends = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    return {name: own + TURNED if own.endswith(ends) else own for name, own in renamed.items()}


def make_target(view: Tensor, shape: tuple[int, int, int], slices: tuple[slice, slice]) -> WeightTarget:
    """Return the place of a part of all experts' matrices [num_experts, out, in]."""
    return WeightTarget(view, shape, (slice(None), *slices))


def make_turned_target(view: Tensor, shape: tuple[int, int, int], slices: tuple[slice, slice]) -> WeightTarget:
    """Return the same where the checkpoint has [num_experts, in, out]."""
    num_experts, rows, columns = shape
    return make_target(view.transpose(1, 2), (num_experts, columns, rows), slices[::-1])


class Experts(ShardedLayer):
    """The matrices of E SwiGLU MLPs. Each rank holds its share of the intermediate features of every expert.

    A backend may pack them after loading; then their elements are in its own order.

    Attributes:
        gate_up: [num_experts, 2 * intermediate, hidden], gate first.
        down: [num_experts, hidden, intermediate].
        packed: quantised matrices instead of these two, which are then empty.
    """

    packed: tuple[PackedExperts, PackedExperts] | None = None

    def __init__(self, num_experts: int, hidden: int, intermediate: int, parallel: Parallel) -> None:
        super().__init__()
        self.intermediate = intermediate
        self.start, length = parallel.shard(intermediate, "moe_intermediate_size")
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * length, hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(num_experts, hidden, length), requires_grad=False)

    def multiply_gate_up(self, x: Tensor, routing: Routing, operators: ExpertOperators) -> Tensor:
        """x [num_tokens, hidden] -> [pairs, 2 * intermediate], sorted."""
        if self.packed is not None:
            return self.packed[0].multiply_pairs(x, routing, True)
        return operators.grouped_linear(x, self.gate_up, routing, gather=True)

    def multiply_down(self, x: Tensor, routing: Routing, operators: ExpertOperators) -> Tensor:
        """x [pairs, intermediate] -> [pairs, hidden], both sorted."""
        if self.packed is not None:
            return self.packed[1].multiply_pairs(x, routing, False)
        return operators.grouped_linear(x, self.down, routing, gather=False)

    def list_matrices(self) -> tuple[nn.Parameter, ...]:
        return self.gate_up, self.down

    def list_packed(self) -> Sequence[PackedExperts]:
        return self.packed or ()

    def set_packed(self, packed: Sequence[PackedExperts], empty: nn.Parameter) -> None:
        gate_up, down = packed
        self.packed = (gate_up, down)
        self.gate_up = empty
        self.down = empty

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        """See `ShardedLayer`. Either one tensor holds gate and up of all experts, gate first, or each has its own."""
        num_experts, hidden, length = self.down.shape
        size = self.intermediate
        mine = slice(self.start, self.start + length)
        everything = slice(None)
        gates, ups = self.gate_up.view(num_experts, 2, length, hidden).unbind(1)
        for end, turn in (("", make_target), (TURNED, make_turned_target)):
            fused = f"{path}.gate_up_proj{end}"
            fused_down = f"{path}.down_proj{end}"
            if fused in names or fused_down in names:  # of new weights either may come first
                mine_of_up = slice(size + self.start, size + self.start + length)
                for view, rows in ((gates, mine), (ups, mine_of_up)):
                    yield fused, turn(view, (num_experts, 2 * size, hidden), (rows, everything))
                yield fused_down, turn(self.down, (num_experts, hidden, size), (everything, mine))
                return
        for i, (gate, up, down) in enumerate(zip(gates, ups, self.down, strict=True)):
            for name, view in (("gate_proj", gate), ("up_proj", up)):
                yield f"{path}.{i}.{name}.weight", WeightTarget(view, (size, hidden), (mine, everything))
            yield f"{path}.{i}.down_proj.weight", WeightTarget(down, (hidden, size), (everything, mine))


class Router(ColumnParallelLinear):
    """The matrix that chooses the experts of each token. It is never quantised: a small error chooses others."""

    def list_matrices(self) -> tuple[nn.Parameter, ...]:
        return ()


class SparseMLP(nn.Module):
    """Mixture of experts: for each token a router chooses k of E experts, and their outputs are summed with weights."""

    def __init__(
        self,
        config: "PretrainedConfig",
        backend: Backend,
        parallel: Parallel,
        normalize: bool,
        gates: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            normalize: whether the weights of a token's experts are divided by their sum.
            gates: names of further vectors that are multiplied with x beside the router. Each gives one number a token.
        """
        super().__init__()
        self.backend = backend
        self.operators = backend.find_operators(ExpertOperators, "experts")
        self.parallel = parallel
        self.k: int = config.num_experts_per_tok
        self.normalize = normalize
        num_experts: int = config.num_experts
        hidden: int = config.hidden_size
        parts = [Part("gate", num_experts, 0, num_experts)]  # each rank holds the whole router
        parts += [Part(name, 1, 0, 1) for name in gates]
        self.gate = Router(hidden, parts, bias=False)
        self.experts = Experts(num_experts, hidden, config.moe_intermediate_size, parallel)

    def forward(self, x: Tensor, inputs: StepInputs) -> Tensor:
        """x [num_tokens, hidden] -> the same shape. Padding, whose slot is -1, goes to no expert."""
        y, routing = self.multiply(x, self.gate(x), inputs)
        return self.parallel.all_reduce(self.operators.combine(y, routing))

    def multiply(self, x: Tensor, logits: Tensor, inputs: StepInputs) -> tuple[Tensor, Routing]:
        """Return what the experts compute of x, [pairs, hidden] in sorted order, and the pairs.

        Args:
            logits: [num_tokens, num_experts], of the router.
        """
        operators = self.operators
        routing = operators.route(logits, self.k, self.normalize, inputs.slots)
        hidden = self.backend.silu_and_mul(self.experts.multiply_gate_up(x, routing, operators))
        return self.experts.multiply_down(hidden, routing, operators), routing

    def count_activations(self) -> int:
        """Return how many numbers it holds for each token: what an `MLP` holds, and the output, for each expert."""
        _, hidden, length = self.experts.down.shape
        return self.k * (3 * length + hidden)


class SparseLayer(Layer):
    """Attention, and a mixture of experts or an MLP."""

    def make_mlp(self, config: "PretrainedConfig", index: int, parallel: Parallel) -> nn.Module:
        if index in find_sparse_layers(config):
            return SparseMLP(config, self.backend, parallel, bool(config.norm_topk_prob))
        return super().make_mlp(config, index, parallel)


def check_experts(config: "PretrainedConfig", source: str, sizes: tuple[str, ...] = ("moe_intermediate_size",)) -> None:
    """Raise a ValueError, which begins with `source`, if a mixture of experts cannot have these values.

    Args:
        sizes: the names of the sizes that must be at least 1.
    """
    k = config.num_experts_per_tok
    experts = config.num_experts
    if not 1 <= k <= experts:
        raise ValueError(f"{source}: num_experts_per_tok is {k}; it must be from 1 to num_experts, which is {experts}")
    for name in sizes:
        if getattr(config, name) < 1:
            raise ValueError(f"{source}: {name} is {getattr(config, name)}; it must be at least 1")


def check_sparse(config: "PretrainedConfig", source: str) -> None:
    """Check the values that `SparseDecoder` limits: see `Family.check`."""
    check_dense(config, source)
    if find_sparse_layers(config):
        check_experts(config, source)


class SparseDecoder(Decoder):
    """The model of one rank."""

    layer_class = SparseLayer
