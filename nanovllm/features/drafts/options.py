"""Checks the option speculative_config."""

from collections.abc import Mapping
from typing import Any

from nanovllm.utils.checks import as_choice, as_integer, quote, refuse

METHODS = ("ngram", "draft_model")
MAX_NUM_DRAFTS = 64
USUAL_NUM_DRAFTS = 4
"""The default of num_speculative_tokens, which only bounds a draft: what a step's rows cost decides how many it has."""
LOOKUP = 5
"""The default of prompt_lookup_max and prompt_lookup_min, as in vLLM."""

_KEYS = {
    "ngram": ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("method", "num_speculative_tokens", "model"),
}


def read_speculative_config(value: Any) -> dict[str, Any]:
    """Check the option speculative_config, which has vLLM's keys, and fill in its defaults.

    Returns:
        A dict of plain values, so that it travels as JSON.

    Raises:
        ValueError: a key or a value is wrong; the message says which.
    """
    if not isinstance(value, Mapping):
        raise refuse(value, "speculative_config", 'a dict, as {"method": "ngram", "num_speculative_tokens": 8}')
    given = {str(key): entry for key, entry in value.items() if entry is not None}
    method = given.setdefault("method", "draft_model" if "model" in given else "ngram")
    as_choice(method, "speculative_config: method", METHODS)
    if unknown := given.keys() - set(_KEYS[method]):
        raise ValueError(
            f'speculative_config has the key {quote(min(unknown))}; with method "{method}" it may have '
            + ", ".join(_KEYS[method])
        )

    def integer(name: str, low: int, high: int) -> int:
        return as_integer(given[name], f"speculative_config: {name}", low, high)

    given.setdefault("num_speculative_tokens", USUAL_NUM_DRAFTS)
    given["num_speculative_tokens"] = integer("num_speculative_tokens", 1, MAX_NUM_DRAFTS)
    if method == "draft_model":
        if not isinstance(given.get("model"), str) or not given["model"]:
            raise refuse(given.get("model"), "speculative_config: model", "a folder or a name")
        return given
    # If only one of the two bounds is given, the other takes its value.
    longest = given.get("prompt_lookup_max", given.get("prompt_lookup_min", LOOKUP))
    given.setdefault("prompt_lookup_min", longest)
    given["prompt_lookup_max"] = longest
    given["prompt_lookup_max"] = integer("prompt_lookup_max", 1, MAX_NUM_DRAFTS)
    given["prompt_lookup_min"] = integer("prompt_lookup_min", 1, given["prompt_lookup_max"])
    return given
