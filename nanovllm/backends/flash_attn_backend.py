"""Attention by the flash-attn package (Dao 2023, https://arxiv.org/abs/2307.08691); the rest by our Triton kernels."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from nanovllm.backends.base import AttentionMetadata, KVCache
from nanovllm.backends.triton_backend import GROUP_SIZES, TritonBackend, check_shape, why_triton_cannot


def why_flash_attn_cannot(device: torch.device, dtype: torch.dtype, block_size: int | None) -> str | None:
    """What is missing for flash-attn here, or None. A block size of None is still to be chosen."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"it needs a GPU of compute capability 8.0 or more, not {major}.{minor}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, not {dtype}"
    if block_size is not None and block_size not in FlashAttnBackend.block_sizes:
        return f"it needs kvcache_block_size to be a multiple of 256, not {block_size}"
    try:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: F401
    except ImportError as error:
        return f'flash-attn does not import ({error}); install it with: pip install "nano-vllm[flash-attn]"'
    return why_triton_cannot(device, dtype, None)


class PrefillPlan(NamedTuple):
    """Arguments of the prefill's call that are the same for every layer of a step."""

    cu_seqlens_q: Tensor  # int32 [num_prefills + 1], from 0
    cu_seqlens_k: Tensor  # int32 [num_prefills + 1], from 0
    max_seqlen_q: int
    max_seqlen_k: int


class FlashAttnBackend(TritonBackend):
    """Keeps tokens before heads in storage, as flash-attn's documentation has it; blocks of a multiple of 256."""

    name: ClassVar[str] = "flash_attn"
    block_sizes: ClassVar[range] = range(256, 4096 + 1, 256)

    def __init__(self) -> None:
        super().__init__()
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._varlen, self._with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache

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
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)

    def attend(self, q: Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        decodes = metadata.num_decodes
        parts = []
        if decodes:
            attended = self._with_kvcache(
                q[:decodes].unsqueeze(1),  # one query token a sequence
                *cache,
                cache_seqlens=metadata.seq_lens[:decodes],
                block_table=metadata.block_tables[:decodes],
                softmax_scale=scale,
                causal=True,
            )
            parts.append(attended.squeeze(1))
        if metadata.seq_lens.shape[0] > decodes:
            plan = self._once_a_step(metadata, lambda: _plan_prefill(metadata))
            attended = self._varlen(
                q[decodes:],
                *cache,
                **plan._asdict(),
                softmax_scale=scale,
                causal=True,
                block_table=metadata.block_tables[decodes:],
            )
            parts.append(attended)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plan_prefill(metadata: AttentionMetadata) -> PrefillPlan:
    decodes = metadata.num_decodes
    if metadata.query_lens_cpu is None or metadata.seq_lens_cpu is None:
        raise RuntimeError("a step that holds prefills needs query_lens_cpu and seq_lens_cpu")
    seq_lens = metadata.seq_lens[decodes:]
    return PrefillPlan(
        cu_seqlens_q=metadata.cu_seqlens_q[decodes:] - decodes,  # every decode has one query token
        cu_seqlens_k=torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=int(metadata.query_lens_cpu[decodes:].max()),
        max_seqlen_k=int(metadata.seq_lens_cpu[decodes:].max()),
    )
