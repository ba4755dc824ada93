"""Draws JSON schemas, ordinary and hostile ones, and tries each of them. Run as a program, it is one victim:

    python -m helpers.hostile_schemas FIRST COUNT

It prints a line for each schema: its number, and "kept", "unfinished", "refused" or "gave up".
"""

import json
import random
import resource
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

import nanovllm
from nanovllm.features.edits.grammars import Grammars, fill_masks
from nanovllm.text.tokenizer import Tokenizer

VOCAB_SIZE = 664
EOS = 663
BYTES = 4 << 30
"""Address space that a victim may take beside what it has at its start."""

LONGEST_WALK = 150
NAMES = ["a", "b", "é", "x y", '"q"', "", "a/b~c"]
VALUES: list[Any] = ["é", 'a"b', "\\", "\n", "日本", 1, 2.5, None, True, [1], {"a": 1}]
PATTERNS = ["^[a-c]{2,5}$", r"^\d{3}$", "^(x|yy)+$", r"^\w{1,4}$", "ab", "b$"]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
RECURSIVE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "n": {"anyOf": [{"$ref": "#/$defs/r"}, {"type": "null"}]}},
    "required": ["v"],
    "additionalProperties": False,
}

Schema = dict[str, Any]
Draw = random.Random

# ---- ordinary schemas


def draw_leaf(draw: Draw) -> Schema:
    kind = draw.choice(["integer", "number", "string", "enum", "const", "format", "pattern", "types", "reference"])
    if kind == "integer":
        limits = {"minimum": draw.randrange(-50, 5), "maximum": draw.randrange(5, 9999)}
        steps = {"multipleOf": draw.choice([2, 3, 7, 25])}
        return {"type": "integer"} | draw.choice([{}, limits, limits, limits | steps])
    if kind == "number":
        return {"type": "number"} | draw.choice([{}, {"exclusiveMinimum": -1.5, "maximum": 7.25}, {"multipleOf": 0.25}])
    if kind == "string":
        return {"type": "string", "minLength": draw.randrange(3), "maxLength": draw.randrange(3, 9)}
    if kind == "format":
        return {"type": "string", "format": draw.choice(FORMATS)}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(PATTERNS), "maxLength": draw.randrange(5, 9)}
    if kind == "enum":
        return {"enum": draw.sample(VALUES, 3)}
    if kind == "const":
        return {"const": draw.choice(VALUES)}
    return draw.choice([{"type": ["boolean", "null"]}, {"$ref": "#/$defs/r"}])


def draw_part(draw: Draw, depth: int = 0) -> Schema:
    """A schema that may use the definition "r"."""
    if depth == 3 or draw.random() < 0.3:
        return draw_leaf(draw)
    kind = draw.choice(["object", "object", "array", "tuple", "any", "one"])
    if kind == "object":
        members = {name: draw_part(draw, depth + 1) for name in draw.sample(NAMES, draw.randrange(1, 4))}
        required = [name for name in members if draw.random() < 0.7]
        others = draw.choice([False, False, {"type": "integer"}])
        return {"type": "object", "properties": members, "required": required, "additionalProperties": others}
    if kind == "array":
        return {"type": "array", "items": draw_part(draw, depth + 1), "maxItems": draw.randrange(1, 4)}
    parts = [draw_part(draw, depth + 1) for _ in range(2)]
    if kind == "tuple":
        return {"type": "array", "prefixItems": parts, "minItems": 2, "items": False}
    return {"anyOf": parts} if kind == "any" else {"oneOf": [{"type": "null"}, {"type": "array", "items": parts[0]}]}


# ---- hostile ones


def draw_size(draw: Draw, most: int) -> int:
    """Small sizes are as likely as large ones: its logarithm is uniform."""
    return int(most ** draw.random())


ODD_VALUES: list[Any] = [-1, 0, 1.5, 10**9, 2**53 + 1, -(2**63), 2**70, 1e-300, 1e308]
ODD_VALUES += [True, "9", None, [], {}, "\ud800"]
ODD_PATTERNS = [
    "(a|b)*a(a|b){30}",
    "((a{1,1000}){1,1000}){1,1000}",
    "((((((a*)*)*)*)*)*)*b",
    r"\p{L}{1,500}\p{Greek}{300}",
    ".{1,100000}",
    r"[^\s\S]",
    "(",
    "(?=a)a",
    r"(a)\1",
    "(" * 300 + "a" + ")" * 300,
    "^(a+)+$",
    r"\x{110000}",
]
KEYWORDS = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "type",
    "enum",
    "const",
    "items",
    "prefixItems",
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "uniqueItems",
    "contains",
    "pattern",
    "format",
    "$ref",
    "$defs",
    "$id",
    "$anchor",
    "x-guidance",
]


def put_odd_values(schema: Schema, draw: Draw) -> Schema:
    """Keywords with values of any kind, at random places."""
    for _ in range(draw.randrange(1, 4)):
        part: Any = schema
        while isinstance(part, dict) and part and draw.random() < 0.6:
            inner = draw.choice(list(part.values()))
            part = inner if isinstance(inner, dict) else part
            if not isinstance(inner, dict):
                break
        if isinstance(part, dict):
            part[draw.choice(KEYWORDS)] = draw.choice(ODD_VALUES)
    return schema


