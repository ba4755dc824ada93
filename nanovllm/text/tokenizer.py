"""Encodes text to token ids, and decodes token ids to text."""

import json
import logging
import re
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from copy import deepcopy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.text.stop_strings import REPLACEMENT, StopStringMatcher, TextDecoder, decode_after
from nanovllm.utils.checks import INT64_MAX

MOST_PARTS = 8
"""The last two characters of a text have at most so many bytes, and so many tokens."""
MOST_TEMPLATES = 64
"""So many chat templates are known at once."""
FILE = "tokenizer.json"
CONVERSIONS = {
    "tokenizer.model": "add_bos_token=True",
    "tekken.json": "bos_token='<s>', eos_token='</s>', add_bos_token=True",
}
"""Files of tokenizers that cannot be read, each with the arguments with which transformers converts it."""


def explain_no_tokenizer(origin: Path | str) -> str:
    """Return why a model has no tokenizer: it must be converted first, or there is none.

    Args:
        origin: the model's folder, or the name of a preset.
    """
    return (
        isinstance(origin, Path) and find_conversion(origin)
    ) or "this model has no tokenizer (the option tokenizer takes another's)"


def find_conversion(folder: Path) -> str:
    """Return how to convert a folder's tokenizer; "" if it has a tokenizer.json, or nothing that can be converted."""
    for name, arguments in CONVERSIONS.items():
        if (folder / name).is_file() and not (folder / FILE).is_file():
            return (
                f"this model's tokenizer is in {name}, which cannot be read: convert it to a {FILE} with transformers, "
                f"AutoTokenizer.from_pretrained('{folder}', {arguments}).save_pretrained('{folder}'), which needs "
                f"pip install sentencepiece protobuf, or give the model that this one was made from as tokenizer="
            )
    return ""


def read_tokenizer(folder: Path) -> tuple[Any, Any]:
    """Read the tokenizer of a folder.

    Whatever a tokenizer.json says, most of transformers' classes build a normalizer, a pre-tokenizer and a decoder of
    their own. So this file is read without the class, which only says which special tokens there are.

    Returns:
        transformers' tokenizer, for chat templates and special tokens, and its backend, a tokenizer of the tokenizers
        library, for token ids.
    """
    from transformers import PreTrainedTokenizerFast

    found = load_auto_tokenizer(folder)
    if (folder / FILE).is_file() and type(found) is not PreTrainedTokenizerFast:
        # This class has the file's backend, with the tokens of tokenizer_config.json that the file lacks.
        plain = PreTrainedTokenizerFast.from_pretrained(folder)
        if isinstance(found, PreTrainedTokenizerFast):
            found._tokenizer = plain.backend_tokenizer
        else:
            found = plain
        for name, token in found.special_tokens_map.items():
            if found.backend_tokenizer.token_to_id(token) is None:  # a default of the class
                setattr(found, name, None)
    backend = found.backend_tokenizer
    # A training script may have left these two in the file. They cut prompts, or make them as long as the longest.
    backend.no_truncation()
    backend.no_padding()
    return found, backend


def load_auto_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a model's folder."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except AttributeError:
        # config.json has a dtype that models/model_config.py reads and transformers does not, such as "torch.bfloat16".
        # Of that file a tokenizer needs the type of the model alone.
        model_type = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
        config = AutoConfig.for_model(model_type)
        return AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)


