"""The operators of a model: attention over the paged cache, small fused operators, the sampler.

resolve.py chooses one backend at start-up, and every layer calls that object. So a layer does not need to know where it
runs.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanovllm.ops.attention import AttentionMetadata, KVCache, attend_reference
from nanovllm.ops.norm_rope_store import norm_rope_store_reference
from nanovllm.ops.rms_norm import add_rms_norm_reference, rms_norm_reference
from nanovllm.ops.sample import sample_reference, store_samples_reference
from nanovllm.ops.silu_and_mul import silu_and_mul_reference
from nanovllm.ops.step_inputs import step_inputs_reference
from nanovllm.ops.token_logprobs import token_logprobs_reference


class Backend:
    """Computes every operator with its plain-torch reference. A subclass replaces the operators that it computes
    faster.

    Each operator is a class attribute that holds the reference function. There is no wrapper method, which would repeat
    the arguments. A subclass whose operator needs an object of its own, such as the loaded CPU library, replaces the
    attribute by a method.

    Attributes:
        name: the name in the option `attention_backend`.
        kernels: the kernels that it runs: "torch" (none but torch's), "cpu" or "gpu". See `find_operators`.
        device_type: the only type of torch.device that it runs on; None if it runs on several.
        dtypes, head_dims, groups, block_sizes: the values that its kernels support; None supports all. A group is the
            number of query heads that share a KV head.
        default_block_size: tokens in a block of the KV cache if the user does not choose.
    """

    name: ClassVar[str]
    kernels: ClassVar[str] = "torch"
    device_type: ClassVar[str | None] = None
    dtypes: ClassVar[Collection[torch.dtype]] = (torch.bfloat16, torch.float16, torch.float32)
    head_dims: ClassVar[Collection[int] | None] = None
    groups: ClassVar[Collection[int] | None] = None
    block_sizes: ClassVar[tuple[int, ...]] = tuple(2**i for i in range(4, 21))
    default_block_size: ClassVar[int] = 64

    step_inputs = staticmethod(step_inputs_reference)
    rms_norm = staticmethod(rms_norm_reference)
    add_rms_norm = staticmethod(add_rms_norm_reference)
    silu_and_mul = staticmethod(silu_and_mul_reference)
    norm_rope_store = staticmethod(norm_rope_store_reference)
    attend = staticmethod(attend_reference)
    sample = staticmethod(sample_reference)
    store_samples = staticmethod(store_samples_reference)
    token_logprobs = staticmethod(token_logprobs_reference)

    @classmethod
    def why_cannot(cls, device: torch.device) -> str | None:
        """Return why this backend cannot run on this machine, as a clause of an error message; None if it can."""
        return None

    def find_operators(self, table: Mapping[str, str]) -> Any:
        """Return the operators that only a family of models or a wing has, in the form for this backend's kernels.

        Args:
            table: {kernels: the name of a module}. "torch" serves for kernels that are not in it.

        Returns:
            An object whose methods are the operators: what the module's `make_operators(backend)` returns.
        """
        return import_module(table.get(self.kernels, table["torch"])).make_operators(self)

    def allocate_cache(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVCache:
        """Return a zeroed cache of one layer. Its shape is [num_blocks, block_size, num_kv_heads, head_dim].

        Its memory has another order: heads come before tokens. So one head of one block is contiguous, as kernels read
        it.
        """
        num_blocks, block_size, num_kv_heads, head_dim = shape
        stored = (num_blocks, num_kv_heads, block_size, head_dim)
        return KVCache(*(self.zeros(stored, dtype, device).transpose(1, 2) for _ in KVCache._fields))

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for the keys, or for the values, of one layer. `allocate_cache` calls it for each of the two."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def prepare_weights(self, weights: Iterable[Tensor]) -> None:
        """Called on the empty parameters before weights are loaded."""

    def pack_weights(self, modules: Iterable[nn.Module]) -> None:
        """Change the weights to the form that this backend multiplies fastest. Called when they are loaded."""

    def prepare_attention(self, metadata: AttentionMetadata, cache: KVCache, num_heads: int) -> AttentionMetadata:
        """Return the metadata with everything that `attend` needs in addition. It is the same for every layer.

        The runner calls this once per step, before the first layer. If the step becomes a CUDA graph, this call is a
        part of the graph.

        Args:
            cache: that of any layer of attention; without such a layer this is not called. Only its shape is used.
            num_heads: number of query heads.
        """
        return metadata
