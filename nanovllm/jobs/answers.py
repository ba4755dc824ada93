"""Outputs and errors to lines of OpenAI's batch format: pure functions, whoever runs the job."""

import json
import re
import time
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from nanovllm.jobs.protocol import Envelope, LineError, num_logprobs, structured_outputs

if TYPE_CHECKING:
    from nanovllm.outputs import Output

_ID = re.compile(r"batch_req_([1-9][0-9]{0,17})", re.ASCII)
"""An answer's id holds the number of the line that it answers, which is how a resumed job knows it."""
_CHECKSUM = b', "checksum": "'
"""What stands before the last field of a line: the xxh3_64 of all before it, in hexadecimal."""


class Usage(NamedTuple):
    """Tokens of an answer that is no error."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    num_cut: int = 0
    """1 for an output that was to fit a grammar, and met a limit before its end."""


class Answer(NamedTuple):
    """The answer to a line of the input: a line of results. usage is None if it is an error."""

    number: int
    line: bytes
    usage: Usage | None


def error_answer(number: int, error: LineError) -> Answer:
    """The answer to a bad line, or to one that the engine failed on."""
    status, kind = (500, "server_error") if error.code == "engine_error" else (400, "invalid_request_error")
    what = {"code": error.code, "message": f"line {number}: {error}", "line": number}
    body = {"error": {"message": what["message"], "type": kind, "param": None, "code": error.code}}
    return Answer(number, _line(number, error.custom_id, _response(number, status, body), what), None)


def result_answer(envelope: Envelope, output: "Output", model_name: str, token_text: Callable[[int], str]) -> Answer:
    """The answer to a line that ran."""
    number, count = envelope.number, num_logprobs(envelope)
    if (error := output.get("error")) is not None:
        return error_answer(number, LineError("engine_error", error, envelope.custom_id))
    echoed, logprobs = "", _chat_logprobs if envelope.is_chat else _completion_logprobs
    if envelope.body.get("echo"):
        echoed = output.get("prompt") or "".join(map(token_text, output["prompt_token_ids"]))
    completions, choices = output.get("outputs", [output]), []
    for i, one in enumerate(completions):
        choice: dict[str, Any] = {"index": i, "finish_reason": one["finish_reason"], "logprobs": None}
        if envelope.is_chat:
            choice["message"] = {"role": "assistant", "content": one["text"]}
        else:
            choice["text"] = echoed + one["text"]
        if count is not None:
            choice["logprobs"] = logprobs({**output, **one}, count, token_text)
        choices.append(choice)
    num_prompt, num_generated = len(output["prompt_token_ids"]), sum(len(one["token_ids"]) for one in completions)
    body = {
        "id": f"{'chatcmpl' if envelope.is_chat else 'cmpl'}-{number}",
        "object": "chat.completion" if envelope.is_chat else "text_completion",
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
    if envelope.body.get("service_tier") is not None:
        body["service_tier"] = "default"
    response = _response(number, 200, body)
    is_cut = any(c["finish_reason"] == "length" for c in choices) and structured_outputs(envelope) is not None
    usage = Usage(num_prompt, output["num_cached_tokens"], num_generated, int(is_cut))
    return Answer(number, _line(number, envelope.custom_id, response, None), usage)


def _response(number: int, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{number}", "body": body}


def _line(number: int, custom_id: str | None, response: Mapping[str, Any], error: Any) -> bytes:
    answer = {"id": f"batch_req_{number}", "custom_id": custom_id, "response": response, "error": error}
    # A lone surrogate, in a message that quotes it, becomes \udxxx, which is how JSON writes it.
    content = json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace")[:-1]
    return content + _CHECKSUM + _checksum(content) + b'"}\n'


def _checksum(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()


def answered_line(raw: bytes, has_checksum: bool) -> tuple[int, bool] | None:
    """(number of the line that it answers, whether that is an error) of a line of results; None if it is damaged.

    Args:
        has_checksum: False if it may lack its checksum, as an older version's does.
    """
    content, mark, end = raw.rpartition(_CHECKSUM)
    if (mark or has_checksum) and end != _checksum(content) + b'"}\n':
        return None
    try:
        answer = json.loads(raw)
        number = _ID.fullmatch(answer["id"])
        return (int(number[1]), answer["error"] is not None) if number else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _likeliest(values: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(values.items(), key=lambda item: -item[1])[:count]


def _floor(logprob: float) -> float:
    """JSON has no infinity: OpenAI writes -9999 for what is next to impossible."""
    return max(-9999.0, logprob)


def _chat_logprobs(output: Mapping[str, Any], count: int, token_text: Callable[[int], str]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id)
        # A token that is a part of a character has no text of its own, and its bytes are not known here.
        return {"token": text, "logprob": _floor(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}

    content = []
    for token_id, values in zip(output["token_ids"], output["logprobs"], strict=True):
        top = [entry(*item) for item in _likeliest(values, count)]
        content.append({**entry(token_id, values[token_id]), "top_logprobs": top})
    return {"content": content}


def _completion_logprobs(output: Mapping[str, Any], count: int, token_text: Callable[[int], str]) -> dict[str, Any]:
    pairs = list(zip(output["token_ids"], output["logprobs"], strict=True))
    if (of_prompt := output.get("prompt_logprobs")) is not None:  # with echo
        pairs = [*zip(output["prompt_token_ids"], of_prompt, strict=True), *pairs]
    tokens = [token_text(token_id) for token_id, _ in pairs]
    return {
        "tokens": tokens,
        "token_logprobs": [values and _floor(values[token_id]) for token_id, values in pairs],
        "top_logprobs": [
            # From the least likely to the most, so that of tokens with the same text the likeliest stays.
            values and {token_text(i): _floor(logprob) for i, logprob in reversed(_likeliest(values, count))}
            for _, values in pairs
        ],
        "text_offset": [0, *accumulate(map(len, tokens[:-1]))] if tokens else [],
    }
