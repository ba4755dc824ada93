"""A request as the caller gives it, and the sequence that it becomes inside the engine."""

import struct
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from nanovllm.engine.token_scores import OutputScores, TokenScores
from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.stop_strings import StopStringMatcher

MASK_64 = 2**64 - 1
NO_ROW = -1
"""Stands for the row of a sequence that has no row. numpy reads index -1 as the last element."""

Content: TypeAlias = tuple[bytes, "Content | None", bytes]
"""Names a full block: its digest, its parent's content and its token ids. The parent of a block is the block before it
in the sequence. The parent of a first block has no tokens and no parent. A class would cost 0.3 us more for each block.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """A tokenised and validated prompt with its sampling_params. `LLMEngine.prepare` makes it."""

    prompt_token_ids: "array[int]"
    """4 bytes each, as the sequences keep them."""
    params: SamplingParams
    prompt: str | None
    """The text that was tokenised; None if the caller gave token ids."""
    edits: Any
    """The edits of the request's logits, a `RowEdits` (features/edits/row_edits.py); None if it asks for no edits."""
    engine: object
    """The `identity` of the engine that prepared the request. Only that engine may run it, because limits differ."""
    numbers: tuple[int, int] | None = None
    """The request's number, and that of its first sequence. If this is None, `LLMEngine.add` chooses both numbers."""
    reason: str = ""
    """With order="auto" the engine chooses the order of the requests. This text says why the request has its place in
    it, and a trace shows the text. It is "" if the caller chose the order."""
    max_len: int | None = None
    """Prompt and output together have at most this many tokens; None: the engine's max_model_len."""


def derive_seed(seed: int, key: int | str) -> int:
    """Return a 64-bit hash of a seed and a key.

    For a request these are the engine's seed and the request's number (in a job file: its name). For a further
    completion of a request they are the request's seed and the completion's number.
    """
    suffix = struct.pack("<q", key) if isinstance(key, int) else key.encode()
    return xxhash.xxh3_64_intdigest(struct.pack("<Q", seed & MASK_64) + suffix)


def check_request(
    token_ids: list[int], params: SamplingParams, has_tokenizer: bool, vocab_size: int, max_model_len: int
) -> "array[int]":
    """Return the prompt's token ids, packed. Raise a ValueError if the engine cannot run a prompt with these params.

    The message says what is wrong and what is allowed.
    """
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        if bad := [i for i in getattr(params, name) or () if not 0 <= i < vocab_size]:
            raise ValueError(f"{name} has {bad[0]}; the vocabulary is 0..{vocab_size - 1}")
    if params.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
    if not token_ids:
        raise ValueError("the prompt is empty; it must have at least one token")
    if params.embed:  # only the prompt's vector is wanted: all its tokens are computed
        most = max_model_len
    elif params.max_tokens == 0:  # only the scores of its tokens are wanted: the last one need not be computed
        most = max_model_len + 1
    else:  # there is room for one token of output
        most = max_model_len - 1
    if len(token_ids) > most:
        raise ValueError(
            f"the prompt has {len(token_ids)} tokens; with max_model_len={max_model_len} it may have at most {most}: "
            "shorten it or raise max_model_len"
        )
    if (start := params.prompt_logprob_start) >= len(token_ids):
        raise ValueError(f"prompt_logprob_start is {start}; it must be below the prompt's {len(token_ids)} tokens")
    try:
        packed = array("i", token_ids)
        greatest = int(np.frombuffer(packed, np.uint32).max())  # without its sign, a negative id is a large number
    except OverflowError:  # an id has more than 32 bits
        greatest = vocab_size
    if greatest >= vocab_size:
        bad_id = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise ValueError(f"the prompt has token id {bad_id}; the vocabulary is 0..{vocab_size - 1}")
    return packed


