"""What comes in: a tokenised prompt and how to sample it, validated before anything runs."""

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import quote

if TYPE_CHECKING:
    from nanovllm.edits.row_edits import RowEdits

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
    engine: object = None
    """The `identity` of the engine that it is for, whose limits it was held against."""


def derive_seed(engine_seed: int, key: int | str) -> int:
    """A request's seed, 64 bits: from the engine's and the request's number, or a name of the caller's choice."""
    suffix = struct.pack("<q", key) if isinstance(key, int) else key.encode()
    return xxhash.xxh3_64_intdigest(struct.pack("<Q", engine_seed & MASK_64) + suffix)


def prepare_request(
    token_ids: list[int], params: SamplingParams, has_tokenizer: bool, vocab_size: int, max_model_len: int
) -> Request:
    """Validate one request; its text, and what edits its logits, are still to come.

    Raises:
        ValueError: what is wrong with it, the limit, and the option to change.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params is {quote(params)}; it must be a SamplingParams")
    params = params.clone()
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        if bad := [i for i in getattr(params, name) or () if not 0 <= i < vocab_size]:
            raise ValueError(f"{name} has {bad[0]}; the vocabulary is 0..{vocab_size - 1}")
    if params.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
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
    return Request(token_ids, params)
