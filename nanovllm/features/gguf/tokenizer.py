"""Writes a model's tokenizer, of which a GGUF file has the parts, as the files that transformers reads.

`tokenizer.ggml.model` says which kind it is: "gpt2" is byte-level BPE, "llama" is SentencePiece's BPE, and "gemma4" is
the same with its merges in the file. Token ids are those of the original model's tokenizer.json.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm.features.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from nanovllm.features.gguf.sentencepiece import build_sentencepiece, restore_spaces
from nanovllm.features.gguf.vocabulary import (
    ADVICE,
    ENDS,
    KEYS,
    Kind,
    Vocabulary,
    read_id,
    read_merges,
    read_vocabulary,
)
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import INT64_MAX, as_bool, quote

TEMPLATE = "tokenizer.chat_template"
NO_TOKENIZER = (None, "none", "no_vocab")
"""Values of the key for the kind in files of models that have no tokenizer."""
SPECIAL = {
    **{"bos": "bos", "eos": "eos", "unknown": "unk", "seperator": "sep"},
    **{"padding": "pad", "cls": "cls", "mask": "mask"},
}
"""{a token's name in the keys, spelt as there: its name in tokenizer_config.json}."""
READ = {
    *("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token"),
    *("add_space_prefix", "remove_extra_whitespaces", *(f"{name}_token_id" for name in (*SPECIAL, *ENDS))),
}
HARMLESS = {
    *("token_type_count", "add_sep_token", "prefix_token_id", "suffix_token_id", "middle_token_id"),
    *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
}
"""Keys that change the ids of no text: they are about pairs of texts, or name tokens for a program's own use."""
WITHOUT_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""The special tokens of Phi-3 that do not take the spaces after them, as all its others do. No key says so."""


def write_tokenizer(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat templates into a folder.

    Args:
        metadata: the keys and values of a GGUF file; arrays are lists.

    Raises:
        ValueError: the tokenizer is of a kind that is not known, what the file says of it contradicts itself, or a key
            may change token ids and is not read. The message says what, and what to do.
    """
    for key in metadata:
        name = key.removeprefix(KEYS)
        if name != key and name not in READ and name not in HARMLESS:
            raise ValueError(f"{key} is {quote(metadata[key])}, and this key is not read: {ADVICE}")
    model = metadata.get(f"{KEYS}model")
    if model not in ("gpt2", "llama", "gemma4"):
        raise ValueError(f"{KEYS}model is {quote(model)}; gpt2, llama and gemma4 are read: {ADVICE}")
    vocabulary = read_vocabulary(metadata)
    special = {own: read_id(metadata, name, vocabulary) for name, own in SPECIAL.items()}
    if model == "gpt2":
        pre = find_pre_tokenizer(metadata.get(f"{KEYS}pre"))
        parts = build_byte_level(metadata, vocabulary, pre)
        adds_bos = pre.adds_bos
    else:
        vocabulary = restore_spaces(vocabulary)
        if special["unk"] is None:
            special["unk"] = next(iter(vocabulary.list_ids(Kind.UNKNOWN)), None)
        unknown = special["unk"]
        parts = build_sentencepiece(metadata, vocabulary, None if unknown is None else vocabulary.tokens[unknown])
        adds_bos = model == "llama"
    takes_spaces = model == "llama" and metadata.get("general.architecture") == "phi3"
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list_added_tokens(vocabulary, takes_spaces),
        "post_processor": frame_texts(metadata, vocabulary, special, adds_bos),
        **parts,
    }
    write_json(directory / "tokenizer.json", whole)
    named = {f"{name}_token": vocabulary.tokens[i] for name, i in special.items() if i is not None}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(directory / "tokenizer_config.json", settings | named)
    write_templates(metadata, directory)


