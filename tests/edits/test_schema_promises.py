"""Each promise of docs/structured.md, beside jsonschema: what a schema accepts can be written, and nothing else."""

import json
import math
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import FormatError, ValidationError
from jsonschema.validators import extend
from llguidance import LLMatcher, LLTokenizer

from nanovllm.features.edits.compiler import compile_grammar, read_grammar

TOKENIZER = LLTokenizer("byte")
NAMES = ["a", "b", "ab", "é", "😀", 'b"c']
LETTERS = ["a", "é", "日", "😀", '"', "\\", "\n"]
MOST_VALUES = 60

PATTERNS = {
    "^a": ["a", "ab", "ba", "", "é", "aé", "A"],
    "b$": ["b", "ab", "ba", ""],
    "[0-9]": ["1", "a1", "a", ""],
    "é": ["é", "aéb", "e", "É", "e\u0301"],
    "^(a|😀)+$": ["a", "😀", "a😀", "", "b", "a😀b"],
    "^.{2}$": ["ab", "a😀", "é", "éa", "abc"],
    "^\\d{2,3}$": ["12", "1", "123", "1234"],
    "\\S": ["", " ", "a", " a"],
    '^[^"\\\\]*$': ["", "a", '"', "\\", "a\\", "é\n"],
    "^a|b$": ["a", "ab", "cb", "ac", "cac"],
    "^$": ["", "a", " "],
    "^[à-ž]{1,2}$": ["à", "ž", "éé", "a", "ééé"],
}
"""Patterns that Python and ECMAScript read alike but for $, with strings on both sides of them."""

NAME_PATTERNS = {
    "^a": ["a", "ab", "aé"],
    "^b": ["b", "ba", 'b"c'],
    "é$": ["é", "bé", "aé"],
    "^.$": ["a", "é", "😀"],
    "^[bc]+$": ["b", "cb"],
    "^a$": ["a"],
    '[^"a]': ["b", "a", '"', 'a"'],
}

FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (
        ["2024-02-29", "2000-02-29", "2023-01-31", "9999-12-31", "0001-01-01"],
        ["2023-02-29", "1900-02-29", "2023-13-01", "2023-04-31", "0000-01-01", "2023-1-01", "2023-01-00"],
    ),
    "time": (
        ["23:59:59Z", "12:00:00+01:00", "12:00:00.5Z", "00:00:00-23:59"],
        ["24:00:00Z", "12:00:60Z", "12:60:00Z", "12:00:00", "12:00:00+24:00", "12:00:00z", "12:00Z", "12:00:00.Z"],
    ),
    "date-time": (
        ["2024-02-29T00:00:00Z", "2024-02-29T00:00:00.123+05:30"],
        ["2023-02-29T00:00:00Z", "2024-02-29 00:00:00Z", "2024-02-29T24:00:00Z", "2024-02-29T00:00:00", "2024-02-29"],
    ),
    "duration": (
        ["P1D", "P1Y0M3D", "P1Y2M3DT4H5M6S", "P1W", "PT1H", "P1DT2S"],
        ["P", "PT", "P1W1D", "P1H", "P1YT", "1D", "P1Y3D", "P1.5D", "PT1H3S"],
    ),
    "email": (["a@b.c", "a.b+c@d-e.f"], ["@b", "a", "a@", "a..b@c.d", ".a@b.c", "a@b..c", "a b@c.d", "a@-b.c"]),
    "hostname": (
        ["a", "a.b", "a-b", "1.2", "a" * 63],
        ["-a", "a-", "a..b", "a.b.", "a_b", "a" * 64, "é", "é.a", "", "xn--a"],
    ),
    "ipv4": (["1.2.3.4", "255.255.255.255", "0.0.0.0"], ["256.1.1.1", "1.2.3", "01.2.3.4", "1.2.3.4.5", "1.2.3.4 "]),
    "ipv6": (
        ["::", "::1", "1:2:3:4:5:6:7:8", "1::8", "ABCD::ef01"],
        ["1::2::3", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "12345::", "::ffff:1.2.3.4", "fe80::1%eth0", "g::", ":"],
    ),
    "uuid": (
        ["12345678-1234-1234-1234-123456789012", "ABCDEFab-1234-1234-1234-123456789012"],
        [
            "12345678-1234-1234-1234-12345678901",
            "12345678123412341234123456789012",
            "g2345678" + "-1234" * 3 + "0" * 12,
        ],
    ),
    "uri": (
        ["http://a.b/c", "a:b", "http://[::1]/", "urn:x:y", "http://a/%20", "http://a?b#c"],
        ["no scheme", "/rel", "http://a b", "http://é.com", "http://a/%zz", "1a:b", "http://a#b#c", "é", "a"],
    ),
}
"""Strings that fit a format, and strings that do not, or are left out by docs/structured.md."""


