"""The tokens of a GGUF file, and what its metadata says of them. A file may come from anywhere: nothing is believed."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from nanovllm.utils.checks import as_integer, quote

KEYS = "tokenizer.ggml."
"""The keys of the tokenizer begin so, but for chat templates."""
ADVICE = "give a folder or an id with the model's own tokenizer as tokenizer="
"""The way out for a file whose tokenizer cannot be built."""
LONGEST_TOKEN = 1024
"""The most characters of a token: SentencePiece's merges take time by the square of it."""

ENDS = ("eos", "eot", "eom")
"""The tokens that end an answer, as keys name them."""
END_TEXTS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>"),
    *("<|call|>", "<end_of_turn>", "<eos>", "<turn|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
}
"""Texts of tokens that end an answer, as llama.cpp knows them. The original model's generation_config.json lists them,
and few files name more than one."""


class Kind(IntEnum):
    """The kinds of tokens in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Vocabulary(NamedTuple):
    """The tokens of a file, each with its kind, in the order of their ids."""

    tokens: list[str]
    kinds: list[Kind]

    def list_ids(self, *kinds: Kind) -> list[int]:
        """Return the ids of the tokens of these kinds, without those that only pad the embedding."""
        return [i for i, kind in enumerate(self.kinds) if kind in kinds and not self.is_padding(i)]

    def is_padding(self, i: int) -> bool:
        """Whether an id has no token: llama.cpp's converter names a row of the embedding that is left over so."""
        return self.kinds[i] != Kind.NORMAL and self.tokens[i] == f"[PAD{i}]"

    def number(self) -> dict[str, int]:
        """Return {token: its id}."""
        return {token: i for i, token in enumerate(self.tokens) if not self.is_padding(i)}


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Return the tokens and their kinds.

    Raises:
        ValueError: there are none, two are the same, one is empty or too long, or a kind does not exist.
    """
    tokens = read_list(metadata, "tokens")
    seen: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if not isinstance(token, str) or not 1 <= len(token) <= LONGEST_TOKEN:
            raise ValueError(
                f"{KEYS}tokens: number {i} is {quote(token)}; it must have 1 to {LONGEST_TOKEN} characters"
            )
        if seen.setdefault(token, i) != i:
            raise ValueError(f"{KEYS}tokens: numbers {seen[token]} and {i} are both {quote(token)}")
    kinds = read_list(metadata, "token_type", len(tokens))
    known = set(Kind)
    for i, kind in enumerate(kinds):
        if kind not in known:
            raise ValueError(f"{KEYS}token_type: number {i} is {quote(kind)}; kinds are 1 to {max(Kind)}")
    return Vocabulary(tokens, [Kind(kind) for kind in kinds])


def read_list(metadata: Mapping[str, Any], name: str, length: int | None = None) -> list[Any]:
    """Return a list of the file; ValueError if it is not there, is no list, or has another length than this."""
    found = metadata.get(KEYS + name)
    if found is None:
        raise ValueError(f"the file has no {KEYS}{name}: {ADVICE}")
    if isinstance(found, (str, bytes, Mapping)) or not hasattr(found, "__len__"):
        raise ValueError(f"{KEYS}{name} is {quote(found)}; it must be a list")
    if length is not None and len(found) != length:
        raise ValueError(f"{KEYS}{name} has {len(found)} elements, and {KEYS}tokens has {length}")
    return list(found)


def read_id(metadata: Mapping[str, Any], name: str, vocabulary: Vocabulary) -> int | None:
    """Return the id that the file has for "bos", for example; None if it has none.

    Raises:
        ValueError: there is no such token.
    """
    key = f"{KEYS}{name}_token_id"
    found = metadata.get(key)
    return None if found is None else as_integer(found, key, 0, len(vocabulary.tokens) - 1)


def read_merges(metadata: Mapping[str, Any], ids: Mapping[str, int]) -> list[list[str]]:
    """Return the merges of the file, the first one first, each as the two tokens that become one.

    Args:
        ids: {token: its id}.

    Raises:
        ValueError: a merge is no pair of tokens that make a third one, or is there twice.
    """
    merges = read_list(metadata, "merges")
    seen: dict[str, int] = {}
    pairs = []
    for i, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else []
        if len(pair) != 2 or not {*pair, "".join(pair)} <= ids.keys():
            raise ValueError(f"{KEYS}merges: number {i}, {quote(merge)}, is not two tokens that make a third one")
        if seen.setdefault(merge, i) != i:
            raise ValueError(f"{KEYS}merges: numbers {seen[merge]} and {i} are both {quote(merge)}")
        pairs.append(pair)
    return pairs


def read_end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that end an answer: those that the file names, and those with such a text.

    Another tokenizer may take the place of the file's. So nothing is said here of a vocabulary that is wrong.
    """
    keys = [f"{KEYS}{name}_token_id" for name in ENDS]
    named = {as_integer(metadata[key], key) for key in keys if metadata.get(key) is not None}
    tokens, kinds = (metadata.get(KEYS + name) for name in ("tokens", "token_type"))
    texts = {}
    if isinstance(tokens, list) and isinstance(kinds, list):
        added = (Kind.CONTROL, Kind.USER_DEFINED)
        pairs = enumerate(zip(tokens, kinds, strict=False))
        texts = {token: i for i, (token, kind) in pairs if kind in added and token in END_TEXTS}
    if {"<|return|>", "<|call|>"} <= texts.keys():  # here <|end|> ends a message, and the answer goes on
        texts.pop("<|end|>", None)
    return sorted(named | set(texts.values()))
