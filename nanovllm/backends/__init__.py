"""Where the model's operators run: plain torch, our Triton kernels, or flash-attn for the attention."""

from nanovllm.backends.base import AttentionMetadata, Backend, KVCache
from nanovllm.backends.select import select_backend

__all__ = ["AttentionMetadata", "Backend", "KVCache", "select_backend"]