def build_tokenizer(metadata: Mapping[str, Any], name: str, max_model_len: int = INT64_MAX) -> Tokenizer | None:
    """Return the tokenizer of a GGUF file; None if the file has none.

    Args:
        metadata: the keys and values of the file; arrays are lists.
        name: what transformers' tokenizer calls itself: the model's name.
        max_model_len: see `Tokenizer`.

    Raises:
        ValueError: see `write_tokenizer`. The name stands in front.
    """
    if metadata.get(f"{KEYS}model") in NO_TOKENIZER:
        return None
    with TemporaryDirectory() as directory:
        try:
            write_tokenizer(metadata, Path(directory))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        tokenizer = Tokenizer(Path(directory), max_model_len)
    tokenizer.template_tokenizer.name_or_path = name
    return tokenizer


def find_pre_tokenizer(name: Any) -> PreTokenizer:
    """Return how a byte-level BPE of this name cuts texts; ValueError if that is not known."""
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        said = f"there is no {KEYS}pre" if name is None else f"{KEYS}pre is {quote(name)}"
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"{said}, so how texts are cut is not known (of {known} it is): {ADVICE}")
    return PRE_TOKENIZERS[name]


def build_byte_level(metadata: Mapping[str, Any], vocabulary: Vocabulary, pre: PreTokenizer) -> dict[str, Any]:
    """Return normalizer, pre_tokenizer, decoder and model of the tokenizer.json of a byte-level BPE."""
    ids = vocabulary.number()
    return {
        "normalizer": {"type": "NFC"} if pre.is_normalised else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre.steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": ids,
            "merges": read_merges(metadata, ids),
            "ignore_merges": pre.ignores_merges,
        },
    }


def list_added_tokens(vocabulary: Vocabulary, takes_spaces: bool) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before it is cut, as tokenizer.json has them.

    Args:
        takes_spaces: whether they take the spaces after them, too.
    """
    return [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": takes_spaces and token not in WITHOUT_SPACES,
            "normalized": False,
            "special": vocabulary.kinds[i] != Kind.USER_DEFINED,
        }
        for i in vocabulary.list_ids(Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)
        for token in [vocabulary.tokens[i]]
    ]


def frame_texts(
    metadata: Mapping[str, Any], vocabulary: Vocabulary, special: Mapping[str, int | None], adds_bos: bool
) -> dict[str, Any]:
    """Return the post_processor of the tokenizer.json, which puts bos and eos around a text.

    Args:
        special: {name: id} of the special tokens.
        adds_bos: whether bos is added if the file does not say.
    """
    added: dict[str, list[dict[str, Any]]] = {}
    tokens = {}
    for name, default in (("bos", adds_bos and special["bos"] is not None), ("eos", False)):
        key = f"{KEYS}add_{name}_token"
        added[name] = []
        if not as_bool(metadata.get(key, default), key):
            continue
        i = special[name]
        if i is None:
            raise ValueError(f"{key} is True, and there is no {KEYS}{name}_token_id")
        token = vocabulary.tokens[i]
        tokens[token] = {"id": token, "ids": [i], "tokens": [token]}
        added[name] = [{"SpecialToken": {"id": token, "type_id": 0}}]
    first = [*added["bos"], {"Sequence": {"id": "A", "type_id": 0}}, *added["eos"]]
    second = [*added["bos"], {"Sequence": {"id": "B", "type_id": 1}}, *added["eos"]]
    return {"type": "TemplateProcessing", "single": first, "pair": [*first, *second], "special_tokens": tokens}


def write_templates(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write the chat templates: the default one, and those with a name, such as tool_use."""
    for key, text in metadata.items():
        name = key.removeprefix(TEMPLATE)
        if name == key or name == "s":  # tokenizer.chat_templates lists the names
            continue
        if not isinstance(text, str) or not re.fullmatch(r"(\.[\w-]{1,64})?", name):
            raise ValueError(f"{quote(key)} is {quote(text)}; it must be a text, and its name letters and digits")
        path = directory / "chat_template.jinja"
        if name:
            path = directory / "additional_chat_templates" / f"{name[1:]}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
