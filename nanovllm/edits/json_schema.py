"""JSON schemas on their way to llguidance, which keeps what it knows and refuses the rest: almost, and without a place.

`read_schema` refuses what llguidance 1.9 would take and not keep, and adds what its formats of dates and times lack;
`find_place` says where in a schema something is that llguidance refuses.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nanovllm.utils.checks import quote

_OF_ONE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_OF_MANY = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
"""Keywords that hold a schema, a list of them, or a dict of them."""

_OTHERS = ("minLength", "maxLength", "minProperties", "maxProperties", "minItems", "maxItems", "uniqueItems")
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
_BY_LETTERS = {name.lower(): name for name in (*_OTHERS, *_BOUNDS, *_OF_ONE, *_OF_MANY, *_OF_NAMED)}
"""Keywords by their lower case: another spelling is a mistake, for which nothing would be kept."""

_IGNORED = ("x-guidance", "divisibleBy", "disallow", "extends")
"""Keywords of drafts before the fourth, and llguidance's own, which could make it lenient."""

_EXACT = 2**53
"""llguidance holds numbers as float64; below this one all integers are different."""

_REAL_DAY = (
    r"^([0-9]{4}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_YEAR_FROM_1 = r"^[0-9]*[1-9][0-9]*-"
_NO_LEAP_SECOND = r"^[^:]*:[^:]*:[0-5]"
_ALSO = {
    "date": (_REAL_DAY, _YEAR_FROM_1),
    "time": (_NO_LEAP_SECOND,),
    "date-time": (_REAL_DAY, _YEAR_FROM_1, _NO_LEAP_SECOND),
}
"""Patterns that a format is to match as well: llguidance has 29 days in each February, a year 0, a second 60."""


_SECONDS_OF_SEARCH = 0.3


def read_schema(text: str) -> dict[str, Any]:
    """The schema of a text, ready for llguidance; ValueError, with the place, for what it would not keep."""
    try:
        schema: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"it is {quote(schema)}; it must be an object")
    is_old = "$schema" in schema
    try:
        for place, part in subschemas(schema):
            if reason := _not_kept(part, is_old):
                raise ValueError(f"at {place}: {reason}")
            if (patterns := _ALSO.get(str(part.get("format")))) and isinstance(part.get("allOf", []), list):
                part["allOf"] = [*part.get("allOf", []), *({"pattern": pattern} for pattern in patterns)]
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return schema


def subschemas(schema: Any, place: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in a schema that is an object, the inner ones first, with its JSON pointer."""
    if not isinstance(schema, dict):
        return
    inner: list[tuple[str, Any]] = []
    for name in _OF_NAMED:
        if isinstance(parts := schema.get(name), dict):
            inner += [(f"{name}/{key.replace('~', '~0').replace('/', '~1')}", part) for key, part in parts.items()]
    for name in _OF_MANY:
        if isinstance(parts := schema.get(name), list):
            inner += [(f"{name}/{i}", part) for i, part in enumerate(parts)]
    for name, part in (*inner, *((name, schema.get(name)) for name in _OF_ONE)):
        yield from subschemas(part, f"{place}/{name}")
    yield place, schema


def _not_kept(schema: Mapping[str, Any], is_old: bool) -> str | None:
    """What llguidance would take of one schema, and not keep."""
    for name in schema:
        known = _BY_LETTERS.get(name.replace("_", "").lower())
        if name in _IGNORED or (known and name != known):
            return f"{name} is not supported" + (f"; did you mean {known}?" if known else "")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"required is {quote(required)}; it must be a list of names"
    if isinstance(schema.get("items"), list) and not is_old:
        return 'items is a list, as before draft 2020-12: write prefixItems, or name the draft in "$schema"'
    least = schema.get("minProperties", 0)
    if isinstance(least, int | float) and least > len(required) + 1:
        return f"minProperties is {least}; it may be at most one more than the required ones, {len(required)}"
    for name in _BOUNDS:
        bound = schema.get(name)
        if isinstance(bound, int) and abs(bound) > _EXACT:
            return f"{name} is {quote(bound)}; integers may be at most 2**53"
        if isinstance(bound, float) and name != "multipleOf" and (bound if "inimum" in name else -bound) >= 2**63:
            return f"{name} is {bound}; it must be within 64-bit integers"
    if not _is_exact([schema.get("const"), schema.get("enum")]):
        return "const and enum may have numbers below 2**53"
    return None


def _is_exact(value: Any) -> bool:
    """Whether llguidance writes every number in a value as it is."""
    if isinstance(value, dict | list):
        return all(map(_is_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int | float) or abs(value) < _EXACT


def find_place(schema: dict[str, Any], error: str, error_of: Callable[[Any], str]) -> str:
    """Where a schema has what makes its error: the innermost place that alone gives the same, "#" if it is not found.

    As each place is tried with all that it may refer to, a large schema's are searched for a limited time.

    Args:
        error_of: the error of a schema by itself; "" for a good one.
    """
    shared = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}
    deadline = time.monotonic() + _SECONDS_OF_SEARCH
    for place, part in subschemas(schema):
        if time.monotonic() > deadline:
            break
        if error_of({**shared, **part}).split("\n")[0] == error.split("\n")[0]:
            return place
    return "#"
