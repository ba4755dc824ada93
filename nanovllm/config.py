"""The options of the engine: as the user asks for them, and as resolved for a model and a machine.

EngineConfig documents each option where it is defined. resolve.py decides what each "auto" becomes.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field
from typing import Any, TypedDict

from nanovllm.sampling_params import refuse_sampling
from nanovllm.utils.checks import INT64_MAX, as_bool, as_choice, as_integer, refuse, refuse_unknown
from nanovllm.utils.foreign_names import translate_names
from nanovllm.utils.integers import ceil_div
from nanovllm.utils.memory import CPU_CACHE_LIMIT
from nanovllm.utils.vllm_names import REST, SYNONYMS

CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "attention_backend": ("auto", "triton", "flash_attn", "cpu", "torch"),
    "kv_cache_dtype": ("auto", "int8", "fp8"),
    "distributed_backend": ("auto", "nccl", "gloo"),
    "load_format": ("auto", "dummy", "gguf"),
    "model_impl": ("auto", "nanovllm", "transformers"),
    "quantization": ("int8", "int8-dynamic", "w8a8", "awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "gguf"),
    "logprobs_mode": ("raw_logprobs", "processed_logprobs"),
    "order": ("auto", "given"),
    "reasoning_parser": ("qwen3", "deepseek_r1"),
    "tool_call_parser": ("hermes", "llama3_json"),
}
"""The values of options that take one of a few words. Where the default is None, None is allowed, too."""

DEFAULT_NUM_SEQS = 512
"""The default max_num_seqs."""

USUAL_LENGTH = 4096
"""Tokens of a sequence for which the KV cache on a CPU has room in each row, and a chat's line of a job without
max_tokens. max_model_len replaces it, if it is given."""

TOKEN_BUDGETS = {"cuda": 16384, "cpu": 2048}
"""The default max_num_batched_tokens on each type of device."""

WORTH_COMPILING = 100_000_000
"""attention_backend="auto" spends the seconds that the CPU kernels take to compile on models of so many parameters."""

MAX_SILENCE = 1 << 30
MAX_NUM_SEQS = 1 << 16
MAX_NUM_BATCHED_TOKENS = 1 << 24
"""Upper bounds of the options: the tables on host and device are made for so many rows or tokens, used or not. Systems
count seconds in 32 bits."""


def _results(default: Any, help: str) -> Any:
    """Return a dataclass field for an option that may change which tokens come out.

    `--help` prints `help`. A resumed batch job may not change such an option.
    """
    return field(default=default, metadata={"help": help, "affects": "results"})


def _pace(default: Any, help: str) -> Any:
    """Return a dataclass field for an option that changes speed or memory, but not the tokens."""
    return field(default=default, metadata={"help": help, "affects": "pace"})


@dataclass(frozen=True)
class EngineConfig:
    """The options of `LLM(model, **options)`, as the user asks for them.

    Raises:
        ValueError: a value is out of range; the message names the value and its limit.
    """

    model: str = _results(MISSING, 'a local folder, a Hugging Face id, or "tiny-qwen3", the built-in model')
    revision: str | None = _results(
        None, "branch, tag or commit of a Hugging Face id; None takes its main branch. A folder has none but main"
    )
    tokenizer: str | None = _results(
        None, "folder, or Hugging Face id, of the tokenizer and its chat template; None takes the model's own"
    )
    dtype: str = _results(
        "auto",
        "number format of weights, activations and KV cache: float32, float16 or bfloat16. On a GPU, auto takes the "
        "model's own. On a CPU, auto takes bfloat16 if the CPU computes it or the cpu backend runs, else float32",
    )
    device: str = _results("auto", "cpu or cuda; auto takes cuda if there is a GPU")
    tensor_parallel_size: int = _results(1, "number of ranks (GPUs, or processes on a CPU) that share each layer")
    pipeline_parallel_size: int = _pace(
        1, "number of ranks (GPUs, or processes on a CPU) of which each computes some of the layers"
    )
    data_parallel_size: int = _pace(
        1,
        "number of replicas: engines in processes of their own that share the requests. Each has its own GPUs, or its "
        "own share of the cores and the memory",
    )
    distributed_backend: str = _results(
        "auto",
        "library through which the ranks talk: nccl or gloo. With gloo, several ranks can share one GPU, but slowly. "
        "auto takes nccl on a GPU and gloo on a CPU",
    )
    max_silence: int = _pace(
        60,
        "seconds without a sign of life after which a rank or a replica counts as failed, at least 5. Each gives one a "
        "second, however long a step takes; but none while it loads a large library from a slow disk",
    )
    max_model_len: int | None = _results(
        None,
        "most tokens of a prompt and its output together; reduced to the model's own limit if that is lower. None "
        "means the model's own limit, or as many tokens as the KV cache holds if these are fewer",
    )
    max_num_seqs: int | None = _pace(
        None,
        f"most sequences that run at the same time. None means {DEFAULT_NUM_SEQS}, or fewer if the model keeps a state "
        "for each of them and so many do not fit",
    )
    max_num_batched_tokens: int | None = _pace(
        None,
        "most tokens computed in one step; longer prompts are computed in chunks. None means "
        f"{TOKEN_BUDGETS['cuda']} on a GPU, {TOKEN_BUDGETS['cpu']} on a CPU, so that activations fit its caches, and "
        "less with stages of a pipeline",
    )
    gpu_memory_utilization: float = _pace(0.9, "share of the GPU's memory that may be used, above 0 and at most 1")
    num_kvcache_blocks: int | None = _pace(
        None, "size of the KV cache in blocks; if given, the options that set it by memory are ignored"
    )
    kvcache_memory_bytes: int | None = _pace(
        None,
        "size of the KV cache in bytes; on a CPU, None takes a quarter of the free memory, at most "
        f"{CPU_CACHE_LIMIT >> 30} GiB and at most what max_num_seqs sequences of max_model_len tokens need, or of "
        f"{USUAL_LENGTH} if that is left out",
    )
    kvcache_block_size: int | str = _pace(
        "auto",
        "tokens in a block of the KV cache: a power of two, at least 16 (flash_attn: 256). auto is the backend's own",
    )
    kv_cache_dtype: str = _results(
        "auto",
        "type of keys and values; auto: the model's; int8: half the memory; fp8: likewise, on GPUs of sm_89 and later",
    )
    enable_prefix_caching: bool | None = _pace(
        None,
        "reuse the KV cache of equal prefixes, in whole blocks. None means yes, except for models that keep a state "
        "for each sequence",
    )
    enforce_eager: bool = _pace(False, "run decodes without CUDA graphs, and on a CPU without recorded steps")
    attention_backend: str = _results(
        "auto",
        "triton, flash_attn, cpu (C++ kernels, compiled on first use) or torch. auto takes the first of them that runs "
        f"here; it takes cpu only for models of {WORTH_COMPILING // 10**6} million parameters or more",
    )
    load_format: str = _results(
        "auto",
        "auto reads what is there, safetensors or GGUF; gguf reads GGUF alone; dummy makes random weights, for which "
        "config.json is enough",
    )
    model_impl: str = _results(
        "auto",
        "whose code computes the model: nanovllm or transformers. auto takes nanovllm where it has the model",
    )
    lora: str | None = _results(
        None, "folder of one LoRA adapter, as PEFT saves it; it is merged into the weights while they are read"
    )
    quantization: str | None = _results(
        None,
        "int8 quantises the weights while they are read, with a scale for each row. int8-dynamic also rounds what they "
        "are multiplied by, with a scale for 128 inputs: on CPUs, faster for batches and prompts where they multiply "
        "bytes. w8a8 rounds it with one scale for each token: on GPUs, and not measured. awq, gptq, "
        "compressed-tensors, fp8, mxfp4 and gguf are formats of checkpoints that are quantised already; None takes the "
        "checkpoint's own",
    )
    overlap: bool = _pace(True, "on a GPU, plan the next step while the device computes this one")
    speculative_config: Mapping[str, Any] | None = _pace(
        None,
        "guess tokens and verify several of them in one step. To guess from the text so far: "
        '{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}. To let a '
        'smaller model guess: {"model": NAME, "num_speculative_tokens": 4}',
    )
    logprobs_mode: str = _results(
        "raw_logprobs",
        "which log-probabilities outputs have. raw_logprobs: those of the model. processed_logprobs: those that tokens "
        "were sampled by, after edits, temperature and filters; those of prompts stay the model's",
    )
    order: str = _pace(
        "auto",
        "auto admits the requests of a list, and those of a job's file, in the order in which they end soonest: the "
        "longest first towards the end, and those with a common prefix together if the KV cache cannot hold all "
        "prefixes. given keeps their order",
    )
    reasoning_parser: str | None = _results(
        None,
        "qwen3 or deepseek_r1: what the model thinks, <think> ... </think>, stands in the output's `reasoning` and not "
        "in its text, and a grammar holds for what follows",
    )
    tool_call_parser: str | None = _results(
        None, "hermes (Qwen) or llama3_json: calls of tools stand in the output's `tool_calls` and not in its text"
    )
    trace: str | None = _pace(
        None, "file to which a Chrome trace of every step is written, for chrome://tracing or Perfetto"
    )
    seed: int = _results(0, "seed for requests that have none of their own, and for dummy weights")

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            """Replace a field by its checked value. The dataclass is frozen for everybody else."""
            object.__setattr__(self, name, value)

        def check_integer(name: str, low: int, high: int = INT64_MAX, limit: str = "") -> None:
            put(name, as_integer(getattr(self, name), name, low, high, limit))

        for name, kind in (("trace", "a path"), ("lora", "a folder"), ("tokenizer", "a folder or a Hugging Face id")):
            if (path := getattr(self, name)) is not None:
                if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
                    raise refuse(path, name, f"{kind}, or None")
                put(name, os.fspath(path))
        if self.tokenizer == self.model:
            put("tokenizer", None)
        if self.lora is not None and self.load_format == "dummy":
            raise refuse(self.lora, "lora", 'None with load_format="dummy", which reads no weights')
        if self.revision is not None and not isinstance(self.revision, str):
            raise refuse(self.revision, "revision", "the name of a branch, a tag or a commit, or None")
        put("dtype", str(self.dtype).removeprefix("torch."))
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not getattr(EngineConfig, name):  # the default
                as_choice(value, name, choices)
        put("device", str(self.device))
        if self.tensor_parallel_size == 0:  # torch.cuda.device_count()
            raise refuse(0, "tensor_parallel_size", "1 or more; there is no GPU here, if a script counts them: give 1")
        check_integer("tensor_parallel_size", 1, 8)
        check_integer("pipeline_parallel_size", 1, 8)
        check_integer("data_parallel_size", 1)
        if self.tensor_parallel_size > 1 and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size} and pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}; only one of them may be above 1"
            )
        check_integer("max_silence", 5, MAX_SILENCE)
        for name, most in (
            ("max_model_len", INT64_MAX),
            ("max_num_seqs", MAX_NUM_SEQS),
            ("max_num_batched_tokens", MAX_NUM_BATCHED_TOKENS),
            ("num_kvcache_blocks", INT64_MAX),
            ("kvcache_memory_bytes", INT64_MAX),
        ):
            if getattr(self, name) is not None:
                check_integer(name, 1, most)
        if self.kvcache_block_size != "auto":
            check_integer("kvcache_block_size", 1, limit='a power of two, or "auto"')
        use = self.gpu_memory_utilization
        if not isinstance(use, (int, float)) or isinstance(use, bool) or not 0 < use <= 1:
            raise refuse(use, "gpu_memory_utilization", "above 0 and at most 1")
        check_integer("seed", -(2**63), limit="a signed 64-bit integer")
        for name in ("enforce_eager", "overlap"):
            as_bool(getattr(self, name), name)
        if self.enable_prefix_caching is not None:
            as_bool(self.enable_prefix_caching, "enable_prefix_caching")

    @property
    def num_ranks(self) -> int:
        """The number of processes of an engine, of which there are data_parallel_size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @classmethod
    def from_options(cls, model: str | os.PathLike[str], options: Mapping[str, Any]) -> "EngineConfig":
        """Return the configuration for options as a user gives them. Some of vLLM's options are understood, too.

        Raises:
            TypeError: an option does not exist; the message names the nearest one that does.
            ValueError: a value is out of range, or an option of vLLM would change something that we cannot do.
        """
        if not isinstance(model, (str, os.PathLike)) or not str(model):
            raise refuse(model, "model", 'a folder, a Hugging Face id or "tiny-qwen3"')
        known = EngineOptions.__annotations__
        # None asks for the default, also of an option that only another program has.
        options = {name: value for name, value in options.items() if value is not None}
        with suppress(TypeError, ValueError):
            return cls(str(model), **options)
        options = _translate_options(model, options)  # a name or a value is not ours
        refuse_unknown(options, known, "LLM", rest=REST)
        return cls(str(model), **options)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An EngineConfig for one model on one machine. All values are plain, so that it travels as JSON.

    Of the options, dtype, device and attention_backend are no longer "auto", nor is distributed_backend for several
    ranks, and max_model_len is one that the model and the KV cache allow. `device` has its number, as in "cuda:0". The
    fields below replace the options kvcache_block_size, enforce_eager and overlap, which keep what the user asked for.

    Attributes:
        max_model_len, max_num_seqs, max_num_batched_tokens, enable_prefix_caching: no longer None.
        has_given_length: whether the user gave max_model_len. Otherwise the KV cache may reduce it.
        block_size: tokens in a block of the KV cache.
        use_graphs: whether steps that only decode run as CUDA graphs.
        depth: how many steps may be launched before the first of them is read.
        num_devices: how many devices the ranks have; on a CPU they share one.
        vocab_size: the model's number of token ids.
        refused_params: names of the sampling parameters that the backend does not have.
        draft: a draft model's "config" (a dict of this class's fields), "hf_config" and "folder"; None without one.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    block_size: int
    use_graphs: bool
    depth: int
    vocab_size: int
    has_given_length: bool = True
    num_devices: int = 1
    refused_params: Sequence[str] = ()
    draft: Mapping[str, Any] | None = None

    @property
    def num_speculative_tokens(self) -> int:
        """The most drafts that a step verifies for one sequence."""
        return int((self.speculative_config or {}).get("num_speculative_tokens", 0))

    @property
    def kv_dtype(self) -> str:
        """The torch name of the type that the KV cache has."""
        return {"auto": self.dtype, "fp8": "float8_e4m3fn"}.get(self.kv_cache_dtype, self.kv_cache_dtype)

    @property
    def usual_length(self) -> int:
        """The user's max_model_len, or else USUAL_LENGTH, if the model allows so many tokens."""
        return self.max_model_len if self.has_given_length else min(self.max_model_len, USUAL_LENGTH)

    @property
    def max_blocks_per_seq(self) -> int:
        """The blocks that a sequence of max_model_len tokens needs."""
        return ceil_div(self.max_model_len, self.block_size)


