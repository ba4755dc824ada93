"""Turns every "auto" into a value for one model on this machine, and refuses what cannot run here."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nanovllm.backends import Backend, find_backend
from nanovllm.backends.devices import DEVICES
from nanovllm.config import DEFAULT_NUM_SEQS, TOKEN_BUDGETS, WORTH_COMPILING, EngineConfig, ResolvedConfig
from nanovllm.models.model_config import limit_length
from nanovllm.models.sizes import Sizes, read_dtype
from nanovllm.ops.sample import SamplingValues
from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

LARGEST_DEFAULT_BLOCK = 256
"""The default kvcache_block_size of flash-attn, the largest of all backends."""


def resolve(
    config: EngineConfig, hf_config: "PretrainedConfig", sizes: Sizes, gpu_memory: int | None = None
) -> ResolvedConfig:
    """Turn every "auto" into a value, for one device. `load.resolve_options` adds what ranks and families change.

    Args:
        sizes: the sizes of the whole model.
        gpu_memory: the bytes of a GPU that need not be here, for an estimate. It has every kernel, and the larger of
            the blocks that a GPU may have. None: the device that the options name.

    Raises:
        ValueError: an option asks for something that cannot run here; the message says why.
    """
    device = resolve_device(config.device) if gpu_memory is None else torch.device("cuda:0")
    block_size = None if config.kvcache_block_size == "auto" else int(config.kvcache_block_size)
    rank_sizes = sizes if config.tensor_parallel_size == 1 else Sizes(hf_config, config.tensor_parallel_size)
    head_dim, group = find_heads(rank_sizes)
    work = Work(
        device=device,
        dtype=read_dtype(hf_config),
        head_dim=head_dim,
        group=group,
        block_size=block_size,
        num_parameters=sizes.num_parameters,
        kv_cache_dtype=config.kv_cache_dtype,
        variants=sizes.list_variants(),
    )
    if gpu_memory is None:
        dtype = resolve_dtype(config.dtype, config.attention_backend, work)
        backend = resolve_backend(config.attention_backend, work._replace(dtype=dtype))
        name = backend.name
        captures_steps = backend.captures_steps
        block_size = block_size or backend.default_block_size
        num_devices = min(config.num_ranks, torch.get_device_module(device).device_count())
        refused = [name for name in SamplingValues._fields if name not in backend.sampling_values]
    else:  # the backends of a GPU may not be installed here
        dtype = work.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        name = "triton"
        captures_steps = True
        block_size = block_size or LARGEST_DEFAULT_BLOCK
        num_devices = config.num_ranks
        refused = []
    runs_beside_host = DEVICES[device.type].runs_beside_host
    resolved = {
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "attention_backend": name,
        # A CUDA graph cannot capture work of the host, where plain torch reads lengths.
        "use_graphs": runs_beside_host and not config.enforce_eager and captures_steps,
        "block_size": block_size,
        "max_num_batched_tokens": config.max_num_batched_tokens or TOKEN_BUDGETS[device.type],
        "max_model_len": limit_length(hf_config, config.max_model_len),
        "has_given_length": config.max_model_len is not None,
        "depth": 2 if config.overlap and runs_beside_host and config.speculative_config is None else 1,
        "vocab_size": int(hf_config.vocab_size),
        "num_devices": num_devices,
        "refused_params": refused,
        "max_num_seqs": config.max_num_seqs or DEFAULT_NUM_SEQS,
        "enable_prefix_caching": config.enable_prefix_caching is not False,
    }
    return ResolvedConfig(**{**vars(config), **resolved})


def find_heads(sizes: Sizes) -> tuple[int, int]:
    """Return the largest head_dim of the layers with attention, and the most query heads that share a KV head."""
    layers: Iterable[Any] = sizes.model.layers
    heads = [(layer.self_attn.head_dim, layer.self_attn.group) for layer in layers if hasattr(layer.self_attn, "group")]
    return max((dim for dim, _ in heads), default=64), max((group for _, group in heads), default=1)


def resolve_device(name: str) -> torch.device:
    """Return the device called `name` ("auto", "cpu", "cuda", "cuda:1"); ValueError if there is no such device here.

    "cuda" becomes the current device with its number, because each thread has a current device of its own.
    """
    if name == "auto":
        name = next(type for type in DEVICES if torch.get_device_module(type).is_available())
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEVICES:
        names = ", ".join(f'"{type}"' for type in sorted(DEVICES))
        raise ValueError(f'device is {quote(name)}; it must be {names} or "auto"')
    if device.type == "cpu":
        return device
    module = torch.get_device_module(device.type)
    kind = device.type.upper()
    if not module.is_available():
        raise ValueError(
            f'device is "{device.type}", but torch finds no {kind} device here; use device="cpu" or "auto"'
        )
    if (device.index or 0) >= module.device_count():
        raise ValueError(f"device is {quote(name)}, but there are {module.device_count()} {kind} devices")
    return device if device.index is not None else torch.device(device.type, module.current_device())


class Work(NamedTuple):
    """The properties of model and machine that decide which backends can run.

    Attributes:
        dtype: the model's own, until it is resolved.
        head_dim: elements of a head.
        group: query heads per KV head, on one rank.
        block_size: tokens in a block of the KV cache; None if the backend is to choose.
        num_parameters: the parameters of the whole model.
        kv_cache_dtype: the value that the user gave to the option.
        variants: the fields of `AttentionVariant` that layers of the model set.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    group: int
    block_size: int | None = None
    num_parameters: int = 0
    kv_cache_dtype: str = "auto"
    variants: tuple[str, ...] = ()


