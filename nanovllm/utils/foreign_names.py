"""Answers an option or a field that is vLLM's or nano-vLLM's, and not ours: by the tables of vllm_names.py."""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from nanovllm.utils.checks import quote
from nanovllm.utils.vllm_names import ACCEPTED, ADVICE, ANY, GUIDED, RENAMED

logger = logging.getLogger(__name__)


def translate_names(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return `given` with our names for others', and without names that change nothing.

    Args:
        what: the class that the names are for, as `ACCEPTED` has it.

    Raises:
        ValueError: a name that we do not have asks for something, or both names for the same are given.
    """
    ours = leave_out(given, what, ACCEPTED[what], ADVICE)
    if what == "SamplingParams":
        if ours.pop("do_sample", None) is False:
            ours["temperature"] = 0.0
        for kind in GUIDED:
            if (value := ours.pop(f"guided_{kind}", None)) is not None:
                ours["guided_decoding"] = {kind: value}
    for name in ours.keys() & RENAMED.keys():
        value = ours.pop(name)
        if value is not None and ours.setdefault(RENAMED[name], value) is not value:
            raise ValueError(f"{what}: {name} and {RENAMED[name]} are the same: give one of them")
    return ours


def leave_out(
    given: Mapping[str, Any], what: str, harmless: Mapping[str, tuple[Any, ...]], advice: Mapping[str, str]
) -> dict[str, Any]:
    """Return `given` without the harmless names, if their values change nothing; else raise a ValueError with advice.

    Args:
        what: the class or the method that the names are for.
        harmless: {name: the values that change nothing, beside None}.
    """
    ignored = {name: given[name] for name in given if name in harmless and given[name] is not None}
    for name, value in ignored.items():
        accepted = harmless[name]
        if ANY not in accepted and not any(value == other for other in accepted):
            values = " or ".join(map(repr, accepted))
            instead = advice.get(name, f"give {values}, which changes nothing")
            raise ValueError(f"{what}: {name}, which others have, is not supported here as {quote(value)}: {instead}")
    if ignored:
        _note_ignored(what, ", ".join(ignored))
    return {name: value for name, value in given.items() if name not in harmless}


@cache
def _note_ignored(what: str, names: str) -> None:
    """Log names that change nothing: once, though thousands of requests may have them."""
    logger.info("%s: ignored, because nothing changes with it here: %s", what, names)
