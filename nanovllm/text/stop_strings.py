"""Finds stop strings in an output while it grows."""

from collections.abc import Sequence as Seq
from functools import partial
from operator import itemgetter
from typing import Any

from tokenizers.decoders import DecodeStream

from nanovllm.sampling_params import SamplingParams


class StopStringMatcher:
    """Decodes one sequence token by token, and finds the first stop string in its text. It may span several tokens."""

    def __init__(self, backend: Any, params: SamplingParams, context: Seq[int] = ()) -> None:
        """
        Args:
            backend: a tokenizer of the tokenizers library.
            context: the tokens before the sequence. Some decoders would strip the first space without them.
        """
        self._backend = backend
        self._stop = tuple(params.stop or ())
        self._begin = partial(DecodeStream, skip_special_tokens=params.skip_special_tokens)
        self._stream = self._begin(list(context))
        self._num_free = params.min_tokens  # the next so many tokens cannot end the sequence
        self._is_included = params.include_stop_str_in_output
        self.text = ""
        """The text so far. A stop string that was found is cut off, unless it is to be included; so is what follows."""
        self.found: str | None = None
        """The stop string that was found."""

    def feed(self, token_id: int) -> bool:
        """Add the next token. Returns True if that completed a stop string."""
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception:  # tokenizers fails if a decoder of bytes replaces a character that it has already returned
            self._stream = self._begin([])
            piece = self._stream.step(self._backend, token_id)
        self._num_free -= 1
        if not piece:
            return False
        known = len(self.text)
        self.text += piece
        if self._num_free >= 0:
            return False
        found = [(at + len(s), s) for s in self._stop if (at := self.text.find(s, max(0, known - len(s) + 1))) >= 0]
        if not found:
            return False
        # Of several, the one that is complete first counts, wherever tokens meet. min() keeps the order of equal ones.
        end, self.found = min(found, key=itemgetter(0))
        self.text = self.text[: end if self._is_included else end - len(self.found)]
        return True
