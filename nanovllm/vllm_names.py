"""What vLLM's scripts pass that has no meaning here: what is harmless passes, what would change results is refused."""

from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from typing import Any, TypeVar

from nanovllm.utils.checks import refuse_unknown

T = TypeVar("T")

ANY: Any = object()
"""Among accepted values: whatever it is."""

SAMPLING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_decoding", "truncate_prompt_tokens", "repetition_detection"), (None,)),
    **dict.fromkeys(("prompt_logprob_token_ids", "trace_decode_token_ids"), (None,)),
    **dict.fromkeys(("logits_processors", "logprob_token_ids"), (None, [])),
    **dict.fromkeys(("flat_logprobs", "skip_reading_prefix_cache", "use_beam_search"), (None, False)),
    # Offline, vLLM sets the first itself; the last is about slow tokenizers.
    **dict.fromkeys(("output_kind", "stream_interval", "skip_clone", "spaces_between_special_tokens"), (ANY,)),
    "best_of": (None, 1),
    "extra_args": (None, {}),
    "thinking_token_budget": (None, -1),
    "routed_experts_prompt_start": (0,),
}
"""Fields of vLLM's SamplingParams that have none in ours: the values that are taken, and do nothing."""

STRUCTURED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("structural_tag", "whitespace_pattern"), (None,)),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), (None, False)),
}
"""Likewise, of its StructuredOutputsParams."""

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    # What is on or off here as it is; logging; pace and memory.
    **dict.fromkeys(("disable_log_stats", "disable_log_requests", "enable_log_requests", "use_tqdm_on_load"), (ANY,)),
    **dict.fromkeys(("enable_chunked_prefill", "async_scheduling", "disable_async_output_proc"), (ANY,)),
    **dict.fromkeys(("swap_space", "compilation_config", "optimization_level", "max_seq_len_to_capture"), (ANY,)),
    **dict.fromkeys(("disable_custom_all_reduce", "disable_cascade_attn", "distributed_executor_backend"), (ANY,)),
    **dict.fromkeys(("cudagraph_capture_sizes", "max_cudagraph_capture_size", "num_scheduler_steps"), (ANY,)),
    **dict.fromkeys(("max_num_partial_prefills", "long_prefill_token_threshold", "use_v2_block_manager"), (ANY,)),
    **dict.fromkeys(("max_parallel_loading_workers", "prefix_caching_hash_algo", "ignore_patterns"), (ANY,)),
    **dict.fromkeys(("disable_hybrid_kv_cache_manager", "disable_sliding_window", "served_model_name"), (ANY,)),
    **dict.fromkeys(("max_logprobs", "limit_mm_per_prompt", "max_loras", "max_lora_rank", "max_cpu_loras"), (ANY,)),
    "trust_remote_code": (ANY,),  # a folder that needs code of its own is refused when it is read
    # What would change results, or cannot be had.
    **dict.fromkeys(("quantization", "hf_config_path", "code_revision", "tokenizer_revision", "download_dir"), (None,)),
    **dict.fromkeys(("rope_theta", "pooler_config", "override_pooler_config", "logits_processor_pattern"), (None,)),
    **dict.fromkeys(("speculative_model", "num_speculative_tokens", "hf_token"), (None,)),
    **dict.fromkeys(("kv_transfer_config", "kv_events_config", "logits_processors", "reasoning_parser"), (None,)),
    **dict.fromkeys(("hf_overrides", "rope_scaling", "override_generation_config", "additional_config"), (None, {})),
    **dict.fromkeys(("mm_processor_kwargs", "model_loader_extra_config", "structured_outputs_config"), (None, {})),
    **dict.fromkeys(("enable_lora", "enable_lora_bias", "enable_prompt_adapter", "skip_tokenizer_init"), (False,)),
    **dict.fromkeys(("enable_prompt_embeds", "enable_sleep_mode", "enable_expert_parallel", "is_embedding"), (False,)),
    **dict.fromkeys(("calculate_kv_scales", "enable_return_routed_experts"), (False,)),
    **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"), (1,)),
    **dict.fromkeys(("task", "runner"), ("auto", "generate")),
    **dict.fromkeys(("tokenizer_mode", "config_format"), ("auto", "hf")),
    **dict.fromkeys(("kv_cache_dtype", "generation_config", "worker_cls", "guided_decoding_backend"), ("auto",)),
    "convert": ("auto", "none"),
    "model_impl": ("auto", "vllm"),
    "cpu_offload_gb": (0,),
    "scheduler_delay_factor": (0,),
    "scheduling_policy": ("fcfs",),
    "preemption_mode": (None, "recompute"),
    "logprobs_mode": (None, "raw_logprobs"),
    # nano-vLLM's.
    "hf_config": (None,),
    "eos": (-1,),
}
"""Options of vLLM's LLM, and of nano-vLLM's, that ours has not: the values that are taken, and do nothing."""

HINTS: Mapping[str, str] = {
    "block_size": "here it is 'kvcache_block_size'",
    "num_gpu_blocks_override": "here it is 'num_kvcache_blocks'",
    "kv_cache_memory_bytes": "here it is 'kvcache_memory_bytes'",
}
"""Options of vLLM's that have another name here."""

SYNONYMS: Mapping[str, Mapping[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "num_kvcache_blocks": {-1: None},
}
"""Values, by option, that others write otherwise."""


def translate_options(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options as EngineConfig has them, of those that a script for vLLM or nano-vLLM gives.

    Raises:
        ValueError: one that would change something here.
    """
    options = drop_harmless(given, {**OPTIONS, "tokenizer": (None, model)}, "LLM")
    for name in options.keys() & SYNONYMS.keys():
        value = options[name]
        if isinstance(value, Hashable):
            options[name] = SYNONYMS[name].get(value, value)
    return options


def drop_harmless(given: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], what: str) -> dict[str, Any]:
    """given without the names in table.

    Raises:
        ValueError: one of them has a value that would change something.
    """
    for name in given.keys() & table.keys():
        accepted = table[name]
        if ANY not in accepted and not any(given[name] == value for value in accepted):
            values = " or ".join(map(repr, accepted))
            raise ValueError(f"{what}: {name}, which vLLM has, is not supported here; leave it out, or give {values}")
    return {name: value for name, value in given.items() if name not in table}


def names_checked(harmless: Mapping[str, tuple[Any, ...]]) -> Callable[[type[T]], type[T]]:
    """A dataclass whose calls drop the names in a table, as `drop_harmless`, and refuse others, as `refuse_unknown`."""

    def decorate(cls: type[T]) -> type[T]:
        init: Any = cls.__init__

        @wraps(init)
        def checked(self: T, *args: Any, **kwargs: Any) -> None:
            kwargs = drop_harmless(kwargs, harmless, cls.__name__)
            refuse_unknown(kwargs, cls.__dataclass_fields__, cls.__name__)  # type: ignore[attr-defined]
            init(self, *args, **kwargs)

        cls.__init__ = checked  # type: ignore[assignment]
        return cls

    return decorate