@dataclass
class PromptScores:
    """Holds what a sequence asks for of its prompt: the scores of its tokens, or its embedding.

    Attributes:
        next_target: index of the first prompt token whose score is wanted and is not planned yet; the token before it
            gives the score. If the prompt is embedded, the token before this index is the first one whose hidden state
            is wanted and is not planned yet. At least the number of prompt tokens if nothing is left.
        first: index of the first prompt token whose score is wanted.
        tokens: the scores of the tokens from `first` on, with as many of the most likely ones as the request asks for.
            None before the first one was read.
        num_read: how many rows of `tokens` have their values.
        embedding: the sum of the wanted hidden states that were read, float64 [hidden]; None before the first one.
    """

    next_target: int
    first: int
    tokens: TokenScores | None = None
    num_read: int = 0
    embedding: NDArray[np.float64] | None = None

    def add(self, scores: TokenScores, num_prompt_tokens: int) -> None:
        """Add the scores of the next tokens. They are copied, because the arrays of a step hold those of others."""
        if self.tokens is None:
            self.tokens = TokenScores.allocate(num_prompt_tokens - self.first, scores.num_top)
        end = self.num_read + len(scores.logprobs)
        for whole, part in zip(self.tokens, scores, strict=True):
            whole[self.num_read : end] = part
        self.num_read = end


