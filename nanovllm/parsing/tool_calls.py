"""Reads the calls of tools out of an answer, as the chat templates of Qwen and Llama ask the model to write them."""

import json
import re
from typing import Any

import xxhash

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def read_hermes(text: str) -> tuple[str, list[Any]]:
    """Read calls in the form of Qwen's templates, which is that of Hermes.

        some text <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call> <tool_call>...</tool_call>

    Returns:
        The text before the first call, and the values between the tags.

    Raises:
        ValueError: a call is not JSON, or its end is missing.
    """
    before, tag, calls = text.partition("<tool_call>")
    if _HERMES.sub("", tag + calls).strip():
        raise ValueError("there is text between the calls or after them, or a call is cut")
    return before.strip(), [json.loads(call) for call in _HERMES.findall(tag + calls)]


def read_llama(text: str) -> tuple[str, list[Any]]:
    """Read calls in the form of Llama 3's templates: the whole answer is one call, or several with ";" between them.

        {"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}

    Returns:
        "" and the values.

    Raises:
        ValueError: the text is something else.
    """
    rest = text.strip().removeprefix("<|python_tag|>").strip()
    calls = []
    while rest:
        call, end = json.JSONDecoder().raw_decode(rest)
        calls.append(call)
        rest = rest[end:].lstrip()
        if rest and not rest.startswith(";"):
            raise ValueError("there is text after the call")
        rest = rest[1:].lstrip()
    return "", calls


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
        calls = [_make_call(value, f"{i} {text}") for i, value in enumerate(values)]
    except (ValueError, RecursionError):
        return text, []
    return (content, calls) if calls else (text, [])


def _make_call(value: Any, key: str) -> dict[str, Any]:
    """Return one call in OpenAI's form; ValueError if it has no name or its arguments are no object.

    Args:
        key: the id is a hash of it, so that the same answer has the same ids.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("a call has no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise ValueError("the arguments of a call are no object")
    function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    digest = xxhash.xxh3_64_hexdigest(key.encode(errors="replace"))
    return {"id": f"call_{digest}", "type": "function", "function": function}
