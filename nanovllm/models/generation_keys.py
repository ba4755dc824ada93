"""Checks the keys of generation_config.json: one that changes the output and that nobody reads would be lost."""

from collections.abc import Mapping
from typing import Any

from nanovllm.models.config_keys import list_names
from nanovllm.utils.checks import quote

READ = list_names(
    """
    do_sample temperature top_k top_p min_p repetition_penalty max_new_tokens min_new_tokens bad_words_ids
    suppress_tokens eos_token_id
    """
)
"""The keys that the engine reads."""

HARMLESS = list_names(
    """
    max_length early_stopping length_penalty diversity_penalty num_beam_groups low_memory
    use_cache cache_implementation cache_config max_cache_len prefill_chunk_size compile_config disable_compile
    continuous_batching_config output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate renormalize_logits remove_invalid_values
    pad_token_id bos_token_id decoder_start_token_id transformers_version _from_model_config
    is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
    prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind
    assistant_ensemble_weight speculation_type use_mtp
    """
)
"""The keys that change no token: caches, what transformers' own methods return, drafts, and what only beams read.
`max_length` is here because max_tokens and max_model_len limit a request."""

OF_SAMPLING = {"typical_p": 1.0, "top_h": None, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
"""Keys that transformers reads if it samples, and that the engine does not have, each with its neutral value."""

OF_LLAMA_CPP = {"mirostat": 0, "xtc_probability": 0, "sequence": "", "penalty_last_n": -1}
"""Keys that a GGUF file may have."""

NEUTRAL: dict[str, Any] = {
    **OF_SAMPLING,
    **OF_LLAMA_CPP,
    **dict.fromkeys(("min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "penalty_alpha"), 0),
    **dict.fromkeys(("num_beams", "num_return_sequences", "encoder_repetition_penalty", "guidance_scale"), 1),
    **dict.fromkeys(("max_time", "stop_strings", "exponential_decay_length_penalty", "watermarking_config")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids", "begin_suppress_tokens")),
    **dict.fromkeys(("sequence_bias", "constraints", "force_words_ids", "dola_layers")),
    "token_healing": False,
}
"""All keys that change the output and that the engine does not have, each with the value that asks for nothing."""


def check_generation_keys(data: Mapping[str, Any]) -> None:
    """Raise a ValueError that names each key of `data` that asks for something that the engine does not have.

    A key that is null or empty asks for nothing. transformers does not read keys that it does not know, either.

    Args:
        data: the content of generation_config.json.
    """
    is_greedy = data.get("do_sample") is False
    changed = []
    for name, neutral in NEUTRAL.items():
        value = data.get(name)
        if value in (None, neutral, [], {}) or (is_greedy and name in OF_SAMPLING):
            continue
        changed.append(f"{name} ({quote(value)})")
    if changed:
        raise ValueError(f"this engine does not have {', '.join(changed)}")
