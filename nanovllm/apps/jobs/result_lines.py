"""Turns outputs and errors into lines of OpenAI's batch format, and reads such lines back. Pure functions."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from nanovllm.apps.jobs.request_lines import LineError, RequestLine, read_num_logprobs, read_structured_outputs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nanovllm.outputs import Output, ScoreArrays

_ID = re.compile(r"batch_req_([1-9][0-9]{0,17})", re.ASCII)
"""The id of a result holds the number of the input line that it answers. A resumed job reads it back from there."""
_CHECKSUM = b', "checksum": "'
"""The last field of a line begins so. Its value is the xxh3_64 of everything before it, in hexadecimal."""


class Usage(NamedTuple):
    """The tokens of one successful result.

    num_cut is 1 if a grammar was asked for and a choice reached its token limit before the grammar's end, else 0.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_cut: int = 0


class LineArrays(NamedTuple):
    """The prompt of a line, int32, and what was expected in the place of each token of its choices."""

    prompt_token_ids: "NDArray[np.int32]"
    choices: "list[ScoreArrays]"


class ResultLine(NamedTuple):
    """One line of the results.

    Attributes:
        number: the number of the input line that it answers.
        line: the bytes to write, with the newline.
        usage: None if the line reports an error.
        error: the error's code and message, or None.
        request_name: see `name_request`.
        is_copy: whether an equal request was answered, and this is its answer.
        arrays: None if nobody asked for them, or if the line reports an error.
    """

    number: int
    line: bytes
    usage: Usage | None
    error: tuple[str, str] | None = None
    request_name: str = ""
    is_copy: bool = False
    custom_id: str | None = None
    arrays: LineArrays | None = None


class EarlierLine(NamedTuple):
    """A line of the results, as far as a resumed job reads it."""

    number: int
    is_error: bool
    request_name: str


def make_error_line(number: int, error: LineError) -> ResultLine:
    """Return the result for an input line that is bad, or on which the engine failed."""
    status, kind = (500, "server_error") if error.code == "engine_error" else (400, "invalid_request_error")
    summary = {"code": error.code, "message": f"line {number}: {error}", "line": number}
    body = {"error": {"message": summary["message"], "type": kind, "param": None, "code": error.code}}
    encoded = encode_line(number, error.custom_id, status, body, summary)
    return ResultLine(number, encoded, None, (error.code, f"line {number}: {error}"), custom_id=error.custom_id)


def make_result_line(
    request: RequestLine, output: "Output", model_name: str, token_text: Callable[[int], str]
) -> ResultLine:
    """Return the result for an input line that the engine ran without an error.

    Args:
        token_text: returns the text of a token id; see `LLM.token_text`.
    """
    number = request.number
    echoed = ""
    if request.body.get("echo"):
        echoed = output.get("prompt") or "".join(map(token_text, output["prompt_token_ids"]))
    num_logprobs = read_num_logprobs(request)
    format_logprobs = _format_chat_logprobs if request.is_chat else _format_completion_logprobs
    completions = output.get("outputs", [output])
    choices = []
    for i, completion in enumerate(completions):
        choice: dict[str, Any] = {"index": i, "finish_reason": completion["finish_reason"], "logprobs": None}
        if request.is_chat:
            choice["message"] = {"role": "assistant", "content": completion["text"]}
        else:
            choice["text"] = echoed + completion["text"]
        if "reasoning" in completion:
            choice.get("message", choice)["reasoning"] = completion["reasoning"]
        if request.is_chat and completion.get("tool_calls"):
            choice["message"] |= {"content": completion["text"] or None, "tool_calls": completion["tool_calls"]}
            if completion["finish_reason"] == "stop":
                choice["finish_reason"] = "tool_calls"
        if num_logprobs is not None:
            choice["logprobs"] = format_logprobs({**output, **completion}, num_logprobs, token_text)
        choices.append(choice)
    num_prompt = len(output["prompt_token_ids"])
    num_generated = sum(len(completion["token_ids"]) for completion in completions)
    body = {
        "id": f"{'chatcmpl' if request.is_chat else 'cmpl'}-{number}",
        "object": "chat.completion" if request.is_chat else "text_completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": output["num_cached_tokens"]},
        },
    }
    if request.body.get("service_tier") is not None:
        body["service_tier"] = "default"
    is_cut = read_structured_outputs(request) is not None and any(c["finish_reason"] == "length" for c in choices)
    usage = Usage(num_prompt, output["num_cached_tokens"], num_generated, int(is_cut))
    return make_good_line(request, body, usage)


