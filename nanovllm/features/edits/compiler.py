"""Compiles grammars with llguidance (https://github.com/guidance-ai/llguidance). It imports neither torch nor numpy.

The engine's process uses it, and so does the child process in which a large grammar is tried first (trial.py).
"""

import json
import re
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from nanovllm.features.edits.grammar_size import is_safe, measure_schema, measure_text
from nanovllm.features.edits.json_schema import list_probes, locate_error, read_schema

LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # of a compile: at most a second
    step_lexer_fuel=200_000,  # of a mask: some 15 ms
    step_max_items=50_000,
    max_items_in_row=2000,
    max_lexer_states=100_000,  # of a grammar, while it is used: some 150 MB
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""llguidance's own limits. A compile beyond them is an error; a mask beyond them ends its request with an error."""

_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)
"""The rule that every grammar in GBNF has."""

MOST_GBNF = 32 << 10
"""Characters of a grammar in GBNF. The converter is written in Python and takes 0.1 s for so many."""

_SPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,20}"
"""White space between the parts of JSON, as people and programs write it. Without a limit a weak model gets lost."""

_ESCAPES = r"nrbtf\""
r"""The characters that may follow a backslash in a string. A name has one spelling then: with \u a model could write
"\u0061ge" for a listed "age", and llguidance would take it for another name."""


def read_grammar(kind: str, text: str) -> tuple[str | dict[str, Any], bool]:
    """Read and measure a grammar.

    Args:
        kind: which parameter of structured_outputs gave it.

    Returns:
        The grammar for `compile_grammar`: of the kinds json and json_object the schema, changed for llguidance, and of
        the others the text. And whether this process may compile it at once.

    Raises:
        ValueError: it is too large, or it is a schema of which llguidance would not keep everything.
    """
    if kind == "grammar" and _GBNF.search(text):
        text = convert_gbnf(text)
    size = measure_text(kind, text)
    safe = is_safe(size)
    if kind == "json":
        schema = read_schema(text)
        return schema, is_safe(measure_schema(schema, size.bytes))
    return {"type": "object"} if kind == "json_object" else text, safe


def convert_gbnf(text: str) -> str:
    """Return a grammar in Lark's syntax for one in GBNF, llama.cpp's syntax. ValueError if it is too long or bad."""
    if len(text) > MOST_GBNF:
        raise ValueError(
            f"its text has {len(text)} characters; in GBNF (root ::= ...) it may have {MOST_GBNF}: use Lark"
        )
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the converter's own, or a RecursionError
        raise ValueError(f"it is no grammar in GBNF: {error}") from None


def compile_grammar(tokenizer: LLTokenizer, kind: str, grammar: str | dict[str, Any]) -> LLMatcher:
    """Return a matcher at the start of a grammar that `read_grammar` has read.

    Raises:
        ValueError: the grammar is bad, or llguidance would not keep a part of it. For a schema the message names the
            place.
    """
    if isinstance(grammar, dict):
        return _compile_schema(tokenizer, grammar)
    if kind == "grammar":
        text = LLMatcher.grammar_from_lark(grammar)
    else:
        choices = map(_quote_literal, json.loads(grammar) if kind == "choice" else ())
        text = LLMatcher.grammar_from_regex(grammar if kind == "regex" else "|".join(choices))
    matcher, error = _make_matcher(tokenizer, text)
    if error:
        raise ValueError(error)
    return matcher


def _compile_schema(tokenizer: LLTokenizer, schema: dict[str, Any]) -> LLMatcher:
    def make_matcher(part: Any) -> tuple[LLMatcher, str]:
        options: Any = {"whitespace_pattern": _SPACE, "json_allowed_escapes": _ESCAPES}
        return _make_matcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(part), overrides=options))

    matcher, error = make_matcher(schema)
    if error:
        raise ValueError(f"at {locate_error(schema, error, lambda part: make_matcher(part)[1])}: {error}")
    for place, probe in list_probes(schema):
        if _ends_dead(tokenizer, *make_matcher(probe), list(probe["properties"])):
            why = "patternProperties matches only names that properties or required list, and no other may come"
            raise ValueError(f"at {place}: {why}: leave it out")
    return matcher


def _ends_dead(tokenizer: LLTokenizer, matcher: LLMatcher, error: str, names: list[str]) -> bool:
    """Return whether nothing can follow an object's last listed name, its null and a comma."""
    text = "{" + "".join(f"{json.dumps(name, ensure_ascii=False)}: null, " for name in names)
    if error or not matcher.consume_tokens(tokenizer.tokenize_str(text)):
        return False  # no comma may come
    matcher.compute_bitmask()
    return bool(matcher.is_error())


def _make_matcher(tokenizer: LLTokenizer, text: str) -> tuple[LLMatcher, str]:
    """Return a matcher and its grammar's error, "" if there is none. What llguidance would ignore is an error, too."""
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()  # fails where nothing can begin
    error = get_error(matcher) or ", ".join(matcher.get_grammar_warnings())
    return matcher, "the options of a oneOf may overlap" if error.startswith("oneOf ") else error


def _quote_literal(text: str) -> str:
    """Return the regular expression that only this text matches."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def get_error(matcher: LLMatcher) -> str:
    """Return why a matcher has failed, without llguidance's state and backtrace; "" if it has not failed."""
    message = matcher.get_error()
    for appendix in ("\n<state>", "\n<non-verbose/>", "\n<backtrace>"):
        message = message.split(appendix)[0]
    if message.startswith("panic: "):
        return f"llguidance gave up ({message.removeprefix('panic: ')})"
    return message.replace("NoExtensionBias", "nothing fits it")