def wrap(schema: Schema, draw: Draw) -> Schema:
    """Deep nesting."""
    definitions = schema.pop("$defs")
    kind = draw.choice(["items", "properties", "anyOf", "allOf", "additionalProperties", "const"])
    for _ in range(draw_size(draw, 900)):
        if kind == "properties":
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        elif kind == "const":
            schema = {"const": [schema.get("const", 1)]}
        else:
            schema = {kind: [schema] if kind.endswith("Of") else schema}
    return schema | {"$defs": definitions}


def add_names(schema: Schema, draw: Draw) -> Schema:
    names = [f"name {i}" for i in range(draw_size(draw, 6000))]
    members = {name: draw_leaf(draw) for name in names}
    return schema | {"type": "object", "properties": members, "required": names[: draw_size(draw, len(names) + 1)]}


def add_patterns(schema: Schema, draw: Draw) -> Schema:
    patterns = [f"{i}[a-z]*" for i in range(draw_size(draw, 300))]
    if draw.random() < 0.5:
        return schema | {"type": "object", "patternProperties": {f"^{pattern}x$": {} for pattern in patterns}}
    return schema | {"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}


def add_odd_pattern(schema: Schema, draw: Draw) -> Schema:
    part = {"type": "string", "pattern": draw.choice(ODD_PATTERNS)} | draw.choice([{}, {"maxLength": 5000}])
    return {"type": "array", "items": part, "$defs": schema["$defs"]}


def chain_references(schema: Schema, draw: Draw) -> Schema:
    """Definitions that refer to the next one, perhaps twice; the last one may refer to the first."""
    count = draw_size(draw, 3000)
    definitions = dict(schema.pop("$defs"))
    for i in range(count):
        step = {"$ref": f"#/$defs/d{i + 1}"}
        members = {"type": "object", "properties": {"a": step, "b": step}, "required": ["a", "b"]}
        definitions[f"d{i}"] = draw.choice([step, {"allOf": [step, step]}, {"anyOf": [step, step]}, members])
    definitions[f"d{count}"] = draw.choice([schema, {"$ref": "#/$defs/d0"}, {"$ref": "#"}, {"$ref": "#/$defs/no"}])
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def add_multiples(schema: Schema, draw: Draw) -> Schema:
    steps = [{"multipleOf": draw_size(draw, 10**7)} for _ in range(draw.randrange(1, 4))]
    return schema | {"type": "integer", "allOf": steps}


def add_repetitions(schema: Schema, draw: Draw) -> Schema:
    definitions = schema.pop("$defs")
    for _ in range(draw.randrange(1, 4)):
        schema = {"type": "array", "items": schema, "maxItems": draw_size(draw, 10**6)}
        schema["minItems"] = draw_size(draw, schema["maxItems"] + 1)
    return schema | {"$defs": definitions}


def add_choices(schema: Schema, draw: Draw) -> Schema:
    constants = [f"value {i}" for i in range(draw_size(draw, 20_000))]
    return draw.choice([schema | {"enum": constants}, schema | {"const": "x" * draw_size(draw, 10**6)}])


DAMAGES: list[Callable[[Schema, Draw], Schema]] = [
    put_odd_values,
    put_odd_values,
    wrap,
    add_names,
    add_patterns,
    add_odd_pattern,
    chain_references,
    add_multiples,
    add_repetitions,
    add_choices,
]


def draw_schema(number: int) -> tuple[Schema, bool]:
    """The schema with this number, and whether it is an ordinary one. Two of three are."""
    draw = random.Random(number)
    schema = deepcopy(draw_part(draw) | {"$defs": {"r": RECURSIVE}})  # what damages it changes it in place
    if number % 3:
        return schema, True
    return draw.choice(DAMAGES)(schema, draw), False


# ---- a victim


class Victim:
    """The grammars of the built-in model."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer(Path(nanovllm.__file__).parent / "assets" / "tiny-qwen3")
        self.grammars = Grammars(self.tokenizer, VOCAB_SIZE, [EOS])
        self._weights = np.ones(VOCAB_SIZE)
        for token, weight in {'"': 30.0, "]": 30.0, "}": 30.0}.items():
            self._weights[self.tokenizer.encode_batch([token], add_special_tokens=False)[0][0]] = weight
        self._weights[EOS] = 100.0

    def try_schema(self, number: int) -> str:
        schema, is_ordinary = draw_schema(number)
        try:
            matcher = self.grammars.compile({"json": schema}).deep_copy()
        except ValueError as error:
            assert 0 < len(str(error)) < 600, "the message is too long"
            return "refused"
        draw = np.random.default_rng(number)
        mask = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
        token_ids: list[int] = []
        while not matcher.is_stopped():
            if len(token_ids) == LONGEST_WALK:
                return "unfinished"
            fill_masks(mask, [(matcher, 0, [])])
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            weights = self._weights[allowed]
            token_id = int(draw.choice(allowed, p=weights / weights.sum()))
            if not matcher.consume_token(token_id) or matcher.is_error():
                return "gave up"
            if token_id != EOS:
                token_ids.append(token_id)
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        value = json.loads(text)
        if is_ordinary:  # Python's re may take for ever with a hostile pattern
            import jsonschema

            validator = jsonschema.Draft202012Validator
            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)
        return "kept"


def main(first: int, count: int) -> None:
    victim = Victim()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    for number in range(first, first + count):
        print(number, victim.try_schema(number), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
