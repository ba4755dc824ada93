"""What vLLM's scripts pass that has no meaning here: what is harmless passes, what would change results is refused."""

from collections.abc import Mapping
from typing import Any

ANY: Any = object()
"""Among accepted values: whatever it is."""

SAMPLING: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_decoding", "truncate_prompt_tokens", "repetition_detection"), (None,)),
    **dict.fromkeys(("prompt_logprob_token_ids", "prompt_logprob_start", "trace_decode_token_ids"), (None,)),
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
