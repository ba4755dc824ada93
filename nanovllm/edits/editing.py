"""What the requests of one model ask to be done to their logits: read from a request, and gathered for a step."""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from nanovllm.edits.logit_edits import LogitEdits, make_edits
from nanovllm.edits.row_edits import RowEdits
from nanovllm.engine.step import ScheduledStep
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.edits.grammars import Grammars


class Editing:
    """Of one engine, which makes it when the first request asks for edits."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int], max_model_len: int
    ) -> None:
        self._tokenizer, self._vocab_size, self._max_model_len = tokenizer, vocab_size, max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self.grammars: Grammars | None = None

    def of_request(self, params: SamplingParams) -> RowEdits:
        """What a request asks for.

        Raises:
            ValueError: it cannot be had with this model, or its grammar is bad.
        """
        if params.bad_words and self._tokenizer is None:
            raise ValueError("bad_words need a tokenizer, and this model has none; use logit_bias")
        matcher, words = None, list[list[int]]()
        if self._tokenizer is not None:
            words = spell(params.bad_words or (), self._tokenizer, self._max_model_len)
            words = [word for word in words if max(word) < self._vocab_size]  # others cannot come
        if params.structured_outputs is not None:
            if self.grammars is None:
                from nanovllm.edits.grammars import Grammars

                self.grammars = Grammars(self._tokenizer, self._vocab_size, self._eos_token_ids)
            matcher = self.grammars.compile(params.structured_outputs)
        stop_ids = self._eos_token_ids | set(params.stop_token_ids or ())
        return RowEdits(params, words, stop_ids, self._vocab_size, matcher)

    def of_step(self, step: ScheduledStep) -> LogitEdits | None:
        """What the requests of a step ask for; None if that is nothing."""
        return make_edits(step, self._vocab_size)


def spell(words: Iterable[str], tokenizer: Tokenizer, max_model_len: int) -> list[list[int]]:
    """The token ids that spell each word at a text's beginning, and within it if a space makes other tokens."""
    found = []
    for word in words:
        texts = (word.lstrip(), " " + word.lstrip())
        alone, spaced = (tokenizer.encode(text, max_model_len, add_special_tokens=False) for text in texts)
        # vLLM's rule: a space that becomes a token of its own adds nothing.
        found += [alone, spaced] if len(spaced) == len(alone) and spaced[:1] != alone[:1] else [alone]
    return [token_ids for token_ids in found if token_ids]