def make_reading_line(
    request: RequestLine, body: Mapping[str, Any], outputs: "Sequence[Output]", model_name: str
) -> ResultLine:
    """Return the result for an input line whose texts were read, and for which nothing was generated.

    Args:
        body: the answer without `model` and `usage`.
        outputs: those of all its requests.
    """
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return make_good_line(request, {**body, "model": model_name, "usage": usage}, Usage(num_tokens, num_cached, 0))


def make_good_line(request: RequestLine, body: Mapping[str, Any], usage: Usage, is_copy: bool = False) -> ResultLine:
    """Return the result for an input line that has an answer."""
    extra: dict[str, Any] = {"request_name": request.request_name} if request.request_name else {}
    if is_copy:
        extra["is_copy"] = True
    encoded = encode_line(request.number, request.custom_id, 200, body, extra=extra)
    return ResultLine(request.number, encoded, usage, None, request.request_name, is_copy, request.custom_id)


def copy_result(raw: bytes, request: RequestLine, model_name: str) -> ResultLine:
    """Return the result for an input line from that of an equal request.

    Args:
        raw: the line of that result.
    """
    body = json.loads(raw)["response"]["body"]
    if "id" in body:
        body["id"] = f"{body['id'].rpartition('-')[0]}-{request.number}"
    return make_good_line(request, {**body, "model": model_name}, Usage(0, 0, 0), is_copy=True)


def encode_line(
    number: int,
    custom_id: str | None,
    status: int,
    body: Mapping[str, Any],
    error: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the bytes of a result: number and id of its input line, HTTP's status, and the body that answers it."""
    response = {"status_code": status, "request_id": f"req_{number}", "body": body}
    fields = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": error}
    fields |= extra or {}
    # An error may quote a lone surrogate, which UTF-8 cannot encode: it is written as \udxxx, JSON's escape for it.
    content = json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace")[:-1]
    return content + _CHECKSUM + _hash(content) + b'"}\n'


def _hash(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()


def read_result_line(raw: bytes) -> EarlierLine | None:
    """Return what a line of the results says of itself, or None if it is damaged."""
    content, _, end = raw.rpartition(_CHECKSUM)
    if end != _hash(content) + b'"}\n':
        return None
    try:
        fields = json.loads(raw)
        number = _ID.fullmatch(fields["id"])
        name = fields.get("request_name", "")
        return EarlierLine(int(number[1]), fields["error"] is not None, name) if number else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _sort_likeliest(values: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(values.items(), key=lambda item: -item[1])[:count]


def _limit_below(logprob: float) -> float:
    """Replace -infinity, which JSON cannot write, by -9999, as OpenAI does."""
    return max(-9999.0, logprob)


def _format_chat_logprobs(output: Mapping[str, Any], count: int, token_text: Callable[[int], str]) -> dict[str, Any]:
    def format_token(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id)
        # U+FFFD means that the token is part of a character. It has no text of its own, and its bytes are unknown here.
        text_bytes = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": _limit_below(logprob), "bytes": text_bytes}

    content = []
    for token_id, values in zip(output["token_ids"], output["logprobs"], strict=True):
        top = [format_token(*item) for item in _sort_likeliest(values, count)]
        content.append({**format_token(token_id, values[token_id]), "top_logprobs": top})
    return {"content": content}


def _format_completion_logprobs(
    output: Mapping[str, Any], count: int, token_text: Callable[[int], str]
) -> dict[str, Any]:
    pairs = list(zip(output["token_ids"], output["logprobs"], strict=True))
    if (prompt_logprobs := output.get("prompt_logprobs")) is not None:  # the line asks for `echo`
        pairs = [*zip(output["prompt_token_ids"], prompt_logprobs, strict=True), *pairs]
    tokens = [token_text(token_id) for token_id, _ in pairs]
    return {
        "tokens": tokens,
        "token_logprobs": [values and _limit_below(values[token_id]) for token_id, values in pairs],
        "top_logprobs": [
            # The likeliest comes last: of several tokens with the same text, the dict keeps the last one.
            values and {token_text(i): _limit_below(x) for i, x in reversed(_sort_likeliest(values, count))}
            for _, values in pairs
        ],
        "text_offset": [0, *accumulate(map(len, tokens[:-1]))] if tokens else [],
    }
