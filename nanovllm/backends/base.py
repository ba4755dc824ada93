"""The interface between the model and what computes it: attention over the paged cache, and the fused small operators.

One object chosen at start-up (resolve.py) answers for all of them, so that no layer asks where it runs.
"""

from collections.abc import Callable, Collection, Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from nanovllm.kernels.attention import AttentionMetadata, KVCache, attend_reference
from nanovllm.kernels.combine import combine_reference
from nanovllm.kernels.edit_logits import MaskAndPenalties, edit_logits_reference
from nanovllm.kernels.grouped_linear import grouped_linear_reference
from nanovllm.kernels.norm_rope_store import NormRope, norm_rope_store_reference
from nanovllm.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from nanovllm.kernels.route import Routing, route_reference
from nanovllm.kernels.sample import Sampled, SamplingValues, sample_reference
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference
from nanovllm.kernels.step_inputs import PlannedRows, RowTables, StepInputs, step_inputs_reference


class Backend:
    """What a layer asks for, computed by the plain-torch references; a backend overrides what it does better.

    Attributes:
        name: as in `attention_backend`.
        dtypes, head_dims, groups, block_sizes: what it has kernels for (None: for any); a group is the query heads that
            share a KV head.
        default_block_size: where the user does not say.
    """

    name: ClassVar[str]
    dtypes: ClassVar[Collection[torch.dtype]] = (torch.bfloat16, torch.float16, torch.float32)
    head_dims: ClassVar[Collection[int] | None] = None
    groups: ClassVar[Collection[int] | None] = None
    block_sizes: ClassVar[tuple[int, ...]] = tuple(2**i for i in range(4, 21))
    default_block_size: ClassVar[int] = 64

    @classmethod
    def why_cannot(cls, device: torch.device) -> str | None:
        """What this backend misses on the machine, as "it needs ..."; None if it can run."""
        return None

    def allocate_cache(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVCache:
        """Zeroed cache of one layer, of the logical shape [num_blocks, block_size, num_kv_heads, head_dim].

        Here heads lie before tokens in storage: what is read of a block, one head of it, is one run of memory.
        """
        num_blocks, block_size, num_kv_heads, head_dim = shape
        stored = (num_blocks, num_kv_heads, block_size, head_dim)
        # Not torch.zeros: on a CPU, fill_ touches gigabytes of new pages with all threads.
        parts = (torch.empty(stored, dtype=dtype, device=device).fill_(0) for _ in KVCache._fields)
        return KVCache(*(part.transpose(1, 2) for part in parts))

    def before_writing(self, weights: Iterable[Tensor]) -> None:
        """The model's parameters, whose memory is new."""

    def pack_weights(self, modules: Iterable[nn.Module], check: Callable[[], None]) -> None:
        """Once the weights are loaded: bring them into the form that this backend multiplies fastest.

        Args:
            check: called before each matrix; raises if there is no use in going on.
        """

    def step_inputs(self, planned: PlannedRows, tables: RowTables, block_size: int) -> StepInputs:
        """The rest of a step's inputs; inside the capture when the step is captured in a CUDA graph."""
        return step_inputs_reference(planned, tables, block_size)

    def complete(self, metadata: AttentionMetadata, cache: KVCache, num_heads: int) -> AttentionMetadata:
        """Add what `attend` derives from the metadata for every layer alike: once a step, before the first layer.

        Called inside the capture when the step is captured in a CUDA graph.

        Args:
            cache: of any layer, for its shape.
            num_heads: query heads.
        """
        return metadata

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_reference(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm_reference(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul_reference(gate_up)

    def route(self, logits: Tensor, k: int, normalize: bool, slots: Tensor) -> Routing:
        return route_reference(logits, k, normalize, slots)

    def grouped_linear(self, x: Tensor, weight: Tensor, routing: Routing, gather: bool) -> Tensor:
        return grouped_linear_reference(x, weight, routing, gather)

    def combine(self, y: Tensor, routing: Routing) -> Tensor:
        return combine_reference(y, routing)

    def norm_rope_store(self, qkv: Tensor, norms: NormRope, positions: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
        return norm_rope_store_reference(qkv, norms, positions, cache, slots)

    def attend(self, q: Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        return attend_reference(q, cache, metadata, scale)

    def sample(self, logits: Tensor, values: SamplingValues) -> Sampled:
        return sample_reference(logits, values)

    def edit_logits(self, logits: Tensor, edits: MaskAndPenalties) -> None:
        """Before `sample`, where a request asks for it: logits float32 [n, vocab], contiguous, in place."""
        edit_logits_reference(logits, edits)
