"""Writes conversations as the texts of prompts, through the model's chat template: the wing behind `LLM.chat`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.text.prompts import Message, name_errors
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import as_choice, quote

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The roles that a message may have, each with the chat template's name for it."""


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
        ValueError: `messages` is not a conversation, or a part of a content is not text, or a role is unknown. The
            error shows the value.
    """
    is_list = isinstance(messages, (list, tuple)) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise ValueError(f'a conversation is {quote(messages)}; it must be a list of {{"role": ..., "content": ...}}')
    conversation = []
    for i, message in enumerate(messages):
        read = {**message, "role": ROLES[as_choice(message["role"], f"the role of message {i}", ROLES)]}
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