class Tokenizer:
    """The tokenizer of a model's folder, with the few functions that the engine needs."""

    def __init__(self, folder: Path, max_model_len: int = INT64_MAX) -> None:
        """Read the tokenizer; ValueError if that fails.

        Args:
            max_model_len: the most tokens of a prompt and its output. Texts that are far too long for it are refused.
        """
        self.max_model_len = max_model_len
        self._longest_token: int | None = None
        logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
        try:
            self.template_tokenizer, self._backend = read_tokenizer(folder)
        except Exception as error:  # transformers, tokenizers and json each raise their own
            advice = f"; {advice}" if (advice := find_conversion(folder)) else ""
            raise ValueError(f"the tokenizer in {folder} cannot be read: {error}{advice}") from error
        eos = self.template_tokenizer.eos_token_id
        self.eos_token_ids = frozenset[int]() if eos is None else frozenset([eos])
        """The tokenizer's end-of-sequence token. A model's files may name more."""
        self._bos_token_id: int | None = self.template_tokenizer.bos_token_id
        self.added_tokens: dict[int, Any] = self._backend.get_added_tokens_decoder()
        """The added tokens by their ids, each an AddedToken of the tokenizers library."""
        texts = sorted(
            (token.content for token in self.added_tokens.values() if token.special and token.content),
            key=len,
            reverse=True,
        )
        self.find_forms: Callable[[str, str], dict[str, Any]] = lru_cache(MOST_TEMPLATES)(lambda *template: {})
        """Returns the dict in which conversations.py keeps what it has found out about a chat template with options."""
        self._special_tokens = re.compile("|".join(map(re.escape, texts))) if texts else None

    @staticmethod
    def find(folder: Path | None, max_model_len: int = INT64_MAX) -> "Tokenizer | None":
        """Read the folder's tokenizer; None if it has none."""
        names = (FILE, "tokenizer_config.json", "vocab.json")
        if folder is None or not any((folder / name).is_file() for name in names):
            return None
        return Tokenizer(folder, max_model_len)

    @cached_property
    def transformers(self) -> Any:
        """transformers' tokenizer, for callers. It has a backend of its own, because padding=True, for example, changes
        the backend for later calls, too."""
        self.template_tokenizer._tokenizer = deepcopy(self._backend)
        return self.template_tokenizer

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token, added ones included."""
        return self._backend.get_vocab(with_added_tokens=True)  # type: ignore[no-any-return]

    def to_str(self) -> str:
        """Return the contents of its tokenizer.json."""
        return self._backend.to_str()  # type: ignore[no-any-return]

    def check(self, text: str) -> None:
        """Raise a ValueError for a text that cannot be tokenised, or is far too long, before time and memory are spent.

        The limit is 4 times the characters that max_model_len of the longest tokens have: normalisers may drop some.
        """
        max_tokens = self.max_model_len
        if len(text) > 4 * max_tokens:  # a shorter text is within the limit, because every token has a character
            if self._longest_token is None:
                self._longest_token = max(map(len, self.vocabulary), default=1)
            most = 4 * max_tokens * self._longest_token
            if len(text) > most:
                raise ValueError(
                    f"the prompt has {len(text)} characters; with max_model_len={max_tokens} it may have at most "
                    f"{most}: shorten it or raise max_model_len"
                )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            why = f"character {error.start} is half of a surrogate pair"
            raise ValueError(f"the text cannot be tokenised: {why}") from None

    def encode_batch(self, texts: Seq[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Tokenise texts on all cores. `check` must have let each of them pass.

        Args:
            add_special_tokens: put the tokenizer's special tokens around each text. A text that begins with the bos
                token gets no second one. The bos tokens of the text itself all stay.
        """
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        bos = self._bos_token_id
        if not add_special_tokens or not self._adds_bos:  # each bos token is the text's own
            return [e.ids for e in encodings]
        return [e.ids[1:] if e.ids[:2] == [bos, bos] else e.ids for e in encodings]

    @cached_property
    def _adds_bos(self) -> bool:
        """Whether the bos token is among the special tokens that the tokenizer puts around a text, in front of it."""
        bos = self._bos_token_id
        return bos is not None and self._backend.encode("", add_special_tokens=True).ids[:1] == [bos]

    def decode(self, token_ids: Seq[int], skip_special_tokens: bool, prompt: Seq[int] = ()) -> str:
        """Return the text of token_ids when they follow a prompt: see `decode_after`.

        It is always the text that a `TextDecoder` reads token by token. If bytes are no character, some decoders
        replace the characters before them, too, when they see all tokens at once.
        """
        context = self._find_context(prompt)
        text = decode_after(self._backend, context, token_ids, skip_special_tokens)
        if REPLACEMENT not in text:
            return text
        decoder = TextDecoder(self._backend, skip_special_tokens, context)
        for token_id in token_ids:
            decoder.feed(token_id)
        return decoder.text + decoder.read_rest()

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token by itself, special ones included."""
        return self._backend.decode([token_id], skip_special_tokens=False)  # type: ignore[no-any-return]

    def join_tokens(self, token_ids: Seq[int]) -> str:
        """Return tokens as the vocabulary writes them, in which a space may be another character."""
        return "".join(map(self._backend.id_to_token, token_ids))

    def find_token(self, text: str) -> int | None:
        """Return the id of a token that the vocabulary writes so; None if there is none."""
        return self._backend.token_to_id(text)  # type: ignore[no-any-return]

    def find_special_tokens(self, texts: Iterable[str]) -> set[int]:
        """Return the ids of the special tokens that have one of these texts."""
        ids = map(self.find_token, texts)
        return {i for i in ids if i is not None and i in self.added_tokens and self.added_tokens[i].special}

    def _find_context(self, prompt: Seq[int]) -> Seq[int]:
        """Return the end of a prompt, from the last place where a character begins that is text, and not special."""
        start = len(prompt) - 1
        num_tries = 0
        for i in range(len(prompt) - 1, -1, -1):
            text = self._backend.decode([prompt[i]], skip_special_tokens=True)
            if text.startswith(REPLACEMENT):  # a character of several tokens may begin here
                text = self._backend.decode(list(prompt[i:]), skip_special_tokens=True)
                start = i
                num_tries += 1
            if text and not text.startswith(REPLACEMENT):
                return prompt[i:]
            if num_tries == MOST_PARTS:
                break
        return prompt[max(start, 0) :]

    def stop_matcher(self, params: SamplingParams, prompt: Seq[int]) -> StopStringMatcher:
        """Return a matcher that decodes an output, and watches it for the request's stop strings."""
        return StopStringMatcher(self._backend, params, self._find_context(prompt), self._special_tokens)
