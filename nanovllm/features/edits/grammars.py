"""Constrained output: the compiled grammars of one model, and the masks of the tokens that may come next.

`Editing` imports this when the first request asks for structured output. llguidance holds the place of each sequence in
its grammar, byte by byte, and walks through the vocabulary to tell which tokens continue it. A mask depends on every
token before it. So the masks of a step are made once the step before it is read: see `LLMEngine.step`.
"""

import json
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from functools import cached_property, lru_cache
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

from nanovllm.engine.plan import IntArray
from nanovllm.features.edits.compiler import compile_grammar, read_grammar
from nanovllm.sampling_params import KINDS, StructuredOutputsParams
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import quote

MOST_KEPT = 32
"""Compiled grammars that are kept for later requests; a large one may take tens of megabytes."""

LONGEST_ERROR = 500
"""Characters of an error: it may repeat a part of the grammar."""

_executor = LLExecutor()


def read_value(params: StructuredOutputsParams) -> tuple[str, str]:
    """Return the name of the attribute that is given, and its value as text: a schema or a list is written as JSON.

    Raises:
        ValueError: the value cannot be written as JSON, or is not Unicode.
    """
    kind = next(name for name in KINDS if getattr(params, name) is not None)
    value = getattr(params, kind)
    try:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # fails if half of a surrogate pair is in it
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs.{kind} is {quote(value)}; it is not Unicode JSON: {error}") from None
    return kind, text


def fill_masks(masks: IntArray, places: Seq[tuple[LLMatcher, int, list[int]]]) -> None:
    """For each (matcher, i, drafts) write masks[i]: bit t % 32 of word t // 32 is set if token t may come next.

    masks[i + 1] and those after it are for the tokens that follow each draft, up to the first draft that may not come.
    A matcher that has failed lets an end of sequence pass; it may also fail while it makes a mask.
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
        self._vocab_size = vocab_size
        self._eos = min(eos_token_ids)
        try:
            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except ValueError as why:  # it does not spell bytes
            raise ValueError(f"structured_outputs cannot be had with this model's tokenizer: {why}") from None
        self.find = lru_cache(MOST_KEPT)(self._compile)
        """Returns what `_compile` returns. Two threads may compile the same grammar at the same time."""

    def compile(self, params: StructuredOutputsParams | Mapping[str, Any]) -> LLMatcher:
        """Return the matcher at the start of a grammar, of which each sequence gets a copy.

        Raises:
            ValueError: the grammar is bad or too large, or llguidance would not keep a part of it.
        """
        found = self.find(*read_value(StructuredOutputsParams.convert(params)))
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _compile(self, kind: str, text: str) -> LLMatcher | str:
        """Return the matcher at the start of a grammar, or the error of a bad one."""
        try:
            grammar, is_safe = read_grammar(kind, text)
            if not is_safe:
                from nanovllm.features.edits.trial import try_in_child

                if error := try_in_child(kind, text, self._special_tokens, self._vocab_size, self._eos):
                    raise ValueError(error)
            return compile_grammar(self._tokenizer, kind, grammar)
        except ValueError as why:
            return f"structured_outputs.{kind}: {str(why)[:LONGEST_ERROR]}"

    @cached_property
    def _special_tokens(self) -> dict[int, str]:
        ids = filter(self._tokenizer.is_special_token, range(self._vocab_size))
        texts = {token_id: self._tokenizer.decode_str([token_id]) for token_id in ids}
        return {token_id: text for token_id, text in texts.items() if text}
