"""Names in scripts for vLLM or nano-vLLM that are not ours: translated, ignored, or refused with what to do instead.

This file is imported only when a script gives a name or a value that is not ours.
"""

import gc
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from enum import Enum
from functools import cache, partial
from importlib.machinery import ModuleSpec
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.config import EngineConfig, EngineOptions
from nanovllm.inputs import LoRARequest
from nanovllm.outputs import Embedding, Output
from nanovllm.sampling_params import KINDS, SamplingParams
from nanovllm.text.prompts import Prompt
from nanovllm.utils.checks import quote, refuse_unknown

if TYPE_CHECKING:
    from nanovllm.llm import LLM

logger = logging.getLogger(__name__)

# ---- options, fields and arguments

ANY: Any = object()
"""In a tuple of accepted values: every value is accepted."""

SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (None,),
    **dict.fromkeys(("output_kind", "skip_clone", "spaces_between_special_tokens"), (ANY,)),
    "logits_processors": (None, []),
    **dict.fromkeys(("flat_logprobs", "use_beam_search"), (None, False)),
    "best_of": (None, 1),
    "extra_args": (None, {}),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "trace_decode_token_ids": (None, []),
}
"""Fields of vLLM's SamplingParams that ours does not have, and the values of them that we accept and ignore."""

STRUCTURED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("structural_tag", "whitespace_pattern"), (None,)),
    **dict.fromkeys(("backend", "disable_fallback"), (ANY,)),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), (None, False)),
}
"""The same for vLLM's StructuredOutputsParams."""

POOLING: Mapping[str, tuple[Any, ...]] = {
    "task": ("embed",),
    **dict.fromkeys(("skip_reading_prefix_cache", "output_kind"), (ANY,)),
    **dict.fromkeys(("late_chunking_params", "step_tag_id", "returned_token_ids", "extra_kwargs"), (None,)),
}
"""The same for vLLM's PoolingParams."""

_SPEED = (
    *("async_scheduling", "attention_config", "compilation_config", "cudagraph_capture_sizes", "disable_cascade_attn"),
    *("disable_custom_all_reduce", "distributed_executor_backend", "enable_chunked_prefill", "enable_sleep_mode"),
    *("max_num_partial_prefills", "max_parallel_loading_workers", "max_seq_len_to_capture", "num_scheduler_steps"),
    *("optimization_level", "performance_mode", "ray_workers_use_nsight", "scheduling_policy", "swap_space"),
)
_LOGGING = (
    *("disable_log_requests", "disable_log_stats", "enable_log_requests", "max_logprobs", "served_model_name"),
    *("show_hidden_metrics_for_version", "use_tqdm_on_load"),
)
_OFF = (
    *("allowed_local_media_path", "fully_sharded_loras", "interleave_mm_strings", "limit_mm_per_prompt"),
    *("max_cpu_loras", "max_lora_rank", "max_loras", "mm_processor_cache_gb"),
    "enable_lora",  # generate, chat and jobs take adapters without it
    "trust_remote_code",  # a model that needs code of its own is refused when it is loaded
)
OPTIONS: Mapping[str, tuple[Any, ...]] = {
    # These change speed, memory or logging, or belong to features that are always off here.
    **dict.fromkeys((*_SPEED, *_LOGGING, *_OFF), (ANY,)),
    # These would change results, or ask for something that we do not have.
    **dict.fromkeys(("kv_transfer_config", "logits_processors", "pooler_config", "profiler_config"), (None,)),
    **dict.fromkeys(("hf_overrides", "rope_scaling", "mm_processor_kwargs", "override_generation_config"), (None, {})),
    **dict.fromkeys(("enable_prompt_embeds", "enable_trace_replay"), (False,)),
    **dict.fromkeys(("enable_expert_parallel", "skip_tokenizer_init", "calculate_kv_scales"), (False,)),
    "task": ("auto", "generate", "embed", "embedding"),
    "runner": ("auto", "generate", "pooling"),
    "convert": ("auto", "none", "embed"),
    **dict.fromkeys(("tokenizer_mode", "config_format"), ("auto", "hf")),
    "model_impl": ("auto", "vllm"),
    "generation_config": ("auto",),
    "cpu_offload_gb": (0,),
    "tokenizer": (None,),  # or the model
    # These are nano-vLLM's.
    "hf_config": (None,),
    "eos": (-1,),
}
"""Options of vLLM's LLM, and of nano-vLLM's, that ours does not have, and the values that we accept and ignore.

For options that are not here REST is the one answer.
"""

ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("priority", "chat_template_content_format", "mode"), (ANY,)),
    **dict.fromkeys(("tokenization_kwargs", "mm_processor_kwargs"), (None, {})),
    **dict.fromkeys(("lora_request", "pooling_params", "prompt_token_ids", "tags", "truncate_prompt_tokens"), (None,)),
    "reset_running_requests": (False,),
}
"""The same for the arguments of methods of vLLM's LLM."""

