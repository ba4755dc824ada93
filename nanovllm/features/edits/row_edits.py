"""The edits of logits that one request asks for. edit_logits.py says how they change a row of logits."""

import math
from array import array
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from nanovllm.engine.plan import IntArray
from nanovllm.features.edits.after_thinking import AfterThinking
from nanovllm.features.edits.bad_words import BadWord
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from nanovllm.features.parsing.thinking import ThinkingTokens

_MOST = 1e30
"""Biases and penalties are cut here: beyond it they would have no other effect, and logits stay finite in float32."""


def _packed(token_ids: Iterable[int], vocab_size: int) -> IntArray:
    """Return a mask, int32 [ceil(vocab / 32)], in which the bits of token_ids are set."""
    bits = np.zeros(ceil_div(vocab_size, 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


class RowEdits:
    """The edits that one request asks for; the completions of a prompt share it.

    What depends on a completion's tokens is not here: its place in a grammar is `Sequence.grammar`, and how often it
    has each token is in `PenaltyCounts`.
    """

    def __init__(
        self,
        params: SamplingParams,
        bad_words: Seq[BadWord],
        stop_ids: Collection[int],
        vocab_size: int,
        matcher: "LLMatcher | None" = None,
        thinking: "ThinkingTokens | None" = None,
    ) -> None:
        """
        Args:
            bad_words: the texts among `params.bad_words`. Lists of token ids are read from `params`.
            stop_ids: the token ids that min_tokens forbids.
            matcher: stands at the start of the output's grammar; None without one.
            thinking: the grammar holds after the thinking; None: from the first token on.
        """
        repetition = min(max(params.repetition_penalty, 1 / _MOST), _MOST)
        self.penalties = (repetition, params.frequency_penalty, params.presence_penalty)
        self.has_penalties = self.penalties != (1, 0, 0)
        bias = params.logit_bias or {}
        self.bias_ids = np.array([*bias], np.int64)
        self.bias = np.clip([*bias.values()], -_MOST, _MOST).astype(np.float32)
        self._allowed = params.allowed_token_ids
        listed = [array("i", word) for word in params.bad_words or () if not isinstance(word, str)]
        self._bad_tokens = [token_id for word in bad_words for token_id in word.single_tokens]
        self._bad_tokens += [token_ids[0] for token_ids in listed if len(token_ids) == 1]
        self._bad_sequences = [token_ids for token_ids in listed if len(token_ids) > 1]
        self._bad_words = [word for word in bad_words if word.has_pairs]
        self._longest_word = max((word.length for word in self._bad_words), default=0)
        self._min_tokens = params.min_tokens
        self._stop_ids = stop_ids
        self._vocab_size = vocab_size
        self._matcher = matcher
        self._thinking = thinking

    def new_matcher(self, prompt: Seq[int], text: str | None) -> "LLMatcher | AfterThinking | None":
        """Return a matcher at the start of the output's grammar, for one completion; None without a grammar.

        Args:
            text: the prompt's text; None if the caller gave token ids.
        """
        if self._matcher is None:
            return None
        matcher = self._matcher.deep_copy()
        if self._thinking is None:
            return matcher
        return AfterThinking(matcher, self._thinking, self._thinking.is_opened_by(prompt, text))

    def explain_error(self, matcher: "LLMatcher | AfterThinking | None") -> str:
        """Return why the matcher of an output has failed; "" if it has not, or if there is none."""
        return matcher.get_error().split("\n")[0] if matcher is not None else ""

    @cached_property
    def _masks(self) -> list[tuple[float, IntArray]]:
        """(length of the output from which on the mask no longer holds, mask). Made only when the request runs."""
        masks: list[tuple[float, IntArray]] = []
        if self._allowed is not None:
            masks.append((math.inf, _packed(self._allowed, self._vocab_size)))
        if self._bad_tokens:
            masks.append((math.inf, ~_packed(self._bad_tokens, self._vocab_size)))
        if self._min_tokens and self._stop_ids:
            masks.append((self._min_tokens, ~_packed(self._stop_ids, self._vocab_size)))
        return masks

    @property
    def needs_known_tokens(self) -> bool:
        """True if the tokens sampled before decide which tokens are forbidden: the host must have read those."""
        return self._matcher is not None or bool(self._bad_words or self._bad_sequences)

    @property
    def allows_drafts(self) -> bool:
        """True if the edits after a drafted token are known before the step runs."""
        return not (self.has_penalties or self._bad_words or self._bad_sequences)

    def forbids(self, num_output: int) -> bool:
        """Return whether it may forbid a token after num_output tokens of output."""
        return self.needs_known_tokens or any(num_output < end for end, _ in self._masks)

    def forbid(self, mask: IntArray, token_ids: "array[int]", num_output: int) -> None:
        """Clear, in mask int32 [ceil(vocab / 32)], the bits of tokens that may not come after num_output tokens of
        output.

        Args:
            token_ids: prompt and output, as far as they are known.
        """
        for end, words in self._masks:
            if num_output < end:
                mask &= words
        num_tokens = len(token_ids)
        output = token_ids[num_tokens - min(num_output, self._longest_word) :].tolist()
        last_tokens = [last for word in self._bad_words for last in word.find_last_tokens(output)]
        for sequence in self._bad_sequences:
            start = max(num_tokens - len(sequence) + 1, 0)
            if token_ids[start:] == sequence[:-1]:
                last_tokens.append(sequence[-1])
        for last in last_tokens:
            mask.view(np.uint32)[last // 32] &= ~np.uint32(1 << last % 32)
