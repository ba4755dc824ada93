"""Turns prompts, in every form that users give them, into token ids."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from nanovllm.text.tokenizer import Tokenizer, explain_no_tokenizer
from nanovllm.utils.checks import as_integer, quote

BATCH = 256
"""How many texts one call tokenises: enough to keep all cores busy, and few enough to move the progress bar often."""

Prompt = str | list[int] | Mapping[str, Any]
"""A text, token ids, or a dict with "prompt" (a text) or "prompt_token_ids", as in vLLM.

In a dict with both, the token ids are run, and the text is only shown in the output."""


class ChatPrompt(str):
    """The text of a prompt that a chat template wrote. It knows which part of it the template wrote for the answer.

    Everything that takes a string takes it. A text that is made from it, for example by `+`, is a plain string again.

    Attributes:
        opening: the end of the text, which opens the answer. None: the template does not tell it from the messages.
    """

    opening: str | None

    def __new__(cls, text: str, opening: str | None = None) -> "ChatPrompt":
        prompt = super().__new__(cls, text)
        prompt.opening = opening
        return prompt


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


# ---- one or several


def read_column(values: Any, name: str) -> Any:
    """Return a table's column of this name as a list. Return an array or a column as a list, and other values as given.

    Args:
        values: a table or a column of pandas, polars, pyarrow or datasets, a tensor, or any other value.

    Raises:
        ValueError: the table has no such column.
    """
    names = getattr(values, "column_names", None) or getattr(values, "columns", None)  # pyarrow's columns are no names
    if names is not None:
        if name not in names:
            raise ValueError(f"the table has the columns {quote([*names])}; it must have one that is named {name!r}")
        values = values[name]
    for convert in ("tolist", "to_list", "to_pylist"):
        if hasattr(values, convert):
            return getattr(values, convert)()
    return values


def list_prompts(prompts: Any) -> list[Any]:
    """Return a list of prompts, given one prompt, several, or a table with a column "prompt".

    A list of numbers is one prompt.

    Raises:
        ValueError: `prompts` is not a prompt and not a list.
    """
    prompts = read_column(prompts, "prompt")
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {quote(prompts)}; it must be a string, a list of token ids, or a list of prompts")
    prompts = list(prompts)
    # A number may also be an array of numpy or torch with 0 dimensions. For a type without `ndim` we take 1, which
    # means that it is not a number.
    is_one = bool(prompts) and all(isinstance(p, Number) or getattr(p, "ndim", 1) == 0 for p in prompts)
    return [prompts] if is_one else prompts


def list_conversations(messages: Any) -> list[Sequence[Message]]:
    """Return a list of conversations, given one, several, or a table with a column "messages"; else ValueError."""
    messages = read_column(messages, "messages")
    if not messages or isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ValueError(f"messages is {quote(messages)}; it must be a conversation or a list of conversations")
    return [messages] if isinstance(messages[0], Mapping) else [read_column(one, "messages") for one in messages]


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
                f'a prompt has the keys {quote(list(prompt))}; it must have "prompt" or "prompt_token_ids", '
                "and there are no images, videos or sounds"
            )
        if "prompt_token_ids" in given and isinstance(given.get("prompt"), str):
            text = given["prompt"]
        prompt = given.get("prompt_token_ids", given.get("prompt"))
    if isinstance(prompt, str):
        return prompt, None
    if prompt is None or (isinstance(prompt, float) and math.isnan(prompt)):
        raise ValueError(f"a prompt is {quote(prompt)}, as a table has where a row is empty: leave such rows out")
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
    *,
    kind: str = "prompt",
    add_special_tokens: bool = True,
    show: bool = False,
    origin: Path | str = "",
) -> list[TokenisedPrompt]:
    """Read all prompts, and tokenise the texts among them. The tokenizer uses all cores for each batch of texts.

    Args:
        kind: what error messages call a prompt.
        add_special_tokens: put the tokenizer's special tokens around each text.
        show: draw a progress bar if it takes longer than a second.
        origin: the model's folder, for the error of a model without a tokenizer.

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
                    raise ValueError(f"the prompt is a string, and {explain_no_tokenizer(origin)}; or pass token ids")
                tokenizer.check(text)
                texts.append((i, text))
            done.append(TokenisedPrompt(text, token_ids or []))
    if tokenizer is None:
        return done
    starts = range(0, len(texts), BATCH)
    bar = {"desc": "Tokenising", "unit": kind, "unit_scale": BATCH, "leave": False, "delay": 1.0}
    for start in tqdm(starts, **bar) if show else starts:
        batch = texts[start : start + BATCH]
        encoded = tokenizer.encode_batch([text for _, text in batch], add_special_tokens)
        for (i, text), token_ids in zip(batch, encoded, strict=True):
            done[i] = TokenisedPrompt(text, token_ids)
    return done
