"""A request as the caller gives it, and the sequence that it becomes inside the engine."""

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.text.stop_strings import StopStringMatcher

MASK_64 = 2**64 - 1


class GrammarMatcher(Protocol):
    """Follows one output through its grammar. llguidance's LLMatcher is one."""

    def consume_token(self, token_id: int) -> bool:
        """Advance by one token; returns False if the grammar does not allow it."""

    def is_stopped(self) -> bool:
        """Return whether the output is complete: the grammar allows nothing more."""

    def is_error(self) -> bool:
        """Return whether the matcher has failed; its mask then allows the end-of-sequence token."""

    def get_error(self) -> str:
        """Return why it has failed; "" if it has not."""


class RequestEdits(Protocol):
    """The edits of logits that one request asks for. A `LogitEditor` makes it (engine/hooks.py)."""

    @property
    def needs_known_tokens(self) -> bool:
        """True if the edits of a step depend on the tokens sampled before: the host must have read those."""

    @property
    def allows_drafts(self) -> bool:
        """True if the edits after a drafted token are known before the step runs."""

    def new_matcher(self) -> GrammarMatcher | None:
        """Return a matcher at the start of the request's grammar, for one completion; None without a grammar."""


@dataclass(frozen=True, slots=True)
class Request:
    """A tokenised and validated prompt, and how to sample it. `LLMEngine.prepare` makes it."""

    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None
    """The text that was tokenised; None if the caller gave token ids."""
    edits: RequestEdits | None
    """The edits of its logits; None if it asks for none."""
    engine: object
    """The `identity` of the engine that prepared it: its limits hold for no other engine."""


def derive_seed(engine_seed: int, key: int | str) -> int:
    """Return a 64-bit seed for a request: a hash of the engine's seed and the request's number or name."""
    suffix = struct.pack("<q", key) if isinstance(key, int) else key.encode()
    return xxhash.xxh3_64_intdigest(struct.pack("<Q", engine_seed & MASK_64) + suffix)


def check_request(
    token_ids: list[int], params: SamplingParams, has_tokenizer: bool, vocab_size: int, max_model_len: int
) -> None:
    """Raise a ValueError if the engine cannot run a prompt with these params.

    The message names what is wrong, the limit, and the option to change.
    """
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        if bad := [i for i in getattr(params, name) or () if not 0 <= i < vocab_size]:
            raise ValueError(f"{name} has {bad[0]}; the vocabulary is 0..{vocab_size - 1}")
    if params.stop and not has_tokenizer:
        raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
    if not token_ids:
        raise ValueError("the prompt is empty; it must have at least one token")
    # There must be room for one generated token. A request that is only scored generates none, and the last token of
    # its prompt is never computed.
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


