"""Every option of the engine, documented where it is defined: as asked for, and as resolved for a model and a machine.

What each "auto" becomes is decided in resolve.py.
"""

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from nanovllm.speculative_config import read_speculative_config
from nanovllm.utils.checks import INT64_MAX, as_bool, as_choice, as_integer, refuse, refuse_unknown
from nanovllm.vllm_names import HINTS, translate_options

DTYPES = ("auto", "float32", "float16", "bfloat16")
BACKENDS = ("auto", "flash_attn", "triton", "cpu", "torch")
DISTRIBUTED_BACKENDS = ("auto", "nccl", "gloo")
LOAD_FORMATS = ("auto", "dummy")

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 1 << 16, 1 << 24
"""Each has its place in tables on the host and on the device, whether or not it is used."""


def _results(default: Any, help: str) -> Any:
    """A field whose documentation travels with it, as `--help` prints it; it may change the tokens that come out, so a
    resumed batch job may not change it."""
    return field(default=default, metadata={"help": help, "affects": "results"})


def _pace(default: Any, help: str) -> Any:
    """As `_results`, of an option that changes how fast they come and in how much memory, but not the tokens."""
    return field(default=default, metadata={"help": help, "affects": "pace"})


@dataclass(frozen=True)
class EngineConfig:
    """The options of `LLM(model, **options)`, as asked for.

    Raises:
        ValueError: a value out of range, naming it and its limit.
    """

    model: str = _results(MISSING, 'a local folder, a Hugging Face id, or "tiny-qwen3", the model in the box')
    revision: str | None = _results(None, "branch, tag or commit of a Hugging Face id; by default its main branch")
    dtype: str = _results(
        "auto",
        "of weights, activations and KV cache: float32, float16, bfloat16; auto takes the model's on a GPU, and "
        "bfloat16 on CPUs that compute it or where the cpu backend runs; float32 elsewhere",
    )
    device: str = _results("auto", "cpu or cuda; auto takes cuda where there is one")
    tensor_parallel_size: int = _results(1, "ranks (GPUs, or processes on a CPU) that share each layer")
    distributed_backend: str = _results(
        "auto", "how ranks talk: nccl, or gloo, with which they may share a GPU, slowly; auto is nccl on a GPU"
    )
    max_model_len: int = _results(4096, "longest prompt and output together, in tokens; never beyond the model's own")
    max_num_seqs: int = _pace(512, "most sequences that run at a time")
    max_num_batched_tokens: int | None = _pace(
        None,
        "most tokens computed in one step; longer prompts are cut into chunks; by default 16384 on a GPU, and on a CPU "
        "2048, with whose activations its caches still help",
    )
    gpu_memory_utilization: float = _pace(0.9, "share of the GPU's memory to use in all, above 0 and at most 1")
    num_kvcache_blocks: int | None = _pace(None, "blocks of KV cache; wins over the memory options")
    kvcache_memory_bytes: int | None = _pace(
        None, "bytes of KV cache; on a CPU a quarter of the free memory by default, at most 4 GiB"
    )
    kvcache_block_size: int | str = _pace(
        "auto", "tokens a block: a power of two from 16 (flash_attn: from 256); auto is 256 for flash_attn, else 64"
    )
    enable_prefix_caching: bool = _pace(True, "reuse the KV of equal prefixes, in whole blocks")
    enforce_eager: bool = _pace(False, "do without CUDA graphs")
    attention_backend: str = _results(
        "auto",
        "flash_attn, triton, cpu (C++ kernels, compiled on first use) or torch; auto takes the first that runs here, "
        "cpu only for models of 100 million parameters or more",
    )
    load_format: str = _results("auto", "auto reads safetensors; dummy makes random weights from config.json alone")
    overlap: bool = _pace(True, "on a GPU, plan the next step while the device computes this one")
    speculative_config: Mapping[str, Any] | None = _pace(
        None,
        'verify guessed tokens, several a step: guessed from text by {"method": "ngram", "num_speculative_tokens": 8, '
        '"prompt_lookup_max": 4, "prompt_lookup_min": 2}, or by a smaller model, {"model": NAME, '
        '"num_speculative_tokens": 4}',
    )
    trace: str | None = _pace(None, "file to write a Chrome trace of every step to (chrome://tracing, Perfetto)")
    seed: int = _results(0, "of the requests that bring no seed of their own, and of dummy weights")

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        def check_integer(name: str, low: int, high: int = INT64_MAX, limit: str = "") -> None:
            put(name, as_integer(getattr(self, name), name, low, high, limit))

        if self.trace is not None:
            if not isinstance(self.trace, (str, os.PathLike)):
                raise refuse(self.trace, "trace", "a path, or None")
            put("trace", os.fspath(self.trace))
        if self.revision is not None and not isinstance(self.revision, str):
            raise refuse(self.revision, "revision", "the name of a branch, a tag or a commit, or None")
        put("dtype", as_choice(str(self.dtype).removeprefix("torch."), "dtype", DTYPES))
        as_choice(self.attention_backend, "attention_backend", BACKENDS)
        as_choice(self.distributed_backend, "distributed_backend", DISTRIBUTED_BACKENDS)
        as_choice(self.load_format, "load_format", LOAD_FORMATS)
        put("device", str(self.device))
        check_integer("tensor_parallel_size", 1, 8)
        check_integer("max_model_len", 1)
        check_integer("max_num_seqs", 1, MAX_NUM_SEQS)
        for name in ("max_num_batched_tokens", "num_kvcache_blocks", "kvcache_memory_bytes"):
            if getattr(self, name) is not None:
                check_integer(name, 1, limit="at least 1, or None")
        if self.max_num_batched_tokens is not None:
            check_integer("max_num_batched_tokens", 1, MAX_NUM_BATCHED_TOKENS)
        if self.kvcache_block_size != "auto":
            check_integer("kvcache_block_size", 1, limit='a power of two, or "auto"')
        use = self.gpu_memory_utilization
        if not isinstance(use, (int, float)) or isinstance(use, bool) or not 0 < use <= 1:
            raise refuse(use, "gpu_memory_utilization", "above 0 and at most 1")
        check_integer("seed", -(2**63), limit="a signed 64-bit integer")
        if self.speculative_config is not None:
            put("speculative_config", read_speculative_config(self.speculative_config))
        for name in ("enable_prefix_caching", "enforce_eager", "overlap"):
            as_bool(getattr(self, name), name)

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: Mapping[str, Any]) -> "EngineConfig":
        """Of options as users give them, vLLM's among them.

        Raises:
            TypeError: one that does not exist, with the nearest one that does.
            ValueError: a value out of range, or one of vLLM's that would change something.
        """
        if not isinstance(model, (str, os.PathLike)) or not str(model):
            raise refuse(model, "model", 'a folder, a Hugging Face id or "tiny-qwen3"')
        options = translate_options(model, options)
        refuse_unknown(options, [f.name for f in fields(cls) if f.name != "model"], "LLM", HINTS)
        return cls(str(model), **options)


