"""Bounds on the size of a grammar, checked before llguidance sees it.

llguidance compiles ordinary grammars in a millisecond. But one line of a job can hold a grammar on which it works for
minutes, fills the memory or runs out of stack, and no signal ends a compile. So every grammar is measured first, from
its text alone. Beyond MOST it is refused. Beyond SAFE it is compiled in a child process first (trial.py).
"""

import math
from decimal import Decimal
from typing import Any, NamedTuple

from nanovllm.features.edits.json_schema import FORMAT_PATTERNS, walk_schema

_OWN_PATTERNS = frozenset(pattern for patterns in FORMAT_PATTERNS.values() for pattern in patterns)

_CHARACTERS_OF_A_PATTERN = 128
"""Added to the length of each pattern: llguidance may intersect any two of them, and many short ones take long."""


class Size(NamedTuple):
    """The size of one grammar, or a bound for each part of it.

    Attributes:
        bytes: length of the text in UTF-8. Constants and lists of choices are within it.
        names: how many names all `properties`, `patternProperties` and `required` of a schema have together.
        depth: bounds the levels of llguidance's recursion. Of a schema: (different $refs + 1) x the deepest JSON
            pointer. Of a Lark grammar: lines with a ":", and opening brackets.
        patterns: characters of regular expressions, and 128 for each `pattern`, `format` and name in
            `patternProperties`. Of a Lark grammar: of the whole text.
        multiple: the largest `multipleOf`, as an integer without decimal point and trailing zeros.
        multiples: the sum of all `multipleOf` as integers, or their least common multiple if that is larger.
            llguidance makes automata of as many states.
        schemas: whether a Lark grammar may hold JSON schemas, which are not measured.
    """

    bytes: int
    names: int = 0
    depth: int = 0
    patterns: int = 0
    multiple: int = 0
    multiples: int = 0
    schemas: bool = False

    def find_excess(self, bound: "Size") -> str | None:
        """Return the name of the first part that is larger than its bound; None if all are within."""
        parts = zip(self._fields, self, bound, strict=True)
        return next((name for name, size, most in parts if size > most), None)


_NO_BOUND = 1 << 62

SAFE = Size(bytes=32 << 10, names=1000, depth=400, patterns=8 << 10, multiple=10_000, multiples=10_000, schemas=False)
"""Up to this size a compile takes at most a second, 200 MB and 1.5 MB of stack; an ordinary one, a millisecond."""

MOST = Size(512 << 10, 5000, 10_000, _NO_BOUND, 50_000, _NO_BOUND, schemas=True)
"""Beyond this size llguidance would need many seconds, gigabytes or a deeper stack than threads have."""

_REFUSALS = {
    "bytes": "its text has {size} bytes; at most {most} are accepted",
    "names": "its properties and required have {size} names; at most {most} are accepted",
    "depth": "its references and nesting may be {size} levels deep; at most {most} are accepted",
    "multiple": "its multipleOf is {size}, without decimal point and trailing zeros; at most {most} is accepted",
}


def measure_text(kind: str, text: str) -> Size:
    """Return the size of a grammar, as far as it can be told before a schema is parsed."""
    num_bytes = len(text) if text.isascii() else len(text.encode())
    if kind != "grammar":
        return Size(num_bytes, patterns=num_bytes if kind == "regex" else 0)
    # A rule or terminal of Lark begins on a line of its own.
    depth = sum(":" in line for line in text.splitlines()) + text.count("(") + text.count("[")
    holds_schemas = "%json" in text or text.lstrip().startswith("{")
    return Size(num_bytes, depth=depth, patterns=num_bytes, schemas=holds_schemas)


def measure_schema(schema: dict[str, Any], num_bytes: int) -> Size:
    """Return the size of a JSON schema that `read_schema` has read from a text of num_bytes."""
    names = 0
    deepest = 0
    references = set[str]()
    patterns: list[str] = []
    multiples: list[int] = []
    for place, part in walk_schema(schema):
        deepest = max(deepest, place.count("/"))
        for keyword in ("properties", "required", "patternProperties"):
            if isinstance(part.get(keyword), dict | list):
                names += len(part[keyword])
        if isinstance(part.get("patternProperties"), dict):
            patterns += part["patternProperties"]
        if str(part.get("pattern")) not in _OWN_PATTERNS:  # it may be of any type
            patterns += [str(part[keyword]) for keyword in ("pattern", "format") if keyword in part]
        if "$ref" in part:
            references.add(str(part["$ref"]))
        if multiple := _read_digits(part.get("multipleOf")):
            multiples.append(multiple)
    common = 1
    for multiple in multiples:
        if common <= SAFE.multiples:
            common = math.lcm(common, multiple)
    return Size(
        num_bytes,
        names=names,
        depth=(1 + len(references)) * deepest,
        patterns=sum(len(pattern) + _CHARACTERS_OF_A_PATTERN for pattern in patterns),
        multiple=max((int(str(multiple).rstrip("0")) for multiple in multiples), default=0),
        multiples=max(sum(multiples), common),
    )


def _read_digits(number: Any) -> int:
    """Return a number without its sign and decimal point: 25 for -0.25. Return 0 for what is no number."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return 0
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    whole = int("".join(map(str, digits)))
    return whole * int(10 ** max(0, min(int(exponent), 18)))


def is_safe(size: Size) -> bool:
    """Tell whether a grammar may be compiled in this process at once. If not, it is tried in a child process first.

    Raises:
        ValueError: the grammar is larger than MOST. The message says in what, its size and the bound.
    """
    if name := size.find_excess(MOST):
        raise ValueError(_REFUSALS[name].format(size=getattr(size, name), most=getattr(MOST, name)))
    return size.find_excess(SAFE) is None
