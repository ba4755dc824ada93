"""Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464): attention with a state of a fixed size.

The state of a sequence does not grow with its length, so it lives in a row of a tensor and needs no blocks.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm.backends import Backend, CacheSize
from nanovllm.layers.linear import ColumnParallelLinear, Part, RowParallelLinear
from nanovllm.layers.parallel import Parallel
from nanovllm.layers.weights import NamedTargets, ShardedLayer, WeightTarget, make_whole_target
from nanovllm.models.qwen3_5.operators import choose_hybrid_operators
from nanovllm.models.qwen3_5.ops import RowState
from nanovllm.models.qwen3_5.sizes import DeltaShape
from nanovllm.ops.step_inputs import StepInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class DeltaNet(ShardedLayer):
    """A convolution over the last tokens, the gated delta rule, and a gated norm. The ranks share the heads.

    It stands in a layer where others have attention. In a checkpoint it is called linear_attn.
    """

    def __init__(self, config: "PretrainedConfig", backend: Backend, parallel: Parallel) -> None:
        super().__init__()
        self.operators = choose_hybrid_operators(backend)
        self.eps = config.rms_norm_eps
        self.whole = whole = DeltaShape.from_config(config, 1)
        self.shape = mine = whole.shard(parallel.size)
        self.rank = parallel.rank
        self.sections = ((0, mine.keys), (whole.keys, mine.keys), (2 * whole.keys, mine.values))
        """(first row of the checkpoint's tensor, rows of this rank) of queries, keys and values."""
        parts = [
            Part("in_proj_qkv", whole.channels, first + self.rank * count, count) for first, count in self.sections
        ]
        parts.append(Part("in_proj_z", whole.values, self.rank * mine.values, mine.values))
        for name in ("in_proj_b", "in_proj_a"):
            parts.append(Part(name, whole.value_heads, self.rank * mine.value_heads, mine.value_heads))
        self.in_proj = ColumnParallelLinear(config.hidden_size, parts, bias=False)
        self.conv = self._make(mine.conv_width, mine.channels)
        self.a_log = self._make(mine.value_heads, dtype=torch.float32)
        self.dt_bias = self._make(mine.value_heads, dtype=torch.float32)
        self.norm = self._make(mine.value_dim)
        self.out_proj = RowParallelLinear(whole.values, config.hidden_size, False, parallel, "out_proj")

    @staticmethod
    def _make(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)

    def make_cache(self, size: CacheSize, dtype: torch.dtype, device: torch.device) -> RowState:
        """Return the states of all rows. They may hold anything: a sequence's first step reads none of it."""
        mine = self.shape
        return RowState(
            conv=torch.empty(size.num_rows, mine.conv_width - 1, mine.channels, dtype=dtype, device=device),
            recurrent=torch.empty(
                size.num_rows, mine.value_heads, mine.key_dim, mine.value_dim, dtype=torch.float32, device=device
            ),
        )

    def forward(self, x: Tensor, cos_sin: Tensor, state: RowState, inputs: StepInputs) -> Tensor:
        """x [num_tokens, hidden] -> [num_tokens, hidden]; the states of the step's rows are carried on.

        Args:
            cos_sin: not used: the order of the tokens is all that it knows of their positions.
        """
        mine = self.shape
        sizes = [mine.channels, mine.values, 2 * mine.value_heads]
        qkv, z, gates = self.in_proj(x).split(sizes, dim=1)
        qkv = self.operators.causal_conv(qkv, self.conv, state.conv, inputs)
        out = self.operators.gated_delta(qkv, gates, self.a_log, self.dt_bias, state.recurrent, inputs)
        return self.out_proj(self.operators.gated_rms_norm(out, z, self.norm, self.eps))  # type: ignore[no-any-return]

    def weight_targets(self, path: str, names: Collection[str]) -> NamedTargets:
        whole = self.whole
        shape = (whole.channels, 1, whole.conv_width)
        offset = 0
        for first, count in self.sections:
            rows = slice(first + self.rank * count, first + (self.rank + 1) * count)
            view = self.conv[:, offset : offset + count].t()
            yield f"{path}.conv1d.weight", WeightTarget(view, shape, (rows, 0, slice(None)))
            offset += count
        heads = slice(self.rank * self.shape.value_heads, (self.rank + 1) * self.shape.value_heads)
        yield f"{path}.A_log", WeightTarget(self.a_log, (whole.value_heads,), (heads,))
        yield f"{path}.dt_bias", WeightTarget(self.dt_bias, (whole.value_heads,), (heads,))
        yield f"{path}.norm.weight", make_whole_target(self.norm)
