"""Reads the calls of tools out of an answer, as the chat templates of Qwen and Llama ask the model to write them."""

import json
import re
from typing import Any

import xxhash

MOST_CALLS = 1000
"""An answer with more calls is text: no model means them, and each one costs time between two steps."""

_DECODER = json.JSONDecoder()


def _read_values(text: str, begin: str, end: str) -> list[Any]:
    """Read JSON values to the end of a text, in time that grows with its length alone.

    Args:
        begin: a regular expression for what stands before each value. `end` is one for what stands after it.

    Raises:
        ValueError: a value is not JSON, something else stands between two of them, or there are too many.
    """
    values: list[Any] = []
    place = 0
    while place < len(text):
        opening = re.compile(begin).match(text, place)
        if opening is None or len(values) == MOST_CALLS:
            raise ValueError("there is text between the calls or after them, or there are too many")
        value, place = _DECODER.raw_decode(text, opening.end())
        closing = re.compile(end).match(text, place)
        if closing is None:
            raise ValueError("a call is cut, or there is text after it")
        values.append(value)
        place = closing.end()
    return values


def read_hermes(text: str) -> tuple[str, list[Any]]:
    """Read calls in the form of Qwen's templates, which is that of Hermes.

        some text <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> <tool_call>...</tool_call>

    Returns:
        The text before the first call, and the values between the tags.

    Raises:
        ValueError: a call is not JSON, or its end is missing.
    """
    before, tag, calls = text.partition("<tool_call>")
    return before.strip(), _read_values(tag + calls, r"<tool_call>\s*", r"\s*</tool_call>\s*")


def read_llama(text: str) -> tuple[str, list[Any]]:
    """Read calls in the form of Llama 3's templates: the whole answer is one call, or several with ";" between them.

        {"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}

    Returns:
        "" and the values.

    Raises:
        ValueError: the text is something else.
    """
    return "", _read_values(text.strip().removeprefix("<|python_tag|>").strip(), "", r"\s*(;\s*|\Z)")


READERS = {"hermes": read_hermes, "llama3_json": read_llama}
"""By vLLM's names."""


def split_tool_calls(parser: str, text: str) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into its text and its calls of tools.

    Args:
        parser: a key of READERS.

    Returns:
        The text, and the calls in OpenAI's form, whose `arguments` are JSON in a string. If anything in the answer is
        not as it should be, all of it is text, and there are no calls.
    """
    try:
        content, values = READERS[parser](text)
        digest = xxhash.xxh3_64_hexdigest(text.encode(errors="replace"))
        calls = [_make_call(value, f"{i} {digest}".encode()) for i, value in enumerate(values)]
    except (ValueError, RecursionError):
        return text, []
    return (content, calls) if calls else (text, [])


def _make_call(value: Any, key: bytes) -> dict[str, Any]:
    """Return one call in OpenAI's form; ValueError if it has no name, or its arguments are no object of JSON.

    Args:
        key: the id is a hash of it, so that the same answer has the same ids.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call has no name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        raise ValueError("a call has no arguments, or they are no object")
    function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False)}
    "".join(function.values()).encode()  # fails if half of a surrogate pair is in it
    return {"id": f"call_{xxhash.xxh3_64_hexdigest(key)}", "type": "function", "function": function}
