"""Conversations as users write them, to messages as chat templates want them, and to prompts."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from nanovllm.text.prompts import Prompt, each, tokenise_texts
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import quote, refuse

Message = Mapping[str, Any]
"""{"role": ..., "content": ...}; the content is a string, or OpenAI's list of parts, all of them text."""


def conversation_prompts(
    conversations: Sequence[Sequence[Message]],
    tokenizer: Tokenizer | None,
    options: Mapping[str, Any],
    max_model_len: int,
    show: bool,
) -> list[Prompt]:
    """The prompt, as text and token ids, of each conversation.

    Args:
        options: see `render`.
        show: a bar, if tokenising takes long.

    Raises:
        ValueError: the model has no chat template, or the template does not take a conversation, naming which.
    """

    def render_one(conversation: Sequence[Message]) -> str:
        if tokenizer is None:
            raise ValueError("this model has no tokenizer, so no chat template; use generate() with token ids")
        return render(tokenizer.transformers, read_conversation(conversation), options)

    texts = each("conversation", conversations, render_one)
    return tokenise_texts(texts, tokenizer, max_model_len, show, "conversation")


def template_variables(given: Any) -> Mapping[str, Any]:
    """chat_template_kwargs, none of None; ValueError if they are no dict."""
    if not isinstance(given, Mapping | None):
        raise refuse(given, "chat_template_kwargs", "a dict of the template's variables, or None")
    return given or {}


def split_conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation or several, as a list; ValueError if it is neither."""
    if not messages or not isinstance(messages, (list, tuple)):
        raise ValueError(f"messages is {quote(messages)}; it must be a conversation or a list of conversations")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def read_conversation(messages: Any) -> list[dict[str, Any]]:
    """The messages, with parts of text joined, a line each; other fields (tool_calls, name ...) stay.

    Raises:
        ValueError: it is no conversation, or has a part that is no text, naming the message.
    """
    if not messages or not isinstance(messages, (list, tuple)) or not all(_has_role(m) for m in messages):
        raise ValueError(f'a conversation is {quote(messages)}; it must be a list of {{"role": ..., "content": ...}}')
    return [
        {**message, "content": join_parts(message["content"], i)} if "content" in message else dict(message)
        for i, message in enumerate(messages)
    ]


def _has_role(message: Any) -> bool:
    return isinstance(message, Mapping) and "role" in message


def join_parts(content: Any, index: int) -> Any:
    """The content of message number `index` as a string; None, which goes with tool_calls, stays."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else [content]
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        if not is_text and not isinstance(part, str):
            raise ValueError(f"message {index} has the content {quote(content)}; only text is supported")
    return "\n".join(part if isinstance(part, str) else part["text"] for part in parts)


def render(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
    """The prompt of a conversation, ending where the assistant's answer begins unless the options say otherwise.

    Args:
        tokenizer: as transformers made it.
        options: of its apply_chat_template, and the template's own.

    Raises:
        ValueError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if not tokenizer.chat_template and options.get("chat_template") is None:
        raise ValueError("this model's tokenizer has no chat template; use generate() with a prompt of your own")
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, **{"add_generation_prompt": True, **options}
        )
    except Exception as error:  # jinja2's own, or whatever the template's code meets
        raise ValueError(f"the chat template refuses these messages: {error}") from error
    return text


def rendering_arguments(tokenizer: Any) -> frozenset[str]:
    """Names of the options that are transformers' own; all others are the template's variables."""
    return frozenset({"messages", *signature(tokenizer.apply_chat_template).parameters})
