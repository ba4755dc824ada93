"""Prompts in all the forms that users give them, and many of them tokenised at once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from numbers import Number
from typing import Any, TypeVar

from tqdm import tqdm

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import as_integer, quote

BATCH = 256
"""Texts that are tokenised at a time: enough for all cores, and for a bar that moves."""

Prompt = str | list[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt": text} or {"prompt_token_ids": token ids}, as vLLM takes them.

A dict of both has the ids run; its text is only what the output shows as its prompt."""

S = TypeVar("S")
T = TypeVar("T")


def as_prompts(prompts: Any) -> list[Any]:
    """One prompt or a list of prompts, as a list: numbers are one prompt. ValueError if it is neither."""
    if hasattr(prompts, "tolist"):  # a tensor or an array
        prompts = prompts.tolist()
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts is {quote(prompts)}; it must be a string, a list of token ids, or a list of prompts")
    prompts = list(prompts)
    is_one = bool(prompts) and all(isinstance(p, Number) or getattr(p, "ndim", 1) == 0 for p in prompts)
    return [prompts] if is_one else prompts


def one_each(params: Any, count: int) -> list[SamplingParams | None]:
    """The sampling_params of each of count prompts, given one for all or one each (ValueError if it is neither)."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, (str, Mapping)) or not isinstance(params, Iterable):
        raise ValueError(f"sampling_params is {quote(params)}; it must be a SamplingParams, or one each")
    each: list[SamplingParams | None] = list(params)
    if len(each) != count:
        raise ValueError(f"{len(each)} sampling_params for {count} prompts; give one for all or one each")
    return each


def as_iterable(requests: Any) -> Iterable[Any]:
    """What `stream` runs: a sequence, an array or a dict may be one prompt; all else is taken as it comes."""
    may_be_one = isinstance(requests, Sequence | Mapping) or hasattr(requests, "tolist")
    return requests if isinstance(requests, Iterable) and not may_be_one else as_prompts(requests)


@contextmanager
def naming(what: str, number: int, count: int | None = None) -> Iterator[None]:
    """Within, a ValueError says which of count it is about, unless there is only one."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what} {number}: {error}" if count != 1 else str(error)) from None


def each(what: str, items: Sequence[S], work: Callable[[S], T]) -> list[T]:
    """The work done on each of the items; a ValueError says which of them it is about, as `naming` does."""
    done = []
    for i, item in enumerate(items):
        with naming(what, i, len(items)):
            done.append(work(item))
    return done


def tokenise_prompt(
    prompt: Prompt, tokenizer: Tokenizer | None, max_model_len: int, add_special_tokens: bool = True
) -> tuple[str | None, list[int]]:
    """(its text, if it has one, its token ids); ValueError if it is no prompt."""
    text: str | None = None
    if isinstance(prompt, Mapping):
        keys = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
        unknown = {key for key, value in prompt.items() if value is not None} - {"prompt_token_ids", "prompt"}
        if unknown or not keys:
            raise ValueError(
                f'a prompt has the keys {quote(list(prompt))}; it must have "prompt" or "prompt_token_ids"'
            )
        text = prompt["prompt"] if isinstance(prompt.get("prompt"), str) else None
        prompt = prompt[keys[0]]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the prompt is a string, and this model has no tokenizer: pass token ids")
        return prompt, tokenizer.encode(prompt, max_model_len, add_special_tokens)
    if hasattr(prompt, "tolist"):  # a tensor or an array
        prompt = prompt.tolist()
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Iterable):
        raise ValueError(f"a prompt is {quote(prompt)}; it must be a string, a list of token ids, or a dict of either")
    token_ids: list[Any] = list(prompt)
    if set(map(type, token_ids)) == {int}:  # as nearly always, and much faster to see
        return text, token_ids
    return text, [as_integer(i, "a token id of the prompt") for i in token_ids]


def tokenise_texts(
    prompts: Sequence[Any], tokenizer: Tokenizer | None, max_model_len: int, show: bool, what: str = "prompt"
) -> list[Any]:
    """The prompts, those that are texts with their token ids: in batches, on all cores, beside a bar if it takes long.

    Args:
        what: the prompts are: a "conversation", rendered, gets no special tokens beside its own.

    Raises:
        ValueError: a text that is too long or cannot be tokenised, naming its number among them.
    """
    texts = {i: text for i, prompt in enumerate(prompts) if (text := _text_of(prompt)) is not None}
    done = list(prompts)
    if tokenizer is None:
        return done
    numbers = iter(texts)
    with tqdm(total=len(texts), desc="Tokenising", unit="prompt", disable=not show, leave=False, delay=1.0) as bar:
        while batch := list(islice(numbers, BATCH)):
            try:
                encoded = tokenizer.encode_batch([texts[i] for i in batch], max_model_len, what != "conversation")
            except ValueError:
                for i in batch:  # which one?
                    with naming(what, i, len(prompts)):
                        tokenizer.encode(texts[i], max_model_len, what != "conversation")
                raise
            for i, ids in zip(batch, encoded, strict=True):
                done[i] = {"prompt": texts[i], "prompt_token_ids": ids}
            bar.update(len(batch))
    return done


def _text_of(prompt: Any) -> str | None:
    """The text to tokenise, if it is one."""
    if isinstance(prompt, Mapping):
        prompt = prompt["prompt"] if prompt.keys() == {"prompt"} else None
    return prompt if isinstance(prompt, str) else None
