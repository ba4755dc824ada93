"""Turns every "auto" into a value for one model on this machine, and refuses what cannot run here."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from nanovllm.backends import BACKENDS, Backend
from nanovllm.config import EngineConfig, ResolvedConfig
from nanovllm.models.config import Shape, limit_length
from nanovllm.utils.checks import quote
from nanovllm.utils.machine import has_native_bfloat16
from nanovllm.utils.memory import cpu_cache_budget

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

WORTH_COMPILING = 100_000_000
"""attention_backend="auto" spends the seconds that the CPU kernels take to compile on models of so many parameters."""

DEFAULT_NUM_SEQS = 512
TOKEN_BUDGETS = {"cuda": 16384, "cpu": 2048}
"""The default max_num_batched_tokens on each type of device."""
SMALLEST_BUDGET = 128
"""With fewer tokens a step would multiply more slowly."""


def resolve(
    config: EngineConfig, hf_config: "PretrainedConfig", count_bytes: Callable[[Shape, int], int] = Shape.count_bytes
) -> ResolvedConfig:
    """Turn every "auto" into a value.

    Args:
        count_bytes: returns the memory of a model's weights, if those that are not quantised take so many bytes each.

    Raises:
        ValueError: an option asks for something that cannot run here; the message says why.
    """
    device = resolve_device(config.device)
    block_size = None if config.kvcache_block_size == "auto" else int(config.kvcache_block_size)
    shape = Shape.from_config(hf_config)
    share = shape.shard(config.tensor_parallel_size)
    work = Work(device, read_dtype(hf_config), share.head_dim, share.group, block_size, shape.num_parameters)
    dtype = resolve_dtype(config.dtype, config.attention_backend, work)
    backend = resolve_backend(config.attention_backend, work._replace(dtype=dtype))
    stages = config.pipeline_parallel_size
    distributed = resolve_distributed_backend(config.distributed_backend, device, config.num_ranks, stages > 1)
    # A CUDA graph cannot capture work of the host: gloo sends through it, and plain torch reads lengths there.
    through_host = backend.name == "torch" or (config.num_ranks > 1 and distributed == "gloo")
    is_cuda = device.type == "cuda"
    resolved = {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "attention_backend": backend.name,
        "distributed_backend": distributed,
        "use_graphs": is_cuda and not config.enforce_eager and not through_host,
        "block_size": block_size or backend.default_block_size,
        "max_num_batched_tokens": config.max_num_batched_tokens or default_budget(device.type, stages),
        "max_model_len": limit_length(hf_config, config.max_model_len),
        "depth": 2 if config.overlap and is_cuda and config.speculative_config is None else 1,
        "max_num_seqs": config.max_num_seqs or DEFAULT_NUM_SEQS,
        "enable_prefix_caching": config.enable_prefix_caching is not False,
    }
    if shape.delta is not None:
        check_state_options(config)
        weights = count_bytes(shape, dtype.itemsize) // config.num_ranks
        row_bytes = shape.row_bytes(dtype.itemsize)
        num_seqs = config.max_num_seqs or count_rows_that_fit(config, device, weights, row_bytes)
        resolved |= {"enable_prefix_caching": False, "max_num_seqs": num_seqs}
    if stages > 1:
        resolved["depth"] = stages
    return ResolvedConfig(**{**vars(config), **resolved})


def check_state_options(config: EngineConfig) -> None:
    """Raise a ValueError for an option that a model with a state per row cannot have. Log what is off."""
    if config.enable_prefix_caching:
        raise ValueError(
            "enable_prefix_caching is True, and this model keeps a state for each sequence, which has no blocks that "
            "another sequence could take over: set it to False, or leave it out"
        )
    if config.speculative_config is not None:
        raise ValueError(
            "speculative_config asks for drafts, and this model keeps a state for each sequence, which cannot take "
            "back the tokens of a wrong draft: leave it out"
        )
    logger.info("prefix caching is off: the model keeps a state for each sequence")


def count_rows_that_fit(config: EngineConfig, device: torch.device, weights: int, row_bytes: int) -> int:
    """Return the max_num_seqs of a model with a state per row, by the memory that is free before it is loaded.

    Args:
        weights: bytes of one rank's weights.
        row_bytes: of a row's state, of all ranks.
    """
    if device.type != "cuda":
        return fit_rows(cpu_cache_budget(), row_bytes)  # ranks on a CPU share its memory
    free, total = torch.cuda.mem_get_info(device)
    room = min(free, int(total * config.gpu_memory_utilization)) - weights
    return fit_rows(room, row_bytes // config.num_ranks)


def fit_rows(room: int, row_bytes: int) -> int:
    """Return the max_num_seqs for states of row_bytes each: 512, or as many as half of the room holds.

    The other half is for keys and values. One row more is there for padding.
    """
    num_seqs = min(DEFAULT_NUM_SEQS, max(room // 2 // row_bytes - 1, 1))
    total = (num_seqs + 1) * row_bytes
    logger.info(
        "max_num_seqs is %d: the state of a sequence takes %.1f MiB, and all of them %.2f GiB of memory",
        *(num_seqs, row_bytes / 2**20, total / 2**30),
    )
    return num_seqs


def default_budget(device_type: str, stages: int) -> int:
    """Return the default max_num_batched_tokens.

    In a pipeline it is smaller. While one stage computes a chunk, the others need chunks of their own. And they have
    nothing to do while the first chunks come and the last ones go.
    """
    budget = TOKEN_BUDGETS[device_type]
    return budget if stages == 1 else max(budget // (8 * stages), SMALLEST_BUDGET)


def resolve_device(name: str) -> torch.device:
    """Return the device called `name` ("auto", "cpu", "cuda", "cuda:1"); ValueError if there is no such device here.

    "cuda" becomes the current device with its number, because each thread has a current device of its own.
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


