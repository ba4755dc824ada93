"""A tokenizer built from the metadata of a GGUF file gives the ids and the prompts of the original."""

import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers.gguf_models import describe_tokenizer
from tokenizers import Tokenizer as Backend
from transformers import CohereTokenizer, GemmaTokenizer, GPT2Tokenizer, GPTNeoXTokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from nanovllm.features.gguf.pre_tokenizers import PRE_TOKENIZERS
from nanovllm.features.gguf.tokenizer import build_tokenizer, write_tokenizer
from nanovllm.features.gguf.vocabulary import Kind, read_end_ids
from nanovllm.models.hub import BOX, find_model
from nanovllm.text.tokenizer import Tokenizer

TEXTS = (
    "what is the capital of Japan?",
    "I'm  here\n\n  12345 don't WE'LL HTTPServer camelCase",
    "nai\u0308ve cafe\u0301 \u00e9 \u1112\u1161\u11ab \u6f22\u5b57 \U0001f600\t x \u0928\u092e\u0938\u094d\u0924\u0947",
    "<|im_start|>user\nhi<|im_end|>\n [PAD700]",
    "A1b2 C3!!  .. path/to//x \r\n\r\n 1/3 ½ ",
    " ",
    "\n",
    "",
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "e\u0301"},
]
METASPACE = "\u2581"


@pytest.fixture
def box() -> dict[str, Any]:
    """The metadata of the built-in model's tokenizer."""
    return describe_tokenizer(find_model(BOX), "qwen2", 704)


