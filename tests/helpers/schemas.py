"""Sixty JSON schemas without an endless output: what has no length of its own has a limit."""

from typing import Any

Schema = dict[str, Any]

BAD_VALUES = {
    "date-time": "2023-02-29T10:00:00Z",
    "time": "24:00:00Z",
    "date": "2023-02-29",
    "duration": "P1H",
    "email": "nobody",
    "hostname": "-a.b",
    "ipv4": "256.1.1.1",
    "ipv6": "1::2::3",
    "uuid": "12345678-1234-1234-1234-12345678901",
    "uri": "no scheme",
}
"""Every format that is kept, and a string that is not of it."""


def text(most: int, least: int = 0, **more: Any) -> Schema:
    return {"type": "string", "minLength": least, "maxLength": most, **more}


def whole(low: int, high: int, **more: Any) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high, **more}


def items(of: Schema, most: int, least: int = 0) -> Schema:
    return {"type": "array", "items": of, "minItems": least, "maxItems": most}


def record(optional: int = 0, **properties: Schema) -> Schema:
    """An object; the last `optional` of its properties may be left out."""
    required = list(properties)[: len(properties) - optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_POINT = record(x=whole(-9, 9), y=whole(-9, 9))
_TREE = {"$defs": {"leaf": record(name=text(4), size=whole(0, 99))}}

SCHEMAS: dict[str, Schema] = {
    # strings
    "text": text(12),
    "text of a length": text(6, 6),
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern inside": text(8, pattern="ab"),
    "pattern of choices": {"type": "string", "pattern": "^(red|green|(light|dark) blue)$"},
    "unicode letters": {"type": "string", "pattern": "^[à-ž]{1,6}$"},
    "unicode scripts": {"type": "string", "pattern": "^[あ-ん]{2,4}$"},
    "emoji": {"enum": ["😀", "🎉🎉", "✓"]},
    "escapes": {"enum": ['"quoted"', "back\\slash", "new\nline", "tab\t/"]},
    **{name: text(20, format=name) for name in ("date", "email", "hostname", "ipv4", "uri", "duration")},
    **{name: text(40, format=name) for name in ("date-time", "time", "ipv6", "uuid")},
    "date of this century": {"type": "string", "format": "date", "pattern": "^20"},
    "leap day": {"type": "string", "format": "date", "pattern": "-02-29$"},
    # numbers
    "integer": whole(0, 100),
    "negative": whole(-1000, -1),
    "exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "multiple": whole(0, 1000, multipleOf=25),
    "quarters": {"type": "number", "minimum": 0, "maximum": 5, "multipleOf": 0.25},
    "halves": {"type": "number", "exclusiveMinimum": -2, "maximum": 2, "multipleOf": 0.5},
    "large": whole(10**12, 10**15),
    # enums and constants
    "enum": {"enum": ["small", "medium", "large"]},
    "mixed enum": {"enum": [1, "one", 1.5, True, None]},
    "enum of objects": {"enum": [{"a": 1}, {"a": 2, "b": [1, 2]}, []]},
    "constant": {"const": {"version": 3, "name": "ü"}},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "types": {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 9},
    # arrays
    "array": items(whole(0, 9), 5),
    "array of a length": items({"type": "boolean"}, 3, 3),
    "array of arrays": items(items(whole(0, 1), 2), 3, 1),
    "empty array": items({}, 0),
    "tuple": {"type": "array", "prefixItems": [whole(0, 9), text(3)], "items": False, "minItems": 2},
    "tuple and more": {"type": "array", "prefixItems": [{"const": "v"}], "items": whole(0, 9), "maxItems": 4},
    "array of records": items(_POINT, 3, 1),
    # objects
    "record": record(name=text(8), age=whole(0, 120)),
    "optional": record(2, id=whole(1, 9), note=text(5), tag={"enum": ["a", "b"]}),
    "all optional": record(2, a=whole(0, 9), b=whole(0, 9)),
    "nested": record(a=record(b=record(c=whole(0, 9)))),
    "names with signs": record(**{'a "b"': whole(0, 9), "ä/~": {"type": "boolean"}, "": {"type": "null"}}),
    "address": record(street=text(10), number=whole(1, 999), city={"enum": ["Köln", "København", "Łódź"]}),
    "event": record(at={"type": "string", "format": "date"}, place=_POINT, tags=items(text(4), 2)),
    # combinations
    "any of": {"anyOf": [whole(0, 9), text(3), {"type": "null"}]},
    "any of records": {"anyOf": [record(a=whole(0, 9)), record(b=text(3))]},
    "one of": {"oneOf": [whole(0, 9), {"type": "boolean"}]},
    "one of kinds": {"oneOf": [record(kind={"const": "i"}, i=whole(0, 9)), record(kind={"const": "s"}, s=text(3))]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    "all of records": {"type": "object", "allOf": [{"properties": {"a": whole(0, 9)}}], "required": ["a"]}
    | {"additionalProperties": False, "properties": {"a": True, "b": {"type": "boolean"}}},
    "reference": {**_TREE, **record(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"})},
    "references in an array": {**_TREE, **items({"$ref": "#/$defs/leaf"}, 2, 1)},
    "reference or null": {**_TREE, **record(leaf={"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]})},
    "draft 7": {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"n": whole(0, 9)}}
    | record(n={"$ref": "#/definitions/n"}),
    "annotated": {"title": "T", "description": "d", "default": 1, "examples": [2], **whole(0, 9)},
}