@dataclass(frozen=True)
class ResolvedConfig:
    """An EngineConfig for one model on one machine: nothing is "auto". Plain values, so that it travels as JSON.

    Attributes:
        dtype: a name, as "bfloat16".
        device: with its number, as "cuda:0".
        block_size: tokens a block of the KV cache.
        use_graphs: whether steps of decodes run as CUDA graphs.
        depth: steps that may be launched before the first of them is read.
        speculative_config: complete, as `read_speculative_config` gives it.
        draft: what a runner needs of the draft model: its "config" (of this class), "hf_config" and "folder".
    """

    model: str
    dtype: str
    device: str
    tensor_parallel_size: int
    distributed_backend: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    num_kvcache_blocks: int | None
    kvcache_memory_bytes: int | None
    block_size: int
    enable_prefix_caching: bool
    use_graphs: bool
    attention_backend: str
    load_format: str
    depth: int
    speculative_config: dict[str, Any] | None
    trace: str | None
    seed: int
    draft: Mapping[str, Any] | None = None

    @property
    def num_speculative_tokens(self) -> int:
        """The most drafts of a sequence that a step verifies."""
        return int((self.speculative_config or {}).get("num_speculative_tokens", 0))

    @property
    def max_blocks_per_seq(self) -> int:
        return -(-self.max_model_len // self.block_size)