def make_bytes(pre: str, words: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the metadata of a byte-level vocabulary whose merges make these words, from left to right."""
    letters = bytes_to_unicode()
    tokens = list(letters.values())
    merges = []
    for word in words:
        symbols = [letters[byte] for byte in word.encode()]
        for at in range(1, len(symbols)):
            left = "".join(symbols[:at])
            if (merged := left + symbols[at]) not in tokens:
                tokens.append(merged)
                merges.append(f"{left} {symbols[at]}")
    tokens += ["<|endoftext|>", "<tool>"]
    kinds = [Kind.NORMAL] * (len(tokens) - 2) + [Kind.CONTROL, Kind.USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": list(map(int, kinds)),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }


def make_pieces(
    pieces: dict[str, float], *added: tuple[str, Kind], has_bytes: bool = True, **keys: Any
) -> dict[str, Any]:
    """Return the metadata of a vocabulary of SentencePiece: these pieces with their scores, and added tokens."""
    rows = [("<unk>", 0.0, Kind.UNKNOWN), ("<s>", 0.0, Kind.CONTROL), ("</s>", 0.0, Kind.CONTROL)]
    if has_bytes:
        rows += [(f"<0x{byte:02X}>", 0.0, Kind.BYTE) for byte in range(256)]
    rows += [(piece, score, Kind.NORMAL) for piece, score in pieces.items()]
    rows += [(token, -1000.0, kind) for token, kind in added]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [row[0] for row in rows],
        "tokenizer.ggml.scores": [row[1] for row in rows],
        "tokenizer.ggml.token_type": [int(row[2]) for row in rows],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}


LETTERS = {letter: -100.0 - i for i, letter in enumerate(METASPACE + "helowrdab<>\n")} | {"hello": -9.0}
PIECES = LETTERS | {f"{METASPACE}h": -1.0, "el": -2.0, "lo": -3.0, f"{METASPACE}hel": -4.0, f"{METASPACE}hello": -5.0}
PIECES |= {"ll": -6.0, f"{METASPACE}w": -7.0, "or": -8.0, "he": -2.5}


def build(metadata: dict[str, Any]) -> Tokenizer:
    tokenizer = build_tokenizer(metadata, "model.gguf")
    assert tokenizer is not None
    return tokenizer


def encode(metadata: dict[str, Any], text: str, add_special_tokens: bool = False) -> list[str]:
    """Return the tokens of a text."""
    tokenizer = build(metadata)
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    return [metadata["tokenizer.ggml.tokens"][i] for i in ids]


# ---- byte-level BPE


def test_the_built_in_model_gives_its_own_ids_texts_and_prompts(box: dict[str, Any]) -> None:
    own = Tokenizer(find_model(BOX))
    built = build(box)
    ids = own.encode_batch(TEXTS)
    assert built.encode_batch(TEXTS) == ids
    for skip in (True, False):
        assert [built.decode(one, skip) for one in ids] == [own.decode(one, skip) for one in ids]
    assert built.vocabulary == own.vocabulary, "rows that only pad the embedding are no tokens"
    assert built.eos_token_ids == own.eos_token_ids
    for options in ({}, {"add_generation_prompt": True}, {"enable_thinking": False, "add_generation_prompt": True}):
        prompts = [one.transformers.apply_chat_template(TALK, tokenize=False, **options) for one in (built, own)]
        assert prompts[0] == prompts[1] != ""
    assert built.transformers.name_or_path == "model.gguf"


@pytest.mark.parametrize(
    ("pre", "cls"),
    [
        ("qwen2", Qwen2Tokenizer),
        ("deepseek-r1-qwen", Qwen2Tokenizer),
        ("qwen35", Qwen3_5Tokenizer),
        ("gpt-2", GPT2Tokenizer),
        ("mpt", GPTNeoXTokenizer),
        ("olmo", GPTNeoXTokenizer),
        ("command-r", CohereTokenizer),
    ],
)
def test_texts_are_normalised_and_cut_as_the_class_of_the_original_does(pre: str, cls: Any) -> None:
    """The words hold pairs that only one kind may merge: across digits, marks, cases and line ends."""
    words = ("12345", " 12", "e\u0301", "\u00e9", "..\n", "don't", "'t", "n\u0303o", "\n\n ", "/x", "WE'LL")
    metadata = make_bytes(pre, words)
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    right = cls(vocab=ids, merges=merges).backend_tokenizer
    texts = [text.replace("<|im_", "<im_") for text in TEXTS] + list(words)
    assert build(metadata).encode_batch(texts) == [right.encode(text, add_special_tokens=False).ids for text in texts]


TEXT = "Don't 12345 e\u0301A\u0301b camelCase!!\n\n  x/y\u6f22\u5b57\u304b"
CUTS = {
    ("llama-bpe", "llama3", "llama-v3", "dbrx"): (
        "Don|'t| |123|45| e|\u0301A|\u0301b| camelCase|!!\n\n| | x|/y\u6f22\u5b57\u304b"
    ),
    ("qwen2", "deepseek-r1-qwen"): "Don|'t| |1|2|3|4|5| \u00e9\u00c1b| camelCase|!!\n\n| | x|/y\u6f22\u5b57\u304b",
    ("qwen35",): "Don|'t| |1|2|3|4|5| \u00e9\u00c1b| camelCase|!!\n\n| | x|/y\u6f22\u5b57\u304b",
    ("tekken",): "Don|'t| |1|2|3|4|5| e\u0301|A\u0301b| camel|Case|!!\n\n| | x|/y\u6f22\u5b57\u304b",
    ("gpt-4o",): "Don't| |123|45| e\u0301|A\u0301b| camel|Case|!!\n\n| | x|/y\u6f22\u5b57\u304b",
    ("gpt-2", "phi-2"): "Don|'t| 12345| e|\u0301|A|\u0301|b| camelCase|!!|\n\n | x|/|y\u6f22\u5b57\u304b",
    ("mpt", "olmo"): "Don|'t| 12345| \u00e9\u00c1b| camelCase|!!|\n\n | x|/|y\u6f22\u5b57\u304b",
    ("smollm", "starcoder", "refact"): (
        "Don|'t| |1|2|3|4|5| e|\u0301|A|\u0301|b| camelCase|!!|\n\n | x|/|y\u6f22\u5b57\u304b"
    ),
    ("command-r",): "Don|'t| |1|2|3|4|5| \u00e9\u00c1b| camelCase|!!|\n\n | x|/|y\u6f22\u5b57\u304b",
    # It cuts at digits when bytes are characters, of which some are digits, such as \u00bc.
    ("falcon",): "Don|'|t| |123|45| e|\u0301|A|\u0301|b| camelCase|!!|\n\n | x|/|y\\xe6|\\xbc|\\xa2\u5b57\u304b",
    ("deepseek-llm",): "Don|'|t| |1|2|3|4|5| e|\u0301|A|\u0301|b| camelCase|!!|\n|\n| | x|/|y|\u6f22\u5b57\u304b",
    ("deepseek-coder",): "Don|'|t| |1|2|3|4|5| e|\u0301|A|\u0301|b| camelCase|!!|\n|\n| | x|/|y|\u6f22\u5b57\u304b",
    ("deepseek-v3",): "Don|'t| |123|45| e\u0301A\u0301b| camelCase|!!\n\n| | x|/y|\u6f22\u5b57\u304b",
}
"""The pieces of TEXT, by the names that cut it so, worked out from the originals' patterns by hand."""


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_each_name_cuts_a_text_into_the_pieces_of_its_pattern(pre: str, tmp_path: Path) -> None:
    write_tokenizer(make_bytes(pre), tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    text = TEXT if backend.normalizer is None else backend.normalizer.normalize_str(TEXT)
    back = {letter: byte for byte, letter in bytes_to_unicode().items()}
    pieces = [
        bytes(back[x] for x in piece).decode(errors="backslashreplace")
        for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)
    ]
    (expected,) = [cut for names, cut in CUTS.items() if pre in names]
    assert "|".join(pieces) == expected


def test_decomposed_accents_get_the_ids_of_composed_ones_where_the_original_composes() -> None:
    """The file does not say so: its vocabulary has both."""
    text = "cafe\u0301"
    composes = {pre: encode(make_bytes(pre), text) == encode(make_bytes(pre), "caf\u00e9") for pre in PRE_TOKENIZERS}
    assert {pre for pre, does in composes.items() if does} == {
        *("qwen2", "deepseek-r1-qwen", "qwen35", "mpt", "olmo", "command-r")
    }
    assert unicodedata.normalize("NFC", text) == "caf\u00e9"


def test_a_piece_that_is_a_token_is_one_where_the_original_ignores_merges() -> None:
    """No merge makes "abc" here: llama3 and tekken find it all the same."""
    for pre, expected in (("llama-bpe", ["abc"]), ("tekken", ["abc"]), ("qwen2", ["a", "b", "c"])):
        metadata = make_bytes(pre)
        metadata["tokenizer.ggml.tokens"].append("abc")
        metadata["tokenizer.ggml.token_type"].append(int(Kind.NORMAL))
        assert encode(metadata, "abc") == expected


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)])
def test_bos_and_eos_stand_around_texts_as_the_file_or_else_the_kind_says(pre: str, adds: bool) -> None:
    end = "<|endoftext|>"
    metadata = make_bytes(pre)
    metadata["tokenizer.ggml.bos_token_id"] = metadata["tokenizer.ggml.tokens"].index("<tool>")
    assert encode(metadata, "a", True) == ["<tool>", "a"][not adds :]
    for bos in (True, False):
        keys = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": not bos}
        assert encode(metadata | keys, "a", True) == (["<tool>", "a"] if bos else ["a", end])
        assert encode(metadata | keys, "a") == ["a"]


