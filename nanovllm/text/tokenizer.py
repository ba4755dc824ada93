"""Text to token ids and back."""

import logging
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import why_not_unicode

if TYPE_CHECKING:
    from nanovllm.text.stop_strings import StopStringMatcher


class Tokenizer:
    """A model folder's tokenizer, as far as the engine needs it."""

    def __init__(self, folder: Path) -> None:
        """Raises a ValueError if the folder's tokenizer cannot be read."""
        from transformers import AutoTokenizer

        self._longest_token: int | None = None
        logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
        try:
            self.transformers: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            self._backend: Any = self.transformers.backend_tokenizer
        except Exception as error:  # transformers, tokenizers and json each raise their own
            raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error

    @staticmethod
    def of(folder: Path | None) -> "Tokenizer | None":
        """The folder's, if it has one."""
        names = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
        return Tokenizer(folder) if folder is not None and any((folder / name).is_file() for name in names) else None

    @property
    def eos_token_id(self) -> int | None:
        return self.transformers.eos_token_id  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added ones included."""
        return self._backend.get_vocab(with_added_tokens=True)  # type: ignore[no-any-return]

    def to_str(self) -> str:
        """The contents of its tokenizer.json."""
        return self._backend.to_str()  # type: ignore[no-any-return]

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Refuse, before time and memory are spent on it, a text that cannot come to so few tokens (ValueError).

        Four times as many characters as the tokens could spell are let through, for normalisers that drop some.
        """
        if len(text) > 4 * max_tokens:  # no token is empty: only now does it matter how long the longest is
            if self._longest_token is None:
                self._longest_token = max(map(len, self.vocabulary), default=1)
            most = 4 * max_tokens * self._longest_token
            if len(text) > most:
                raise ValueError(
                    f"the prompt has {len(text)} characters; with max_model_len={max_tokens} it may have at most "
                    f"{most}: shorten it or raise max_model_len"
                )

    def encode(self, text: str, max_model_len: int, add_special_tokens: bool = True) -> list[int]:
        """Raises a ValueError for text that is far too long, or has half of a surrogate pair in it."""
        return self.encode_batch([text], max_model_len, add_special_tokens)[0]

    def encode_batch(self, texts: Seq[str], max_model_len: int, add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode`, of many texts on all cores; what is wrong with one fails them all.

        Special tokens are those that the tokenizer puts around a text; one that brings its bos gets no second.
        """
        for text in texts:
            self._check_length(text, max_model_len)
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:  # tokenizers knows that this is no text of its language, and not why
            reason = next(filter(None, map(why_not_unicode, texts)), error)
            raise ValueError(f"the text cannot be tokenised: {reason}") from error
        bos = self.transformers.bos_token_id
        return [e.ids[1:] if bos is not None and e.ids[:2] == [bos, bos] else e.ids for e in encodings]

    def decode(self, token_ids: Seq[int], skip_special_tokens: bool, prompt: Seq[int] = ()) -> str:
        """The text of token_ids, or what they add to the text of a prompt: some decoders strip a text's first space."""

        def decode(ids: Seq[int]) -> str:
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)  # type: ignore[no-any-return]

        context = self._context(prompt)
        known, text = decode(context), decode([*context, *token_ids])
        return text[len(known) :] if text.startswith(known) else decode(token_ids)

    def _context(self, prompt: Seq[int]) -> Seq[int]:
        """The end of a prompt, from the last token that is text by itself: not special, no part of a character."""
        for i in range(len(prompt) - 1, -1, -1):
            text = self._backend.decode([prompt[i]], skip_special_tokens=True)
            if text and "\ufffd" not in text:
                return prompt[i:]
        return prompt[-1:]

    def stop_matcher(self, params: SamplingParams, prompt: Seq[int]) -> "StopStringMatcher | None":
        """What watches an output's text for stop strings; None if the request has none."""
        if not params.stop:
            return None
        from nanovllm.text.stop_strings import StopStringMatcher

        return StopStringMatcher(self._backend, params, self._context(prompt))
