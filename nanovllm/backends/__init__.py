"""Where the model's operators run: plain torch, our Triton kernels, or flash-attn for the attention."""

from nanovllm.backends.base import AttentionMetadata, Backend, KVCache
from nanovllm.backends.select import default_block_size, make_backend, resolve_backend

__all__ = ["AttentionMetadata", "Backend", "KVCache", "default_block_size", "make_backend", "resolve_backend"]
