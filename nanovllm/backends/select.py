"""Which backend runs here."""

import logging

import torch

from nanovllm.backends.base import Backend

logger = logging.getLogger(__name__)

NAMES = ("flash_attn", "triton", "torch")


def default_block_size(name: str) -> int:
    """Tokens a KV block where the user does not say: flash-attn's paged kernels need multiples of 256."""
    return 256 if name == "flash_attn" else 64


def resolve_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int | None = None,
    heads: tuple[int, int] | None = None,
) -> str:
    """The name of the backend to use: `name`, or for "auto" the best that can run on device.

    That is flash_attn, if it imports and the GPU can run it; else triton on CUDA; else torch.

    Args:
        block_size: None if it is still to be chosen.
        heads: (head_dim, query heads per KV head) for "auto" to look at; None for those that every backend has.

    Raises:
        ValueError: the named backend cannot run here; the message says why and what to install.
    """
    if name not in ("auto", *NAMES):
        choices = ", ".join(f'"{known}"' for known in ("auto", *NAMES))
        raise ValueError(f'attention_backend="{name}" is unknown; choose one of {choices}')
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return "torch"
    from nanovllm.backends.flash_attn_backend import why_flash_attn_cannot
    from nanovllm.backends.triton_backend import why_no_kernels, why_triton_cannot

    checks = {"flash_attn": why_flash_attn_cannot, "triton": why_triton_cannot}
    if name != "auto":
        if reason := checks[name](device, dtype, block_size):
            raise ValueError(f'attention_backend="{name}" cannot run here: {reason}; or use attention_backend="auto"')
        return name
    for candidate, why_cannot in checks.items():
        reason = why_cannot(device, dtype, block_size)
        if reason is None and heads is not None and (missing := why_no_kernels(*heads)):
            reason = f"it {missing}"
        if reason is None:
            return candidate
        logger.info("the %s backend is not used: %s", candidate, reason)
    logger.warning("no GPU backend can run here (%s); plain torch is slow on a GPU", reason)
    return "torch"


def make_backend(
    name: str,
    device: torch.device,
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    num_parameters: int = 0,
) -> Backend:
    """The backend called name, already resolved.

    Args:
        group: query heads per KV head.
        num_parameters: of the model: on a CPU, kernels are compiled only for one that is worth the seconds.

    Raises:
        ValueError: the backend has no kernels for this shape.
    """
    if name == "torch" and device.type == "cpu":
        from nanovllm.backends.cpu_backend import make_cpu_backend

        return make_cpu_backend(dtype, head_dim, group, block_size, num_parameters)
    if name == "torch":
        from nanovllm.backends.torch_backend import TorchBackend

        return TorchBackend()
    from nanovllm.backends.flash_attn_backend import FlashAttnBackend
    from nanovllm.backends.triton_backend import TritonBackend, check_shape

    backend = FlashAttnBackend if name == "flash_attn" else TritonBackend
    check_shape(name, head_dim, group, block_size, backend.block_sizes)
    return backend()
