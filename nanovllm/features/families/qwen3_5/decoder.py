"""The decoder of Qwen3.5, 3.6 and 3.8: of four layers three are Gated DeltaNets, and one is gated attention.

It computes the same numbers as transformers' modeling_qwen3_5. Pictures and multi-token prediction are not read.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.backends import Backend, KVCache
from nanovllm.features.families.qwen3_5.delta_net import DeltaNet
from nanovllm.features.families.qwen3_5.ops import HybridOperators
from nanovllm.models.config_keys import LackingError
from nanovllm.models.decoder import Attention, Decoder, Layer
from nanovllm.models.layers.linear import ColumnParallelLinear, Part
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import NamedTargets, ShardedLayer, WeightTarget
from nanovllm.models.model_config import find_rotary_dim
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.ops.step_inputs import StepInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LINEAR_SIZES = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)


def pair_halves(head_dim: int, rotary_dim: int) -> list[tuple[int, int]]:
    """Return the order in which a head's elements are stored here, as (first element, count).

    The family rotates the first rotary_dim elements of a head, and pairs i with i + rotary_dim / 2. The kernels pair i
    with i + head_dim / 2. So the elements are moved when the weights are loaded, and where nothing rotates the angle
    is 0. Attention's scores do not change, because queries and keys have the same order.
    """
    half = rotary_dim // 2
    rest = head_dim // 2 - half  # unrotated elements in each half of a head
    pieces = [(0, half), (rotary_dim, rest), (half, half), (rotary_dim + rest, rest)]
    return [(first, count) for first, count in pieces if count]


class GatedAttention(Attention, ShardedLayer):
    """Grouped-query attention on normed heads of which a part rotates. A sigmoid of a gate scales its output.

    In a checkpoint q_proj has, for each head, the query and then the gate.
    """

    norm_dtype = torch.float32

    def __init__(self, config: "PretrainedConfig", backend: Backend, parallel: Parallel) -> None:
        super().__init__(config, backend, parallel)
        self.operators = backend.find_operators(HybridOperators, "hybrids")

    def make_projections(self, config: "PretrainedConfig", heads: range, kv_heads: range, bias: bool) -> None:
        dim = self.head_dim
        self.pieces = pair_halves(dim, find_rotary_dim(config))
        queries = 2 * config.num_attention_heads * dim  # and their gates
        keys = config.num_key_value_heads * dim
        parts = [Part("q_proj", queries, 2 * dim * head + at, count) for head in heads for at, count in self.pieces]
        for head in kv_heads:
            parts += [Part("k_proj", keys, dim * head + at, count) for at, count in self.pieces]
        parts.append(Part("v_proj", keys, kv_heads.start * dim, len(kv_heads) * dim))
        gates = [Part("q_proj", queries, dim * (2 * head + 1), dim) for head in heads]
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, parts, bias)
        self.gate_proj = ColumnParallelLinear(config.hidden_size, gates, bias)

    def forward(self, x: Tensor, cos_sin: Tensor, cache: KVCache, inputs: StepInputs) -> Tensor:
        norms = NormRope(self.q_norm, self.k_norm, self.eps, cos_sin)
        q = self.backend.norm_rope_store(self.qkv_proj(x), norms, inputs.positions, cache, inputs.slots)
        out = self.backend.attend(q, cache, inputs, self.scale).flatten(1)
        return self.o_proj(self.operators.sigmoid_and_mul(out, self.gate_proj(x)))  # type: ignore[no-any-return]

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            assert norm is not None
            end = 0
            for first, count in self.pieces:
                end += count
                source = (slice(first, first + count),)
                yield f"{path}.{name}.weight", WeightTarget(norm[end - count : end], (self.head_dim,), source, plus=1)


class HybridLayer(Layer):
    """A DeltaNet or gated attention, and an MLP. Its norms multiply by 1 + weight."""

    norm_dtype = torch.float32
    norm_plus = 1.0

    def make_attention(self, config: "PretrainedConfig", index: int, parallel: Parallel) -> nn.Module:
        is_linear = config.layer_types[index] == "linear_attention"
        return (DeltaNet if is_linear else GatedAttention)(config, self.backend, parallel)


class HybridDecoder(Decoder):
    """The model of one rank."""

    layer_class = HybridLayer


def check_hybrid(config: "PretrainedConfig", source: str) -> None:
    """Check the values that `HybridDecoder` limits: see `Family.check`."""
    if unknown := set(config.layer_types) - {"full_attention", "linear_attention"}:
        raise LackingError(f"{source}: layer_types {sorted(map(str, unknown))} are not supported")
    for name in LINEAR_SIZES:
        if getattr(config, name) < 1:
            raise ValueError(f"{source}: {name} is {getattr(config, name)}; it must be at least 1")
    dim = find_rotary_dim(config)
    if dim % 2 or not 2 <= dim <= config.head_dim:
        raise ValueError(
            f"{source}: partial_rotary_factor rotates {dim} elements of a head of {config.head_dim}; it must be an "
            "even number"
        )
    value_heads = config.linear_num_value_heads
    key_heads = config.linear_num_key_heads
    if value_heads % key_heads:
        raise ValueError(f"{source}: {value_heads} value heads cannot share {key_heads} key heads evenly")
