"""Reads JSON schemas for llguidance, so that a schema is kept whole or refused with the place of what cannot be kept.

llguidance refuses most of what it does not support, but not all, and it names no place. `read_schema` refuses what
llguidance 1.9 would accept without keeping it, and adds what its formats of dates and times lack. `locate_error` says
where in a schema something is that llguidance refuses.
"""

import json
import math
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain, islice, product
from typing import Any
from urllib.parse import unquote

from nanovllm.utils.checks import quote

_DICT_KEYWORDS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
"""Keywords whose value is a dict of schemas by name."""

_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
"""Keywords whose value is, or may be, a list of schemas."""

_SCHEMA_KEYWORDS = (
    *("items", "additionalItems", "additionalProperties", "contains"),
    *("not", "if", "then", "else", "propertyNames"),
)
"""Keywords whose value is, or may be, one schema."""

_HOLDERS = frozenset((*_DICT_KEYWORDS, *_LIST_KEYWORDS, *_SCHEMA_KEYWORDS))

_SIZE_KEYWORDS = ("minLength", "maxLength", "minProperties", "maxProperties", "minItems", "maxItems", "uniqueItems")
_NUMBER_KEYWORDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
_SPELLINGS = {
    name.lower(): name
    for name in (*_SIZE_KEYWORDS, *_NUMBER_KEYWORDS, *_SCHEMA_KEYWORDS, *_LIST_KEYWORDS, *_DICT_KEYWORDS)
}
"""Keywords by their lower case. llguidance ignores another spelling of one, such as "maxlength" or "max_length"."""

_REFUSED_KEYWORDS = ("x-guidance", "divisibleBy", "disallow", "extends")
"""llguidance's own keyword, which could make it lenient, and keywords of draft 3, which it ignores."""

_EXACT = 2**53
"""llguidance holds numbers as float64. Below this one all integers are different."""

_UNWRITTEN = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters that would need \\u in a JSON string. See `_ESCAPES` in compiler.py."""

_REAL_DAY = (
    r"^([0-9]{4}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))"
    r"|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
_YEAR_FROM_1 = r"^[0-9]*[1-9][0-9]*-"
_CLOCK_TIME = r"^[^:a-z]*:[^:]*:[0-5][^a-z]*$"
_LABEL = r"([^.]{1,3}|[^.]{2}([^.][^.-]|[^.-]-)[^.]*)"
FORMAT_PATTERNS = {
    "date": (_REAL_DAY, _YEAR_FROM_1),
    "time": (_CLOCK_TIME,),
    "date-time": (_REAL_DAY, _YEAR_FROM_1, _CLOCK_TIME),
    "hostname": (rf"^{_LABEL}(\.{_LABEL})*$", "^.{1,253}$"),
}
"""Patterns that a string of this format must match as well.

