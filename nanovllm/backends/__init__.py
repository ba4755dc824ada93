"""The four backends, which compute a model's operators: torch, compiled CPU kernels, Triton kernels, flash-attn."""

from torch import Tensor

from nanovllm.backends.base import Backend
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.gpu.flash_attn_backend import FlashAttnBackend
from nanovllm.backends.gpu.triton_backend import TritonBackend
from nanovllm.backends.torch_backend import TorchBackend
from nanovllm.ops.attention import CacheSize, KVCache

BACKENDS: dict[str, type[Backend]] = {b.name: b for b in (FlashAttnBackend, TritonBackend, CpuBackend, TorchBackend)}
"""Every backend by its name. resolve.py decides which of them "auto" takes."""

LayerCache = tuple[Tensor, ...]
"""Holds what a layer keeps of the tokens that it has seen. A layer of attention has a KVCache."""

__all__ = ["BACKENDS", "Backend", "CacheSize", "KVCache", "LayerCache"]
