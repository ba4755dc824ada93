"""Options of `LLM` and fields of parameters in scripts for vLLM or nano-vLLM that are not ours: the values that we
accept, and what to do instead.

This file is data, and imports nothing of the package. Whoever meets such a name asks utils/foreign_names.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

ANY: Any = object()
"""Among accepted values: every value is accepted."""


class Row(NamedTuple):
    """Options, fields or arguments that have the same answer.

    Attributes:
        names: the names, with a space between them.
        accepted: values that change nothing here, so they are ignored. None always is one: it asks for the default.
        advice: what to do instead of giving another value. A name that has two rows has its advice in one of them.
    """

    names: str
    accepted: tuple[Any, ...]
    advice: str = ""


_TEXT_ALONE = "a prompt is text or token ids, without images, videos or sounds"
_OTHER_WORK = "embed(prompts) gives vectors, and score(prompts, continuations) likelihoods; no option prepares them"
_TRACE = "LLM(model, trace='steps.json') writes what every step did"
_COPY = "write the value into the config.json of a copy of the model's folder"
_NO_SPACE = "white space in JSON is as docs/structured.md says: for another, write a regex or a grammar"
_GIVEN_TOKENS = "score(prompts, continuations) gives the log-probabilities of tokens that are given"
_EDITS = "logit_bias, bad_words, allowed_token_ids and structured_outputs do what most of them are for"
_ONE_CACHE = "the KV cache stays within one engine"

_LESS_MEMORY = (
    'quantization="int8" rounds weights when they are loaded; for 4 bits load a checkpoint in AWQ, GPTQ or GGUF'
)

REST = "docs/porting.md lists the options of vLLM that are understood"
"""The advice for options of vLLM's that no row has."""

OPTIONS = (
    # These change speed, memory or logging, or belong to features that are always off here.
    Row("async_scheduling attention_config compilation_config cudagraph_capture_sizes disable_cascade_attn", (ANY,)),
    Row("disable_custom_all_reduce distributed_executor_backend enable_chunked_prefill enable_sleep_mode", (ANY,)),
    Row("enable_expert_parallel long_prefill_token_threshold disable_hybrid_kv_cache_manager", (ANY,)),
    Row("max_num_partial_prefills max_parallel_loading_workers max_seq_len_to_capture num_scheduler_steps", (ANY,)),
    Row("optimization_level performance_mode ray_workers_use_nsight renderer_num_workers", (ANY,)),
    Row("scheduling_policy swap_space", (ANY,)),
    Row("preemption_mode use_v2_block_manager guided_decoding_backend", (ANY,)),
    Row("disable_log_requests disable_log_stats enable_log_requests max_logprobs served_model_name", (ANY,)),
    Row("enable_log_stats kv_cache_metrics show_hidden_metrics_for_version use_tqdm_on_load", (ANY,)),
    Row("allowed_local_media_path interleave_mm_strings limit_mm_per_prompt mm_processor_cache_gb", (ANY,)),
    # generate, chat and jobs take adapters without these.
    Row("enable_lora fully_sharded_loras max_cpu_loras max_lora_rank max_loras", (ANY,)),
    Row("trust_remote_code", (ANY,)),  # a model that needs code of its own is refused when it is loaded
    # These would change results, or ask for something that we do not have.
    Row("kv_transfer_config", (None,), _ONE_CACHE),
    Row("logits_processors", (None,), _EDITS),
    Row("pooler_config", (None,), "modules.json and 1_Pooling in the folder choose the pooling: docs/embeddings.md"),
    Row("profiler_config", (None,), _TRACE),
    Row("hf_overrides rope_scaling", (None, {}), _COPY),
    Row("mm_processor_kwargs", (None, {}), _TEXT_ALONE),
    Row("override_generation_config", (None, {}), "give the values to SamplingParams"),
    Row("enable_prompt_embeds", (False,), _TEXT_ALONE),
    Row("enable_trace_replay", (False,), _GIVEN_TOKENS),
    Row("skip_tokenizer_init calculate_kv_scales", (False,)),
    Row("task", ("auto", "generate", "embed", "embedding"), _OTHER_WORK),
    Row("runner", ("auto", "generate", "pooling"), _OTHER_WORK),
    Row("convert", ("auto", "none", "embed"), _OTHER_WORK),
    Row("hf_config_path", (None,), "a GGUF file says what its config.json would: leave it out"),
    Row("tokenizer_mode config_format", ("auto", "hf")),
    Row("generation_config", ("auto",)),
    Row("tokenizer_revision code_revision", ("main",)),
    Row("cpu_offload_gb", (0,)),
    # These are transformers' and the original nano-vLLM's.
    Row("load_in_4bit load_in_8bit", (False,), _LESS_MEMORY),
    Row("quantization_config", (None, {}), _LESS_MEMORY),
    Row("hf_config", (None,)),
    Row("eos", (-1,)),
)

