"""Turns lines of OpenAI's batch format into requests for the engine. Pure functions.

`read_request_line` and then `prepare_request` either return a Request or raise a LineError. result_lines.py turns the
engine's output, or the LineError, into a line of the results.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from nanovllm.apps.jobs.job import DEFAULTS
from nanovllm.apps.jobs.source import Line
from nanovllm.engine.sequence import derive_seed
from nanovllm.sampling_params import change_defaults
from nanovllm.utils.checks import as_integer, quote, refuse, refuse_unknown

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Request
    from nanovllm.llm import LLM

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
EMBEDDINGS_URL = "/v1/embeddings"
PLAIN = {"prompt": COMPLETIONS_URL, "messages": CHAT_URL, "input": EMBEDDINGS_URL}
"""{a field: the address that a plain line with it means}."""
# OpenAI's limits:
MAX_LOGPROBS = 20
MAX_N = 128
MAX_STRINGS = 256
"""One line may have this many stop strings, and this many bad words. They are searched for after every token, while the
other lines wait."""

_LINE_FIELDS = {"custom_id": str, "method": str, "url": str, "body": dict}
_SAMPLING = (*DEFAULTS, "seed")
_CHAT = ("messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs", "tools", "tool_choice")
_SERVICE = {
    **dict.fromkeys(("user", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"), str),
    **{"metadata": dict, "store": bool, "parallel_tool_calls": bool},
}
"""These fields concern an online service. They are accepted and change no result."""
_COMMON = ("model", "lora", *_SAMPLING, "logprobs", "response_format", "structured_outputs", *_SERVICE)
_FIELDS = {True: (*_COMMON, *_CHAT), False: (*_COMMON, "prompt", "echo")}
"""The fields that a body may have; the key tells whether it is a chat."""
_OBJECTS = ("logit_bias", "structured_outputs")
_KINDS = {"lora": str, "echo": bool, **dict.fromkeys(_OBJECTS, dict), **_SERVICE}
"""The kinds of those fields that SamplingParams does not check."""
_KIND_NAMES = {str: "a string", dict: "an object", bool: "true or false"}
_NULLS = (
    *("audio", "moderation", "prediction", "prompt_cache_options"),
    *("reasoning_effort", "stream_options", "verbosity", "web_search_options"),
)
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(_NULLS),
    **{"best_of": 1, "stream": False, "echo": False, "suffix": ""},
    **{"tools": [], "tool_choice": "none", "functions": [], "function_call": "none", "modalities": ["text"]},
}
"""Fields that are not supported, each with the one value that asks for nothing. That value and null are accepted."""
_ROLE_FIELDS = {"assistant": ("tool_calls", "reasoning", "reasoning_content"), "tool": ("tool_call_id",)}
"""The fields that a message of this role may have beside those of every message."""


class LineError(Exception):
    """One line cannot be answered. The message says why.

    Attributes:
        code: "invalid_json", "invalid_request", "duplicate_id" or "engine_error".
        custom_id: the line's id; None if it has none, or if an earlier line has the same.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A line whose frame is valid. Its body is not checked yet.

    Attributes:
        number: the line's number in the input, from 1.
        custom_id: the line's id; None for a plain line, which is known by its number.
        url: the address that it asks. forms.py has those that are answered.
        body: the fields of the request.
        request_name: see `name_request`.
    """

    number: int
    custom_id: str | None
    url: str
    body: dict[str, Any]
    request_name: str = ""

    @property
    def is_chat(self) -> bool:
        return self.url == CHAT_URL


def read_request_line(
    line: Line, is_new: Callable[[str], bool] = lambda _: True, plain: Mapping[str, str] = PLAIN
) -> RequestLine:
    """Parse a line of the batch format, or a plain line: a body alone.

    Args:
        is_new: tells whether no earlier line had this id. It is called once for every line that has an id, even if the
            rest of the line is bad.
        plain: {a field: the address that a plain line with it means}.

    Raises:
        LineError: the line has neither form, or its id was seen before.
    """
    if line.is_cut:
        raise LineError("invalid_request", f"the line has more than {len(line.raw) - 1} bytes")
    data = _read_object(line.raw.removeprefix(b"\xef\xbb\xbf").strip())
    if not data.keys() & _LINE_FIELDS.keys():
        urls = [url for name, url in plain.items() if name in data]
        if len(urls) != 1:
            *others, last = (f'"{name}"' for name in plain)
            raise LineError(
                "invalid_request",
                f'a line must have "custom_id", "method", "url" and "body", or one of {", ".join(others)} and {last}',
            )
        return RequestLine(line.number, None, urls[0], data)
    custom_id = data.get("custom_id")
    try:
        if not isinstance(custom_id, str) or not custom_id.encode():
            raise refuse(custom_id, "custom_id", "a string, and not empty")
    except ValueError as error:  # a lone surrogate too: encode() refuses it
        raise LineError("invalid_request", str(error)) from error
    if not is_new(custom_id):
        raise LineError("duplicate_id", f"the id {quote(custom_id)} was seen before")
    try:
        refuse_unknown(data, _LINE_FIELDS, "a batch line")
        for name, kind in _LINE_FIELDS.items():
            if not isinstance(data.get(name), kind):
                raise refuse(data.get(name), name, _KIND_NAMES[kind])
        if data["method"] != "POST":
            raise refuse(data["method"], "method", '"POST"')
    except (TypeError, ValueError) as error:
        raise LineError("invalid_request", str(error), custom_id) from error
    return RequestLine(line.number, custom_id, data["url"], data["body"])


def add_defaults(line: RequestLine, defaults: Mapping[str, Any]) -> RequestLine:
    """Give a line the job's sampling parameters for those that it leaves out or has as null, if it is sampled."""
    if line.url not in (CHAT_URL, COMPLETIONS_URL) or not defaults:
        return line
    body = {name: value for name, value in line.body.items() if value is not None or name not in defaults}
    if body.get("max_completion_tokens") is not None:
        defaults = {name: value for name, value in defaults.items() if name != "max_tokens"}
    return replace(line, body={**defaults, **body})


