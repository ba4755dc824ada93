"""What a request's output must be: JSON of a schema, one of several strings, a regular expression's, a grammar's.

How masks come of it is in edits/grammars.py, which is imported when the first such request comes.
"""

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.utils.checks import as_list, quote, refuse
from nanovllm.vllm_names import STRUCTURED, names_checked

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@names_checked(STRUCTURED)
@dataclass(init=False, slots=True)
class StructuredOutputsParams:
    """What the output of a request must be: exactly one of the attributes is given.

    Checked when it is made, and again, and copied, by each SamplingParams and request that has it.

    Attributes:
        json: a JSON schema, as a dict, as its text, or as a pydantic model's class. What cannot be kept of it is
            refused (docs/structured.md).
        regex: a regular expression that the whole output matches, in Rust's syntax: no look-around.
        choice: strings, one of which is the output.
        grammar: in Lark's syntax, as llguidance has it.
        json_object: True for any JSON object.

    Raises:
        ValueError: none or several are given, one of the wrong kind, or an option of vLLM's that is not supported.
        TypeError: an unknown name, with the nearest known one.
    """

    json: str | Mapping[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    json_object: bool | None

    def __init__(
        self,
        json: str | Mapping[str, Any] | type | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
    ) -> None:
        given = dict(zip(KINDS, (json, regex, choice, grammar, json_object), strict=True))
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            raise ValueError(f"structured_outputs has {' and '.join(names) or 'none'} of {', '.join(KINDS)}; give one")
        if isinstance(json, type) and hasattr(json, "model_json_schema"):
            json = json.model_json_schema()
        if json is not None and not isinstance(json, str | Mapping):
            raise refuse(
                json, "structured_outputs.json", "a schema, as a dict or its text, or a pydantic model's class"
            )
        for name, text in (("regex", regex), ("grammar", grammar)):
            if text is not None and (not isinstance(text, str) or not text):
                raise refuse(text, f"structured_outputs.{name}", "a string, and not empty")
        if choice is not None:
            limit = "a list of different strings, none of them empty"
            choice = as_list(choice, "structured_outputs.choice", limit)
            if not choice or not all(isinstance(c, str) and c for c in choice) or len({*choice}) < len(choice):
                raise refuse(choice, "structured_outputs.choice", limit)
        if json_object is not None and json_object is not True:
            raise refuse(json_object, "structured_outputs.json_object", "True, or left out")
        self.json, self.regex, self.choice, self.grammar, self.json_object = json, regex, choice, grammar, json_object

    @classmethod
    def of(cls, value: Any) -> "StructuredOutputsParams":
        """A copy of value, checked once more, if it is one; or made of a dict of its attributes."""
        if isinstance(value, cls):
            return replace(value)
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise refuse(value, "structured_outputs", "a StructuredOutputsParams, or a dict of its attributes")
        return cls(**value)

    @property
    def kind(self) -> str:
        """Which of the attributes is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def text(self) -> str:
        """Its value, as a text: of a schema or a list, JSON. ValueError for what is no JSON, or no text."""
        value = getattr(self, self.kind)
        try:
            text = value if isinstance(value, str) else jsonlib.dumps(value, ensure_ascii=False, allow_nan=False)
            text.encode()  # no half of a surrogate pair is in it
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"structured_outputs.{self.kind} is {quote(value)}; it is not Unicode JSON: {error}"
            ) from None
        return text
