"""Refusing names that nobody defined, with the nearest one that somebody did."""

import difflib
from collections.abc import Iterable, Mapping


def refuse_unknown(given: Iterable[str], known: Iterable[str], what: str, hints: Mapping[str, str] = {}) -> None:
    """Raise a TypeError for the first name of given that is not in known.

    Args:
        what: what the names belong to, as the message should call it: "SamplingParams", "LLM".
        hints: for names that are missing on purpose, what to say of them.
    """
    known = list(known)
    for name in given:
        if name in known:
            continue
        if name in hints:
            raise TypeError(f"{what} has no option {name!r}: {hints[name]}")
        nearest = difflib.get_close_matches(name, known, n=1)
        suggestion = f"; did you mean {nearest[0]!r}?" if nearest else f"; the options are {', '.join(known)}"
        raise TypeError(f"{what} has no option {name!r}{suggestion}")
