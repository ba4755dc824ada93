"""Decodes tokens that follow others, and finds stop strings in an output while it grows."""

import re
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


class TextDecoder:
    """Decodes one sequence token by token."""

    def __init__(self, backend: Any, skip_special_tokens: bool, context: Seq[int] = ()) -> None:
        """
        Args:
            backend: a tokenizer of the tokenizers library.
            context: the tokens before the sequence: see `decode_after`.
        """
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._context = context
        self._new: list[int] = []
        """Tokens whose text is not in `text` yet, because a character may lack its last bytes."""
        self.text = ""
        """The text so far."""
        self.num_before = 0
        """So many characters did `text` have before the last token."""
        self.num_known = 0
        """So many characters has `text`, those of tokens in `_new` included."""

    def feed(self, token_id: int) -> None:
        """Add the next token."""
        self.num_before = len(self.text)
        self._new.append(token_id)
        piece = self.read_rest()
        self.num_known = self.num_before + len(piece)
        num_ready = len(self._new)
        if not piece or piece.endswith(REPLACEMENT):
            if num_ready < MOST_WAITING:
                return
            # These are no character: one that lacks bytes has begun within the last 4 tokens. Waiting has an end, so
            # that the time is linear.
            num_ready -= 4
            piece = decode_after(self._backend, self._context, self._new[:num_ready], self._skip_special_tokens)
        if piece:
            # The first piece may begin with a character that the context has the first bytes of.
            self._context = [*(() if self.text else self._context), *self._new[:num_ready]]
        self._new = self._new[num_ready:]
        self.text += piece

    def read_rest(self) -> str:
        """Return the text of the tokens whose text is not in `text` yet, as if no token followed them."""
        return decode_after(self._backend, self._context, self._new, self._skip_special_tokens)


class StopStringMatcher:
    """Decodes one sequence token by token, and finds the first stop string in its text. It may span several tokens.

    A stop string may have the text of special tokens, which is not in the request's text if the request skips special
    tokens. Such a stop string is also looked for in a second text, in which special tokens are not skipped. The place
    where it begins there is then mapped to the request's text, token by token.
    """

    def __init__(
        self,
        backend: Any,
        params: SamplingParams,
        context: Seq[int] = (),
        special_tokens: re.Pattern[str] | None = None,
    ) -> None:
        """
        Args:
            backend: a tokenizer of the tokenizers library.
            context: the tokens before the sequence: see `decode_after`.
            special_tokens: matches the text of any special token; None if there are none.
        """
        self.decoder = TextDecoder(backend, params.skip_special_tokens, context)
        self._full_decoder: TextDecoder | None = None
        """Decodes special tokens, too. None if no stop string needs it."""
        self._lengths = [(0, 0)]
        """`num_known` of the full decoder and of the request's own, before the first token and after each one."""
        self._stop: list[tuple[str, TextDecoder]] = []
        """Each stop string, and the decoder in whose text it is found."""
        for stop in params.stop or ():
            self._stop.append((stop, self.decoder))
            if special_tokens is not None and params.skip_special_tokens and special_tokens.search(stop):
                self._full_decoder = self._full_decoder or TextDecoder(backend, False, context)
                self._stop.append((stop, self._full_decoder))
        self._num_free = params.min_tokens  # the next so many tokens cannot end the sequence
        self._is_included = params.include_stop_str_in_output
        self.text = ""
        """The text so far. A stop string that was found is cut off, unless it is to be included; so is what follows."""
        self.found: str | None = None
        """The stop string that was found."""

    def feed(self, token_id: int) -> bool:
        """Add the next token. Returns True if that completed a stop string."""
        self._num_free -= 1
        self.decoder.feed(token_id)
        self.text = self.decoder.text
        if self._full_decoder is not None:
            self._full_decoder.feed(token_id)
            self._lengths.append((self._full_decoder.num_known, self.decoder.num_known))
        if self._num_free >= 0:
            return False
        found = []
        for stop, decoder in self._stop:
            at = decoder.text.find(stop, max(0, decoder.num_before - len(stop) + 1))
            if at >= 0:
                num_after = len(decoder.text) - at - len(stop)
                found.append((num_after, at, stop, decoder))
        if not found:
            return False
        # Of several, the one that is complete first counts, wherever tokens meet. max() keeps the order of equal ones.
        _, at, self.found, decoder = max(found, key=itemgetter(0))
        if decoder is not self.decoder:
            self.text += self.decoder.read_rest()
            at = self._count_visible(at)
        self.text = self.text[:at]
        if self._is_included:
            self.text += self.found
        return True

    def _count_visible(self, at: int) -> int:
        """Return how many characters of the full text before index `at` are in the request's text, too.

        If the index is within a special token, these are the characters before that token.
        """
        i = len(self._lengths) - 1
        while self._lengths[i - 1][0] > at:
            i -= 1
        # Token i - 1 has the character at the index. If it is a special token, the visible text has no part of it.
        num_full, num_visible = self._lengths[i]
        num_visible_before = self._lengths[i - 1][1]
        return max(num_visible_before, num_visible - (num_full - at))