class Sequence:
    """One completion of a request: its tokens, its limits, and, while it is resident, its row and its blocks.

    It is resident from admission until it ends or is preempted. Counts that change with every token of a resident
    sequence are in the scheduler's `RowTable`, not here.

    It owns three facts. Its end: `check_end` decides whether a token ends it, and how; aborts and last scores end it
    through `Scheduler.end`. Its log-probabilities: `logprobs` has an entry for each token of output, `prompt_logprobs`
    one for each prompt token. Its text, as far as stop strings matter: `stop_matcher`.
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
        stop_matcher: "StopStringMatcher | None" = None,
        edits: RequestEdits | None = None,
        lead: "Sequence | None" = None,
        prompt: str | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.prompt = prompt
        """The text that was tokenised; None if the caller gave token ids."""
        self.params = params
        self.seed = seed
        self.token_ids = array("i", prompt_token_ids)
        """Prompt and output, as far as the host knows them. A token in flight is not here yet."""
        self.num_prompt_tokens = len(self.token_ids)
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        self.limit = max(min(self.num_prompt_tokens + max_tokens, max_model_len), self.num_prompt_tokens)
        """Prompt and output together have at most this many tokens."""
        self.num_needed = max(self.limit - 1, 1)
        """Upper bound of the tokens whose keys and values are needed: nothing follows the last token."""
        scores_from = self.num_prompt_tokens if params.prompt_logprobs is None else max(params.prompt_logprob_start, 1)
        self.next_scored = scores_from
        """The first prompt token that no launched step scores; num_prompt_tokens when none is left."""
        self.prompt_logprobs: list[dict[int, float] | None] = [None] * scores_from
        """The same for each prompt token as far as it is scored; None for tokens that are not to be scored."""
        self._eos_ids = frozenset[int]() if params.ignore_eos else eos_token_ids
        self.stop_ids = self._eos_ids | frozenset(params.stop_token_ids or ())
        """Token ids that end it."""
        self.stop_matcher = stop_matcher
        self.edits = edits
        """The edits of its logits; None if it asks for none."""
        self.grammar = edits.new_matcher() if edits is not None else None
        """Follows its output through its grammar; None without one."""
        self.lead = lead
        """With n > 1: the first completion. None in the first itself."""
        self.others: list[Sequence] = []
        """With n > 1, in the first completion: the n - 1 others."""
        self.row = -1
        """Its row in the device's tables; -1 while it is not resident. Only `RowTable` sets it."""
        self.block_table: list[int] = []
        """Its blocks in order, while it is resident. Only `BlockTables` changes it."""
        self.digests: list[bytes] = []
        """Prefix digests of its full blocks, as far as they were needed: no block is hashed twice."""
        self.drafting: Any = None
        """The `Speculator`'s notes about it."""
        self.num_in_flight = 0
        """After a preemption: results of launched steps that it must wait for before it is admitted again."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache when it was admitted first; None before that."""
        self.finish_reason: FinishReason | None = None
        """None until it has ended."""
        self.stop_reason: int | str | None = None
        """The stop string, or the id in stop_token_ids, that ended it; None for the model's own end of sequence."""
        self.error: str | None = None
        """With finish_reason "error": what went wrong."""
        self.logprobs: list[dict[int, float]] = []
        """For each token of output {token id: log-probability}; empty unless params.logprobs asks for them."""

    @property
    def is_only_scored(self) -> bool:
        """True if it ends when its prompt is scored. The last prompt token is then a target, and never computed."""
        return self.params.max_tokens == 0

    @property
    def max_cached_tokens(self) -> int:
        """Upper bound of a prefix-cache hit. A token whose successor is scored needs logits, so it must be computed;
        so must the last token."""
        return (self.next_scored if self.next_scored < self.num_prompt_tokens else len(self.token_ids)) - 1

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    def check_end(self) -> FinishReason | None:
        """Decide whether the last token ends the sequence; sets finish_reason and stop_reason, and returns the former.

        The scheduler calls it once after each token, in order, because stop strings and grammars follow the text. It
        may leave the call out only for tokens that `Scheduler.may_stop` and `RowTable.unchecked_until` rule out.
        """
        token_id = self.token_ids[-1]
        grammar = self.grammar
        # -1: the logits were no distribution. A grammar that has failed lets an end of sequence pass, which is no end.
        if token_id < 0 or (grammar is not None and (not grammar.consume_token(token_id) or grammar.is_error())):
            self.token_ids.pop()
            del self.logprobs[len(self.token_ids) - self.num_prompt_tokens :]
            self.finish_reason = "error"
        elif token_id in self.stop_ids:
            self.finish_reason = "stop"
            self.stop_reason = None if token_id in self._eos_ids else token_id
        elif self.stop_matcher is not None and self.stop_matcher.feed(token_id):
            self.finish_reason = "stop"
            self.stop_reason = self.stop_matcher.found
        elif grammar is not None and grammar.is_stopped():
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.limit:
            self.finish_reason = "length"
        return self.finish_reason

    def __repr__(self) -> str:
        num_output = len(self.token_ids) - self.num_prompt_tokens
        return f"Sequence({self.seq_id}, {self.num_prompt_tokens}+{num_output} tokens)"
