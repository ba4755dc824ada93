"""Turns lines of a job into texts to score. A line is one of `run-batch`, or has a text in the place of a prompt."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.apps.jobs.request_lines import (
    CHAT_URL,
    COMPLETIONS_URL,
    LineError,
    RequestLine,
    check_model,
    list_rendering_arguments,
)
from nanovllm.utils.checks import refuse, refuse_unknown

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Request
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams

PLAIN = {"messages": CHAT_URL, **dict.fromkeys(("prompt", "text"), COMPLETIONS_URL)}
"""{a field: the address that a plain line with it means}."""
FIELDS = {True: ("model", "messages", "tools", "chat_template_kwargs"), False: ("model", "prompt", "text")}
"""The fields that a body may have; the key tells whether it is a chat."""


class Text(NamedTuple):
    """A text that is to be scored.

    Attributes:
        mask: bool [tokens], which tokens count. The first one never does, because nothing comes before it.
    """

    request: "Request"
    mask: NDArray[np.bool_]


def prepare_text(
    line: RequestLine, llm: "LLM", params: "SamplingParams", model_name: str, only_assistant: bool
) -> Text:
    """Check a line, and tokenise its text.

    Args:
        params: ask for the scores of a whole text.
        model_name: the only `model` that a body may ask for.
        only_assistant: of a conversation, only the messages of the assistant count.

    Raises:
        LineError: the line is wrong.
    """
    body = {name: value for name, value in line.body.items() if value is not None}
    try:
        if line.url not in (CHAT_URL, COMPLETIONS_URL):
            raise ValueError(f"the line asks {line.url}, which answers no text: give a prompt or messages")
        refuse_unknown(body, FIELDS[line.is_chat], "a conversation" if line.is_chat else "a text")
        check_model(body, model_name)
        options = body.get("chat_template_kwargs", {})
        if not isinstance(options, dict) or options.keys() & list_rendering_arguments():
            raise refuse(options, "chat_template_kwargs", "an object of the template's own variables")
        options = {**options, "tools": body.get("tools"), "add_generation_prompt": False}
        prompt: Any = body.get("text", body.get("prompt"))
        if line.is_chat:
            prompt = llm.render_chat(body.get("messages", ()), options)
        elif not isinstance(prompt, str | list) or {"text", "prompt"} <= body.keys():
            raise refuse(prompt, "prompt or text", "a string or a list of token ids, and one of the two")
        request = llm.prepare(prompt, params)
        mask = np.ones(len(request.prompt_token_ids), np.bool_)
        if line.is_chat and only_assistant:
            mask = mask_assistant(body["messages"], request.prompt_token_ids.tolist(), llm, options)
        mask[0] = False
    except (TypeError, ValueError, OverflowError) as error:
        raise LineError("invalid_request", str(error), line.custom_id) from error
    if mask.any():
        params = replace(params, prompt_logprob_start=int(mask.argmax()))
    return Text(replace(request, params=params), mask)


def mask_assistant(messages: Any, token_ids: list[int], llm: "LLM", options: dict[str, Any]) -> NDArray[np.bool_]:
    """Return which tokens of a conversation the assistant wrote: bool [tokens].

    They are found by rendering the messages before and up to each answer.

    Raises:
        ValueError: nobody is the assistant, or the template writes the beginning of a conversation otherwise than in
            the whole one.
    """
    mask = np.zeros(len(token_ids), np.bool_)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("no message has the role 'assistant', and only such messages count")
    for i in answers:
        ends = []
        for beginning, is_opened in ((messages[:i], True), (messages[: i + 1], False)):
            opening = {**options, "add_generation_prompt": is_opened}
            prompt: Any = llm.render_chat(beginning, opening) if beginning else {"prompt_token_ids": []}
            ids = prompt["prompt_token_ids"]
            if token_ids[: len(ids)] != ids:
                raise ValueError(
                    f"the chat template writes the messages up to message {i} otherwise where others follow, so "
                    "nothing tells which tokens the assistant wrote"
                )
            ends.append(len(ids))
        mask[ends[0] : ends[1]] = True
    return mask
