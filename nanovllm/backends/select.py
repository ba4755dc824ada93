"""Which backend runs here."""

import torch

from nanovllm.backends.base import Backend


def select_backend(name: str, device: torch.device) -> Backend:
    """The backend called name, or for "auto" the best that can run on device.

    Raises:
        ValueError: the named backend cannot run here; the message says why and what to install.
    """
    from nanovllm.backends.torch_backend import TorchBackend

    if name in ("auto", "torch"):
        return TorchBackend()
    raise ValueError(f'attention_backend="{name}" cannot run on {device.type}; use "auto" or "torch"')
