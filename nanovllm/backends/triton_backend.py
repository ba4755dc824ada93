"""Our own Triton kernels: needs nothing but torch, triton and a CUDA device (or Triton's interpreter, for tests)."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from nanovllm.backends.base import AttentionMetadata, KVCache
from nanovllm.kernels.norm_rope_store import norm_rope_store
from nanovllm.kernels.paged_decode import paged_decode, plan_decode
from nanovllm.kernels.paged_prefill import paged_prefill
from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.kernels.sample import sample
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.kernels.triton_shim import HAS_TRITON, INTERPRETED

HEAD_DIMS = (32, 64, 128)
GROUP_SIZES = (1, 2, 3, 4, 5, 8)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

T = TypeVar("T")


def why_triton_cannot(device: torch.device, dtype: torch.dtype, block_size: int | None) -> str | None:
    """What is missing for the Triton kernels here, or None. A block size of None is still to be chosen."""
    if not HAS_TRITON:
        return "triton is not installed (pip install triton)"
    if device.type != "cuda" and not INTERPRETED:
        return f"it needs a CUDA device, not {device.type} (or, for tests, TRITON_INTERPRET=1 set before the start)"
    if dtype not in DTYPES:
        return f"dtype {dtype} is none of {', '.join(map(str, DTYPES))}"
    if block_size is not None and block_size not in TritonBackend.block_sizes:
        return f"kvcache_block_size {block_size} is not a multiple of 16 from 16 to 256"
    return None


def why_no_kernels(head_dim: int, group: int) -> str | None:
    """What of a model's heads the kernels, and with them flash-attn's backend, do not know, or None."""
    found = {"head_dim": head_dim, "query heads per KV head": group}
    for (what, value), allowed in zip(found.items(), (HEAD_DIMS, GROUP_SIZES), strict=True):
        if value not in allowed:
            return f"has kernels for {what} of {', '.join(map(str, allowed))}, not {value}"
    return None


def check_shape(name: str, head_dim: int, group: int, block_size: int, block_sizes: range) -> None:
    """Raise a ValueError if the backend called name has no kernels for a model's heads or for a block size."""
    if reason := why_no_kernels(head_dim, group):
        raise ValueError(f'the {name} backend {reason}: use attention_backend="torch"')
    if block_size not in block_sizes:
        raise ValueError(
            f"the {name} backend needs kvcache_block_size to be a multiple of {block_sizes.step} "
            f"from {block_sizes.start} to {block_sizes[-1]}, not {block_size}"
        )


def _is_capturing(metadata: AttentionMetadata) -> bool:
    return metadata.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()


class TritonBackend:
    """Keeps heads before tokens in storage: what a program reads of a block, one head of it, is one run of memory."""

    name: ClassVar[str] = "triton"
    block_sizes: ClassVar[range] = range(16, 256 + 1, 16)

    def __init__(self) -> None:
        self._step: tuple[AttentionMetadata, bool] | None = None
        self._plan: Any = None

    def allocate_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        check_shape(self.name, head_dim, GROUP_SIZES[0], block_size, self.block_sizes)

        def zeros() -> Tensor:
            storage = torch.zeros(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype, device=device)
            return storage.transpose(1, 2)

        return zeros(), zeros()

    def pack_weights(self, modules: Iterable[nn.Module], check: Callable[[], None]) -> None:
        """The weights stay as they are."""

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._step, self._plan = (metadata, _is_capturing(metadata)), None

    def _once_a_step(self, metadata: AttentionMetadata, plan: Callable[[], T]) -> T:
        """plan() for the first layer of a step, its result for the others; for every layer if no step was begun.

        A plan made outside a capture is not taken into it: the graph would replay without planning anew.
        """
        begun = self._step
        if begun is None or begun[0] is not metadata or begun[1] != _is_capturing(metadata):
            return plan()
        if self._plan is None:
            self._plan = plan()
        result: T = self._plan
        return result

    def attend(self, q: Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = metadata.num_decodes
        seq_lens, block_tables = metadata.seq_lens, metadata.block_tables
        if decodes:
            tables = block_tables[:decodes]
            plan = self._once_a_step(
                metadata, lambda: plan_decode(seq_lens[:decodes], tables, num_heads=q.shape[1], k_cache=cache[0])
            )
            paged_decode(q[:decodes], *cache, tables, plan, scale, out[:decodes])
        if seq_lens.shape[0] > decodes:
            prefills = (metadata.cu_seqlens_q[decodes:], seq_lens[decodes:], block_tables[decodes:])
            paged_prefill(q, *cache, *prefills, num_tokens=q.shape[0] - decodes, scale=scale, out=out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul(gate_up)

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
        return norm_rope_store(qkv, q_weight, k_weight, eps, cos_sin, positions, *cache, slot_mapping)

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
        return sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
