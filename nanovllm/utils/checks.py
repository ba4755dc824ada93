"""Checks of values that users pass: names, integers, numbers, booleans, choices. Errors name value and limit."""

import difflib
import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

INT64_MAX = 2**63 - 1
LONGEST_QUOTE = 200
"""Characters of a value that a message shows at most, because data from files may be megabytes long."""

CLOSE = 0.8
"""Two names at least so similar (1 is equal) are worth a "did you mean"."""


def quote(value: Any) -> str:
    """Return the value as a message shows it: its repr, cut to 200 characters."""
    if isinstance(value, (str, bytes)):
        value = value[:LONGEST_QUOTE]
    try:
        text = repr(value)
    except Exception as error:  # an integer of too many digits, an object whose repr fails
        text = f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 3] + "..."


def refuse(value: Any, name: str, limit: str) -> ValueError:
    """Return the error to raise for a value that is not within its limit."""
    return ValueError(f"{name} is {quote(value)}; it must be {limit}")


def refuse_unknown(given: Iterable[str], known: Collection[str], what: str, rest: str = "") -> None:
    """Raise a TypeError for the first name in `given` that is not in `known`.

    Args:
        known: the known names. Every request is checked here, so this is a dict where there are many.
        what: the class or function that the names belong to, as the message calls it: "SamplingParams", "LLM".
        rest: the advice for unknown names that resemble no known one.
    """
    for name in given:
        if name in known:
            continue
        options = f"the options are {', '.join(known)}" + (f" ({rest})" if rest else "")
        raise TypeError(f"{what} has no option {quote(name)}; {suggest(name, known) or options}")


def suggest(name: str, known: Iterable[str]) -> str | None:
    """Return a question that names the nearest known name; None if no known name resembles `name`."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)
    return f"did you mean {nearest[0]!r}?" if nearest else None


def as_integer(value: Any, name: str, low: int | None = None, high: int = INT64_MAX, limit: str = "") -> int:
    """Return value as an int; ValueError if it is not an integer from low to high. Booleans are refused.

    Args:
        value: an int, or an integer of numpy or torch.
        low: None sets no bounds.
        limit: the words of the message after "it must be"; by default they name the bounds.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise refuse(value, name, "an integer") from None
    if low is not None and not low <= number <= high:
        bounds = f"at least {low}" if number < low and high == INT64_MAX else f"from {low} to {high}"
        raise refuse(value, name, limit or bounds)
    return number


def as_number(value: Any, name: str) -> float:
    """Return value, a number or a scalar of numpy or torch, as a float; ValueError for others. Booleans are refused."""
    try:
        number = value if isinstance(value, (int, float)) else value.item()
        if isinstance(number, bool):
            raise TypeError
        return float(number)
    except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError):
        raise refuse(value, name, "a number") from None


def as_bool(value: Any, name: str) -> bool:
    """Return value if it is True or False; else ValueError, because the string "no" would count as true."""
    if not isinstance(value, bool):
        raise refuse(value, name, "True or False")
    return value


def as_choice(value: Any, name: str, choices: Iterable[str]) -> str:
    """Return value if it is one of the choices; else ValueError, with the nearest choice."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        nearest = difflib.get_close_matches(str(value)[:LONGEST_QUOTE], choices, n=1, cutoff=CLOSE)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise refuse(value, name, f"one of {', '.join(choices)}{hint}")
    return value


def as_list(value: Any, name: str, limit: str) -> list[Any]:
    """Return the items of a list, tuple or array; [] for None. ValueError for a string, bytes or a mapping."""
    if value is None:
        return []
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise refuse(value, name, limit)
    try:
        return list(value)
    except TypeError:  # a tensor without dimensions
        raise refuse(value, name, limit) from None
