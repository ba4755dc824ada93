"""Constrained output: grammars, each compiled once, and the masks of what may come next. Imported when a request asks.

llguidance (https://github.com/guidance-ai/llguidance) holds each sequence's place in its grammar, byte by byte, and
walks through the vocabulary to tell which tokens go on from there. A mask depends on every token before it, so while a
sequence with a grammar is resident the engine reads each step before it plans the next.
"""

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from threading import Lock
from typing import Any

from nanovllm.edits.json_schema import find_place, read_schema
from nanovllm.engine.plan import IntArray
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.text.tokenizer import Tokenizer

try:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens
except ImportError as why:
    raise ValueError(f"structured_outputs needs llguidance: pip install 'nano-vllm[guided]' ({why})") from None

MOST_KEPT = 256
"""Compiled grammars that are kept for requests to come; requests keep their own."""

MOST_SAID = 500
"""Characters of an error: it may repeat a part of the grammar."""

_SPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,20}"
"""White space between the parts of JSON, as people and programs write it: without end, a weak model gets lost in it."""

_executor = LLExecutor()


def fill_masks(masks: IntArray, places: Seq[tuple[LLMatcher, int, list[int]]]) -> None:
    """For each (matcher, i, drafts) write masks[i]: bit t % 32 of word t // 32 is set if token t may come next.

    masks[i + 1] and on are for what comes after each draft, up to the first that may not come. A matcher that has
    failed, as it also may while it makes a mask, lets an end of sequence pass.
    """
    if drafted := [place for place in places if place[2]]:
        fill_next_token_bitmask_par_with_draft_tokens(_executor, drafted, masks)
    if plain := [(matcher, i) for matcher, i, drafts in places if not drafts]:
        fill_next_token_bitmask_par(_executor, plain, masks)


class Grammars:
    """The grammars of one model's requests."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Takes seconds for a large vocabulary; ValueError without a tokenizer, or an end of sequence."""
        if tokenizer is None or not eos_token_ids:
            missing = "a tokenizer" if tokenizer is None else "an end-of-sequence token"
            raise ValueError(f"structured_outputs needs {missing}, and this model has none")
        try:
            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except ValueError as why:  # it does not spell bytes
            raise ValueError(f"structured_outputs cannot be had with this model's tokenizer: {why}") from None
        self._kept: OrderedDict[tuple[str, str], LLMatcher | str] = OrderedDict()
        """The grammars asked for last; of a bad one, what is wrong with it."""
        self._lock = Lock()  # requests are prepared ahead, in a thread

    def compile(self, params: StructuredOutputsParams | Mapping[str, Any]) -> LLMatcher:
        """The matcher at the start of a grammar, of which each sequence gets a copy.

        Raises:
            ValueError: the grammar is bad, or has what llguidance would not keep, and where that is.
        """
        params = StructuredOutputsParams.convert(params)
        key = params.kind, params.text
        with self._lock:
            found = self._kept[key] = self._kept.pop(key) if key in self._kept else self._compile(*key)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _compile(self, kind: str, text: str) -> LLMatcher | str:
        try:
            if kind in ("json", "json_object"):
                return self._compile_schema(read_schema(text) if kind == "json" else {"type": "object"})
            if kind == "grammar":
                grammar = LLMatcher.grammar_from_lark(text)
            else:
                regex = text if kind == "regex" else "|".join(map(_literal, json.loads(text)))
                grammar = LLMatcher.grammar_from_regex(regex)
            matcher, error = self._match(grammar)
            if error:
                raise ValueError(error)
        except ValueError as why:
            return f"structured_outputs.{kind}: {str(why)[:MOST_SAID]}"
        return matcher

    def _compile_schema(self, schema: Any) -> LLMatcher:
        def match(part: Any) -> tuple[LLMatcher, str]:
            options: Any = {"whitespace_pattern": _SPACE}
            return self._match(LLMatcher.grammar_from_json_schema(json.dumps(part), overrides=options))

        matcher, error = match(schema)
        if error:
            raise ValueError(f"at {find_place(schema, error, lambda part: match(part)[1])}: {error}")
        return matcher

    def _match(self, grammar: str) -> tuple[LLMatcher, str]:
        """A matcher, and what is wrong with its grammar, "" if nothing is: what would be ignored, too."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # fails where nothing can begin
        error = error_of(matcher) or ", ".join(matcher.get_grammar_warnings())
        return matcher, "the options of a oneOf may overlap" if error.startswith("oneOf ") else error


def _literal(text: str) -> str:
    """The regular expression of one text."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def error_of(matcher: LLMatcher) -> str:
    """Why a matcher has failed, in short; "" if it has not."""
    return matcher.get_error().split("\n<state>")[0].replace("NoExtensionBias", "nothing fits it")