def test_control_tokens_are_special_and_tokens_of_users_are_text(box: dict[str, Any]) -> None:
    metadata = make_bytes("qwen2")
    tokenizer = build(metadata)
    text = "a<|endoftext|><tool>b"
    assert encode(metadata, text) == ["a", "<|endoftext|>", "<tool>", "b"]
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


# ---- SentencePiece


def merge_plainly(pieces: dict[str, float], text: str) -> list[str]:
    """SentencePiece's algorithm: of all neighbours that make a piece, those with the best score, the leftmost first."""
    symbols = list(text.replace(" ", METASPACE))
    while True:
        found = [(-pieces[a + b], at) for at, (a, b) in enumerate(zip(symbols, symbols[1:])) if a + b in pieces]  # noqa: B905, RUF007
        if not found:
            return symbols
        at = min(found)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@pytest.mark.parametrize("text", ["hello world", "hellohello", " hello  he llo", "wor ld\nhello", "elllo", "a a"])
@pytest.mark.parametrize("has_prefix", [True, False])
def test_pieces_are_merged_by_their_scores_behind_a_space_that_the_file_asks_for(text: str, has_prefix: bool) -> None:
    metadata = make_pieces(PIECES, add_space_prefix=has_prefix)
    assert encode(metadata, text) == merge_plainly(PIECES, " " * has_prefix + text)
    tokenizer = build(metadata)
    (ids,) = tokenizer.encode_batch([text])
    assert ids[0] == 1, "bos stands in front, as the file says no other"
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_character_that_is_no_piece_becomes_its_bytes_and_comes_back() -> None:
    metadata = make_pieces(PIECES)
    text = "h\u6f22\U0001f600\te\u0301"
    expected = [f"<0x{byte:02X}>" for byte in "\u6f22\U0001f600\t".encode()]
    tokens = encode(metadata, text)
    assert tokens[:1] + tokens[1:9] == [f"{METASPACE}h", *expected]
    tokenizer = build(metadata)
    assert tokenizer.decode(tokenizer.encode_batch([text])[0], True) == text, "and SentencePiece composes no accents"
    assert encode(make_pieces(PIECES, has_bytes=False), "h\u6f22\u6f22e") == [f"{METASPACE}h", "<unk>", "e"]


