"""What every "auto" becomes for a model on this machine, and the refusal of what cannot be had here."""

import logging
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

import torch

from nanovllm.backends import BACKENDS, Backend
from nanovllm.config import EngineConfig, ResolvedConfig
from nanovllm.models.config import limit_length
from nanovllm.models.shape import Shape
from nanovllm.utils.checks import quote
from nanovllm.utils.machine import has_native_bfloat16

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

WORTH_COMPILING = 100_000_000
"""Parameters of a model for which attention_backend="auto" spends the seconds that the CPU kernels take to compile."""

TOKEN_BUDGETS = {"cuda": 16384, "cpu": 2048}
"""The default max_num_batched_tokens on each type of device."""


def resolve(config: EngineConfig, hf_config: "PretrainedConfig") -> ResolvedConfig:
    """Turn every "auto" into a value.

    Raises:
        ValueError: something asked for cannot be had here; the message says why.
    """
    device = resolve_device(config.device)
    size = None if config.kvcache_block_size == "auto" else int(config.kvcache_block_size)
    shape = Shape.of(hf_config)
    mine = shape.of_rank(config.tensor_parallel_size)
    work = Work(device, own_dtype(hf_config), mine.head_dim, mine.group, size, shape.num_parameters)
    dtype = resolve_dtype(config.dtype, config.attention_backend, work)
    backend = resolve_backend(config.attention_backend, work._replace(dtype=dtype))
    distributed = resolve_distributed_backend(config.distributed_backend, device, config.tensor_parallel_size)
    # A CUDA graph captures nothing that goes through the host: what gloo sends, and lengths that plain torch reads.
    through_host = backend.name == "torch" or (config.tensor_parallel_size > 1 and distributed == "gloo")
    is_cuda = device.type == "cuda"
    return copy_options(
        config,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        attention_backend=backend.name,
        distributed_backend=distributed,
        use_graphs=is_cuda and not config.enforce_eager and not through_host,
        block_size=size or backend.default_block_size,
        max_num_batched_tokens=config.max_num_batched_tokens or TOKEN_BUDGETS[device.type],
        max_model_len=limit_length(hf_config, config.max_model_len),
        depth=2 if config.overlap and is_cuda and config.speculative_config is None else 1,
    )


def copy_options(config: EngineConfig, **resolved: object) -> ResolvedConfig:
    """A ResolvedConfig of resolved values, and of the options that are what was asked for."""
    names = {field.name for field in fields(EngineConfig)}
    asked = {field.name: getattr(config, field.name) for field in fields(ResolvedConfig) if field.name in names}
    return ResolvedConfig(**{**asked, **resolved})


def resolve_device(name: str) -> torch.device:
    """The device called name ("auto", "cpu", "cuda", "cuda:1"); ValueError if there is no such device here.

    "cuda" becomes the current one, with its number: which one is current may change, and differs between threads.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f'device is {quote(name)}; it must be "cpu", "cuda" or "auto"')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError('device is "cuda", but torch finds no CUDA device here; use device="cpu" or "auto"')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {quote(name)}, but there are {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def own_dtype(hf_config: "PretrainedConfig") -> torch.dtype:
    """The dtype that the model's config.json names; float32 where it names none."""
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


class Work(NamedTuple):
    """What a backend would be asked to do.

    Attributes:
        group: query heads per KV head.
        block_size: None if it is still to be chosen.
        num_parameters: of the whole model.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    group: int
    block_size: int | None = None
    num_parameters: int = 0


def resolve_dtype(name: str, backend: str, work: Work) -> torch.dtype:
    """The dtype called name; "auto" is the model's own, work.dtype, where this machine or our kernels compute it.

    On a CPU without bfloat16 our kernels read it and widen it: half the bytes are worth more than that costs. Plain
    torch would emulate it, so there, and for float16 on any CPU, it becomes float32.
    """
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]  # EngineConfig has checked the name
    if work.dtype == torch.float16 and work.device.type == "cuda":
        return work.dtype
    if work.dtype == torch.bfloat16:
        cpu = BACKENDS["cpu"]
        if has_native_bfloat16(work.device) or (cpu in candidates(backend, work) and why_cannot(cpu, work) is None):
            return work.dtype
    return torch.float32


def candidates(name: str, work: Work) -> list[type[Backend]]:
    """The backends to try, the best first."""
    if name != "auto":
        return [BACKENDS[name]]
    if work.device.type == "cuda":
        return [BACKENDS["flash_attn"], BACKENDS["triton"], BACKENDS["torch"]]
    return [BACKENDS["cpu"]] * (work.num_parameters >= WORTH_COMPILING) + [BACKENDS["torch"]]


def resolve_backend(name: str, work: Work) -> type[Backend]:
    """The backend called name; for "auto" the best that can do the work.

    On CUDA that is flash_attn, else triton; on a CPU cpu, for a model that is worth the compile; else torch.

    Raises:
        ValueError: the backend cannot do it; the message says why and what to change.
    """
    reason = None
    for backend in candidates(name, work):
        passed_over, reason = reason, why_cannot(backend, work)
        if reason is None:
            if passed_over is not None and backend.name == "torch":
                logger.warning("plain torch runs instead of faster kernels: %s", passed_over)
            return backend
        logger.info("the %s backend cannot run: %s", backend.name, reason)
    if name == "auto":
        raise ValueError(reason)
    raise ValueError(f'attention_backend="{name}" cannot run here: {reason}; or use attention_backend="auto"')


def why_cannot(backend: type[Backend], work: Work) -> str | None:
    """What of the work the backend does not know, or what it misses on this machine; None if it can do it."""
    sizes, size = backend.block_sizes, work.block_size
    if size is not None and size not in sizes:
        return f"kvcache_block_size is {size}; it must be a power of two from {sizes[0]} to {sizes[-1]}"
    facts = (
        ("dtype", work.dtype, backend.dtypes),
        ("head_dim", work.head_dim, backend.head_dims),
        ("query heads per KV head", work.group, backend.groups),
    )
    for what, value, known in facts:
        if known is not None and value not in known:
            named = f"{known[0]} to {known[-1]}" if isinstance(known, range) else ", ".join(map(str, known))
            return f"it has kernels for {what} of {named}, not {value}"
    return backend.why_cannot(work.device)


def resolve_distributed_backend(name: str, device: torch.device, size: int) -> str:
    """What the ranks speak: for "auto" NCCL on CUDA and gloo on a CPU.

    Raises:
        ValueError: NCCL where it cannot run, with what can.
    """
    if name == "auto":
        name = "nccl" if device.type == "cuda" else "gloo"
    if name == "nccl" and size > 1:
        if device.type != "cuda":
            raise ValueError('distributed_backend="nccl" needs CUDA devices; on a CPU use "gloo" or "auto"')
        if (count := torch.cuda.device_count()) < size:
            raise ValueError(
                f"tensor_parallel_size is {size}, and NCCL wants a GPU for each rank: there are {count}; change it, "
                'or let ranks share a GPU with distributed_backend="gloo"'
            )
    return name
