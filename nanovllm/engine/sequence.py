"""One request on its way through the engine."""

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.edits.row_edits import RowEdits
    from nanovllm.text.stop_strings import StopStringMatcher


class Sequence:
    """One request: its tokens, its limits, and (while it is resident) its row and its blocks.

    Counts that change with every token of a resident sequence (known, planned, computed) live in the scheduler's
    row table, not here; a sequence that is not resident has computed nothing, and knows all of `token_ids` but the
    `num_in_flight` tokens that a launched step will still deliver.
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
        edits: "RowEdits | None" = None,
        lead: "Sequence | None" = None,
        prompt: str | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.prompt = prompt
        """The text that was tokenised, if it was a text."""
        self.params = params
        self.seed = seed
        self.token_ids = array("i", prompt_token_ids)
        """Prompt and output, as far as the host knows them."""
        self.num_prompt_tokens = len(self.token_ids)
        max_tokens = max_model_len if params.max_tokens is None else params.max_tokens
        self.limit = max(min(self.num_prompt_tokens + max_tokens, max_model_len), self.num_prompt_tokens)
        """Prompt and output together never grow beyond this."""
        self.num_needed = max(self.limit - 1, 1)
        """Tokens whose keys and values may be needed: nothing comes after the last one."""
        scores_from = self.num_prompt_tokens if params.prompt_logprobs is None else max(params.prompt_logprob_start, 1)
        self.next_scored = scores_from
        """The first token of the prompt that no launched step scores; num_prompt_tokens when none is left."""
        self.prompt_logprobs: list[dict[int, float] | None] = [None] * scores_from
        self.stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.stop_matcher = stop_matcher
        self.edits = edits
        """What is done to its logits before a token is sampled."""
        self.grammar = edits.new_matcher() if edits is not None else None
        """Its place in the grammar that its output must fit."""
        self.lead = lead
        """Of several completions of a prompt the first, in the others."""
        self.others: list[Sequence] = []
        """And in the first, the others."""
        self.row = -1
        """Its place in the device's tables, -1 when it is not resident."""
        self.block_table: list[int] = []
        self.digests: list[bytes] = []
        """Prefix digests of its full blocks, as far as they were needed: nothing is hashed twice."""
        self.drafting: Any = None
        """How its drafts fared, where there is speculation."""
        self.num_in_flight = 0
        """For a preempted sequence: results of launched steps that it must wait for before it moves in again."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at first admission."""
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        """What went wrong, if that is its finish_reason."""
        self.logprobs: list[dict[int, float]] = []

    @property
    def is_only_scored(self) -> bool:
        """Ends once its prompt is scored; its last token is a target, and never computed."""
        return self.params.max_tokens == 0

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens that it may find in the prefix cache: what predicts a token to be scored is computed."""
        return (self.next_scored if self.next_scored < self.num_prompt_tokens else len(self.token_ids)) - 1

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    def feed_last_token(self) -> FinishReason | None:
        """Show the last token to what may end the sequence; gives the reason if it does. Once for every token."""
        token_id = self.token_ids[-1]
        grammar = self.grammar
        # None, for the logits were no distribution; or what a grammar's mask lets through when its matcher has failed.
        if token_id < 0 or (grammar is not None and (not grammar.consume_token(token_id) or grammar.is_error())):
            self.token_ids.pop()
            del self.logprobs[len(self.token_ids) - self.num_prompt_tokens :]
            return "error"
        if token_id in self.stop_ids:
            return "stop"
        if self.stop_matcher is not None and self.stop_matcher.feed(token_id):
            return "stop"
        if grammar is not None and grammar.is_stopped():
            return "stop"
        return "length" if len(self.token_ids) >= self.limit else None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.num_prompt_tokens}+{len(self.token_ids) - self.num_prompt_tokens} tokens)"
        )