class Formats(FormatChecker):
    """jsonschema's checker, which is wrong about a few of the strings above: it asks an e-mail for "@" alone."""

    checkers = Draft202012Validator.FORMAT_CHECKER.checkers

    def check(self, instance: object, format: str) -> None:
        if instance in FORMATS[format][1]:
            raise FormatError(f"no {format}")
        super().check(instance, format)


def check_pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[ValidationError]:
    """Keep a pattern as ECMAScript reads it: Python's $ also stands before a last line feed."""
    if isinstance(value, str) and not re.search(pattern.replace("$", r"\Z"), value):
        yield ValidationError(pattern)


Validator = extend(Draft202012Validator, {"pattern": check_pattern})


@lru_cache
def make_validator(text: str) -> Any:
    return Validator(json.loads(text, parse_float=Decimal), format_checker=Formats())


def judge(schema: Any, value: Any, definitions: Any) -> bool:
    """Return whether jsonschema accepts a value, with decimals in place of floats."""
    validator = make_validator(json.dumps({"allOf": [schema], "$defs": definitions}))
    return bool(validator.is_valid(json.loads(json.dumps(value), parse_float=Decimal)))


# ---- Values around the bounds of a schema


def follow(schema: Any, definitions: Any) -> dict[str, Any]:
    """Return a schema with what its $ref leads to in allOf."""
    if isinstance(schema, bool):
        return {}
    if "$ref" not in schema:
        return dict(schema)
    rest = {name: value for name, value in schema.items() if name != "$ref"}
    return {**rest, "allOf": [*rest.get("allOf", []), definitions["x"]]}


def list_around(schema: Any, definitions: Any, rng: random.Random) -> list[Any]:
    """Return values at the bounds of a schema, just inside of them and just outside, and some of other types."""
    part = follow(schema, definitions)
    values: list[Any] = [None, True, 1, "a", [], {}]
    for inner in (*part.get("anyOf", []), *part.get("oneOf", []), *part.get("allOf", [])):
        values += list_around(inner, definitions, rng)
    for constant in (*part.get("enum", []), *([part["const"]] if "const" in part else [])):
        values += [constant, *list_neighbours(constant)]
    values += list_numbers(part)
    values += list_strings(part, rng)
    values += list_arrays(part, definitions, rng)
    values += list_objects(part, definitions, rng)
    unique = {json.dumps(value): value for value in map(shorten, values)}
    return rng.sample(list(unique.values()), min(len(unique), MOST_VALUES))