HARMLESS = {
    "LLM": OPTIONS,
    "PoolingParams": POOLING,
    "SamplingParams": SAMPLING,
    "StructuredOutputsParams": STRUCTURED,
}
"""For each class; of methods it is `ARGUMENTS`. None is accepted for every name, because it asks for the default."""

REST = "docs/porting.md lists the options of vLLM that are understood"

RENAMED: Mapping[str, str] = {
    "block_size": "kvcache_block_size",
    "num_gpu_blocks_override": "num_kvcache_blocks",
    "kv_cache_memory_bytes": "kvcache_memory_bytes",
    "guided_decoding": "structured_outputs",
    "max_new_tokens": "max_tokens",
}
"""Names of options and fields that have another name here. With None they stand for the default."""

_NO_SPACE = "white space in JSON is as docs/structured.md says: for another, write a regex or a grammar"
_OTHER_WORK = "embed(prompts) gives vectors, and score(prompts, continuations) likelihoods; no option prepares them"
_COPY = "write the value into the config.json of a copy of the model's folder"
_GROUPS = "generate and chat take lora_request; LLM(model, lora='folder') merges one adapter for everything"
_TEXT_ALONE = "a prompt is text or token ids, without images, videos or sounds"
_TRACE = "LLM(model, trace='steps.json') writes what every step did"
_EMBED = "embed(prompts, dimensions=..., normalize=...) has these as arguments"
_NO_HEAD = "models with a head for classes or rewards are not run; score(prompts, labels) tells how likely they are"
_ONE_ENGINE = "one engine has one process, which answers many threads and asyncio tasks through LLM.submit"
_GIVEN_TOKENS = "score(prompts, continuations) gives the log-probabilities of tokens that are given"
_EDITS = "logit_bias, bad_words, allowed_token_ids and structured_outputs do what most of them are for"
_ONE_CACHE = "the KV cache stays within one engine"
_INNER = f"these are vLLM's inner classes; LLM.stats() has counts, LLM.observe sees each step; {_ONE_ENGINE}"
_LISTED = "docs/porting.md lists the names of vLLM's that are taken"

