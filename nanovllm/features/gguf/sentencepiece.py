"""A tokenizer of SentencePiece in a GGUF file, as the parts of a tokenizer.json: "llama" and "gemma4".

The ids are those of the tokenizer.json that transformers makes of the original's tokenizer.model. SentencePiece itself
gives others in rare texts: where two pairs make the same piece, it may merge the other pair first.
"""

import math
from collections.abc import Mapping
from typing import Any

from nanovllm.features.gguf.vocabulary import ADVICE, KEYS, Kind, Vocabulary, read_list, read_merges
from nanovllm.utils.checks import as_bool, as_number, quote

SPACE = "\u2581"
"""SentencePiece writes a space so."""
USER_SCORE = 0.0
"""The score of the tokens that its trainer was given. llama.cpp's converter overwrites it with a low one."""


def restore_spaces(vocabulary: Vocabulary) -> Vocabulary:
    """Return the vocabulary as SentencePiece wrote it: the file has spaces in the tokens of spaces alone."""
    tokens = [SPACE * len(token) if not token.strip(" ") else token for token in vocabulary.tokens]
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{KEYS}tokens has a token of spaces twice, written with {quote(' ')} and with {quote(SPACE)}")
    return Vocabulary(tokens, vocabulary.kinds)


def build_sentencepiece(metadata: Mapping[str, Any], vocabulary: Vocabulary, unknown: str | None) -> dict[str, Any]:
    """Return normalizer, pre_tokenizer, decoder and model of the tokenizer.json.

    Args:
        vocabulary: what `restore_spaces` returned.
        unknown: the token for what no token is; None if bytes are there for all.
    """
    has_merges = metadata.get(f"{KEYS}model") == "gemma4"
    prefix = as_bool(metadata.get(f"{KEYS}add_space_prefix", not has_merges), f"{KEYS}add_space_prefix")
    squeezes = as_bool(metadata.get(f"{KEYS}remove_extra_whitespaces", False), f"{KEYS}remove_extra_whitespaces")
    if unknown is None and not vocabulary.list_ids(Kind.BYTE):
        raise ValueError(f"the tokenizer has neither bytes nor an unknown token, for texts that are no token: {ADVICE}")
    ids = vocabulary.number()
    normalizers: list[dict[str, Any]] = [replace({"String": " "}, SPACE)]
    decoders: list[dict[str, Any]] = [replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if squeezes:
        ends = replace({"Regex": r"\A +| +\z"}, "")
        normalizers = [ends, replace({"Regex": " {2,}"}, " "), *normalizers]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": read_merges(metadata, ids) if has_merges else find_merges(metadata, vocabulary, ids),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    """Return the step of a normalizer or a decoder that replaces a pattern."""
    return {"type": "Replace", "pattern": pattern, "content": content}


def find_merges(metadata: Mapping[str, Any], vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[list[str]]:
    """Return the merges that scores stand for: each two tokens that make a third one, by its score.

    Where two pairs make one token, or scores are equal, the order is that of transformers' converter: of the ids for
    the former, of the lengths for the latter.
    """
    scores = read_list(metadata, "scores", len(vocabulary.tokens))
    merges = []
    for i in vocabulary.list_ids(Kind.NORMAL, Kind.USER_DEFINED):
        score = as_number(scores[i], f"{KEYS}scores: number {i}")
        if not math.isfinite(score):
            raise ValueError(f"{KEYS}scores: number {i} is {score}; it must be a number")
        if vocabulary.kinds[i] == Kind.USER_DEFINED:
            score = USER_SCORE
        token = vocabulary.tokens[i]
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(score, *pair) for pair in pairs]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in merges]