llguidance's own formats have 29 days in each February, a year 0, a second 60, and "t" and "z" in lower case. Not all
checkers accept these. Its host names are of any length, and may have "--" after two characters, as in "xn--", where
a name of another script is encoded, which no pattern can check.
"""

_SPACES = "\\t-\\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_TRANSLATED = {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]", r"\<": "<", r"\>": ">"}
"""Escapes of ECMAScript in Rust's syntax. In Rust U+0085 is white space, U+FEFF is none, and \\< is a word's start."""

_SECONDS_OF_SEARCH = 0.3
_MOST_JOINS = 32


def read_schema(text: str) -> dict[str, Any]:
    """Return the schema that is written in text, changed for llguidance.

    Raises:
        ValueError: the text is not a JSON object, or llguidance would not keep a part of it, whose place is named.
    """
    try:
        schema: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"it is {quote(schema)}; it must be an object")
    names_draft = "$schema" in schema
    try:
        parts = list(_find_parts(schema))
        for place, part in parts:
            if reason := _find_unkept(part, names_draft):
                raise ValueError(f"at {place}: {reason}")
            try:
                _change_part(part)
            except ValueError as why:
                raise ValueError(f"at {place}: {why}") from None
        _include_bounds([part for _, part in parts])
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return schema


def _change_part(part: dict[str, Any]) -> None:
    """Change the formats, patterns and multiples of one schema for llguidance.

    Raises:
        ValueError: a pattern cannot be kept.
    """
    more: list[Any] = [{"pattern": pattern} for pattern in FORMAT_PATTERNS.get(str(part.get("format")), ())]
    multiple = _read_number(part.get("multipleOf"))
    if multiple is not None and multiple > 0 and math.isfinite(multiple) and not multiple.is_integer():
        _move_bounds_to_multiples(part, Fraction(str(multiple)))
        more.append({"anyOf": [{"maximum": -multiple}, {"minimum": 0}]})
    if more and isinstance(part.get("allOf", []), list):
        part["allOf"] = [*part.get("allOf", []), *more]
    if isinstance(part.get("pattern"), str):
        part["pattern"] = _translate(part["pattern"])
    if isinstance(part.get("patternProperties"), dict):
        part["patternProperties"] = {_translate(name): one for name, one in part["patternProperties"].items()}


def _move_bounds_to_multiples(part: dict[str, Any], multiple: Fraction) -> None:
    """Write the bounds beside a multipleOf so that llguidance loses no multiple.

    It writes multiples of 0.25 with two decimals. But above an excluded bound it takes no 0 at the end (nor between -1
    and 0, if a range begins below 0 and ends above it: see the anyOf of `_change_part`), and of the bound that is
    farther from 0 it takes no beginning, and no more zeros. So the bound that is nearer to 0 becomes the first
    multiple, and the other one the first multiple beyond, which is excluded.
    """
    for kind, sign in (("Minimum", 1), ("Maximum", -1)):
        names = (kind.lower(), f"exclusive{kind}")
        known, excluded = (_read_number(part.get(name)) for name in names)
        steps = []
        if known is not None and abs(known) < _EXACT:
            steps.append(math.ceil(sign * Fraction(str(known)) / multiple))
        if excluded is not None and abs(excluded) < _EXACT:
            steps.append(math.floor(sign * Fraction(str(excluded)) / multiple) + 1)
        if not steps or part.get(names[1]) is True:
            continue
        first = max(steps)
        part.pop(names[first >= 0], None)
        part[names[first < 0]] = float(sign * multiple * (first - (first < 0)))


def _find_parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what `walk_schema` yields, and then the schemas in other places that a $ref leads to, as #/components."""
    seen: set[int] = set()
    targets: list[tuple[str, Any]] = [("#", schema)]
    for start, target in targets:
        if id(target) in seen:
            continue
        for place, part in walk_schema(target, start):
            seen.add(id(part))
            ref = part.get("$ref")
            if isinstance(ref, str) and ref.startswith("#/"):
                targets.append((ref, _follow(schema, ref)))
            yield place, part


def _follow(schema: Any, pointer: str) -> Any:
    """Return the value that a JSON pointer leads to; None if it leads nowhere."""
    for key in unquote(pointer).split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
            schema = schema[int(name)]
        else:
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def _include_bounds(parts: Sequence[dict[str, Any]]) -> None:
    """Write excluded bounds that llguidance would not keep as bounds that are not excluded.

    It takes 1 for a number above 1 that is at most 1.5, say: the excluded bound is whole, and the other one farther
    from 0 by less than 1. It also takes a bound of 2**53 or more, where its step of 1 is no number of float64. allOf,
    anyOf and $ref may join the bounds of any two parts, so all parts are looked at. The new bound is as near to the old
    one as float64 can tell, or a billionth of the way to the other bound.
    """
    for kind, opposite, sign in (("Minimum", "Maximum", 1), ("Maximum", "Minimum", -1)):
        excluding = f"exclusive{kind}"
        others = [_read_number(part.get(name)) for part in parts for name in (opposite.lower(), f"exclusive{opposite}")]
        ahead = sorted(sign * other for other in others if other is not None)
        for part in parts:
            known = _read_number(part.get(kind.lower()))
            bound = known if part.get(excluding) is True else _read_number(part.get(excluding))  # draft 4 has True
            if bound is None or not bound.is_integer():
                continue
            nearest = bisect_right(ahead, sign * bound)
            gap = ahead[nearest] - sign * bound if nearest < len(ahead) else 1.0
            if (gap < 1 and sign * bound >= 0) or abs(bound) >= _EXACT:
                next_one = math.nextafter(bound, sign * math.inf)
                moved = sign * max(sign * next_one, sign * bound + min(gap, 1.0) / 1e9)
                del part[excluding]
                part[kind.lower()] = moved if known is None else sign * max(sign * known, sign * moved)