def _read_object(raw: bytes) -> dict[str, Any]:
    def refuse_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("an object names a field twice")
        return fields

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        data = json.loads(raw.decode(), object_pairs_hook=refuse_doubles, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise LineError("invalid_json", f"{error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json", str(error)) from error
    if not isinstance(data, dict):
        raise LineError("invalid_json", f"the line holds {quote(data)}, not an object")
    return data


def prepare_request(line: RequestLine, llm: "LLM", model_name: str) -> "Request":
    """Check every field of a line, tokenise its prompt, and return the engine's request.

    Args:
        model_name: the only `model` that a body may ask for.

    Raises:
        LineError: a field is wrong, or the engine refuses the request.
        ValueError: no line can be answered, because the model's files ask for what the engine does not have.
    """
    defaults = llm.get_default_sampling_params()
    with blame_line(line):
        body = _check_body(line, model_name)
        sampling = {name: body[name] for name in _SAMPLING if name in body}
        sampling["logprobs"] = read_num_logprobs(line)
        sampling["structured_outputs"] = read_structured_outputs(line)
        if body.get("echo"):
            sampling["prompt_logprobs"] = sampling["logprobs"]
        is_open = line.is_chat and not body.keys() & {"max_tokens", "max_completion_tokens"}
        if "max_completion_tokens" in body:
            sampling["max_tokens"] = body["max_completion_tokens"]
        elif line.custom_id is not None:
            sampling.setdefault("max_tokens", llm.engine.config.usual_length if line.is_chat else 16)
        params = change_defaults(defaults, sampling)
        if params.seed is None:
            params.seed = derive_seed(llm.engine.config.seed, line.custom_id or str(line.number))
        if line.is_chat:
            tools = _read_tools(body)
            prompt = render_messages(llm, body, {"tools": tools} if tools else {})
        else:
            prompt = _read_prompt(body.get("prompt"))
        request = llm.prepare(prompt, params)
        return _limit_length(request, llm.engine.config.usual_length) if is_open else request


@contextmanager
def blame_line(line: RequestLine) -> Iterator[None]:
    """Turn what a wrong field raises within the block into the LineError of its line."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise LineError("invalid_request", str(error), line.custom_id) from error


def render_messages(llm: "LLM", body: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return the prompt that the model's template makes of a line's `messages` and `chat_template_kwargs`.

    Args:
        options: further arguments of `LLM.render_chat`.
    """
    variables = body.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise refuse(variables, "chat_template_kwargs", "an object")
    for name in variables:
        # A line may set variables of the model's template, but bring no template: a template is a program.
        if name in list_rendering_arguments():
            raise ValueError(f"chat_template_kwargs has {name!r}, which is not for a line to choose")
    return llm.render_chat(_read_messages(body.get("messages")), {**variables, **options})


def _limit_length(request: "Request", most: int) -> "Request":
    """Return a chat without max_tokens with a limit for its prompt and its output together."""
    if (count := len(request.prompt_token_ids)) >= most:
        raise ValueError(
            f"the prompt has {count} tokens; without max_tokens it may have at most {most - 1}: give max_tokens, or "
            "set max_model_len"
        )
    return replace(request, max_len=most)


def list_rendering_arguments() -> set[str]:
    """Return the names of the arguments of transformers' apply_chat_template, which Python code alone may set."""
    from transformers import PreTrainedTokenizerBase

    return {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}


def read_fields(line: RequestLine, names: Iterable[str], what: str, model_name: str) -> dict[str, Any]:
    """Return the fields of a body that generates nothing, without those that are null.

    Args:
        names: those that it may have beside `model` and `user`.
        what: what error messages call the line.

    Raises:
        ValueError: it has another field, or asks for another model.
    """
    body = {name: value for name, value in line.body.items() if value is not None}
    refuse_unknown(body, ("model", "user", *names), what)
    check_model(body, model_name)
    return body


def _check_body(line: RequestLine, model_name: str) -> dict[str, Any]:
    """Return the body's fields, without those that are null or ask for nothing.

    Raises:
        TypeError, ValueError: a field is unknown, or has a value of the wrong kind.
    """
    fields = _FIELDS[line.is_chat]
    body = {}
    for name, value in line.body.items():
        if name in _NEUTRAL and name not in fields:
            if value is not None and not _is_same(value, _NEUTRAL[name]):
                neutral = json.dumps(_NEUTRAL[name])
                raise ValueError(f"{name} is {quote(value)}; it is not supported, other than as {neutral}")
            continue
        refuse_unknown([name], fields, "a chat" if line.is_chat else "a completion")
        if value is None:
            continue
        if (kind := _KINDS.get(name)) and not isinstance(value, kind):
            raise refuse(value, name, _KIND_NAMES[kind])
        body[name] = value
    for name in ("stop", "bad_words"):
        if isinstance(body.get(name), list) and len(body[name]) > MAX_STRINGS:
            raise ValueError(f"{name} has {len(body[name])} strings; a line may have at most {MAX_STRINGS}")
    check_model(body, model_name)
    if "n" in body:
        as_integer(body["n"], "n", 1, MAX_N)
    if "max_tokens" in body and "max_completion_tokens" in body:
        raise ValueError("max_tokens and max_completion_tokens are the same limit: give one")
    return body


def check_model(body: Mapping[str, Any], model_name: str) -> None:
    """Raise a ValueError if a body asks for another model than the one that runs."""
    if body.get("model", model_name) != model_name:
        raise refuse(body["model"], "model", f"{model_name!r}, which runs: leave it out, or set --served-model-name")


def read_num_logprobs(line: RequestLine) -> int | None:
    """Return how many alternatives the line asks for beside each token; None if it asks for no log-probabilities.

    A chat asks with `logprobs` (true or false) and `top_logprobs`, a completion with the number `logprobs`.
    """
    wanted = line.body.get("logprobs")
    if line.is_chat:
        top = line.body.get("top_logprobs")
        if wanted is not None and not isinstance(wanted, bool):
            raise refuse(wanted, "logprobs", "true or false for a chat, which has the number in top_logprobs")
        if top is not None and not wanted and not _is_same(top, 0):
            raise ValueError(f"top_logprobs is {quote(top)}; it needs logprobs: true")
        wanted = (top or 0) if wanted else None
    if wanted is None:
        return None
    return as_integer(wanted, "top_logprobs" if line.is_chat else "logprobs", 0, MAX_LOGPROBS)


def read_structured_outputs(line: RequestLine) -> dict[str, Any] | None:
    """Return the grammar that the line's output must fit, as StructuredOutputsParams takes it; None without one.

    A line names it in OpenAI's field `response_format` or in vLLM's `structured_outputs`.
    """
    wanted = line.body.get("response_format")
    if isinstance(wanted, dict):
        wanted = {name: value for name, value in wanted.items() if value is not None}
    own: dict[str, Any] | None = line.body.get("structured_outputs")
    if wanted is None or wanted == {"type": "text"}:
        return own
    if own is not None:
        raise ValueError("response_format and structured_outputs are both given: give one of them")
    if wanted == {"type": "json_object"}:
        return {"json_object": True}
    has_schema = isinstance(wanted, dict) and wanted.keys() == {"type", "json_schema"}
    if not has_schema or wanted["type"] != "json_schema" or not isinstance(wanted["json_schema"], dict):
        limit = "of the type text, json_object, or json_schema, with an object json_schema"
        raise refuse(wanted, "response_format", limit)
    rest = wanted["json_schema"]
    refuse_unknown(rest, ("name", "description", "schema", "strict"), "response_format.json_schema")
    if not isinstance(rest.get("schema"), dict):
        raise refuse(rest.get("schema"), "response_format.json_schema.schema", "an object")
    return {"json": rest["schema"]}  # whether `strict` is true or not


def find_foreign_model(lines: Iterable[Line], model_name: str) -> str | None:
    """Return the model that all lines ask for, if it is the same in all and another than model_name; else None."""
    foreign = None
    for line in lines:
        try:
            model = read_request_line(line).body.get("model")
        except LineError:
            continue
        if not isinstance(model, str) or model == model_name or foreign not in (None, model):
            return None
        foreign = model
    return foreign


def _read_prompt(prompt: Any) -> str | list[int]:
    """Return the only prompt of a line. A list of several prompts, which OpenAI's server takes, is refused."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(i, int) for i in prompt)):
        return prompt
    raise refuse(prompt, "prompt", "a string or a list of token ids: one prompt a line")


def _read_tools(body: Mapping[str, Any]) -> list[Any]:
    """Return the tools that the chat template describes to the model; [] if there are none or none may be called."""
    tools = body.get("tools", [])
    choice = body.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise refuse(choice, "tool_choice", '"auto" or "none": a grammar can force a call')
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        raise refuse(tools, "tools", 'a list of {"type": "function", "function": ...}')
    return tools if choice == "auto" else []


def _is_function(value: Any) -> bool:
    """Tell whether a tool, or a call of one, is a function with a name."""
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the conversation. A field that the chat template would not see is refused."""
    if not isinstance(messages, list) or not messages:
        raise refuse(messages, "messages", 'a list of {"role": ..., "content": ...}')
    return [_read_message(message, i) for i, message in enumerate(messages)]


def _read_message(message: Any, index: int) -> dict[str, Any]:
    """Return a message without its empty fields: the message of a result has every field, and many are empty."""
    given = message if isinstance(message, dict) else {}
    read = {name: value for name, value in given.items() if name == "content" or value not in ("", [], {})}
    read = {name: value for name, value in read.items() if value is not None}
    if read.get("role") == "assistant":
        read.setdefault("content", "")  # an answer that only calls tools, or that is empty, has no content
    role = read.get("role")
    if not isinstance(role, str) or "content" not in read:
        raise ValueError(f"message {index} is {quote(message)}; it must have a role and a content, and may have a name")
    fields = ("role", "content", "name", *_ROLE_FIELDS.get(role, ()))
    for name, value in read.items():
        if name not in fields:
            raise ValueError(
                f"message {index} has the field {quote(name)}, which is {quote(value)}; with the role {quote(role)} it "
                f"may have {', '.join(fields)}"
            )
        if name not in ("role", "content", "tool_calls") and not isinstance(value, str):
            raise ValueError(f"message {index} has the {name} {quote(value)}; it must be a string")
    calls = read.get("tool_calls", [])
    if not isinstance(calls, list) or not all(map(_is_function, calls)):
        raise ValueError(f"message {index} has the tool_calls {quote(calls)}; it must be a list of calls of functions")
    return read


def _is_same(value: Any, other: Any) -> bool:
    """Compare as JSON does: 0 equals 0.0, and does not equal false."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