def test_tokens_of_spaces_are_merged_first_whatever_their_score_in_the_file_is() -> None:
    """llama.cpp's converter writes them with spaces, and with a score of -1000."""
    runs = [("  ", Kind.USER_DEFINED), ("   ", Kind.USER_DEFINED)]
    metadata = make_pieces(PIECES, *runs, add_space_prefix=False)
    assert encode(metadata, "a   h") == ["a", "   ", "h"]
    normal = make_pieces(PIECES | {f"{METASPACE}{METASPACE}": -20.0}, add_space_prefix=False)
    assert encode(normal, "a   h") == ["a", METASPACE * 2, f"{METASPACE}h"]


def test_added_tokens_may_have_spaces_and_a_space_stands_behind_each() -> None:
    metadata = make_pieces(PIECES, ("<a b>", Kind.USER_DEFINED), ("[INST]", Kind.CONTROL))
    letter = f"{METASPACE}h"
    assert encode(metadata, "h<a b>h[INST]h") == [letter, "<a b>", letter, "[INST]", letter]


def test_gemma_s_spaces_and_runs_of_line_ends_are_its_class_s() -> None:
    pieces = PIECES | {"\n\n": -1.0}
    metadata = make_pieces(pieces, add_space_prefix=False, model="gemma4")
    metadata |= {"tokenizer.ggml.merges": [f"{METASPACE} h", "e l", "\n \n", f"{METASPACE} w"]}
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    right = GemmaTokenizer(vocab=ids, merges=merges, bos_token="<s>", eos_token="</s>").backend_tokenizer
    texts = [text for text in TEXTS if "<" not in text] + ["hello\n\n\n  wello", " h"]
    expected = [right.encode(text, add_special_tokens=False).ids for text in texts]
    assert build(metadata).encode_batch(texts, add_special_tokens=False) == expected


def test_phi_3_s_special_tokens_take_the_spaces_after_them() -> None:
    added = [("<|user|>", Kind.CONTROL), ("<|endoftext|>", Kind.CONTROL)]
    metadata = make_pieces(PIECES, *added, add_space_prefix=False)
    text = "<|user|> \nh<|endoftext|> h"
    plain = ["<|user|>", METASPACE, "\n", "h", "<|endoftext|>", f"{METASPACE}h"]
    assert encode(metadata, text) == plain
    assert encode(metadata | {"general.architecture": "phi3"}, text) == [plain[0], *plain[3:]]


def test_spaces_at_the_ends_and_double_ones_go_if_the_file_says_so() -> None:
    metadata = make_pieces(PIECES, remove_extra_whitespaces=True)
    assert encode(metadata, "  hello   hello ") == encode(make_pieces(PIECES), "hello hello")
    for text in ("\n", "\thello\n\n", "a\n b\n"):
        assert encode(metadata, f" {text} ") == encode(make_pieces(PIECES), text), "other white space stays"


# ---- templates, ends, refusals