class Sequence:
    """Holds one completion of a request: its tokens, its limits, and how it ended.

    A sequence waits until the scheduler admits it. To admit a sequence means to give it a row and blocks of the KV
    cache. A row is a place in the device's tables. An admitted sequence is resident until it ends or is preempted. To
    preempt a sequence means to take its row and its blocks away, and to let it wait again. The counts that change with
    every token of a resident sequence are in the scheduler's `RowTable`.

    CPython is slower with an object that has 30 or more attributes of its own: give new duties to other classes.
    """

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: Iterable[int],
        params: SamplingParams,
        *,
        max_model_len: int,
        seed: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        stop_matcher: StopStringMatcher | None = None,
        edits: Any = None,
        lead: "Sequence | None" = None,
        prompt: str | None = None,
        reason: str = "",
        pooled: range | None = None,
    ) -> None:
        """
        Args:
            pooled: if the prompt is embedded, the indices of the tokens whose hidden states its vector is made of. None
                stands for the last token.
        """
        self.seq_id = seq_id
        self.reason = reason
        """Why the request has its place in the order: see `Request.reason`."""
        self.prompt = prompt
        """The text that was tokenised; None if the caller gave token ids."""
        self.params = params
        self.seed = seed
        self.token_ids = array("i", prompt_token_ids)  # a copy, even of an array
        """The prompt, and the output that the host has read. A token of a step in flight is not here yet."""
        self.num_prompt_tokens = len(self.token_ids)
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        # The outer max() is for a prompt that is only scored: it may have one token more than max_model_len.
        self.limit = max(min(self.num_prompt_tokens + max_tokens, max_model_len), self.num_prompt_tokens)
        """Prompt and output together have at most this many tokens."""
        self.pooled = range(self.num_prompt_tokens - 1, self.num_prompt_tokens) if pooled is None else pooled
        """If the prompt is embedded, the indices of the tokens whose hidden states its vector is made of."""
        self.num_needed = self.pooled.stop if params.embed else max(self.limit - 1, 1)
        """At most this many tokens are computed. A prompt that is embedded is computed up to the last hidden state that
        is wanted. Otherwise the last of `limit` tokens is not computed, because no token follows it. But a prompt of
        one token that is only scored takes part in one step, too."""
        self.scores: PromptScores | None = None
        """The scores or the embedding of the prompt; None if the request asks for neither. `Scoring` sets it."""
        self._eos_ids = frozenset[int]() if params.ignore_eos else eos_token_ids
        self.stop_ids = self._eos_ids | frozenset(params.stop_token_ids or ())
        """Token ids that end the sequence."""
        self.stop_matcher = stop_matcher
        self.edits = edits
        """The edits of the sequence's logits; None if the request asks for no edits."""
        self.grammar = edits.new_matcher(self.token_ids, prompt) if edits is not None else None
        """Checks the output against the request's grammar; None if there is no grammar."""
        self.lead = lead
        """The first completion of the same request. In the first completion this is None."""
        self.others: list[Sequence] = []
        """In the first completion: the request's n - 1 other completions. In each of the others this list is empty."""
        self.row = NO_ROW
        """The sequence's row in the device's tables; NO_ROW while it is not resident. Only `RowTable` sets it."""
        self.block_table: list[int] = []
        """The sequence's blocks in order, while it is resident. Only `BlockTables` changes this list."""
        self.contents: list[Content] = []
        """The content of each full block that was hashed so far, in order. Only `BlockManager` changes this list."""
        self.drafting: Any = None
        """Only drafts/ reads and writes this."""
        self.num_in_flight = 0
        """Of a preempted sequence: how many tokens the steps in flight will still sample for it. If the sequence has no
        output, this is 1 while its last scores, or its embedding, are in flight. The sequence is admitted again when
        this is 0. A resident sequence always has 0."""
        self.times = [time.time()]
        """Seconds since 1970: first the time when the sequence was made, then the time when its first token of output
        was read. The second time is missing until then."""
        self.num_cached_tokens: int | None = None
        """How many prompt tokens the prefix cache had at the first admission; None before that admission."""
        self.finish_reason: FinishReason | None = None
        """None until the sequence has ended."""
        self.stop_reason: int | str | None = None
        """The stop string, or the id in stop_token_ids, that ended the sequence. None if anything else ended it, the
        model's end-of-sequence id included."""
        self.logprobs = OutputScores()
        """Those of the tokens of output; of none unless params.logprobs asks for them."""
        self.error: str | None = None
        """A message if finish_reason is "error"."""

    @property
    def has_output(self) -> bool:
        """False if the sequence ends when its prompt is scored, or when its prompt is embedded."""
        return self.params.max_tokens != 0

    @property
    def max_cached_tokens(self) -> int:
        """The prefix cache may supply at most this many tokens; all later tokens are computed.

        The token before the first scored token must be computed, because its logits are needed, and so must the first
        token whose hidden state is wanted. If nothing is scored, the last token must be computed: the output is sampled
        from its logits.
        """
        if self.scores is not None and self.scores.next_target < self.num_prompt_tokens:
            return self.scores.next_target - 1
        return len(self.token_ids) - 1

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    def check_end(self, num_new: int = 1) -> FinishReason | None:
        """Decide whether one of the last num_new tokens ends the sequence, and drop the tokens after that token.

        This sets finish_reason and stop_reason, and returns finish_reason. Stop strings and grammars must see every
        token, in order. For a resident sequence without them the scheduler calls this method only if a new token may be
        a stop token or a failed sample, or may reach `limit`. For a preempted sequence it always calls this method.
        """
        num_before = len(self.token_ids) - num_new
        for num_tokens, token_id in enumerate(self.token_ids[num_before:], num_before + 1):
            self.finish_reason = self._check_token(token_id, num_tokens)
            if self.finish_reason is not None:
                # The token that ends the sequence is kept. After an error it is dropped: it is -1, the mark of a failed
                # sample, or a token that the grammar forbids.
                num_kept = num_tokens - 1 if self.finish_reason == "error" else num_tokens
                del self.token_ids[num_kept:]
                self.logprobs.drop(num_kept - self.num_prompt_tokens)
                break
        return self.finish_reason

    def _check_token(self, token_id: int, num_tokens: int) -> FinishReason | None:
        """Return how a token ends the sequence; None if the sequence goes on. num_tokens counts this token, too."""
        grammar = self.grammar
        # Token id -1: the logits were not a valid distribution. consume_token() returns True for the end-of-sequence
        # token even if the matcher has failed, so is_error() is checked, too.
        if token_id < 0 or (grammar is not None and (not grammar.consume_token(token_id) or grammar.is_error())):
            return "error"
        if token_id in self.stop_ids:
            self.stop_reason = None if token_id in self._eos_ids else token_id
            return "stop"
        if self.stop_matcher is not None and self.stop_matcher.feed(token_id):
            self.stop_reason = self.stop_matcher.found
            return "stop"
        if grammar is not None and grammar.is_stopped():
            return "stop"
        return "length" if num_tokens >= self.limit else None

    def explain_error(self) -> str:
        """Return why finish_reason is "error"."""
        reason = self.edits.explain_error(self.grammar) if self.edits is not None else ""
        return reason or "the logits hold NaN or infinity, or they allow no token"

    def __repr__(self) -> str:
        num_output = len(self.token_ids) - self.num_prompt_tokens
        return f"Sequence({self.seq_id}, {self.num_prompt_tokens}+{num_output} tokens)"