def read_dtype(hf_config: "PretrainedConfig") -> torch.dtype:
    """Return the dtype that the model's config.json names, or float32 if it names none."""
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


class Work(NamedTuple):
    """The properties of model and machine that decide which backends can run.

    Attributes:
        dtype: the model's own, until it is resolved.
        head_dim: elements of a head.
        group: query heads per KV head, on one rank.
        block_size: tokens in a block of the KV cache; None if the backend is to choose.
        num_parameters: of the whole model.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    group: int
    block_size: int | None = None
    num_parameters: int = 0


def resolve_dtype(name: str, backend: str, work: Work) -> torch.dtype:
    """Return the dtype called `name`; "auto" is the model's own, work.dtype, if it is fast here, else float32.

    On a CPU without bfloat16 our C++ kernels read bfloat16 and widen it, which is faster because they read half the
    bytes. Plain torch would emulate bfloat16, so with it the dtype becomes float32; so does float16 on every CPU.
    """
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]  # EngineConfig has checked the name
    if work.dtype == torch.float16 and work.device.type == "cuda":
        return work.dtype
    if work.dtype == torch.bfloat16:
        cpu = BACKENDS["cpu"]
        if has_native_bfloat16(work.device) or (
            cpu in list_candidates(backend, work) and why_cannot(cpu, work) is None
        ):
            return work.dtype
    return torch.float32


def list_candidates(name: str, work: Work) -> list[type[Backend]]:
    """Return the backends to try, the best first."""
    if name != "auto":
        return [BACKENDS[name]]
    if work.device.type == "cuda":
        return [BACKENDS["flash_attn"], BACKENDS["triton"], BACKENDS["torch"]]
    if work.num_parameters >= WORTH_COMPILING:
        return [BACKENDS["cpu"], BACKENDS["torch"]]
    return [BACKENDS["torch"]]


def resolve_backend(name: str, work: Work) -> type[Backend]:
    """Return the backend called `name`; for "auto" the first of `list_candidates` that can run.

    Raises:
        ValueError: the backend cannot run; the message says why and what to change.
    """
    reason = None
    for backend in list_candidates(name, work):
        reason_before = reason
        reason = why_cannot(backend, work)
        if reason is None:
            if reason_before is not None and backend.name == "torch":
                logger.warning("plain torch runs instead of faster kernels: %s", reason_before)
            return backend
        logger.info("the %s backend cannot run: %s", backend.name, reason)
    if name == "auto":
        raise ValueError(reason)
    raise ValueError(f'attention_backend="{name}" cannot run here: {reason}; or use attention_backend="auto"')


def why_cannot(backend: type[Backend], work: Work) -> str | None:
    """Return the reason why the backend cannot run this work on this machine; None if it can."""
    sizes = backend.block_sizes
    if work.block_size is not None and work.block_size not in sizes:
        return f"kvcache_block_size is {work.block_size}; it must be a power of two from {sizes[0]} to {sizes[-1]}"
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


def resolve_distributed_backend(name: str, device: torch.device, size: int, is_pipeline: bool = False) -> str:
    """Return the library through which the ranks talk: for "auto" NCCL on CUDA and gloo on a CPU, or in a pipeline.

    Raises:
        ValueError: NCCL cannot run here; the message names an alternative.
    """
    if name == "auto":
        name = "nccl" if device.type == "cuda" and not is_pipeline else "gloo"
    if name == "nccl" and is_pipeline:
        raise ValueError('distributed_backend="nccl" has no links for pipeline_parallel_size; use "gloo" or "auto"')
    if name == "nccl" and size > 1:
        if device.type != "cuda":
            raise ValueError('distributed_backend="nccl" needs CUDA devices; on a CPU use "gloo" or "auto"')
        if (count := torch.cuda.device_count()) < size:
            raise ValueError(
                f"tensor_parallel_size is {size}, and NCCL wants a GPU for each rank: there are {count}; change it, "
                'or let ranks share a GPU with distributed_backend="gloo"'
            )
    return name
