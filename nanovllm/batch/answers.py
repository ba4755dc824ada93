"""Outputs and errors to lines of OpenAI's batch format: pure functions, whoever runs the job."""

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nanovllm.batch.protocol import Envelope, LineError, num_logprobs

if TYPE_CHECKING:
    from nanovllm.outputs import Output

ID_PREFIX = "batch_req_"
"""An answer's id is this and the number of the line that it answers, which is how a resumed job knows it."""


def error_line(number: int, error: LineError) -> bytes:
    """The answer to a bad line."""
    what = {"code": error.code, "message": f"line {number}: {error}", "line": number}
    return _line(number, error.custom_id, None, what)


def result_line(envelope: Envelope, output: "Output", model_name: str, token_text: Callable[[int], str]) -> bytes:
    """The answer to a line that ran."""
    number, count = envelope.number, num_logprobs(envelope)
    choice: dict[str, Any] = {"index": 0, "finish_reason": output["finish_reason"], "logprobs": None}
    if envelope.is_chat:
        choice["message"] = {"role": "assistant", "content": output["text"]}
    else:
        choice["text"] = output["text"]
    if count is not None:
        choice["logprobs"] = (_chat_logprobs if envelope.is_chat else _completion_logprobs)(output, count, token_text)
    num_prompt, num_generated = len(output["prompt_token_ids"]), len(output["token_ids"])
    body = {
        "id": f"{'chatcmpl' if envelope.is_chat else 'cmpl'}-{number}",
        "object": "chat.completion" if envelope.is_chat else "text_completion",
        "created": int(time.time()),
        "model": model_name,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": output["num_cached_tokens"]},
        },
    }
    response = {"status_code": 200, "request_id": f"req_{number}", "body": body}
    return _line(number, envelope.custom_id, response, None)


def _line(number: int, custom_id: str | None, response: Mapping[str, Any] | None, error: Any) -> bytes:
    answer = {"id": f"{ID_PREFIX}{number}", "custom_id": custom_id, "response": response, "error": error}
    # A lone surrogate, in a message that quotes it, becomes \udxxx, which is how JSON writes it.
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def answered_line(raw: bytes) -> tuple[int, bool] | None:
    """(number of the line that it answers, whether that is an error) of a line of results; None if it is none."""
    try:
        answer = json.loads(raw)
        return int(answer["id"].removeprefix(ID_PREFIX)), answer["response"] is None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _likeliest(values: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(values.items(), key=lambda item: -item[1])[:count]


def _floor(logprob: float) -> float:
    """JSON has no infinity: OpenAI writes -9999 for what is next to impossible."""
    return max(-9999.0, logprob)


def _chat_logprobs(output: "Output", count: int, token_text: Callable[[int], str]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = token_text(token_id)
        # A token that is a part of a character has no text of its own, and its bytes are not known here.
        return {"token": text, "logprob": _floor(logprob), "bytes": None if "\ufffd" in text else list(text.encode())}

    content = []
    for token_id, values in zip(output["token_ids"], output["logprobs"], strict=True):
        top = [entry(*item) for item in _likeliest(values, count)]
        content.append({**entry(token_id, values[token_id]), "top_logprobs": top})
    return {"content": content}


def _completion_logprobs(output: "Output", count: int, token_text: Callable[[int], str]) -> dict[str, Any]:
    tokens = [token_text(token_id) for token_id in output["token_ids"]]
    offsets, offset = [], 0
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    pairs = list(zip(output["token_ids"], output["logprobs"], strict=True))
    return {
        "tokens": tokens,
        "token_logprobs": [_floor(values[token_id]) for token_id, values in pairs],
        "top_logprobs": [
            # From the least likely to the most, so that of tokens with the same text the likeliest stays.
            {token_text(i): _floor(logprob) for i, logprob in reversed(_likeliest(values, count))}
            for _, values in pairs
        ],
        "text_offset": offsets,
    }
