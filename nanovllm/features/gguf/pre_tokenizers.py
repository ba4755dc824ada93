"""How each kind of byte-level BPE cuts a text before it merges bytes: by the name in `tokenizer.ggml.pre`.

A GGUF file has that name alone: no pattern, and no normaliser. They are here as the models' own tokenizer.json files
have them. llama.cpp's patterns (src/llama-vocab.cpp) cut the same texts, but llama.cpp never normalises.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

Step = Mapping[str, Any]
"""One step of a pre-tokenizer, as tokenizer.json writes it."""


def split(pattern: str) -> Step:
    """Return the step that makes each match of a pattern a piece of its own."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


class PreTokenizer(NamedTuple):
    """The way of a text to the pieces whose bytes are merged.

    Attributes:
        steps: the steps, one after another. The last one writes bytes as characters.
        is_normalised: whether characters are composed first (NFC): an "e" and an accent become one character.
        ignores_merges: whether a piece that is a token becomes it, whatever the merges would make of it.
        adds_bos: whether bos stands in front of a text if the file does not say.
    """

    steps: tuple[Step, ...]
    is_normalised: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


BYTES: Step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORDS_AND_BYTES: Step = {**BYTES, "use_regex": True}
"""GPT-2's: this step has a pattern of its own."""
SINGLE_DIGITS: Step = {"type": "Digits", "individual_digits": True}
GROUPED_DIGITS: Step = {"type": "Digits", "individual_digits": False}
PUNCTUATION: Step = {"type": "Punctuation", "behavior": "Contiguous"}

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
QWEN2 = rf"{CONTRACTION}|{LETTERS}|\p{{N}}|{SIGNS}|{SPACES}"
QWEN35 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
CL100K = rf"{CONTRACTION}|{LETTERS}|\p{{N}}{{1,3}}|{SIGNS}|{SPACES}"

UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAPITALISED = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+"
CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
SIGNS_AND_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
TEKKEN = rf"{CAPITALISED}|{CAPITALS}|\p{{N}}|{SIGNS_AND_PATHS}|{SPACES}"
O200K = rf"{CAPITALISED}{CONTRACTION}?|{CAPITALS}{CONTRACTION}?|\p{{N}}{{1,3}}|{SIGNS_AND_PATHS}|{SPACES}"

CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters of scripts with two cases, as DeepSeek lists them: escaped, because some look like others."""

CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
SIGNS_OF_EAST_AND_WEST = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
DEEPSEEK_LLM = tuple(map(split, ("[\r\n]", rf"\s?[{CASED}]+", rf"\s?{SIGNS_OF_EAST_AND_WEST}", r"\s+$", CJK)))
DEEPSEEK_CODER = tuple(map(split, ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK)))
DEEPSEEK_V3 = (
    split(r"\p{N}{1,3}"),
    split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
    split(
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
    ),
)

LLAMA3 = PreTokenizer((split(CL100K), BYTES), ignores_merges=True, adds_bos=True)
QWEN = PreTokenizer((split(QWEN2), BYTES), is_normalised=True)
GPT2 = PreTokenizer((WORDS_AND_BYTES,))
DIGITS = PreTokenizer((SINGLE_DIGITS, WORDS_AND_BYTES))

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": QWEN,
    "deepseek-r1-qwen": QWEN,
    "qwen35": PreTokenizer((split(QWEN35), BYTES), is_normalised=True),
    "tekken": PreTokenizer((split(TEKKEN), BYTES), ignores_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((split(O200K), BYTES)),
    "dbrx": PreTokenizer((split(CL100K), BYTES)),
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "mpt": GPT2._replace(is_normalised=True),
    "olmo": GPT2._replace(is_normalised=True),
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": DIGITS._replace(is_normalised=True),
    "falcon": PreTokenizer((PUNCTUATION, WORDS_AND_BYTES, GROUPED_DIGITS, split("[0-9][0-9][0-9]"))),
    "deepseek-llm": PreTokenizer((*DEEPSEEK_LLM, SINGLE_DIGITS, BYTES)),
    "deepseek-coder": PreTokenizer((*DEEPSEEK_CODER, SINGLE_DIGITS, BYTES)),
    "deepseek-v3": PreTokenizer((*DEEPSEEK_V3, BYTES)),
}
"""By the name in `tokenizer.ggml.pre`. A name is here if its original is known; others would be guesses."""
