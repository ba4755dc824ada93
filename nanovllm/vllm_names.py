"""Names in scripts for vLLM that are not ours: translated, ignored if harmless, or refused with what to do instead.

This file is imported only when a script gives a name or a value that is not ours.
"""

from collections.abc import Mapping
from typing import Any

from nanovllm.utils.checks import quote

ANY: Any = object()
"""In a tuple of accepted values: every value is accepted."""

SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (None,),
    **dict.fromkeys(("output_kind", "skip_clone", "spaces_between_special_tokens"), (ANY,)),
    "logits_processors": (None, []),
    "flat_logprobs": (None, False),
    "best_of": (None, 1),
    "extra_args": (None, {}),
}
"""Fields of vLLM's SamplingParams that ours does not have, and the values of them that we accept and ignore."""

STRUCTURED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("structural_tag", "whitespace_pattern"), (None,)),
    **dict.fromkeys(("backend", "disable_fallback"), (ANY,)),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), (None, False)),
}
"""The same for vLLM's StructuredOutputsParams."""

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    # These change logging, speed or memory, or switch something that is always on or always off here.
    **dict.fromkeys(("disable_log_stats", "enable_chunked_prefill", "async_scheduling", "swap_space"), (ANY,)),
    "enable_sleep_mode": (ANY,),
    **dict.fromkeys(("compilation_config", "disable_custom_all_reduce", "distributed_executor_backend"), (ANY,)),
    **dict.fromkeys(("limit_mm_per_prompt", "max_loras", "max_lora_rank", "max_cpu_loras"), (ANY,)),
    "trust_remote_code": (ANY,),  # a model that needs code of its own is refused when it is loaded
    # These would change results, or ask for something that we do not have.
    **dict.fromkeys(("kv_transfer_config", "logits_processors"), (None,)),
    **dict.fromkeys(("hf_overrides", "rope_scaling", "mm_processor_kwargs"), (None, {})),
    **dict.fromkeys(("enable_lora", "enable_prompt_embeds"), (False,)),
    **dict.fromkeys(("enable_expert_parallel", "skip_tokenizer_init", "calculate_kv_scales"), (False,)),
    **dict.fromkeys(("task", "runner"), ("auto", "generate")),
    **dict.fromkeys(("tokenizer_mode", "config_format"), ("auto", "hf")),
    "generation_config": ("auto",),
    "cpu_offload_gb": (0,),
    "tokenizer": (None,),  # or the model
    # These are nano-vLLM's.
    "hf_config": (None,),
    "eos": (-1,),
}
"""Options of vLLM's LLM, and of nano-vLLM's, that ours does not have, and the values that we accept and ignore.

These are the options in vLLM's own examples of offline inference. For all others REST is the one answer.
"""

HARMLESS = {"LLM": OPTIONS, "SamplingParams": SAMPLING, "StructuredOutputsParams": STRUCTURED}

REST = "docs/porting.md lists the options of vLLM that are understood"

RENAMED: Mapping[str, str] = {
    "block_size": "kvcache_block_size",
    "num_gpu_blocks_override": "num_kvcache_blocks",
    "kv_cache_memory_bytes": "kvcache_memory_bytes",
    "guided_decoding": "structured_outputs",
}
"""vLLM's names of options and fields that have another name here. With None they stand for the default."""

_NO_SPACE = "white space in JSON is as docs/structured.md says: for another, write a regex or a grammar"
_OTHER_WORK = "LLM(model) generates, and LLM.score computes likelihoods, whatever the task"
_COPY = "write the value into the config.json of a copy of the model's folder"

ADVICE: Mapping[str, str] = {
    "best_of": "ask for n=best_of and logprobs=0, and choose by cumulative_logprob",
    "logits_processors": "logit_bias, bad_words, allowed_token_ids and structured_outputs do what most of them are for",
    "truncate_prompt_tokens": "pass token ids, and cut the list yourself",
    "flat_logprobs": "each token has a dict of its log-probabilities",
    "extra_args": "nothing reads them",
    "structural_tag": "write the form as a grammar",
    "whitespace_pattern": _NO_SPACE,
    "disable_any_whitespace": _NO_SPACE,
    "disable_additional_properties": 'write "additionalProperties": false into the schema',
    "enable_prompt_embeds": "a prompt is text or token ids",
    "enable_lora": "one adapter is merged when the model is loaded: LLM(model, lora='folder')",
    "tokenizer": "put the other tokenizer's files into a copy of the model's folder",
    "hf_overrides": _COPY,
    "rope_scaling": _COPY,
    "task": _OTHER_WORK,
    "runner": _OTHER_WORK,
}
"""Advice for names of which another value than the accepted ones was given."""

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
        ValueError: an option would change something that we cannot do.
    """
    given = {name: value for name, value in given.items() if name != "tokenizer" or value != model}
    options = translate_names(given, "LLM")
    for name in options.keys() & SYNONYMS.keys():
        value = options[name]
        if isinstance(value, str | int):
            options[name] = SYNONYMS[name].get(value, value)
    return options


def translate_names(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return `given` with our names for vLLM's, and without the harmless names.

    Args:
        what: the class that the names are for, as `HARMLESS` has it.

    Raises:
        ValueError: a harmless name has another value, or both names for the same are given.
    """
    harmless = HARMLESS[what]
    for name in given.keys() & harmless.keys():
        accepted = harmless[name]
        if ANY not in accepted and not any(given[name] == value for value in accepted):
            values = " or ".join(map(repr, accepted))
            advice = ADVICE.get(name, f"give {values}, which changes nothing")
            raise ValueError(f"{what}: {name}, which vLLM has, is not supported here as {quote(given[name])}: {advice}")
    ours = {name: value for name, value in given.items() if name not in harmless}
    for name in ours.keys() & RENAMED.keys():
        value = ours.pop(name)
        if value is not None and ours.setdefault(RENAMED[name], value) is not value:
            raise ValueError(f"{what}: {name} and {RENAMED[name]} are the same: give one of them")
    return ours
