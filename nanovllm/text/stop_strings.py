"""The watch for stop strings in a text that grows. Imported when the first request has one."""

from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from tokenizers.decoders import DecodeStream

from nanovllm.sampling_params import SamplingParams


class StopStringMatcher:
    """Decodes a sequence as it grows and finds the first stop string in its text, also one that straddles tokens."""

    def __init__(self, backend: Any, params: SamplingParams, context: Seq[int] = ()) -> None:
        """
        Args:
            backend: a tokenizer of the tokenizers library.
            context: tokens that precede the sequence, for decoders that strip a text's first space.
        """
        self._backend, self._stop = backend, tuple(params.stop or ())
        self._begin = partial(DecodeStream, skip_special_tokens=params.skip_special_tokens)
        self._stream = self._begin(list(context))
        self._num_free = params.min_tokens  # tokens still to come that end nothing
        self._is_included = params.include_stop_str_in_output
        self.text = ""
        """All text so far; once a stop string is complete, what comes before it, or up to its end."""
        self.found: str | None = None
        """The stop string that is complete."""

    def feed(self, token_id: int) -> bool:
        """Take the next token; True once a stop string is complete."""
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception:  # tokenizers': a decoder of single bytes, after some that are no text, takes back a character
            self._stream = self._begin([])
            piece = self._stream.step(self._backend, token_id)
        self._num_free -= 1
        if not piece:
            return False
        known = len(self.text)
        self.text += piece
        if self._num_free >= 0:
            return False
        found = [(at, s) for s in self._stop if (at := self.text.find(s, max(0, known - len(s) + 1))) >= 0]
        if not found:
            return False
        at, self.found = min(found)
        self.text = self.text[: at + len(self.found) if self._is_included else at]
        return True