def shorten(value: Any) -> Any:
    """Return a value whose whole numbers are integers: "1.0" is not how an integer is written."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [shorten(one) for one in value]
    return {name: shorten(one) for name, one in value.items()} if isinstance(value, dict) else value


def list_neighbours(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, int | float):
        return [value + 1, str(value), bool(value)]
    if isinstance(value, str):
        return [f"{value}a", value[:-1], [value]]
    if isinstance(value, list):
        return [[*value, 1], value[:-1]]
    return [{**value, "q": 1}, dict(list(value.items())[1:])] if isinstance(value, dict) else [0, "null"]


def list_numbers(part: dict[str, Any]) -> list[float]:
    step = part.get("multipleOf", 1)
    bounds = [part[name] for name in part if name.lower().endswith("imum")]
    nearby = [round(bound + distance, 6) for bound in bounds for distance in (0, 1, -1, 0.5, -0.5, 0.001, -0.001)]
    first = math.floor(min(bounds, default=0) / step)
    last = math.ceil(max(bounds, default=0) / step)
    nearest = {*range(first - 1, first + 3), *range(last - 2, last + 2)}
    return [*nearby, *(round(number * step, 6) for number in nearest), round(step / 2, 6)]


def list_strings(part: dict[str, Any], rng: random.Random) -> list[str]:
    fitting, others = FORMATS.get(part.get("format", ""), ([], []))
    strings = [*PATTERNS.get(part.get("pattern", ""), []), *fitting, *others]
    for bound in (part.get("minLength"), part.get("maxLength")):
        for size in () if bound is None else range(max(bound - 1, 0), bound + 2):
            strings += [letter * size for letter in LETTERS]
            strings.append("".join(rng.choices(LETTERS, k=size)))
    return strings


def pick(schema: Any, definitions: Any, rng: random.Random, good: bool = True) -> Any:
    """Return a value near a schema, one that fits if there is one."""
    values = list_around(schema, definitions, rng)
    fitting = (value for value in values if good and judge(schema, value, definitions))
    return next(fitting, values[0])


def list_arrays(part: dict[str, Any], definitions: Any, rng: random.Random) -> list[list[Any]]:
    if {"items", "prefixItems", "minItems", "maxItems"}.isdisjoint(part):
        return []
    first = part.get("prefixItems", [])
    sizes = {len(first), len(first) + 1}
    for bound in (part.get("minItems", 0), part.get("maxItems", 2)):
        sizes |= set(range(max(bound - 1, 0), bound + 2))
    arrays = []
    for size in sizes:
        schemas = [*first, *[part.get("items", True)] * size][:size]
        array = [pick(schema, definitions, rng) for schema in schemas]
        arrays.append(array)
        for i, schema in enumerate(schemas):
            arrays.append([*array[:i], pick(schema, definitions, rng, good=False), *array[i + 1 :]])
    return arrays


def list_objects(part: dict[str, Any], definitions: Any, rng: random.Random) -> list[dict[str, Any]]:
    keywords = {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"}
    if keywords.isdisjoint(part):
        return []
    listed = part.get("properties", {})
    patterns = part.get("patternProperties", {})
    required = part.get("required", [])
    others = ["z", "é", *(name for pattern in patterns for name in NAME_PATTERNS[pattern])]

    def find_schema(name: str) -> Any:
        found = (schema for pattern, schema in patterns.items() if re.search(pattern, name))
        return listed[name] if name in listed else next(found, part.get("additionalProperties", True))

    sets = [required, required[1:], [*listed, *required], *([*required, name] for name in (*listed, *others))]
    sets += [rng.sample(others, min(size, len(others))) for size in (1, 2, 3)]
    objects = []
    for names in sets:
        made = {name: pick(find_schema(name), definitions, rng) for name in names[:4]}
        objects.append(made)
        if made:
            name = rng.choice(list(made))
            objects.append({**made, name: pick(find_schema(name), definitions, rng, good=False)})
    return objects


# ---- What can be written


def make_matcher(schema: Any) -> LLMatcher:
    grammar, _ = read_grammar("json", json.dumps(schema, ensure_ascii=False))
    return compile_grammar(TOKENIZER, "json", grammar)


def feed(matchers: list[LLMatcher], text: str) -> list[LLMatcher]:
    """Return copies of those matchers that take a text, after it."""
    spelled = list(text.encode())
    copies = [matcher.deep_copy() for matcher in matchers]
    return [copy for copy in copies if copy.try_consume_tokens(spelled) == len(spelled)]


def write(matchers: list[LLMatcher], value: Any) -> list[LLMatcher]:
    """Return the matchers after a value, in every order of its names, and with zeros at the end of its decimals."""
    if isinstance(value, dict):
        return write_members(feed(matchers, "{"), value, "")
    if isinstance(value, list):
        matchers = feed(matchers, "[")
        for i, one in enumerate(value):
            matchers = write(feed(matchers, ", ") if i else matchers, one)
        return feed(matchers, "]")
    text = json.dumps(value, ensure_ascii=False)
    texts = [text + "0" * more for more in range(3)] if isinstance(value, float) else [text]
    return [after for spelled in texts for after in feed(matchers, spelled)]


def write_members(matchers: list[LLMatcher], rest: dict[str, Any], comma: str) -> list[LLMatcher]:
    if not rest:
        return feed(matchers, "}")
    after = []
    for name, value in rest.items() if matchers else ():
        inner = write(feed(matchers, f"{comma}{json.dumps(name, ensure_ascii=False)}: "), value)
        after += write_members(inner, {other: rest[other] for other in rest if other != name}, ", ")
    return after[:2]


def can_write(matcher: LLMatcher, value: Any) -> bool:
    return any(after.is_accepting() for after in write([matcher], value))


# ---- Any schema


def maybe(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=optional)


def add_type(kind: str, limits: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return limits.map(lambda drawn: {"type": kind, **drawn})


bounds = st.sampled_from([0, 1, -1, 2, 3, 10, -10, 0.5, -0.5, 1.5, 0.1, -2.5, 9.99, 100])
sizes = st.integers(0, 3)
ranges = dict.fromkeys(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], bounds)
patterns = st.sampled_from(list(PATTERNS))
lengths: dict[str, st.SearchStrategy[Any]] = {"minLength": sizes, "maxLength": sizes}
CONSTANTS = [
    1,
    "1",
    None,
    [1, [2]],
    {"a": 2, "b": None},
    "é",
    "😀\n",
    1.5,
    True,
    0,
    "",
    'a"b\\',
    [],
    {},
    -1,
    1000,
    "ab",
]
FIXED: list[Any] = [
    {"type": "null"},
    {"type": "boolean"},
    True,
    False,
    {},
    {"type": ["string", "null"], "maxLength": 1},
    {"type": ["integer", "boolean"], "minimum": 1},
    {"type": ["array", "object"], "maxItems": 1, "maxProperties": 0},
    {"minimum": 2, "maxLength": 1, "minItems": 1, "required": ["a"]},
    {"format": "date"},
]
leaves: st.SearchStrategy[Any] = st.one_of(
    add_type("number", maybe(**ranges)),
    add_type("number", maybe(**ranges, multipleOf=st.sampled_from([1, 2, 0.5, 0.1, 0.25, 1.5]))),
    add_type("integer", maybe(**ranges, multipleOf=st.sampled_from([1, 2, 5, 0.5]))),
    add_type("string", maybe(**lengths, pattern=patterns)),
    add_type("string", maybe(format=st.sampled_from(list(FORMATS)), pattern=st.sampled_from(["[0-9]", "^a"]))),
    st.lists(st.sampled_from(CONSTANTS), min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.sampled_from(CONSTANTS).map(lambda value: {"const": value}),
    st.sampled_from(FIXED),
)


def composed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    arrays = maybe(items=inner, prefixItems=some, minItems=sizes, maxItems=sizes)
    members = maybe(
        properties=st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        required=st.lists(st.sampled_from(NAMES), unique=True, max_size=2),
        additionalProperties=inner | st.booleans(),
        patternProperties=st.dictionaries(st.sampled_from(list(NAME_PATTERNS)), inner, min_size=1, max_size=2),
        minProperties=sizes,
        maxProperties=sizes,
    )
    joined = st.one_of(maybe(anyOf=some), maybe(oneOf=some), maybe(allOf=some), st.just({"$ref": "#/$defs/x"}))
    parts = st.tuples(inner, joined).map(lambda pair: {**(pair[0] if isinstance(pair[0], dict) else {}), **pair[1]})
    return st.one_of(add_type("array", arrays), add_type("object", members), parts)


NAMED = (
    "oneOf",
    "disjoint",
    "only supported when",
    "it may be at most one more",
    "patternProperties",
    "Unable to determine",
)
"""Words of the errors for what docs/structured.md says is refused."""


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(schema=st.recursive(leaves, composed, max_leaves=5), target=leaves)
@example(schema={"type": "number", "multipleOf": 0.25, "exclusiveMinimum": 7}, target=True)
@example(schema={"type": "number", "multipleOf": 0.01, "minimum": -1, "maximum": 0.5}, target=True)
@example(schema={"type": "number", "minimum": 0.5, "exclusiveMaximum": 1}, target=True)
@example(schema={"type": "object", "patternProperties": {'[^"a]': {"const": 1}}}, target=True)
@example(
    schema={"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 3, "maxProperties": 4},
    target=True,
)
@example(schema={"$ref": "#/$defs/x", "maxLength": 2}, target={"type": "string", "pattern": '^[^"\\\\]*$'})
def test_what_jsonschema_accepts_can_be_written_and_what_it_refuses_cannot(schema: Any, target: Any) -> None:
    assume(isinstance(schema, dict))
    definitions = {"x": target}
    values = list_around(schema, definitions, random.Random(0))
    try:
        matcher = make_matcher({**schema, "$defs": definitions})
    except ValueError as error:
        if not any(word in str(error) for word in NAMED):
            assert not [value for value in values if judge(schema, value, definitions)], error
        return
    text = json.dumps([schema, target])
    may_lose = "multipleOf" in text and any(join in text for join in ("allOf", "anyOf", "oneOf", "$ref"))
    for value in values:
        is_accepted = judge(schema, value, definitions)
        assert can_write(matcher, value) == is_accepted or (may_lose and is_accepted), value


@pytest.mark.parametrize("name", FORMATS)
def test_the_samples_of_a_format_are_on_their_side_of_it(name: str) -> None:
    matcher = make_matcher({"type": "string", "format": name})
    fitting, others = FORMATS[name]
    plain = Draft202012Validator.FORMAT_CHECKER
    assert [text for text in (*fitting, *others) if can_write(matcher, text)] == fitting
    assert all(plain.conforms(text, name) for text in fitting)
