"""Edits of logits, read from requests and collected for each step."""

from collections.abc import Collection
from threading import Lock
from typing import TYPE_CHECKING

from nanovllm.config import ResolvedConfig
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.features.edits.bad_words import BadWord
from nanovllm.features.edits.logit_edits import LogitEdits, PenaltyCounts, collect_edits, lacks_tokens
from nanovllm.features.edits.row_edits import RowEdits
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from nanovllm.features.edits.grammars import Grammars
    from nanovllm.features.parsing.thinking import ThinkingTokens


class Editing:
    """Makes the edits of one engine. It is made when the first request asks for edits."""

    def __init__(
        self,
        config: ResolvedConfig,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        thinking: "ThinkingTokens | None" = None,
    ) -> None:
        """
        Args:
            thinking: grammars hold after the thinking; None: from the first token on.
        """
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._vocab_size = config.vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._counts = PenaltyCounts(config.max_num_seqs)
        self._lock = Lock()
        self.grammars: Grammars | None = None
        """Made when the first request asks for structured output."""

    def read_request(self, params: SamplingParams) -> RowEdits:
        """Return the edits that a request asks for.

        Raises:
            ValueError: this model cannot have them, or the request's grammar is bad.
        """
        matcher = None
        words: list[BadWord] = []
        for word in params.bad_words or ():
            if not isinstance(word, str):
                if bad_ids := [i for i in word if not 0 <= i < self._vocab_size]:
                    raise ValueError(f"bad_words has {bad_ids[0]}; the vocabulary is 0..{self._vocab_size - 1}")
            elif self._tokenizer is None:
                raise ValueError("bad_words need a tokenizer, and this model has none; give lists of token ids")
            else:
                words.append(BadWord(word, self._tokenizer, self._vocab_size))
        if params.structured_outputs is not None:
            matcher = self._find_grammars().compile(params.structured_outputs)
        stop_ids = self._eos_token_ids | set(params.stop_token_ids or ())
        if self._tokenizer is not None:
            stop_ids |= {i for i in self._tokenizer.find_special_tokens(params.stop or ()) if i < self._vocab_size}
        return RowEdits(params, words, stop_ids, self._vocab_size, matcher, self._thinking)

    def _find_grammars(self) -> "Grammars":
        """Return the grammars of this engine. Several threads may ask; the first one makes them."""
        with self._lock:
            if self.grammars is None:
                try:
                    from nanovllm.features.edits.grammars import Grammars
                except ImportError as why:
                    raise ValueError(f"structured_outputs needs llguidance: pip install llguidance ({why})") from None
                self.grammars = Grammars(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self.grammars

    def lacks_tokens(self, step: ScheduledStep) -> bool:
        """Return whether the edits of the step that was planned last depend on tokens of steps in flight."""
        return lacks_tokens(step)

    def collect(self, step: ScheduledStep) -> LogitEdits | None:
        """Return the edits of the step that was planned last; None if there are none."""
        return collect_edits(step, self._vocab_size, self._counts)
