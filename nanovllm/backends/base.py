"""The operators of a model: attention over the paged cache, small fused operators, the sampler.

resolve.py chooses one backend at start-up, and every layer calls that object. So a layer does not need to know where it
runs.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from nanovllm.edits.edit_logits import edit_logits_reference
from nanovllm.models.qwen3_moe.ops import combine_reference, grouped_linear_reference, route_reference
from nanovllm.ops.attention import KVCache, attend_reference
from nanovllm.ops.norm_rope_store import norm_rope_store_reference
from nanovllm.ops.rms_norm import add_rms_norm_reference, rms_norm_reference
from nanovllm.ops.sample import sample_reference, store_samples_reference
from nanovllm.ops.silu_and_mul import silu_and_mul_reference
from nanovllm.ops.step_inputs import StepInputs, step_inputs_reference
from nanovllm.ops.token_logprobs import token_logprobs_reference


class Backend:
    """Computes every operator with its plain-torch reference. A subclass replaces the operators that it computes
    faster.

    Each operator is a class attribute that holds the reference function. There is no wrapper method, which would repeat
    the arguments. A subclass whose operator needs an object of its own, such as the loaded CPU library, replaces the
    attribute by a method.

    Attributes:
        name: its name in the option `attention_backend`.
        device_type: the only type of torch.device that it runs on; None if it runs on several.
        dtypes, head_dims, groups, block_sizes: the values that its kernels support; None supports all. A group is the
            number of query heads that share a KV head.
        default_block_size: tokens in a block of the KV cache if the user does not choose.
    """

    name: ClassVar[str]
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
    route = staticmethod(route_reference)
    grouped_linear = staticmethod(grouped_linear_reference)
    combine = staticmethod(combine_reference)
    norm_rope_store = staticmethod(norm_rope_store_reference)
    attend = staticmethod(attend_reference)
    edit_logits = staticmethod(edit_logits_reference)
    sample = staticmethod(sample_reference)
    store_samples = staticmethod(store_samples_reference)
    token_logprobs = staticmethod(token_logprobs_reference)

    @classmethod
    def why_cannot(cls, device: torch.device) -> str | None:
        """Return why this backend cannot run on this machine, as a clause of an error message; None if it can."""
        return None

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

    def prepare_attention(self, inputs: StepInputs, cache: KVCache, num_heads: int) -> StepInputs:
        """Return the inputs with everything that `attend` needs in addition, in `prepared`. All layers share it.

        The runner calls this once per step, before the first layer. If the step becomes a CUDA graph, this call is a
        part of the graph.

        Args:
            cache: the cache of any layer of attention; without such a layer this is not called. Only its shape is used.
            num_heads: number of query heads.
        """
        return inputs