SAMPLING = (
    Row("truncate_prompt_tokens", (None,), "pass token ids, and cut the list yourself"),
    Row("output_kind skip_clone spaces_between_special_tokens", (ANY,)),
    Row("logits_processors", (None, [])),
    Row("flat_logprobs", (None, False), "each token has a dict of its log-probabilities"),
    Row("use_beam_search", (None, False), "n=8 and logprobs=0 give samples with log-probabilities"),
    Row("best_of", (None, 1), "ask for n=best_of and logprobs=0, and choose by cumulative_logprob"),
    Row("extra_args", (None, {}), "nothing reads them"),
    Row("length_penalty", (None, 1)),
    Row("early_stopping", (None, False)),
    Row("trace_decode_token_ids", (None, []), _GIVEN_TOKENS),
)

STRUCTURED = (
    Row("structural_tag", (None,), "write the form as a grammar"),
    Row("whitespace_pattern", (None,), _NO_SPACE),
    Row("backend disable_fallback", (ANY,)),
    Row("disable_any_whitespace", (None, False), _NO_SPACE),
    Row("disable_additional_properties", (None, False), 'write "additionalProperties": false into the schema'),
)

TABLES: Mapping[str, tuple[Row, ...]] = {
    "LLM": OPTIONS,
    "SamplingParams": SAMPLING,
    "StructuredOutputsParams": STRUCTURED,
}
"""The rows of each class of vLLM's."""

ACCEPTED: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    owner: {name: row.accepted for row in rows for name in row.names.split()} for owner, rows in TABLES.items()
}
"""The same as `TABLES`, by name: the accepted values."""

ADVICE: Mapping[str, str] = {
    name: row.advice for rows in TABLES.values() for row in rows if row.advice for name in row.names.split()
}
"""{name: what to do instead}."""

RENAMED: Mapping[str, str] = {
    "block_size": "kvcache_block_size",
    "num_gpu_blocks_override": "num_kvcache_blocks",
    "kv_cache_memory_bytes": "kvcache_memory_bytes",
    "guided_decoding": "structured_outputs",
    "max_new_tokens": "max_tokens",
}
"""Names of options and fields that have another name here. With None they stand for the default."""

GUIDED = ("json", "regex", "choice", "grammar", "json_object")
"""`guided_` and one of these is a field of vLLM's SamplingParams: it is that attribute of StructuredOutputsParams."""

SYNONYMS: Mapping[str, Mapping[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "int8_per_token_head": "int8", "fp8_per_token_head": "fp8"},
    "num_kvcache_blocks": {-1: None},
    "model_impl": {"vllm": "nanovllm"},
    "quantization": {"int8_per_channel_weight_only": "int8", "awq_marlin": "awq", "gptq_marlin": "gptq"},
}
"""For each option: values that vLLM or nano-vLLM write differently, and the values that they mean here."""
