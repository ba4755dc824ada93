"""Attention by the flash-attn package (Dao 2023, https://arxiv.org/abs/2307.08691). The rest is our Triton kernels."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nanovllm.backends.gpu.triton_backend import TritonBackend
from nanovllm.ops.attention import AttentionVariant, KVCache
from nanovllm.ops.step_inputs import StepInputs


class FlashAttnBackend(TritonBackend):
    """In storage tokens come before heads, and blocks have a multiple of 256 tokens: flash-attn asks for both."""

    name = "flash_attn"
    dtypes = (torch.float16, torch.bfloat16)
    variants = ("window", "softcap")
    block_sizes = (256, 512, 1024, 2048, 4096)
    default_block_size = 256
    runs_on_fake_tensors = False

    def __init__(self, device: torch.device | str = "cuda") -> None:
        super().__init__(device)
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self._varlen = flash_attn_varlen_func
        self._with_kvcache = flash_attn_with_kvcache

    @classmethod
    def why_cannot(cls, device: torch.device) -> str | None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"it needs a GPU of compute capability 8.0 or more, not {major}.{minor}"
        try:
            from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: F401
        except ImportError as error:
            return f"flash-attn does not import ({error}); install it with: pip install flash-attn"
        return super().why_cannot(device)

    @classmethod
    def list_kv_cache_dtypes(cls, device: torch.device) -> tuple[str, ...]:
        return ("auto",)

    def allocate_cache(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVCache:
        return KVCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in ("keys", "values")))

    def prepare_attention(self, inputs: StepInputs, cache: KVCache, num_heads: int) -> StepInputs:
        decodes = inputs.num_decodes
        if inputs.seq_lens.shape[0] == decodes:
            return inputs
        if inputs.query_lens_cpu is None or inputs.seq_lens_cpu is None:
            raise RuntimeError("a step that holds prefills needs query_lens_cpu and seq_lens_cpu")
        # The lengths of the prefills, as arguments of flash-attn: cu_seqlens are int32 [num_prefills + 1], from 0 on.
        prefills = {
            "cu_seqlens_q": inputs.cu_seqlens[decodes:] - decodes,  # every decode has one query token
            "cu_seqlens_k": pad(inputs.seq_lens[decodes:].cumsum(0, dtype=torch.int32), (1, 0)),
            "max_seqlen_q": int(inputs.query_lens_cpu[decodes:].max()),
            "max_seqlen_k": int(inputs.seq_lens_cpu[decodes:].max()),
        }
        return replace(inputs, prepared=prefills)

    def attend(
        self, q: Tensor, cache: KVCache, inputs: StepInputs, scale: float, variant: AttentionVariant | None = None
    ) -> Tensor:
        options: dict[str, Any] = {"softmax_scale": scale, "causal": True}
        if variant is not None:
            assert variant.sinks is None, "resolve.py chooses no backend without sinks for a model that has them"
            if variant.window is not None:
                options["window_size"] = (variant.window - 1, 0)  # how many keys before a query's own, and after it
            if variant.softcap is not None:
                options["softcap"] = variant.softcap
        decodes = inputs.num_decodes
        parts = []
        if decodes:
            attended = self._with_kvcache(
                q[:decodes].unsqueeze(1),  # one query token a sequence
                *cache[:2],
                cache_seqlens=inputs.seq_lens[:decodes],
                block_table=inputs.block_tables[:decodes],
                **options,
            )
            parts.append(attended.squeeze(1))
        if inputs.prepared is not None:
            attended = self._varlen(
                q[decodes:],
                *cache[:2],
                **inputs.prepared,
                block_table=inputs.block_tables[decodes:],
                **options,
            )
            parts.append(attended)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
