"""Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464): attention with a state of a fixed size.

The state of a sequence does not grow with its length, so it lives in a row of a tensor and needs no blocks.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.backends import Backend, CacheSize
from nanovllm.features.families.qwen3_5.ops import HybridOperators, RowState
from nanovllm.models.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.layers.weights import NamedTargets, ShardedLayer, WeightTarget, make_whole_target
from nanovllm.ops.step_inputs import StepInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class DeltaNet(ShardedLayer):
    """A convolution over the last tokens, the gated delta rule, and a gated norm. The ranks share the heads.

    It stands in a layer where others have attention.

    Attributes:
        checkpoint_name: its name in a checkpoint, in place of self_attn.
    """

    checkpoint_name = "linear_attn"

    def __init__(self, config: "PretrainedConfig", backend: Backend, parallel: Parallel) -> None:
        super().__init__()
        self.operators = backend.find_operators(HybridOperators, "hybrids")
        self.eps = config.rms_norm_eps
        self.share = parallel.share
        self.key_dim: int = config.linear_key_head_dim
        self.value_dim: int = config.linear_value_head_dim
        self.all_value_heads: int = config.linear_num_value_heads
        _, key_heads = parallel.shard(config.linear_num_key_heads, "linear_num_key_heads")
        _, self.value_heads = parallel.shard(self.all_value_heads, "linear_num_value_heads")
        keys = key_heads * self.key_dim
        self.values = self.value_heads * self.value_dim
        self.channels = 2 * keys + self.values
        """The convolution reads this of a token: queries, keys and values."""
        all_keys = parallel.size * keys
        all_values = parallel.size * self.values
        self.all_channels = 2 * all_keys + all_values
        self.sections = ((0, keys), (all_keys, keys), (2 * all_keys, self.values))
        """(first row of the checkpoint's tensor, rows of this rank) of queries, keys and values."""
        parts = [
            Part("in_proj_qkv", self.all_channels, first + self.share * count, count) for first, count in self.sections
        ]
        parts.append(Part("in_proj_z", all_values, self.share * self.values, self.values))
        for name in ("in_proj_b", "in_proj_a"):
            parts.append(Part(name, self.all_value_heads, self.share * self.value_heads, self.value_heads))
        self.in_proj = ColumnParallelLinear(config.hidden_size, parts, bias=False)
        self.conv = self._make(config.linear_conv_kernel_dim, self.channels)
        self.a_log = self._make(self.value_heads, dtype=torch.float32)
        self.dt_bias = self._make(self.value_heads, dtype=torch.float32)
        self.norm = self._make(self.value_dim)
        self.out_proj = RowParallelLinear(all_values, config.hidden_size, False, parallel, "out_proj")

    @staticmethod
    def _make(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)

    def make_cache(self, size: CacheSize, dtype: torch.dtype, device: torch.device) -> RowState:
        """Return the states of all rows. They may hold anything: a sequence's first step reads none of it."""
        heads = (size.num_rows, self.value_heads, self.key_dim, self.value_dim)
        return RowState(
            conv=torch.empty(size.num_rows, len(self.conv) - 1, self.channels, dtype=dtype, device=device),
            recurrent=torch.empty(heads, dtype=torch.float32, device=device),
        )

    def forward(self, x: Tensor, cos_sin: Tensor, state: RowState, inputs: StepInputs) -> Tensor:
        """x [num_tokens, hidden] -> [num_tokens, hidden]; the states of the step's rows are carried on.

        Args:
            cos_sin: not used: the order of the tokens is all that it knows of their positions.
        """
        sizes = [self.channels, self.values, 2 * self.value_heads]
        qkv, z, gates = self.in_proj(x).split(sizes, dim=1)
        qkv = self.operators.causal_conv(qkv, self.conv, state.conv, inputs)
        out = self.operators.gated_delta(qkv, gates, self.a_log, self.dt_bias, state.recurrent, inputs)
        return self.out_proj(self.operators.gated_rms_norm(out, z, self.norm, self.eps))  # type: ignore[no-any-return]

    def count_state(self) -> int:
        return self.value_heads * self.key_dim * self.value_dim

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        shape = (self.all_channels, 1, len(self.conv))
        offset = 0
        for first, count in self.sections:
            rows = slice(first + self.share * count, first + (self.share + 1) * count)
            view = self.conv[:, offset : offset + count].t()
            yield f"{path}.conv1d.weight", WeightTarget(view, shape, (rows, 0, slice(None)))
            offset += count
        heads = slice(self.share * self.value_heads, (self.share + 1) * self.value_heads)
        yield f"{path}.A_log", WeightTarget(self.a_log, (self.all_value_heads,), (heads,))
        yield f"{path}.dt_bias", WeightTarget(self.dt_bias, (self.all_value_heads,), (heads,))
        yield f"{path}.norm.weight", make_whole_target(self.norm)
