"""The interface between the model and what computes it: attention over the paged cache, and the fused small operators.

One object chosen at start-up (`make_backend`) answers for all of them, so that no layer asks where it runs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor, device, dtype, nn

KVCache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each with the logical shape [num_blocks, block_size, num_kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's attention: num_seqs sequences, those with a single query token (decodes) first.

    Within a step every layer stores K and V before it attends, so a sequence attends to its own new tokens, and to
    those of another sequence of the same step with which it shares a block, through the cache.

    Attributes:
        num_decodes: how many of the sequences, from the first, have exactly one query token.
        cu_seqlens_q: int32 [num_seqs + 1], the running sum of query tokens.
        seq_lens: int32 [num_seqs], tokens in the cache once this step has stored its own.
        block_tables: int32 [num_seqs, max_blocks]; entries beyond a sequence's blocks are arbitrary but in range.
        slot_mapping: int64 [num_tokens]; -1 for padding.
        query_lens_cpu, seq_lens_cpu: int32 [num_seqs] on the host (NumPy), for the size of launches; absent (None)
            when the step is captured in a CUDA graph, in which every sequence is a decode.
    """

    num_decodes: int
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    query_lens_cpu: np.ndarray | None
    seq_lens_cpu: np.ndarray | None


class Backend(Protocol):
    """What a layer asks for. Shapes as in the references under `nanovllm/kernels/`."""

    name: ClassVar[str]

    def allocate_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: dtype, device: device
    ) -> KVCache:
        """Zeroed cache of one layer, in this backend's storage order."""
        ...

    def pack_weights(self, modules: Iterable[nn.Module], check: Callable[[], None]) -> None:
        """Once the weights are loaded: bring them into the form that this backend multiplies fastest.

        Args:
            check: called before each matrix; raises if there is no use in going on.
        """
        ...

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Say that a step begins: what `attend` derives from its metadata may then be shared by all the layers.

        Called before the first layer, and inside the capture when the step is captured in a CUDA graph. Without the
        call every layer derives it anew: slower, never wrong. Between it and the last layer the metadata's tensors
        must not change.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    def norm_rope_store(
        self,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        cache: KVCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Norm and rotate q and k, store k and v in the cache; return q [num_tokens, num_heads, head_dim]."""
        ...

    def attend(self, q: Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        """Causal attention of q [num_tokens, num_heads, head_dim] over the cache; same shape."""
        ...

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """One token id a row, int32 [n], by the rule in `nanovllm/kernels/sample.py`."""
        ...
