"""What comes in: prompts in any of their forms, tokenised and validated before anything runs."""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from nanovllm.engine.tokenizer import Tokenizer
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import as_integer, quote

if TYPE_CHECKING:
    from nanovllm.edits.row_edits import RowEdits

Prompt = str | list[int] | Mapping[str, Any]
"""A text, token ids, or {"prompt": text} or {"prompt_token_ids": token ids}, as vLLM takes them.

A dict of both has the ids run; its text is only what the output shows as its prompt."""


MASK_64 = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, tokenised and validated, and how to sample it. Made by `LLMEngine.prepare`."""

    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    """The text that was tokenised, if it was a text."""
    edits: "RowEdits | None" = None
    """What is done to its logits before a token is sampled."""


def derive_seed(engine_seed: int, key: int | str) -> int:
    """A request's seed, 64 bits: from the engine's and the request's number, or a name of the caller's choice."""
    suffix = struct.pack("<q", key) if isinstance(key, int) else key.encode()
    return xxhash.xxh3_64_intdigest(struct.pack("<Q", engine_seed & MASK_64) + suffix)


def prepare_request(
    prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int
) -> Request:
    """Tokenise and validate one request; what edits its logits is still to come.

    Raises:
        ValueError: what is wrong with it, the limit, and the option to change.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params is {quote(params)}; it must be a SamplingParams")
    params = params.clone()
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        if bad := [i for i in getattr(params, name) or () if not 0 <= i < vocab_size]:
            raise ValueError(f"{name} has {bad[0]}; the vocabulary is 0..{vocab_size - 1}")
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
    text, token_ids = tokenize_prompt(prompt, tokenizer, max_model_len)
    if not token_ids:
        raise ValueError("the prompt is empty; it must have at least one token")
    # There must be room for a token to generate; where none is, the prompt's last token itself is never computed.
    most = max_model_len + (1 if params.max_tokens == 0 else -1)
    if len(token_ids) > most:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens; with max_model_len={max_model_len} it may have at most {most}: "
            "shorten it or raise max_model_len"
        )
    if (start := params.prompt_logprob_start) >= len(token_ids):
        raise ValueError(f"prompt_logprob_start is {start}; it must be below the prompt's {len(token_ids)} tokens")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        bad_id = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise ValueError(f"the prompt has token id {bad_id}; the vocabulary is 0..{vocab_size - 1}")
    return Request(token_ids, params, text)


def tokenize_prompt(
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
