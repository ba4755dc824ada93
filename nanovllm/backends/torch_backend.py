"""Plain torch: the CPU path, and the meaning of every other backend."""

import math
from collections.abc import Callable, Iterable
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.backends.base import AttentionMetadata, KVCache
from nanovllm.kernels.norm_rope_store import norm_rope_store_reference
from nanovllm.kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from nanovllm.kernels.sample import sample_reference
from nanovllm.kernels.silu_and_mul import silu_and_mul_reference


def attend_reference(q: Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Causal attention over the paged cache, one scaled_dot_product_attention a sequence.

    The query heads that share a KV head are folded into rows of one matrix (head-major), so that K and V are read
    once and never repeated.
    """
    k_cache, _ = cache
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    group = q.shape[1] // num_kv_heads
    out = torch.empty_like(q)
    seq_lens = metadata.seq_lens if metadata.seq_lens_cpu is None else metadata.seq_lens_cpu
    query_lens = [1] * len(seq_lens) if metadata.query_lens_cpu is None else metadata.query_lens_cpu.tolist()
    start = 0
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens.tolist(), strict=True)):
        if query_len == 0:
            continue
        blocks = metadata.block_tables[i, : -(-seq_len // block_size)]
        # [blocks, offset, head, dim] -> [head, token, dim]; heads-before-tokens storage makes each gather one run
        k, v = (c.transpose(1, 2)[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim) for c in cache)
        k, v = k[:, :seq_len], v[:, :seq_len]
        rows = q[start : start + query_len].view(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        mask = None
        if query_len > 1:
            mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=q.device).tril(seq_len - query_len)
            mask = mask.repeat(group, 1).unsqueeze(0)
        attended = F.scaled_dot_product_attention(
            rows.reshape(1, num_kv_heads, group * query_len, head_dim), k[None], v[None], attn_mask=mask, scale=scale
        )
        attended = attended.view(num_kv_heads, group, query_len, head_dim).permute(2, 0, 1, 3)
        out[start : start + query_len] = attended.reshape(query_len, -1, head_dim)
        start += query_len
    return out


class TorchBackend:
    """Needs nothing but torch. Keeps heads before tokens in storage: on a CPU that is three times faster to read."""

    name: ClassVar[str] = "torch"

    def allocate_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        def zeros() -> Tensor:
            shape = (num_blocks, num_kv_heads, block_size, head_dim)
            if device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device).transpose(1, 2)
            # torch.zeros writes every page, which for gigabytes takes seconds; numpy's come zeroed, when first touched.
            memory = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
            return torch.from_numpy(memory).view(dtype).view(shape).transpose(1, 2)

        return zeros(), zeros()

    def pack_weights(self, modules: Iterable[nn.Module], check: Callable[[], None]) -> None:
        """The weights stay as they are."""

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """There is nothing to share."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_reference(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm_reference(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return silu_and_mul_reference(gate_up)

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
        return norm_rope_store_reference(qkv, q_weight, k_weight, eps, cos_sin, positions, *cache, slot_mapping)

    def attend(self, q: Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        return attend_reference(q, cache, metadata, scale)

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
        return sample_reference(logits, temperature, top_k, top_p, min_p, seeds, positions)
