"""Lines of OpenAI's batch format to requests: pure functions, whoever runs the job.

A line goes through `read_envelope` and `prepare`, which make a Request of it or raise a LineError. What the engine
makes of the Request, `answers.result_answer` turns into a line again; a LineError, `answers.error_answer`.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanovllm.jobs.source import Line
from nanovllm.text.chat import join_parts
from nanovllm.utils.checks import as_integer, quote, refuse_unknown

if TYPE_CHECKING:
    from nanovllm.engine.request import Request
    from nanovllm.llm import LLM

CHAT_URL, COMPLETIONS_URL = "/v1/chat/completions", "/v1/completions"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles that a message may have, and what the chat template calls them."""
MAX_LOGPROBS, MAX_N, MAX_BIAS = 20, 128, 100  # OpenAI's limits
MAX_STRINGS = 256
"""Stop strings, or bad words, of one line: all are looked for after every token, while the other lines wait."""

_ENVELOPE = {"custom_id": str, "method": str, "url": str, "body": dict}
_LIMITS = ("max_tokens", "stop", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
_EDITS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias")
_LISTS = ("allowed_token_ids", "bad_words", "stop_token_ids")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "n", *_LIMITS, *_EDITS, *_LISTS)
_CHAT_FIELDS = ("messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs")
_SERVICE = {"user": str, "metadata": dict, "store": bool, "service_tier": str, "parallel_tool_calls": bool}
"""Fields that are for a service, and change no answer."""
_COMMON = ("model", *_SAMPLING, "logprobs", "response_format", "structured_outputs", *_SERVICE)
_FIELDS = {True: (*_COMMON, *_CHAT_FIELDS), False: (*_COMMON, "prompt", "echo")}
"""What a body may hold, by whether it is a chat."""
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "echo")
_OBJECTS = ("chat_template_kwargs", "logit_bias")
_KINDS = {**dict.fromkeys(_FLAGS, bool), **dict.fromkeys(_LISTS, list), **dict.fromkeys(_OBJECTS, dict), **_SERVICE}
_KIND_NAMES = {str: "a string", dict: "an object", list: "a list", bool: "true or false"}
_NEUTRAL: dict[str, Any] = {"best_of": 1, "stream": False, "echo": False, "tools": [], "tool_choice": "none"}
"""Fields that are not supported, each with the one value (beside null) that asks for nothing and is taken."""


