"""Answers a name that is vLLM's or nano-vLLM's, and not ours: by the tables of vllm_names.py."""

import logging
import sys
from collections.abc import Collection, Mapping
from functools import cache
from opcode import opname
from typing import Any, NoReturn

from nanovllm.utils.checks import quote, suggest
from nanovllm.utils.vllm_names import ACCEPTED, ADVICE, ANY, GUIDED, INNER, LISTED, RENAMED

logger = logging.getLogger(__name__)


def translate_names(given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return `given` with our names for others', and without names that change nothing.

    Args:
        what: the class that the names are for, as `ACCEPTED` has it, or a method.

    Raises:
        ValueError: a name that we do not have asks for something, or both names for the same are given.
    """
    harmless = ACCEPTED.get(what, ACCEPTED["methods"])
    ignored = {name: given[name] for name in given if name in harmless and given[name] is not None}
    for name, value in ignored.items():
        accepted = harmless[name]
        if ANY not in accepted and not any(value == other for other in accepted):
            values = " or ".join(map(repr, accepted))
            advice = ADVICE.get(name, f"give {values}, which changes nothing")
            raise ValueError(f"{what}: {name}, which vLLM has, is not supported here as {quote(value)}: {advice}")
    if ignored:
        _note_ignored(what, ", ".join(ignored))
    ours = {name: value for name, value in given.items() if name not in harmless}
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


@cache
def _note_ignored(what: str, names: str) -> None:
    """Log names that change nothing: once, though thousands of requests may have them."""
    logger.info("%s: ignored, because nothing changes with it here: %s", what, names)


def explain_missing(what: str, name: str, ours: Collection[str] = ()) -> AttributeError:
    """Return the error for an attribute that `what` lacks, with advice if it is vLLM's or nano-vLLM's.

    Args:
        ours: the names that `what` has. The error suggests one that resembles `name`.
    """
    advice = suggest(name, ours) or ADVICE.get(name)
    return AttributeError(f"{what} has no attribute {name!r}" + (f": {advice}" if advice else ""), name=name)


def check_import(name: str, ours: Collection[str]) -> None:
    """Raise an ImportError for a module of `nanovllm`, or a name in one, that looks like vLLM's or like one of ours.

    Args:
        ours: the names that `nanovllm` has itself.
    """
    parent, _, last = name.rpartition(".")
    advice = suggest(last, ours) if parent == "nanovllm" else None
    if advice is None and (advice := advise(name)):
        advice += "; `nanovllm run script.py` runs a script with its imports from vllm"
    if advice:
        raise ImportError(f"{parent} has no {last!r}: {advice}", name=name)


def refuse_name(module: str, name: str) -> NoReturn:
    """Raise the error for a name that a module of ours lacks: `from module import name` gets that of `check_import`.

    Every other access gets an AttributeError, so that hasattr() is False. Python replaces an AttributeError of an
    import by its own error, which has no advice. So the caller's instruction decides.
    """
    caller = sys._getframe(1)
    if opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM":
        check_import(f"{module}.{name}", ())
    raise explain_missing(f"module {module!r}", name)


def advise(name: str) -> str | None:
    """Return the advice for a module or a name in it. Classes are vLLM's, and all but a few modules of `v1`."""
    last = name.rpartition(".")[2]
    rest = INNER if ".v1." in name else LISTED if last[0].isupper() else None
    return ADVICE.get(last, rest)