HINTS: Mapping[str, str] = {
    # names of several kinds
    **dict.fromkeys(("enable_prompt_embeds", "mm_processor_kwargs"), _TEXT_ALONE),
    **dict.fromkeys(("multimodal", "image", "audio", "video", "EmbedsPrompt"), _TEXT_ALONE),
    "lora_request": _GROUPS,
    **dict.fromkeys(("profiler_config", "start_profile", "stop_profile"), _TRACE),
    **dict.fromkeys(("pooling_params", "PoolerConfig", "PoolingRequestOutput"), _EMBED),
    **dict.fromkeys(("classify", "reward", "ClassificationRequestOutput", "ClassificationOutput"), _NO_HEAD),
    **dict.fromkeys(("ScoringRequestOutput", "ScoringOutput"), _NO_HEAD),
    # values of options and fields
    "best_of": "ask for n=best_of and logprobs=0, and choose by cumulative_logprob",
    "use_beam_search": "n=8 and logprobs=0 give samples with log-probabilities",
    "logits_processors": _EDITS,
    **dict.fromkeys(("enable_trace_replay", "trace_decode_token_ids"), _GIVEN_TOKENS),
    "truncate_prompt_tokens": "pass token ids, and cut the list yourself",
    "flat_logprobs": "each token has a dict of its log-probabilities",
    "extra_args": "nothing reads them",
    "structural_tag": "write the form as a grammar",
    **dict.fromkeys(("whitespace_pattern", "disable_any_whitespace"), _NO_SPACE),
    "disable_additional_properties": 'write "additionalProperties": false into the schema',
    "tokenizer": "put the other tokenizer's files into a copy of the model's folder",
    **dict.fromkeys(("hf_overrides", "rope_scaling"), _COPY),
    "override_generation_config": "give the values to SamplingParams",
    **dict.fromkeys(("task", "runner", "convert"), _OTHER_WORK),
    "pooler_config": "a vector is the hidden state of the last token: docs/embeddings.md",
    "kv_transfer_config": _ONE_CACHE,
    **dict.fromkeys(("late_chunking_params", "late_chunking", "LateChunkingParams"), "embed each chunk as a prompt"),
    # arguments of methods
    "prompt_token_ids": "lists of token ids are prompts: generate([[1, 2, 3]])",
    "tags": "wake_up() brings back the weights and the KV cache together",
    "reset_running_requests": "let them end first, or leave the iterator of stream()",
    "tokenization_kwargs": "tokenise with get_tokenizer(), and pass token ids",
    # methods and attributes of vLLM's LLM
    "beam_search": "generate(prompts, SamplingParams(n=8, logprobs=0)) samples completions, with log-probabilities",
    "encode": "embed(prompts) gives vectors, and get_tokenizer().encode gives token ids",
    "collective_rpc": "the ranks take no calls: make the change in this process, or in the model's folder",
    "apply_model": "llm.engine.runner.model is the model of one device; several ranks take no calls",
    "llm_engine": "`llm.engine` is the engine, with methods of its own; add_request, step and is_finished are llm's",
    "preprocess_chat": "render_chat(messages) returns the prompt and its token ids",
    "abort_request": "leave the iterator of stream() early: requests that still run are aborted",
    **dict.fromkeys(("enqueue", "enqueue_chat", "wait_for_completion"), "submit(prompt) returns a future at once"),
    # attributes of nano-vLLM's
    "scheduler": "llm.engine.scheduler is the scheduler; stats() has counts, and observe(observer) sees each step",
    "model_runner": "llm.engine.runner is the runner, and llm.engine.runner.model the model",
    "config": "llm.engine.config has the options, as this machine and this model resolved them",
    "ps": "the processes of the other ranks belong to llm.engine.runner",
    # modules, and names in them
    **dict.fromkeys(("AsyncLLMEngine", "AsyncLLM", "AsyncEngineArgs", "async_llm_engine"), _ONE_ENGINE),
    **dict.fromkeys(("KVTransferConfig", "kv_transfer", "kv_events"), _ONE_CACHE),
    "BeamSearchParams": "SamplingParams(n=8, logprobs=0) samples completions, with log-probabilities",
    "entrypoints": "there is no server: `nanovllm run-batch` answers a file, and LLM is in nanovllm itself",
    "parallel_state": "each rank is a process that LLM(model, tensor_parallel_size=n) starts itself, without torchrun",
    "model_executor": "models are in nanovllm.models; docs/architecture.md says how a family is added",
    "ModelRegistry": "FAMILIES in nanovllm.models.model_config is the table of models",
    "platforms": "torch.cuda tells whether there is a GPU, and `nanovllm doctor` what runs here",
    "benchmarks": "the project's own are in its repository's folder benchmarks",
    "renderers": "chat(messages, chat_template=...) takes the text of a template",
    "transformers_utils": "llm.get_tokenizer() is transformers' tokenizer",
    "envs": "no environment variable changes the engine: options do",
    "VllmConfig": f"EngineConfig has the options; for logits processors: {_EDITS}",
    **dict.fromkeys(("sample", "gpu_sync_debug"), f"in place of logits processors, {_EDITS}"),
    **dict.fromkeys(("WeightTransferConfig", "weight_transfer"), "LLM.load_weights(named_tensors) takes new weights"),
    **dict.fromkeys(("forward_context", "plugins", "attention", "worker", "executor", "triton_utils"), _LISTED),
    **dict.fromkeys(("network_utils", "async_utils"), _LISTED),
}
"""The advice for each name that a script may give and that we do not have, or only with other values."""

SYNONYMS: Mapping[str, Mapping[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "int8_per_token_head": "int8", "fp8_per_token_head": "fp8"},
    "num_kvcache_blocks": {-1: None},
    "quantization": {"int8_per_channel_weight_only": "int8", "awq_marlin": "awq", "gptq_marlin": "gptq"},
}
"""For each option: values that vLLM or nano-vLLM write differently, and the values that they mean here."""


