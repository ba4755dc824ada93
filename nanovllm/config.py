"""Every option of the engine, documented where it is defined; what "auto" becomes is decided in resolve()."""

import difflib
import os
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from nanovllm.sampling_params import as_bool, as_integer
from nanovllm.utils.names import refuse_unknown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DTYPES = ("auto", "float32", "float16", "bfloat16")
BACKENDS = ("auto", "flash_attn", "triton", "torch")
DISTRIBUTED_BACKENDS = ("auto", "nccl", "gloo")
LOAD_FORMATS = ("auto", "dummy")
TOKEN_BUDGETS = {"cuda": 16384, "cpu": 2048}
"""The default max_num_batched_tokens on each type of device."""


def _option(default: Any, help: str) -> Any:
    """A field whose documentation travels with it: `--help` prints the same words."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class EngineConfig:
    """The options of `LLM(model, **options)`.

    Raises:
        ValueError: a value out of range, naming it and its limit.
    """

    model: str = field(
        metadata={"help": 'a local folder, a Hugging Face id, or "tiny-qwen3", the model in the box'},
    )
    dtype: str = _option(
        "auto",
        "of weights, activations and KV cache: float32, float16, bfloat16; auto takes the model's on a GPU and on CPUs "
        "with native bfloat16, float32 elsewhere",
    )
    device: str = _option("auto", "cpu or cuda; auto takes cuda where there is one")
    tensor_parallel_size: int = _option(1, "ranks (GPUs, or processes on a CPU) that share each layer")
    distributed_backend: str = _option(
        "auto", "how ranks talk: nccl, or gloo, with which they may share a GPU, slowly; auto is nccl on a GPU"
    )
    max_model_len: int = _option(4096, "longest prompt and output together, in tokens; never beyond the model's own")
    max_num_seqs: int = _option(512, "most sequences that run at a time")
    max_num_batched_tokens: int | None = _option(
        None,
        "most tokens computed in one step; longer prompts are cut into chunks; by default 16384 on a GPU, and on a CPU "
        "2048, with whose activations its caches still help",
    )
    gpu_memory_utilization: float = _option(0.9, "share of the GPU's memory to use in all, above 0 and at most 1")
    num_kvcache_blocks: int | None = _option(None, "blocks of KV cache; wins over the memory options")
    kvcache_memory_bytes: int | None = _option(
        None, "bytes of KV cache; on a CPU a quarter of the free memory by default, at most 4 GiB"
    )
    kvcache_block_size: int | str = _option(
        "auto", "tokens a block: a power of two from 16 (flash_attn: from 256); auto is 256 for flash_attn, else 64"
    )
    enable_prefix_caching: bool = _option(True, "reuse the KV of equal prompt prefixes")
    enforce_eager: bool = _option(False, "do without CUDA graphs")
    attention_backend: str = _option("auto", "flash_attn, triton or torch; auto takes the first that runs here")
    load_format: str = _option("auto", "auto reads safetensors; dummy makes random weights from config.json alone")
    overlap: bool = _option(True, "on a GPU, plan the next step while the device computes this one")
    trace: str | None = _option(None, "file to write a Chrome trace of every step to (chrome://tracing, Perfetto)")
    seed: int = _option(0, "of the requests that bring no seed of their own, and of dummy weights")

    def __post_init__(self) -> None:
        def put(name: str, value: Any, ok: bool, limit: str) -> None:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {limit}")
            object.__setattr__(self, name, value)

        def choose(name: str, choices: tuple[str, ...]) -> None:
            value = str(getattr(self, name)).removeprefix("torch.")
            nearest = difflib.get_close_matches(value, choices, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            put(name, value, value in choices, f"one of {', '.join(choices)}{hint}")

        if self.trace is not None:
            is_path = isinstance(self.trace, (str, os.PathLike))
            put("trace", os.fspath(self.trace) if is_path else self.trace, is_path, "a path, or None")
        choose("dtype", DTYPES)
        choose("attention_backend", BACKENDS)
        choose("distributed_backend", DISTRIBUTED_BACKENDS)
        choose("load_format", LOAD_FORMATS)
        for name in ("max_model_len", "max_num_seqs"):
            put(name, value := as_integer(getattr(self, name), name), value >= 1, "at least 1")
        tp = as_integer(self.tensor_parallel_size, "tensor_parallel_size")
        put("tensor_parallel_size", tp, 1 <= tp <= 8, "from 1 to 8")
        for name in ("max_num_batched_tokens", "num_kvcache_blocks", "kvcache_memory_bytes"):
            if getattr(self, name) is not None:
                put(name, value := as_integer(getattr(self, name), name), value >= 1, "at least 1, or None")
        if self.kvcache_block_size != "auto":
            size = as_integer(self.kvcache_block_size, "kvcache_block_size")
            is_power = size >= 16 and size & (size - 1) == 0
            put("kvcache_block_size", size, is_power, 'a power of two from 16, or "auto"')
        use = self.gpu_memory_utilization
        is_share = isinstance(use, (int, float)) and not isinstance(use, bool) and 0 < use <= 1
        put("gpu_memory_utilization", use, is_share, "above 0 and at most 1")
        put("seed", seed := as_integer(self.seed, "seed"), -(2**63) <= seed < 2**63, "a signed 64-bit integer")
        for name in ("enable_prefix_caching", "enforce_eager", "overlap"):
            as_bool(getattr(self, name), name)

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: dict[str, Any]) -> "EngineConfig":
        """Raises a TypeError for an option that does not exist, with the nearest one that does."""
        refuse_unknown(options, [f.name for f in fields(cls) if f.name != "model"], "LLM")
        if not isinstance(model, (str, os.PathLike)) or not str(model):
            raise ValueError(f'model is {model!r}; it must be a folder, a Hugging Face id or "tiny-qwen3"')
        return cls(str(model), **options)

    def resolve(self, hf_config: "PretrainedConfig") -> "EngineConfig":
        """Turn every "auto" into a value, for this model on this machine.

        Raises:
            ValueError: something asked for cannot be had here; the message says why.
        """
        from nanovllm.backends import default_block_size, resolve_backend
        from nanovllm.engine.collectives import resolve_distributed_backend
        from nanovllm.models.config import heads_of_rank, max_position
        from nanovllm.utils.machine import resolve_device, resolve_dtype

        device = resolve_device(self.device)
        dtype = resolve_dtype(self.dtype, device, hf_config)
        size = None if self.kvcache_block_size == "auto" else int(self.kvcache_block_size)
        heads, kv_heads = heads_of_rank(hf_config, self.tensor_parallel_size)
        shape = hf_config.head_dim, heads // kv_heads
        backend = resolve_backend(self.attention_backend, device, dtype, size, shape)
        distributed = resolve_distributed_backend(self.distributed_backend, device, self.tensor_parallel_size)
        # A CUDA graph captures nothing that goes through the host: what gloo sends, and lengths that plain torch reads.
        through_host = self.tensor_parallel_size > 1 and distributed == "gloo"
        return replace(
            self,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            attention_backend=backend,
            distributed_backend=distributed,
            enforce_eager=self.enforce_eager or through_host or backend == "torch",
            kvcache_block_size=size or default_block_size(backend),
            max_num_batched_tokens=self.max_num_batched_tokens or TOKEN_BUDGETS[device.type],
            max_model_len=min(self.max_model_len, max_position(hf_config)),
        )

    @property
    def block_size(self) -> int:
        """The block size of a resolved configuration."""
        return int(self.kvcache_block_size)

    @property
    def token_budget(self) -> int:
        """The max_num_batched_tokens of a resolved configuration."""
        assert self.max_num_batched_tokens is not None
        return self.max_num_batched_tokens

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)
