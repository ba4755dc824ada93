"""What one request asks to be done to its logits before a token is sampled. See kernels/edit_logits.py for the rule."""

import math
from array import array
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

import numpy as np

from nanovllm.engine.plan import IntArray
from nanovllm.sampling_params import SamplingParams

_MOST = 1e30
"""A larger bias or penalty does no more than this, which leaves logits finite in float32."""


def _packed(token_ids: Iterable[int], vocab_size: int) -> IntArray:
    """The mask in which token_ids are set."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4")


class RowEdits:
    """What one request asks for, as far as its tokens do not decide it. The completions of a prompt share it."""

    def __init__(
        self, params: SamplingParams, bad_words: Seq[Seq[int]], stop_ids: Collection[int], vocab_size: int
    ) -> None:
        """
        Args:
            bad_words: the token ids of each.
            stop_ids: what min_tokens keeps from coming.
        """
        repetition = min(max(params.repetition_penalty, 1 / _MOST), _MOST)
        self.penalties = (repetition, params.frequency_penalty, params.presence_penalty)
        self.has_penalties = self.penalties != (1, 0, 0)
        bias = params.logit_bias or {}
        self.bias_ids, self.bias = (
            np.array([*bias], np.int64),
            np.clip([*bias.values()], -_MOST, _MOST).astype(np.float32),
        )
        self._masks: list[tuple[float, IntArray]] = []
        """Each with the length of the output from which on it no longer holds."""
        if params.allowed_token_ids is not None:
            self._masks.append((math.inf, _packed(params.allowed_token_ids, vocab_size)))
        if single := [word[0] for word in bad_words if len(word) == 1]:
            self._masks.append((math.inf, ~_packed(single, vocab_size)))
        if params.min_tokens and stop_ids:
            self._masks.append((params.min_tokens, ~_packed(stop_ids, vocab_size)))
        self._has_grammar = params.structured_outputs is not None
        self._bad_words = [list(word) for word in bad_words if len(word) > 1]

    @property
    def needs_known_tokens(self) -> bool:
        """Whether they depend on tokens that the host must have read."""
        return self._has_grammar or bool(self._bad_words)

    @property
    def allows_drafts(self) -> bool:
        """Whether the edits after a draft are known before it is."""
        return not (self.has_penalties or self._bad_words)

    def forbids(self, num_output: int) -> bool:
        """Whether it may forbid a token after num_output tokens of output."""
        return self.needs_known_tokens or any(num_output < end for end, _ in self._masks)

    def forbid(self, mask: IntArray, token_ids: "array[int]", num_output: int) -> None:
        """Clear in mask, int32 [ceil(vocab / 32)], what may not come after num_output tokens of output.

        Args:
            token_ids: prompt and output, as far as they are known.
        """
        for end, words in self._masks:
            if num_output < end:
                mask &= words
        known = len(token_ids)
        for *begin, last in self._bad_words:
            if num_output >= len(begin) and token_ids[known - len(begin) :].tolist() == begin:
                mask.view(np.uint32)[last // 32] &= ~np.uint32(1 << last % 32)