def _read_number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _translate(pattern: str) -> str:
    """Return a pattern of ECMAScript in Rust's syntax. llguidance itself translates \\d and \\w.

    In Rust a class may hold others, and &&, -- and ~~ join them. No class holds U+0000, which cannot be written: of a
    class with all control characters llguidance takes each escape, also \\" of [^"].

    Raises:
        ValueError: it has [] or [^], an empty class in ECMAScript, which Rust and Python take for the start of one.
    """
    parts = [""]
    is_class = False
    for token in re.findall(r"\\.|\[\^?|.", pattern, re.DOTALL):
        if is_class and token == "]":
            if parts[-1].startswith("[["):
                raise ValueError(f"the pattern {quote(pattern)} has an empty class: write \\[ and \\] for brackets")
            parts.append(r"]&&[^\x00]]")
            is_class = False
        elif is_class and (token[0] == "[" or (token in "&-~" and token == parts[-1])):
            parts.append(f"\\{token}")
        elif token[0] == "[":
            parts.append(f"[{token}")
            is_class = True
        else:
            parts.append(_TRANSLATED.get(token, token))
    return "".join(parts)


def walk_schema(schema: Any, place: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the JSON pointer and the value of every schema within a schema, the inner ones first, the whole one last.

    Schemas that are True or False are left out.
    """
    if not isinstance(schema, dict):
        return
    if not _HOLDERS.isdisjoint(schema):  # most schemas hold no others
        inner: list[tuple[str, Any]] = []
        for name in _DICT_KEYWORDS:
            if isinstance(parts := schema.get(name), dict):
                inner += [(f"{name}/{key.replace('~', '~0').replace('/', '~1')}", part) for key, part in parts.items()]
        for name in _LIST_KEYWORDS:
            if isinstance(parts := schema.get(name), list):
                inner += [(f"{name}/{i}", part) for i, part in enumerate(parts)]
        for name, part in (*inner, *((name, schema.get(name)) for name in _SCHEMA_KEYWORDS)):
            yield from walk_schema(part, f"{place}/{name}")
    yield place, schema


def _find_unkept(schema: Mapping[str, Any], names_draft: bool) -> str | None:
    """Say what llguidance would accept of one schema, but not keep; None if there is nothing.

    Args:
        names_draft: whether the whole schema says of which draft it is ("$schema").
    """
    for name in schema:
        known = _SPELLINGS.get(name.replace("_", "").lower())
        if name in _REFUSED_KEYWORDS or (known and name != known):
            return f"{name} is not supported" + (f"; did you mean {known}?" if known else "")
    ref = schema.get("$ref")
    if isinstance(ref, str) and "#/" in ref[1:]:
        return f"$ref is {quote(ref)}; a place in this schema begins with #/"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return f"required is {quote(required)}; it must be a list of names"
    if isinstance(schema.get("items"), list) and not names_draft:
        return 'items is a list, as before draft 2020-12: write prefixItems, or name the draft in "$schema"'
    least = schema.get("minProperties", 0)
    if isinstance(least, int | float) and least > len(required) + 1:
        return f"minProperties is {least}; it may be at most one more than the required ones, {len(required)}"
    for name in _NUMBER_KEYWORDS:
        bound = schema.get(name)
        if isinstance(bound, int) and abs(bound) > _EXACT:
            return f"{name} is {quote(bound)}; integers may be at most 2**53"
        if isinstance(bound, bool) and name.startswith("exclusive") and not names_draft:
            return f'{name} is {bound}, as in draft 4: give the number, or name the draft in "$schema"'
        if isinstance(bound, float) and name != "multipleOf" and (bound if "inimum" in name else -bound) >= 2**63:
            return f"{name} is {bound}; it must be within 64-bit integers"
    if not _can_be_written([schema.get("const"), schema.get("enum")]):
        return "const and enum may have numbers below 2**53, and of control characters \\b, \\t, \\n, \\f and \\r"
    return None


def list_probes(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the places of objects that may have a comma and then no name, each with a schema that shows it.

    llguidance lets a comma come after the last listed name if there are patterns, also where these match no other name.
    With the schema, in which all values are null, the compiler asks whether they do.
    """
    parts = list(_find_parts(schema))
    if not any(part.get("patternProperties") for _, part in parts):
        return
    known = set()
    for place, part in parts:
        for members in _list_joins(part, schema):
            probe = _make_probe(members)
            text = json.dumps(probe)
            if probe is not None and text not in known:
                known.add(text)
                yield place, probe


def _list_joins(schema: Any, whole: dict[str, Any], seen: frozenset[int] = frozenset()) -> Iterator[list[Any]]:
    """Yield lists of schemas that one value may have to fit together: at most 32, from at most 32 levels.

    A schema stands together with all of its allOf, what its $ref leads to, and one option of its anyOf and its oneOf.
    """
    if not isinstance(schema, dict) or id(schema) in seen or len(seen) == _MOST_JOINS:
        yield []
        return
    groups = [[part] for part in _read(schema, "allOf", list)]
    groups += [options for name in ("anyOf", "oneOf") if (options := _read(schema, name, list))]
    if "$ref" in schema:
        groups.append([_follow(whole, str(schema["$ref"]))])
    choices = []
    for group in groups:
        joins = chain.from_iterable(_list_joins(option, whole, seen | {id(schema)}) for option in group)
        choices.append(list(islice(joins, _MOST_JOINS)))
    for chosen in islice(product(*choices), _MOST_JOINS):
        yield [schema, *chain.from_iterable(chosen)]


def _make_probe(members: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return a schema of objects that have all names which the schemas list, and further ones as all of them allow.

    None if there are no patterns, or if any other name may come.
    """
    null = {"type": "null"}
    names: dict[str, Any] = {}
    parts = []
    for member in members:
        listed = dict.fromkeys(_read(member, "properties", dict), null)
        patterns = {
            name: null if one is not False else one for name, one in _read(member, "patternProperties", dict).items()
        }
        is_open = member.get("additionalProperties") is not False
        part = {"properties": listed, "patternProperties": patterns, "additionalProperties": is_open}
        if "maxProperties" in member:
            part["maxProperties"] = member["maxProperties"]
        parts.append(part)
        names |= listed | dict.fromkeys(_read(member, "required", list), null)
    has_patterns = any(part["patternProperties"] for part in parts)
    if not names or not has_patterns or all(part["additionalProperties"] for part in parts):
        return None
    return {"type": "object", "properties": names, "required": list(names), "allOf": parts}


def _read(schema: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """Return the value of a keyword; an empty one if there is none, or none of this kind."""
    value = schema.get(name)
    return value if isinstance(value, kind) else kind()


def _can_be_written(value: Any) -> bool:
    """Tell whether llguidance writes every number and string in a JSON value as it is."""
    if isinstance(value, dict | list):
        return all(map(_can_be_written, value.values() if isinstance(value, dict) else value))
    if isinstance(value, str):
        return not _UNWRITTEN.search(value)
    return not isinstance(value, int | float) or abs(value) < _EXACT


def locate_error(schema: dict[str, Any], error: str, get_error: Callable[[Any], str]) -> str:
    """Return the JSON pointer of the innermost schema that alone gives the same error; "#" if there is none.

    Each part is tried with the definitions that it may refer to, so the search takes long in a large schema. It ends
    after 0.3 s.

    Args:
        error: the error of the whole schema.
        get_error: returns the error of a schema by itself; "" for a good one.
    """
    shared = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}
    deadline = time.monotonic() + _SECONDS_OF_SEARCH
    for place, part in walk_schema(schema):
        if time.monotonic() > deadline:
            break
        if get_error({**shared, **part}).split("\n")[0] == error.split("\n")[0]:
            return place
    return "#"
