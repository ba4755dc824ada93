"""Which backend runs here."""

import torch

from nanovllm.backends.base import Backend


def resolve_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the backend to use: `name`, or for "auto" the best that can run on device.

    Raises:
        ValueError: the named backend cannot run here; the message says why and what to install.
    """
    if name in ("auto", "torch"):
        return "torch"
    raise ValueError(f'attention_backend="{name}" cannot run on {device.type}; use "auto" or "torch"')


def default_block_size(name: str) -> int:
    """Tokens a KV block where the user does not say: flash-attn's paged kernels need multiples of 256."""
    return 256 if name == "flash_attn" else 64


def make_backend(name: str, device: torch.device, head_dim: int, group: int, block_size: int) -> Backend:
    """The backend called name, already resolved.

    Args:
        group: query heads per KV head.

    Raises:
        ValueError: the backend has no kernels for this shape.
    """
    from nanovllm.backends.torch_backend import TorchBackend

    return TorchBackend()