class LineError(Exception):
    """What is wrong with a line.

    Attributes:
        code: "invalid_json", "invalid_request", "duplicate_id" or "engine_error".
        custom_id: the line's own, if it has one that no line before it had.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code, self.custom_id = code, custom_id


@dataclass(frozen=True, slots=True)
class Envelope:
    """A line that can be told from others: its number (from 1), its id, and what it asks, not yet looked into."""

    number: int
    custom_id: str | None
    is_chat: bool
    body: dict[str, Any]

    @property
    def is_plain(self) -> bool:
        """Whether it has no id of its own, and is known by its number."""
        return self.custom_id is None


def read_envelope(line: Line, is_new: Callable[[str], bool] = lambda _: True) -> Envelope:
    """Read a line of the batch format, or a plain one.

    Args:
        is_new: asked once for every line that has an id, also if the rest of the line is bad.

    Raises:
        LineError: it is neither, or its id is not new.
    """
    if line.is_cut:
        raise LineError("invalid_request", f"the line has more than {len(line.raw) - 1} bytes: see --max-line-bytes")
    data = _read_object(line.raw.removeprefix(b"\xef\xbb\xbf").strip())
    if not data.keys() & _ENVELOPE.keys():
        if ("prompt" in data) == ("messages" in data):
            raise LineError(
                "invalid_request", 'a line has "custom_id", "method", "url", "body", or "prompt" or "messages"'
            )
        return Envelope(line.number, None, "messages" in data, data)
    custom_id = data.get("custom_id")
    try:
        if not isinstance(custom_id, str) or not custom_id.encode():
            raise ValueError(f"custom_id is {quote(custom_id)}; it must be a string, and not empty")
    except ValueError as error:  # also a lone surrogate, which nothing could print
        raise LineError("invalid_request", str(error)) from error
    if not is_new(custom_id):
        raise LineError("duplicate_id", f"the id {quote(custom_id)} was seen before")
    try:
        refuse_unknown(data, _ENVELOPE, "a batch line")
        for name, kind in _ENVELOPE.items():
            if not isinstance(data.get(name), kind):
                raise ValueError(f"{name} is {quote(data.get(name))}; it must be {_KIND_NAMES[kind]}")
        if data["method"] != "POST":
            raise ValueError(f'method is {quote(data["method"])}; it must be "POST"')
        if data["url"] not in (CHAT_URL, COMPLETIONS_URL):
            raise ValueError(f'url is {quote(data["url"])}; it must be "{CHAT_URL}" or "{COMPLETIONS_URL}"')
    except (TypeError, ValueError) as error:
        raise LineError("invalid_request", str(error), custom_id) from error
    return Envelope(line.number, custom_id, data["url"] == CHAT_URL, data["body"])


def _read_object(raw: bytes) -> dict[str, Any]:
    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) < len(pairs):
            raise ValueError("an object names a field twice")
        return names

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        data = json.loads(raw.decode(), object_pairs_hook=no_twins, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise LineError("invalid_json", f"{error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json", str(error)) from error
    if not isinstance(data, dict):
        raise LineError("invalid_json", f"the line holds {quote(data)}, not an object")
    return data


def prepare(envelope: Envelope, llm: "LLM", model_name: str) -> "Request":
    """The engine's request for a line: every field understood, the prompt tokenised; LineError otherwise.

    Args:
        model_name: the one `model` that a body may name.
    """
    try:
        body = _check_body(envelope, model_name)
        sampling = {name: body[name] for name in _SAMPLING if name in body}
        sampling.setdefault("seed", llm.derive_seed(envelope.custom_id or str(envelope.number)))
        sampling["logprobs"] = num_logprobs(envelope)
        sampling["structured_outputs"] = structured_outputs(envelope)
        if body.get("echo"):
            sampling["prompt_logprobs"] = sampling["logprobs"]
        if "max_completion_tokens" in body:
            sampling["max_tokens"] = body["max_completion_tokens"]
        elif not envelope.is_plain:
            sampling.setdefault("max_tokens", llm.max_model_len if envelope.is_chat else 16)
        params = replace(llm.get_default_sampling_params(), **sampling)
        if envelope.is_chat:
            for name in body.get("chat_template_kwargs", ()):
                # A line may fill in the model's template, but not bring one: it is a program, and could run for ever.
                if name in llm.rendering_arguments:
                    raise ValueError(f"chat_template_kwargs has {name!r}, which is not for a line to choose")
            prompt = llm.render_chat(_read_messages(body.get("messages")), body.get("chat_template_kwargs"))
        else:
            prompt = _read_prompt(body.get("prompt"))
        return llm.prepare(prompt, params)
    except (TypeError, ValueError, OverflowError) as error:
        raise LineError("invalid_request", str(error), envelope.custom_id) from error


def _check_body(envelope: Envelope, model_name: str) -> dict[str, Any]:
    """The body's fields, without those that are null or ask for nothing.

    Raises:
        TypeError, ValueError: a field that would have to be ignored, or one of the wrong kind.
    """
    fields, what = _FIELDS[envelope.is_chat], "a chat" if envelope.is_chat else "a completion"
    body = {}
    for name, value in envelope.body.items():
        if name in _NEUTRAL and name not in fields:
            if value is not None and not _is_same(value, _NEUTRAL[name]):
                only = json.dumps(_NEUTRAL[name])
                raise ValueError(f"{name} is {quote(value)}; it is not supported, other than as {only}")
            continue
        refuse_unknown([name], fields, what)
        if value is None:
            continue
        if (kind := _KINDS.get(name)) and not isinstance(value, kind):
            raise ValueError(f"{name} is {quote(value)}; it must be {_KIND_NAMES[kind]}")
        body[name] = value
    if not isinstance(body.get("stop", ""), (str, list)):
        raise ValueError(f"stop is {quote(body['stop'])}; it must be a string or a list of strings")
    for name in ("stop", "bad_words"):
        if isinstance(body.get(name), list) and len(body[name]) > MAX_STRINGS:
            raise ValueError(f"{name} has {len(body[name])} strings; a line may have at most {MAX_STRINGS}")
    if body.get("model", model_name) != model_name:
        raise ValueError(
            f"model is {quote(body['model'])}, and {model_name!r} runs: leave it out, or set --served-model-name"
        )
    if "n" in body:
        as_integer(body["n"], "n", 1, MAX_N)
    if any(isinstance(bias, (int, float)) and abs(bias) > MAX_BIAS for bias in body.get("logit_bias", {}).values()):
        raise ValueError(f"logit_bias has a value that is not from -{MAX_BIAS} to {MAX_BIAS}")
    if "max_tokens" in body and "max_completion_tokens" in body:
        raise ValueError("max_tokens and max_completion_tokens are the same limit: give one")
    return body


def num_logprobs(envelope: Envelope) -> int | None:
    """How many alternatives a line wants beside each token, in the form that its url has for it; None is off."""
    wanted, body = envelope.body.get("logprobs"), envelope.body
    if envelope.is_chat:
        top = body.get("top_logprobs")
        if wanted is not None and not isinstance(wanted, bool):
            raise ValueError(f"logprobs is {quote(wanted)}; a chat has true or false, and the number in top_logprobs")
        if top is not None and not wanted and not _is_same(top, 0):  # which asks for nothing
            raise ValueError(f"top_logprobs is {quote(top)}; it needs logprobs: true")
        wanted = (top or 0) if wanted else None
    if wanted is None:
        return None
    count = as_integer(wanted, "top_logprobs" if envelope.is_chat else "logprobs")
    if not 0 <= count <= MAX_LOGPROBS:
        raise ValueError(
            f"{'top_' if envelope.is_chat else ''}logprobs is {count}; it must be from 0 to {MAX_LOGPROBS}"
        )
    return count


def structured_outputs(envelope: Envelope) -> dict[str, Any] | None:
    """What a line's output must be, as StructuredOutputsParams has it: OpenAI's field for it, or vLLM's."""
    wanted, own = envelope.body.get("response_format"), envelope.body.get("structured_outputs")
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if own is not None and not isinstance(own, dict):
        raise ValueError(f"structured_outputs is {quote(own)}; it must be an object")
    if wanted is None or wanted == {"type": "text"}:
        return own
    if own is not None:
        raise ValueError("response_format and structured_outputs both say what the output must be: give one")
    if wanted == {"type": "json_object"}:
        return {"json_object": True}
    rest = wanted.get("json_schema") if kind == "json_schema" and wanted.keys() == {"type", "json_schema"} else None
    if not isinstance(rest, dict):
        raise ValueError(
            f"response_format is {quote(wanted)}; it must be of the type text, json_object, or json_schema, with an "
            "object json_schema"
        )
    refuse_unknown(rest, ("name", "description", "schema", "strict"), "response_format.json_schema")
    if not isinstance(rest.get("schema"), dict):
        raise ValueError(f"response_format.json_schema.schema is {quote(rest.get('schema'))}; it must be an object")
    return {"json": rest["schema"]}  # strict or not: what was asked for is kept


