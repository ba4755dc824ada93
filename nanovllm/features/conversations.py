"""Writes conversations as the texts of prompts, through the model's chat template: what `LLM.chat` does first."""

import inspect
import json
import logging
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from nanovllm.text.prompts import ChatPrompt, Message, name_errors
from nanovllm.text.tokenizer import Tokenizer, explain_no_tokenizer
from nanovllm.utils.checks import as_choice, quote, suggest

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The roles that a message may have, each with the chat template's name for it."""

REASONING = ("reasoning", "reasoning_content")
"""Templates read the thinking of an earlier answer under one of these names. A message may have it under either."""
WORDS = ("nanovllmfirst", "thenthesecond")
"""If a template writes another text for one than for the other, it writes the content, or a part of it. They have the
same length, and differ in every character."""
STRANGER = "nanovllmkey"
"""No template reads this key of a content part. If it writes the key, it has written the part as a whole."""
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}


ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
"""Names that transformers itself takes beside a template's variables."""
THINKING_SWITCH = "enable_thinking"
"""A variable that scripts give to every model, also to one that does not think."""


class ContentForm(Enum):
    """The forms in which a chat template takes the content of a message."""

    TEXT = "a string alone"
    PARTS = "parts alone"
    ONE_PART = "one part alone"
    BOTH = "a string or parts"


def render_conversations(
    conversations: Sequence[Sequence[Message]],
    tokenizer: Tokenizer | None,
    options: Mapping[str, Any],
    origin: Path | str = "",
) -> list[ChatPrompt]:
    """Write each conversation as the text of a prompt, through the model's chat template.

    Args:
        options: arguments of transformers' apply_chat_template, and values of the template's variables.
        origin: the model's folder, for the error of a model without a tokenizer.

    Raises:
        ValueError: the model has no chat template, or the template refuses a conversation. With several conversations
            the message has its number.
    """
    texts = []
    for i, conversation in enumerate(conversations):
        with name_errors("conversation", i, len(conversations)):
            if tokenizer is None:
                raise ValueError(f"{explain_no_tokenizer(origin)}, so no chat template; use generate() with token ids")
            messages = read_conversation(conversation)
            if not tokenizer.template_tokenizer.chat_template and options.get("chat_template") is None:
                raise ValueError(
                    "this model's tokenizer has no chat template; use generate() with a prompt of your own"
                )
            try:
                texts.append(ChatTemplate(tokenizer, options).render(messages))
            except Exception as error:  # an error of jinja2, or any error in the template's code
                raise ValueError(f"the chat template refuses these messages: {error}") from error
    return texts


