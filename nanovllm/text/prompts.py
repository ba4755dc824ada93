"""Turns prompts and conversations, in every form that users give them, into token ids."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from typing import Any, NamedTuple

from tqdm import tqdm

from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import as_integer, quote

BATCH = 256
"""How many texts one call tokenises: enough to keep all cores busy, and few enough to move the progress bar often."""

Prompt = str | list[int] | Mapping[str, Any]
"""A text, token ids, or a dict with "prompt" (a text) or "prompt_token_ids", as in vLLM.

In a dict with both, the token ids are run, and the text is only shown in the output."""

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}. The content is a string, or a list of text parts as in OpenAI's API."""


class TokenisedPrompt(NamedTuple):
    text: str | None
    """None for a prompt that was given only as token ids."""
    token_ids: list[int]


@contextmanager
def name_errors(kind: str, number: int, count: int | None = None) -> Iterator[None]:
    """Put "prompt 3: " before the message of a ValueError that is raised within this block.

    Args:
        kind: the word before the number, for example "prompt".
        count: how many prompts there are; None if nobody knows. If there is 1, the message stays as it is.
    """
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{kind} {number}: {error}" if count != 1 else str(error)) from None


# ---- one prompt or several


def list_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts, given one prompt or several. A list of numbers is one prompt.

    Raises:
        ValueError: `prompts` is not a prompt and not a list.
    """
    if hasattr(prompts, "tolist"):  # a tensor or an array
        prompts = prompts.tolist()
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {quote(prompts)}; it must be a string, a list of token ids, or a list of prompts")
    prompts = list(prompts)
    # A number may also be an array of numpy or torch with 0 dimensions. For a type without `ndim` we take 1, which
    # means that it is not a number.
    is_one = bool(prompts) and all(isinstance(p, Number) or getattr(p, "ndim", 1) == 0 for p in prompts)
    return [prompts] if is_one else prompts


def iterate_prompts(requests: Any) -> Iterable[Any]:
    """Return the prompts as an iterable. A generator is returned as it is, so that it is read lazily.

    Anything else is read by `list_prompts`.
    """
    is_lazy = isinstance(requests, Iterable) and not isinstance(requests, Sequence | Mapping)
    return requests if is_lazy and not hasattr(requests, "tolist") else list_prompts(requests)


# ---- from prompts to token ids


def read_prompt(prompt: Any) -> tuple[str | None, list[int] | None]:
    """Read a prompt in any form that users give.

    Returns:
        (text, token ids). The text is None if only token ids were given; the token ids are None if the text is to be
        tokenised.

    Raises:
        ValueError: it is not a prompt.
    """
    text: str | None = None
    if isinstance(prompt, Mapping):
        given = {key: value for key, value in prompt.items() if value is not None}
        if not given or not given.keys() <= {"prompt", "prompt_token_ids"}:
            raise ValueError(
                f'a prompt has the keys {quote(list(prompt))}; it must have "prompt" or "prompt_token_ids"'
            )
        if "prompt_token_ids" in given and isinstance(given.get("prompt"), str):
            text = given["prompt"]
        prompt = given.get("prompt_token_ids", given.get("prompt"))
    if isinstance(prompt, str):
        return prompt, None
    if hasattr(prompt, "tolist"):  # a tensor or an array
        prompt = prompt.tolist()
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
        raise ValueError(f"a prompt is {quote(prompt)}; it must be a string, a list of token ids, or a dict of either")
    token_ids: list[Any] = list(prompt)
    if set(map(type, token_ids)) != {int}:  # a fast check, because most prompts have only ints
        token_ids = [as_integer(i, "a token id of the prompt") for i in token_ids]
    return text, token_ids


def tokenise_prompts(
    prompts: Sequence[Any],
    tokenizer: Tokenizer | None,
    max_model_len: int,
    *,
    kind: str = "prompt",
    add_special_tokens: bool = True,
    show: bool = False,
) -> list[TokenisedPrompt]:
    """Read all prompts, and tokenise the texts among them. The tokenizer uses all cores for each batch of texts.

    Args:
        kind: what error messages call a prompt.
        add_special_tokens: put the tokenizer's special tokens around each text.
        show: draw a progress bar if it takes longer than a second.

    Raises:
        ValueError: a prompt has no valid form, is too long, or cannot be tokenised. With several prompts the message
            has its number.
    """
    count = len(prompts)
    done: list[TokenisedPrompt] = []
    texts: list[tuple[int, str]] = []
    for i, prompt in enumerate(prompts):
        with name_errors(kind, i, count):
            text, token_ids = read_prompt(prompt)
            if text is not None and token_ids is None:
                if tokenizer is None:
                    raise ValueError("the prompt is a string, and this model has no tokenizer: pass token ids")
                texts.append((i, text))
            done.append(TokenisedPrompt(text, token_ids or []))
    if tokenizer is None:
        return done
    starts = range(0, len(texts), BATCH)
    bar = {"desc": "Tokenising", "unit": kind, "unit_scale": BATCH, "leave": False, "delay": 1.0}
    for start in tqdm(starts, **bar) if show else starts:
        batch = texts[start : start + BATCH]
        try:
            encoded = tokenizer.encode_batch([text for _, text in batch], max_model_len, add_special_tokens)
        except ValueError:
            for i, text in batch:  # find out which text has the error
                with name_errors(kind, i, count):
                    tokenizer.encode_batch([text], max_model_len, add_special_tokens)
            raise
        for (i, text), token_ids in zip(batch, encoded, strict=True):
            done[i] = TokenisedPrompt(text, token_ids)
    return done


# ---- from conversations to texts


def list_conversations(messages: Any) -> list[Sequence[Message]]:
    """Return a list of conversations, given one conversation or several. ValueError if `messages` is neither."""
    if not messages or not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages is {quote(messages)}; it must be a conversation or a list of conversations")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def render_conversations(
    conversations: Sequence[Sequence[Message]], tokenizer: Tokenizer | None, options: Mapping[str, Any]
) -> list[str]:
    """Write each conversation as the text of a prompt, through the model's chat template.

    Args:
        options: arguments of transformers' apply_chat_template, and values of the template's variables.

    Raises:
        ValueError: the model has no chat template, or the template refuses a conversation. With several conversations
            the message has its number.
    """
    texts = []
    for i, conversation in enumerate(conversations):
        with name_errors("conversation", i, len(conversations)):
            if tokenizer is None:
                raise ValueError("this model has no tokenizer, so no chat template; use generate() with token ids")
            texts.append(_render(tokenizer.transformers, read_conversation(conversation), options))
    return texts


def _render(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """Write one conversation as text. Unless the options say otherwise, the text ends with the opening of an answer.

    Args:
        tokenizer: a tokenizer of transformers.
    """
    if not tokenizer.chat_template and options.get("chat_template") is None:
        raise ValueError("this model's tokenizer has no chat template; use generate() with a prompt of your own")
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, **{"add_generation_prompt": True, **options}
        )
    except Exception as error:  # an error of jinja2, or any error in the template's code
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    return text


def read_conversation(messages: Any) -> list[dict[str, Any]]:
    """Return the messages; the content of each becomes one string. Other fields (tool_calls, name ...) stay.

    Raises:
        ValueError: `messages` is not a conversation, or a part of a content is not text. The error shows the value.
    """
    is_list = isinstance(messages, (list, tuple)) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise ValueError(f'a conversation is {quote(messages)}; it must be a list of {{"role": ..., "content": ...}}')
    conversation = []
    for i, message in enumerate(messages):
        read = dict(message)
        if "content" in message:
            read["content"] = join_parts(message["content"], i)
        if message.get("tool_calls"):
            read["tool_calls"] = read_tool_calls(message["tool_calls"], i)
        conversation.append(read)
    return conversation


def read_tool_calls(tool_calls: Any, index: int) -> list[dict[str, Any]]:
    """Return a message's calls of tools with their arguments as objects, which templates write as JSON.

    In OpenAI's form the arguments are JSON in a string. A template would write that string as JSON once more.

    Args:
        index: the message's number, for the error.
    """
    if not isinstance(tool_calls, (list, tuple)) or not all(isinstance(call, Mapping) for call in tool_calls):
        raise ValueError(f"message {index} has the tool_calls {quote(tool_calls)}; they must be a list of objects")
    calls = []
    for call in tool_calls:
        function = call.get("function", call)
        if not isinstance(function, Mapping):
            raise ValueError(f"message {index} has the call {quote(call)}; its function must be an object")
        arguments = function.get("arguments")
        if arguments is None or isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise ValueError(
                    f"message {index} calls a tool with the arguments {quote(arguments)}; they must be JSON"
                ) from None
        parsed = {**function, "arguments": arguments}
        calls.append({**call, "function": parsed} if "function" in call else parsed)
    return calls


def join_parts(content: Any, index: int) -> Any:
    """Return the content of a message as one string: the text parts are joined by line breaks.

    None stays None, because a message with tool_calls has no content.

    Args:
        index: the message's number, for the error.
    """
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else [content]
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text and not isinstance(part, str):
            raise ValueError(f"message {index} has the content {quote(content)}; only text is supported")
    return "\n".join(part if isinstance(part, str) else part["text"] for part in parts)