def foreign_model(lines: Iterable[Line], model_name: str) -> str | None:
    """The one model that all lines name, if it is not the one that would answer them."""
    foreign = None
    for line in lines:
        try:
            model = read_envelope(line).body.get("model")
        except LineError:
            continue
        if not isinstance(model, str) or model == model_name or foreign not in (None, model):
            return None
        foreign = model
    return foreign


def _read_prompt(prompt: Any) -> str | list[int]:
    """One prompt; OpenAI's lists of several are for a server, where a line is dear."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(i, int) for i in prompt)):
        return prompt
    raise ValueError(f"prompt is {quote(prompt)}; it must be a string or a list of token ids: one prompt a line")


def _read_messages(messages: Any) -> list[dict[str, str]]:
    """A conversation whose every field the chat template sees."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'messages is {quote(messages)}; it must be a list of {{"role": ..., "content": ...}}')
    return [_read_message(message, i) for i, message in enumerate(messages)]


def _read_message(message: Any, index: int) -> dict[str, str]:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys() <= {"role", "content", "name"}:
        raise ValueError(f"message {index} is {quote(message)}; it must have a role and a content, and may have a name")
    role, name = message["role"], message.get("name")
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"message {index} has the role {quote(role)}; it must be one of {', '.join(ROLES)}")
    if not isinstance(name, str | None):
        raise ValueError(f"message {index} has the name {quote(name)}; it must be a string")
    read = {"role": ROLES[role], "content": _read_content(message["content"], index)}
    return read if name is None else {**read, "name": name}


def _read_content(content: Any, index: int) -> str:
    """A string, or OpenAI's list of parts, as long as they are text; parts become lines."""
    if not isinstance(content, str | list):
        raise ValueError(f"message {index} has the content {quote(content)}; it must be a string or a list of parts")
    text: str = join_parts(content, index)
    return text


def _is_same(value: Any, other: Any) -> bool:
    """Equal as JSON: 0 and 0.0 are, 0 and false are not."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