class ChatTemplate:
    """A chat template with the options of one call. Contents get the form that it takes."""

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer.template_tokenizer
        # A model may have several templates, which have names.
        template = self._tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
        for name in options:
            if name not in ARGUMENTS:
                warn_without_variable(template, name)
        self._options = {"add_generation_prompt": True, **options, "chat_template": template}
        self._forms: dict[str, ContentForm] = {}
        """The form of each role's contents, for the roles that conversations had so far."""
        self._probe_options = {**self._options, "add_generation_prompt": False, "continue_final_message": False}
        try:
            key = json.dumps(self._probe_options)
        except (TypeError, ValueError, RecursionError):  # a function as a tool, for example; nothing is kept
            return
        # The options count, too: one of them may decide which form the template takes.
        self._forms = tokenizer.find_forms(template, key)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> ChatPrompt:
        """Write a conversation as text. Unless the options say otherwise, it ends with the opening of an answer."""
        roles = {message["role"] for message in messages if message.get("content") is not None}
        forms = {role: self._find_form(role, messages) for role in roles}
        shaped = [shape_message(message, forms.get(message["role"], ContentForm.TEXT)) for message in messages]
        text: str = self._tokenizer.apply_chat_template(shaped, tokenize=False, **self._options)
        return ChatPrompt(text, self._find_opening(text, shaped))

    def _find_opening(self, text: str, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the end of a prompt that was written for the answer; None if the template does not tell.

        If the answer goes on with the last message, this is that message.
        """
        if continued := self._options.get("continue_final_message"):
            # The last message begins where the conversation without it differs. A template that opens an answer by
            # itself writes such an opening there, too. So its words are changed, which shows where they begin.
            before = self._try(messages[:-1]) if len(messages) > 1 else ""
            changed = self._try([*messages[:-1], replace_words(messages[-1])], continue_final_message=continued)
            others = [other for other in (before, changed) if other is not None]
            start = sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(text, *others, strict=False)))
            return text[start:]
        if self._options["add_generation_prompt"]:
            before = self._try(messages)
        else:
            is_ignored = self._try(messages, add_generation_prompt=True) == text
            return None if is_ignored else ""
        if before is None or before == text or not text.startswith(before):
            return None
        return text[len(before) :]

    def _find_form(self, role: str, messages: Sequence[Mapping[str, Any]]) -> ContentForm:
        """Find out in which form the template takes the contents of a role in this conversation.

        Raises:
            ValueError: the template uses what a user says, and writes it in no form.
        """
        if role in self._forms:
            return self._forms[role]
        for talk in list_talks(role):
            form = self._find_form_in(talk, role)
            if form is not None:
                self._forms[role] = form
                return form
        # Such conversations may be refused, and this one may not be. What it shows may not hold for others.
        form = self._find_form_in(messages, role)
        if form is not None:
            return form
        # A template may leave out a role, as it then does in transformers. Few leave out what a user says.
        own = [message for message in messages if message["role"] == role and message.get("content")]
        words = "".join(shape_message(message, ContentForm.TEXT)["content"] for message in own)
        if role == "user" and words.strip() and self._uses_contents(messages, role):
            raise ValueError(
                f"it does not write the content of the role {role!r}, neither a string nor parts of the type 'text'"
            )
        return ContentForm.TEXT

    def _find_form_in(self, talk: Sequence[Mapping[str, Any]], role: str) -> ContentForm | None:
        """Find out which form makes a difference, when the contents of a role in a conversation have other words.

        Other roles without a known form have strings at first, and then parts.

        Returns:
            the form in which the template writes the words; None if it writes them in no form.
        """
        # STRANGER comes first: the template may write the beginning alone.
        one, other = ({STRANGER: "", "type": "text", "text": word} for word in WORDS)
        for other_form in (ContentForm.TEXT, ContentForm.PARTS):
            shaped = [shape_message(message, self._forms.get(message["role"], other_form)) for message in talk]
            takes_text = self._tells_apart(WORDS, shaped, role)
            if self._tells_apart(([one, one], [other, one], [one, other]), shaped, role):
                return ContentForm.BOTH if takes_text else ContentForm.PARTS
            if takes_text:
                return ContentForm.TEXT
            if self._tells_apart(([one], [other]), shaped, role):
                return ContentForm.ONE_PART
        return None

    def _tells_apart(self, contents: Sequence[Any], talk: Sequence[Mapping[str, Any]], role: str) -> bool:
        """Return whether the template writes another text for each content that the messages of this role may have."""
        texts = set()
        for content in contents:
            text = self._try(replace_contents(talk, role, content))
            if text is None:
                return False
            lower = text.lower()  # a template may write capital letters
            # A template that writes a list of parts as JSON says so itself. Python's form comes where it expects a
            # string.
            if STRANGER in lower and json.dumps(content) not in lower:
                return False
            texts.add(text)
        return len(texts) == len(contents)

    def _uses_contents(self, messages: Sequence[Mapping[str, Any]], role: str) -> bool:
        """Return whether the template writes a conversation, and fails if a role's contents are neither text nor list.

        A template that leaves them out writes both.
        """
        texts = [shape_message(message, ContentForm.TEXT) for message in messages]
        return self._try(texts) is not None and self._try(replace_contents(texts, role, 0)) is None

    def _try(self, messages: Sequence[Mapping[str, Any]], **changed: Any) -> str | None:
        """Return a conversation as text, without the opening of an answer; None if the template refuses it.

        Args:
            changed: options that are others here.
        """
        options = {**self._probe_options, **changed}
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception:  # any error in the template's code
            return None
        return text


@lru_cache(maxsize=256)
def warn_without_variable(template: str, name: str) -> None:
    """Say once that a template does not read a variable of this name, so that a misspelt one is found."""
    words = {THINKING_SWITCH, *re.findall(r"[A-Za-z_]\w*", template)}
    if name not in words:
        hint = suggest(name, words) or "it has no effect"
        logging.getLogger(__name__).warning("the chat template does not read %r; %s", name, hint)


def list_talks(role: str) -> list[list[dict[str, Any]]]:
    """Return conversations in which a role speaks, for finding out about a template. Some want a system message."""
    system: dict[str, Any] = {"role": "system", "content": "hello"}
    question: dict[str, Any] = {"role": "user", "content": "hello"}
    if role == "system":
        return [[system, question]]
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answer = {"role": role, "content": "hello", "tool_call_id": CALL["id"], "name": "f"}
    talk: list[dict[str, Any]] = [question, call, answer]
    if role == "user":
        talk = [question]
    if role == "assistant":
        talk = [question, {"role": role, "content": "hello"}, question]
    return [talk, [system, *talk]]


def replace_contents(messages: Sequence[Mapping[str, Any]], role: str, content: Any) -> list[Mapping[str, Any]]:
    """Return the messages, with another content for those of one role that have one."""
    return [
        {**message, "content": content} if message["role"] == role and message.get("content") is not None else message
        for message in messages
    ]


def replace_words(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with other words in its content and its thinking."""
    part = {"type": "text", "text": WORDS[0]}
    others = {name: message[name] for name in ("content", *REASONING) if message.get(name) is not None}
    return {**message, **{name: [part] if isinstance(words, list) else WORDS[0] for name, words in others.items()}}


def shape_message(message: Mapping[str, Any], form: ContentForm) -> Mapping[str, Any]:
    """Return a message whose content has a form that the template takes."""
    content = message.get("content")
    if content is None:  # a message with tool_calls has no content
        return message
    if isinstance(content, list) and form in (ContentForm.TEXT, ContentForm.ONE_PART):
        content = "\n".join(part["text"] for part in content)
    if isinstance(content, str) and form in (ContentForm.PARTS, ContentForm.ONE_PART):
        content = [{"type": "text", "text": content}]
    return {**message, "content": content}


def read_conversation(messages: Any) -> list[dict[str, Any]]:
    """Return the messages; the content of each becomes a string or a list of text parts. Other fields stay.

    A field that is null is left out, for templates ask whether there is the key. An assistant's content may be null.

    Raises:
        ValueError: `messages` is not a conversation, or a part of a content is not text, or a content is missing, or a
            role is unknown. The error shows the value.
    """
    is_list = isinstance(messages, (list, tuple)) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise ValueError(f'a conversation is {quote(messages)}; it must be a list of {{"role": ..., "content": ...}}')
    conversation = []
    for i, message in enumerate(messages):
        read = {name: value for name, value in message.items() if value is not None or name == "content"}
        read["role"] = ROLES[as_choice(message["role"], f"the role of message {i}", ROLES)]
        if "content" in message:
            read["content"] = read_content(message["content"], i)
        if read.get("content") is None and read["role"] != "assistant":
            raise ValueError(f"message {i} ({read['role']}) has no content; it must be a string or text parts")
        if tool_calls := read.pop("tool_calls", None):  # an empty list means none, too
            read["tool_calls"] = read_tool_calls(tool_calls, i)
        if thinking := read.get("reasoning") or read.get("reasoning_content"):
            read |= {name: read.get(name) or thinking for name in REASONING}
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
        if not isinstance(arguments, Mapping):
            raise ValueError(
                f"message {index} calls a tool with the arguments {quote(arguments)}; they must be an object"
            )
        parsed = {**function, "arguments": arguments}
        calls.append({**call, "function": parsed} if "function" in call else parsed)
    return calls


def read_content(content: Any, index: int) -> Any:
    """Return the content of a message: a string, or a list of text parts, each an object with its text.

    None stays None, because a message with tool_calls has no content.

    Args:
        index: the message's number, for the error.
    """
    if content is None or isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, (list, tuple)) else [content]:
        read = {"type": "text", "text": part} if isinstance(part, str) else part
        if not isinstance(read, Mapping) or read.get("type") != "text" or not isinstance(read.get("text"), str):
            raise ValueError(f"message {index} has the content {quote(content)}; only text is supported")
        parts.append(read)
    return parts