def resolve_dtype(name: str, backend: str, work: Work) -> torch.dtype:
    """Return the dtype called `name`; "auto" is the model's own, work.dtype, if it is fast here, else float32.

    On a CPU without bfloat16 our C++ kernels read bfloat16 and widen it, which is faster because they read half the
    bytes. Plain torch would emulate bfloat16, so with it the dtype becomes float32; so does float16 on every CPU.
    """
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]  # EngineConfig has checked the name
    if work.dtype == torch.float16 and DEVICES[work.device.type].has_float16:
        return work.dtype
    if work.dtype == torch.bfloat16:
        may_be_cpu = "cpu" in list_candidates(backend, work)
        if has_native_bfloat16(work.device) or (may_be_cpu and why_cannot("cpu", work) is None):
            return work.dtype
    return torch.float32


def has_native_bfloat16(device: torch.device) -> bool:
    """Return whether the device computes bfloat16 in hardware."""
    return DEVICES[device.type].has_bfloat16(device)


def list_candidates(name: str, work: Work) -> list[str]:
    """Return the names of the backends to try, the best first."""
    if name != "auto":
        return [name]
    is_worth_compiling = work.num_parameters >= WORTH_COMPILING
    return [name for name in DEVICES[work.device.type].backends if name != "cpu" or is_worth_compiling]


def resolve_backend(name: str, work: Work) -> type[Backend]:
    """Return the backend called `name`; for "auto" the first of `list_candidates` that can run.

    Raises:
        ValueError: the backend cannot run; the message says why and what to change.
    """
    reason = None
    for candidate in list_candidates(name, work):
        reason_before = reason
        reason = why_cannot(candidate, work)
        if reason is None:
            if reason_before is not None and candidate == "torch":
                logger.warning("plain torch runs instead of faster kernels: %s", reason_before)
            backend = find_backend(candidate, work.device)
            assert backend is not None
            return backend
        logger.info("the %s backend cannot run: %s", candidate, reason)
    if name == "auto":
        raise ValueError(reason)
    raise ValueError(f'attention_backend="{name}" cannot run here: {reason}; or use attention_backend="auto"')


def why_cannot(name: str, work: Work) -> str | None:
    """Return the reason why a backend cannot run this work on this machine; None if it can."""
    try:
        backend = find_backend(name, work.device)
    except ImportError as error:
        missing = error.name or "its module"
        advice = "; install it with: pip install triton" if missing.split(".")[0] == "triton" else ""
        return f"{missing} cannot be imported ({error}){advice}"
    if backend is None:
        needed = "the CPU" if name == "cpu" else "a CUDA device"
        return f"it needs {needed}, not {work.device.type}"
    sizes = backend.block_sizes
    if work.block_size is not None and work.block_size not in sizes:
        return f"kvcache_block_size is {work.block_size}; it must be a power of two from {sizes[0]} to {sizes[-1]}"
    facts = (
        ("dtype", work.dtype, backend.dtypes),
        ("kv_cache_dtype", work.kv_cache_dtype, backend.list_kv_cache_dtypes(work.device)),
        ("head_dim", work.head_dim, backend.head_dims),
        ("query heads per KV head", work.group, backend.groups),
    )
    for what, value, known in facts:
        if known is not None and value not in known:
            named = f"{known[0]} to {known[-1]}" if isinstance(known, range) else ", ".join(map(str, known))
            return f"it has kernels for {what} of {named}, not {value}"
    for variant in work.variants:
        if variant not in backend.variants:
            return f"it has no kernels for the {variant} of the model's attention"
    return backend.why_cannot(work.device)