def test_all_templates_of_the_file_are_there(box: dict[str, Any]) -> None:
    box |= {
        "tokenizer.chat_template.tool_use": "tools {{ messages[0].content }}\n",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = build(box).transformers
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    assert tokenizer.apply_chat_template(TALK, tokenize=False, tools=[tool]) == "tools hi"
    own = Tokenizer(find_model(BOX)).transformers
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == own.apply_chat_template(TALK, tokenize=False)


def test_a_model_without_a_template_or_a_tokenizer_has_none(box: dict[str, Any]) -> None:
    del box["tokenizer.chat_template"]
    assert build(box).transformers.chat_template is None
    assert build_tokenizer({}, "x") is None
    assert build_tokenizer({"tokenizer.ggml.model": "none"}, "x") is None


def test_a_template_runs_in_the_sandbox(box: dict[str, Any]) -> None:
    box["tokenizer.chat_template"] = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(Exception, match="unsafe"):
        build(box).transformers.apply_chat_template(TALK, tokenize=False)


def test_every_token_that_ends_an_answer_is_found() -> None:
    """Llama 3's file names one, and its generation_config.json three."""
    metadata = make_bytes("llama-bpe")
    names = ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"]
    metadata["tokenizer.ggml.tokens"] += names
    metadata["tokenizer.ggml.token_type"] += [int(Kind.CONTROL)] * 4
    first = metadata["tokenizer.ggml.tokens"].index(names[0])
    metadata |= {"tokenizer.ggml.eos_token_id": first + 2, "tokenizer.ggml.eot_token_id": 7}
    end = metadata["tokenizer.ggml.tokens"].index("<|endoftext|>")
    assert read_end_ids(metadata) == [7, end, first, first + 1, first + 2]
    metadata["tokenizer.ggml.tokens"][first : first + 4] = ["<|end|>", "<|return|>", "<|call|>", "<|x|>"]
    assert read_end_ids(metadata) == [7, end, first + 1, first + 2], "<|end|> ends a message here"
    for kinds in (None, 5, []):
        found = read_end_ids(metadata | {"tokenizer.ggml.token_type": kinds})
        assert found == [7, first + 2], "another tokenizer may take the place of such a vocabulary"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown kind": ({"model": "bert"}, "'bert'; gpt2, llama and gemma4 are read.*tokenizer="),
    "an unknown pre": ({"pre": "mystery"}, "pre is 'mystery'.*tokenizer="),
    "no pre": ({"pre": None}, "there is no tokenizer.ggml.pre.*tokenizer="),
    "the default pre": ({"pre": "default"}, "pre is 'default'.*tokenizer="),
    "a key that nobody reads": ({"normalizer.lowercase": True}, "normalizer.lowercase is True.*not read.*tokenizer="),
    "no tokens": ({"tokens": None}, "has no tokenizer.ggml.tokens"),
    "tokens that are no list": ({"tokens": {}}, "must be a list"),
    "a token twice": ({"tokens": "!"}, "numbers 0 and 5 are both '!'"),
    "an empty token": ({"tokens": ""}, "number 5 is ''.*1 to 1024"),
    "a giant token": ({"tokens": "x" * 2000}, "number 5 is 'xxx"),
    "a token that is no text": ({"tokens": 1.5}, "number 5 is 1.5"),
    "too few types": ({"token_type": [1, 1]}, "token_type has 2 elements, and tokenizer.ggml.tokens has"),
    "a type that does not exist": ({"token_type": 9}, "number 5 is 9; kinds are 1 to 6"),
    "an id outside": ({"bos_token_id": 10**6}, "bos_token_id is 1000000; it must be from 0 to"),
    "a negative id": ({"eos_token_id": -1}, "eos_token_id is -1"),
    "an id that is no number": ({"padding_token_id": "x"}, "padding_token_id is 'x'"),
    "bos without an id": ({"add_bos_token": True}, "add_bos_token is True, and there is no"),
    "a flag that is no flag": ({"add_eos_token": 1}, "add_eos_token is 1"),
    "no merges": ({"merges": None}, "has no tokenizer.ggml.merges"),
    "a merge of one": ({"merges": ["ab"]}, "number 0, 'ab', is not two tokens"),
    "a merge of three": ({"merges": ["a b c"]}, "is not two tokens"),
    "a merge of unknown tokens": ({"merges": ["a zz"]}, "is not two tokens that make a third one"),
    "a merge that makes none": ({"merges": ["a b"]}, "is not two tokens that make a third one"),
    "a merge twice": ({"merges": ["h e", "h e"]}, "numbers 0 and 1 are both 'h e'"),
    "a merge that is no text": ({"merges": [7]}, "number 0, 7,"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_file_says_wrongly_of_bytes_is_refused_by_name(what: str, tmp_path: Path) -> None:
    metadata = make_bytes("qwen2", ("he",))
    refuse_after(metadata, *REFUSED[what], tmp_path)


REFUSED_PIECES: dict[str, tuple[dict[str, Any], str]] = {
    "no scores": ({"scores": None}, "has no tokenizer.ggml.scores"),
    "too few scores": ({"scores": [1.0]}, "scores has 1 elements"),
    "a score that is no number": ({"scores": float("nan")}, "number 300 is nan"),
    "an infinite score": ({"scores": float("inf")}, "number 300 is inf"),
    "a prefix that is no flag": ({"add_space_prefix": "yes"}, "add_space_prefix is 'yes'"),
    "a map of characters": ({"precompiled_charsmap": [0, 1]}, "precompiled_charsmap.*not read"),
    "a token of spaces twice": ({"tokens": " "}, "twice, written with ' '"),
}


@pytest.mark.parametrize("what", REFUSED_PIECES)
def test_what_a_file_says_wrongly_of_pieces_is_refused_by_name(what: str, tmp_path: Path) -> None:
    pieces = {METASPACE: -1.0} | {f"x-{number}": -2.0 for number in range(60)}
    refuse_after(make_pieces(pieces), *REFUSED_PIECES[what], tmp_path, at=300)


def refuse_after(metadata: dict[str, Any], change: dict[str, Any], message: str, folder: Path, at: int = 5) -> None:
    """Change keys, or one element of a list, and expect the message and no file."""
    for name, value in change.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(metadata.get(key), list) and value is not None and not isinstance(value, (list, dict)):
            metadata[key][at] = value
        elif value is None:
            del metadata[key]
        else:
            metadata[key] = value
    with pytest.raises(ValueError, match=message):
        write_tokenizer(metadata, folder)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("make", [lambda: make_bytes("qwen2", ("he",)), lambda: make_pieces(PIECES)])
def test_whatever_values_the_keys_have_nothing_but_a_value_error_comes(make: Any, tmp_path: Path) -> None:
    """Of each key the whole value, and one element of a list, is replaced by what a file can hold."""
    values: list[Any] = ["", "x", "a b", 0, 1, -1, 2**63, 1.5, float("nan"), True, [], ["x"], [1], [0.5], [True]]
    num_built = 0
    for key in make():
        for value in values:
            others = [value]
            if isinstance(make()[key], list) and not isinstance(value, list):
                others.append([*make()[key][:-1], value])
            for other in others:
                metadata = make() | {key: other}
                with suppress(ValueError):
                    read_end_ids(metadata)
                with suppress(ValueError):
                    write_tokenizer(metadata, tmp_path)
                    num_built += 1
    assert num_built > 0, "some values are right"


def test_neither_bytes_nor_an_unknown_token_is_refused() -> None:
    metadata = make_pieces(PIECES, has_bytes=False)
    del metadata["tokenizer.ggml.unknown_token_id"]
    metadata["tokenizer.ggml.token_type"][0] = int(Kind.NORMAL)
    with pytest.raises(ValueError, match=r"^model\.gguf: .*neither bytes nor an unknown token"):
        build(metadata)


@pytest.mark.parametrize("name", [".../../x", "./x", ".", "x", ".a\n"])
def test_a_template_s_name_is_no_path(name: str, box: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its name letters and digits"):
        write_tokenizer(box | {f"tokenizer.chat_template{name}": "x"}, tmp_path)
    with pytest.raises(ValueError, match="must be a text"):
        write_tokenizer(box | {"tokenizer.chat_template": 7}, tmp_path)


def test_another_tokenizer_takes_the_place_of_one_that_cannot_be_built(tmp_path: Path) -> None:
    from helpers.gguf_models import save_gguf
    from helpers.tiny import SMALL

    from nanovllm import LLM, SamplingParams

    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    metadata = make_bytes("mystery", ("he",))
    save_gguf(path, metadata=metadata, vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    write_tokenizer(metadata | {"tokenizer.ggml.pre": "qwen2"}, tmp_path)
    options = SMALL | {"device": "cpu", "attention_backend": "torch"}
    with pytest.raises(ValueError, match=r"model\.gguf: tokenizer\.ggml\.pre is 'mystery'.*tokenizer="):
        LLM(path, **options)
    with LLM(path, tokenizer=tmp_path, **options) as llm:
        (output,) = llm.generate(["ab"], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert output["prompt_token_ids"] == [metadata["tokenizer.ggml.tokens"].index(letter) for letter in "ab"]