class EngineOptions(TypedDict, total=False):
    """The same options, for type checkers: the keyword arguments of `LLM(model, **options)`."""

    revision: str | None
    tokenizer: str | None
    dtype: str
    device: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    distributed_backend: str
    max_silence: int
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float
    num_kvcache_blocks: int | None
    kvcache_memory_bytes: int | None
    kvcache_block_size: int | str
    kv_cache_dtype: str
    enable_prefix_caching: bool | None
    enforce_eager: bool
    attention_backend: str
    load_format: str
    model_impl: str
    lora: str | None
    quantization: str | None
    overlap: bool
    speculative_config: Mapping[str, Any] | None
    logprobs_mode: str
    order: str
    reasoning_parser: str | None
    tool_call_parser: str | None
    trace: str | None
    seed: int


def _translate_options(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the options of a script for vLLM or nano-vLLM to those of EngineConfig.

    Raises:
        TypeError: an option belongs to a request.
        ValueError: an option would change something that we cannot do.
    """
    options = translate_names(given, "LLM")
    for name in options.keys() & SYNONYMS.keys():
        value = options[name]
        if isinstance(value, str | int):
            options[name] = SYNONYMS[name].get(value, value)
    refuse_sampling({name: options[name] for name in options if name not in EngineOptions.__annotations__}, "LLM")
    return options