def translate_options(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the options of a script for vLLM or nano-vLLM to those of EngineConfig.

    Raises:
        TypeError: an option belongs to a request.
        ValueError: an option would change something that we cannot do.
    """
    given = {name: value for name, value in given.items() if name != "tokenizer" or value != model}
    options = translate_names(given, "LLM")
    for name in options.keys() & SYNONYMS.keys():
        value = options[name]
        if isinstance(value, str | int):
            options[name] = SYNONYMS[name].get(value, value)
    unknown = {name: value for name, value in options.items() if name not in EngineOptions.__annotations__}
    refuse_sampling(unknown, "LLM")
    return options


def translate_names(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return `given` with our names for others', and without the harmless names.

    Args:
        what: the class that the names are for, as `HARMLESS` has it, or a method.

    Raises:
        ValueError: a harmless name has another value, or both names for the same are given.
    """
    harmless = HARMLESS.get(what, ARGUMENTS)
    ignored = {name: given[name] for name in given if name in harmless and given[name] is not None}
    for name, value in ignored.items():
        accepted = harmless[name]
        if ANY not in accepted and not any(value == other for other in accepted):
            values = " or ".join(map(repr, accepted))
            advice = HINTS.get(name, f"give {values}, which changes nothing")
            raise ValueError(f"{what}: {name}, which vLLM has, is not supported here as {quote(value)}: {advice}")
    if ignored:
        _note_ignored(what, ", ".join(ignored))
    ours = {name: value for name, value in given.items() if name not in harmless}
    if what == "SamplingParams":
        if ours.pop("do_sample", None) is False:
            ours["temperature"] = 0.0
        for kind in KINDS:
            if (value := ours.pop(f"guided_{kind}", None)) is not None:
                ours["guided_decoding"] = {kind: value}
    for name in ours.keys() & RENAMED.keys():
        value = ours.pop(name)
        if value is not None and ours.setdefault(RENAMED[name], value) is not value:
            raise ValueError(f"{what}: {name} and {RENAMED[name]} are the same: give one of them")
    return ours


@cache
def _note_ignored(what: str, names: str) -> None:
    """Log names that change nothing: once, though thousands of requests may have them."""
    logger.info("%s: ignored, because nothing changes with it here: %s", what, names)


def refuse_sampling(given: Mapping[str, Any], what: str) -> None:
    """Raise a TypeError if a name in `given` is a field of SamplingParams, or another one of it."""
    for name, value in translate_names(given, "SamplingParams").items():
        if name in SamplingParams.__dataclass_fields__:
            raise TypeError(
                f"{what} has no {name}, because it belongs to a request: generate(prompts, "
                f"SamplingParams({name}={quote(value)}))"
            )


def translate_arguments(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return our arguments for those of vLLM's method. Raise an error for others, unless they change nothing."""
    params = given.get("pooling_params")
    if method == "embed" and isinstance(params, PoolingParams):
        ours = {"dimensions": params.dimensions, "normalize": params.use_activation is not False}
        return ours | translate_arguments(method, {**given, "pooling_params": None})
    rest = translate_names(given, method)
    refuse_sampling(rest, method)
    if rest:
        from nanovllm.llm import LLM

        known = [*signature(getattr(LLM, method)).parameters][1:-1]  # without `self` and `others`
        refuse_unknown(rest, [*known, *ARGUMENTS], method)
    return {}


# ---- names, and modules


class EngineArgs(EngineConfig):
    """vLLM's name for options in one object: `LLM.from_engine_args(args)`, or `LLM(**vars(args))`."""

    def __init__(self, model: str, **options: Any) -> None:
        vars(self).update(vars(EngineConfig.from_options(model, options)))

    @staticmethod
    def add_cli_args(parser: ArgumentParser) -> ArgumentParser:
        """Add all options, with their defaults, to a parser of a command line."""
        from nanovllm.commands.cli import add_engine_options

        add_engine_options(parser, without=())
        defaults = {name: getattr(EngineConfig, name) for name in EngineOptions.__annotations__}
        parser.set_defaults(model="Qwen/Qwen3-0.6B", **defaults)  # as in vLLM
        return parser

    @classmethod
    def from_cli_args(cls, args: Namespace) -> "EngineArgs":
        """Return the options among the arguments that a parser has read."""
        return cls(args.model, **{name: getattr(args, name) for name in EngineOptions.__annotations__})


class FlexibleArgumentParser(ArgumentParser):
    """vLLM's name for a parser of a command line."""


class PoolingParams:
    """vLLM's name for arguments of `embed`: `dimensions`, and `use_activation`, which is our `normalize`."""

    def __init__(self, dimensions: int | None = None, use_activation: bool | None = None, **others: Any) -> None:
        refuse_unknown(translate_names(others, "PoolingParams"), ("dimensions", "use_activation"), "PoolingParams")
        self.dimensions = dimensions
        self.use_activation = use_activation


class LLMEngine:
    """vLLM's name for the loop of `LLM.step`. Each request has an output once, when all its completions have ended."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._names: dict[int, str] = {}

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLMEngine":
        from nanovllm.llm import LLM

        return cls(LLM.from_engine_args(engine_args))

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, **others: Any) -> None:
        """Queue a request for `step`."""
        translate_arguments("add_request", others)
        request = self._llm.prepare(prompt, params)
        with self._llm.claim_loop("add_request()"):
            self._names[self._llm.engine.add(request).seq_id] = request_id

    def step(self) -> list[Output]:
        """Run one step. Return the outputs of the requests that it has ended."""
        engine = self._llm.engine
        with self._llm.claim_loop("step()"):
            outputs = [engine.make_output(seq) for seq in (engine.step() if engine.has_work else ())]
        for output in outputs:
            output.request_id = self._names.pop(int(output.request_id))
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Return whether requests run or wait."""
        return not self._llm.is_finished()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


class Metric(NamedTuple):
    """A count of `LLM.stats`, in the form of vLLM's metrics."""

    name: str
    value: int


METRICS = {name: type(name, (Metric,), {}) for name in ("Counter", "Gauge", "Vector", "Histogram")}
"""vLLM's kinds of metrics. Ours are Counters, which only grow, and Gauges."""


def _get_metrics(llm: "LLM") -> list[Metric]:
    gauges = ("num_blocks", "num_free_blocks")
    return [METRICS["Gauge" if name in gauges else "Counter"](name, count) for name, count in llm.stats().items()]


def _print_embeddings(embeds: Any, prefix: str = "Embeddings") -> None:
    sys.stdout.write(f"{prefix}: {embeds[:4]} (the first of {len(embeds)} elements)\n")


class RequestOutputKind(Enum):
    """vLLM's name for how often a request has outputs. Here it is once, when it ends."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


NAMES: Mapping[str, Any] = {
    "EngineArgs": EngineArgs,
    "FlexibleArgumentParser": FlexibleArgumentParser,
    "RequestOutputKind": RequestOutputKind,
    **dict.fromkeys(("EmbeddingRequestOutput", "EmbeddingOutput"), Embedding),
    "PromptType": Prompt,
    "PoolingParams": PoolingParams,
    "LoRARequest": LoRARequest,
    "LLMEngine": LLMEngine,
    **METRICS,
    "ProfilerConfig": dict,  # the option profiler_config refuses it
    "init_logger": logging.getLogger,
    "print_embeddings": _print_embeddings,
    "cleanup_dist_env_and_memory": gc.collect,  # an LLM frees its memory when it is collected
}
"""Names of vLLM's that stand for something here, whatever module a script imports them from."""

MODULES = (
    *("engine.arg_utils", "utils.argparse_utils", "utils.print_utils", "logger", "pooling_params"),
    *("lora", "lora.request", "v1", "v1.metrics", "v1.metrics.reader"),
)
"""Modules of vLLM's from which scripts import these names."""

METHODS = {"get_metrics": _get_metrics}
"""Methods of vLLM's LLM, as functions of ours."""


def find_name(name: str) -> Any:
    """Return what a name of vLLM's stands for here; AttributeError with advice if we do not have it."""
    if name not in NAMES:
        raise explain_missing("module 'nanovllm'", name)
    return NAMES[name]


def find_module(name: str) -> ModuleSpec | None:
    """Answer Python, which has found a module nowhere: see `nanovllm._Finder`.

    After `from module import name` Python asks for the name, too, if the module has a path.

    Raises:
        ImportError: vLLM has it, and we do not.
    """
    parent, _, last = name.rpartition(".")
    if name.removeprefix("nanovllm.") in MODULES:
        return ModuleSpec(name, None, is_package=True)
    if last in NAMES:
        setattr(sys.modules[parent], last, NAMES[last])  # `from` looks there again when no module was found
    elif advice := _advise(name):
        raise ImportError(f"{parent} has no {last!r}: {advice}", name=name)
    return None


def _advise(name: str) -> str | None:
    """Return the advice for a module or a name in it. Classes are vLLM's, and all but a few modules of `v1`."""
    last = name.rpartition(".")[2]
    rest = _INNER if name.startswith("nanovllm.v1.") else _LISTED if last[0].isupper() else None
    return HINTS.get(last, rest)


def find_attribute(llm: "LLM", name: str) -> Any:
    """Return what a method of vLLM's LLM is here; AttributeError with advice if we do not have it."""
    if name not in METHODS:
        raise explain_missing("LLM", name)
    return partial(METHODS[name], llm)


def explain_missing(what: str, name: str) -> AttributeError:
    """Return the error for an attribute that is missing. `what` lacks it."""
    advice = HINTS.get(name)
    return AttributeError(f"{what} has no attribute {name!r}" + (f": {advice}" if advice else ""), name=name)
