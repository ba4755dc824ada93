"""Where the model's operators run: plain torch, our compiled CPU kernels, our Triton kernels, or flash-attn."""

from nanovllm.backends.base import Backend
from nanovllm.backends.cpu_backend import CpuBackend
from nanovllm.backends.flash_attn_backend import FlashAttnBackend
from nanovllm.backends.torch_backend import TorchBackend
from nanovllm.backends.triton_backend import TritonBackend
from nanovllm.kernels.attention import AttentionMetadata, KVCache

BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (FlashAttnBackend, TritonBackend, CpuBackend, TorchBackend)}
"""By name; which of them "auto" takes is decided in resolve.py."""

__all__ = ["BACKENDS", "AttentionMetadata", "Backend", "KVCache"]
