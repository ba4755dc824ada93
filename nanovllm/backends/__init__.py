"""The backends, which run models on a device. A backend's module is imported when it is chosen, and only then."""

from pkgutil import resolve_name

import torch
from torch import Tensor

from nanovllm.backends.base import Backend as Backend  # "as": others import it from here
from nanovllm.ops.attention import CacheSize as CacheSize
from nanovllm.ops.attention import KVCache as KVCache

_CLASSES = {
    "triton": {
        "cuda": "nanovllm.backends.gpu.triton_backend:TritonBackend",
        "cpu": "nanovllm.backends.gpu.triton_backend:TritonKernels",  # in Triton's interpreter, for tests
    },
    "flash_attn": {"cuda": "nanovllm.backends.gpu.flash_attn_backend:FlashAttnBackend"},
    "cpu": {"cpu": "nanovllm.backends.cpu.backend:CpuBackend"},
    "torch": {
        "cuda": "nanovllm.backends.gpu.device:CudaBackend",
        "cpu": "nanovllm.backends.torch_backend:TorchBackend",
    },
}
"""The class of each backend, by its name and the type of the device."""

NAMES = tuple(_CLASSES)
"""The values of the option `attention_backend`, beside "auto"."""

LayerCache = tuple[Tensor, ...]
"""Holds what a layer keeps of the tokens that it has seen. A layer of attention has a KVCache."""


def find_backend(name: str, device: torch.device) -> type[Backend] | None:
    """Import and return the backend called `name` for a device; None if it does not run on this type of device."""
    path = _CLASSES[name].get(device.type)
    if path is None:
        return None
    found: type[Backend] = resolve_name(path)
    return found


def make_backend(name: str, device: torch.device | str = "cpu") -> Backend:
    """Return a new backend for a device; ValueError if it does not run on this type of device."""
    device = torch.device(device)
    kind = find_backend(name, device)
    if kind is None:
        raise ValueError(f"the {name} backend does not run on {device}")
    return kind(device)
