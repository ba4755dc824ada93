"""Decodes tokens that follow others, and finds stop strings in an output while it grows."""

from collections.abc import Sequence as Seq
from operator import itemgetter
from typing import Any

from nanovllm.sampling_params import SamplingParams

REPLACEMENT = "\ufffd"
"""Decoders return this for bytes that are no character, or not yet one."""
MOST_WAITING = 64
"""At most so many tokens wait until their text is known."""


def decode_after(backend: Any, context: Seq[int], token_ids: Seq[int], skip_special_tokens: bool) -> str:
    """Return the text that token_ids add to the text of the context.

    Without a context some decoders strip the first space. If the context ends within a character that token_ids
    complete, the text begins with that character.

    Args:
        backend: a tokenizer of the tokenizers library.
    """
    known = backend.decode(list(context), skip_special_tokens=skip_special_tokens)
    text: str = backend.decode([*context, *token_ids], skip_special_tokens=skip_special_tokens)
    start = len(known)
    while not text.startswith(known[:start]):
        start -= 1
    if start < len(known.rstrip(REPLACEMENT)):  # a decoder of bytes has replaced a whole character of the context
        text = backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text
    return text[start:]


class StopStringMatcher:
    """Decodes one sequence token by token, and finds the first stop string in its text. It may span several tokens."""

    def __init__(self, backend: Any, params: SamplingParams, context: Seq[int] = ()) -> None:
        """
        Args:
            backend: a tokenizer of the tokenizers library.
            context: the tokens before the sequence: see `decode_after`.
        """
        self._backend = backend
        self._stop = tuple(params.stop or ())
        self._skip_special_tokens = params.skip_special_tokens
        self._context = context
        self._new: list[int] = []
        """Tokens whose text is not in `text` yet, because a character may lack its last bytes."""
        self._num_free = params.min_tokens  # the next so many tokens cannot end the sequence
        self._is_included = params.include_stop_str_in_output
        self.text = ""
        """The text so far. A stop string that was found is cut off, unless it is to be included; so is what follows."""
        self.found: str | None = None
        """The stop string that was found."""

    def feed(self, token_id: int) -> bool:
        """Add the next token. Returns True if that completed a stop string."""
        self._num_free -= 1
        self._new.append(token_id)
        piece = decode_after(self._backend, self._context, self._new, self._skip_special_tokens)
        num_ready = len(self._new)
        if not piece or piece.endswith(REPLACEMENT):
            if num_ready < MOST_WAITING:
                return False
            # These are no character: one that lacks bytes has begun within the last 4 tokens. Waiting has an end, so
            # that the time is linear.
            num_ready -= 4
            piece = decode_after(self._backend, self._context, self._new[:num_ready], self._skip_special_tokens)
        if piece:
            # The first piece may begin with a character that the context has the first bytes of.
            self._context = [*(() if self.text else self._context), *self._new[:num_ready]]
        self._new = self._new[num_ready:]
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

    def read_rest(self) -> str:
        """Return the text of the tokens whose text is not in `text` yet, as if no token followed them."""
        return decode_after(self._backend, self._context, self._new, self._skip_special_tokens)
