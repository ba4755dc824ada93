"""The parameters of one request: how its tokens are sampled, when it ends, and which form its output must have."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import wraps
from typing import Any, ClassVar, TypeVar

from nanovllm.utils.checks import as_bool, as_integer, as_list, as_number, quote, refuse, refuse_unknown
from nanovllm.utils.foreign_names import translate_names

T = TypeVar("T")

_MAX_N = 16384  # vLLM's limit
_INT32_MAX = 2**31 - 1  # step plans carry int32; top_k and logprobs are cut to it, which exceeds every vocabulary

KINDS = ("json", "regex", "choice", "grammar", "json_object")


def accept_vllm_names(cls: type[T]) -> type[T]:
    """Decorate a dataclass: its constructor understands vLLM's names, and raises a TypeError for unknown ones."""
    init: Any = cls.__init__
    fields: Mapping[str, Any] = cls.__dataclass_fields__  # type: ignore[attr-defined]

    @wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        if not kwargs.keys() <= fields.keys():
            kwargs = translate_names(kwargs, cls.__name__)
            refuse_unknown(kwargs, fields, cls.__name__)
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@accept_vllm_names
@dataclass(slots=True)
class StructuredOutputsParams:
    """A form that the output of a request must have. Exactly one of the attributes is given.

    The values are checked here, and once more by each SamplingParams and each request, which take copies.

    Attributes:
        json: a JSON schema, as a dict, as its text, or as a pydantic model's class. A schema with a rule that cannot be
            enforced is refused (docs/structured.md).
        regex: a regular expression that the whole output matches, in Rust's syntax: no look-around.
        choice: strings, one of which is the output.
        grammar: a grammar in Lark's syntax, as llguidance reads it, or in GBNF (root ::= ...).
        json_object: True for any JSON object.

    Raises:
        ValueError: none or several are given, a value has the wrong type, or an option of vLLM is not supported.
        TypeError: a name is unknown; the message names the nearest known one.
    """

    json: str | Mapping[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        names = [name for name in KINDS if getattr(self, name) is not None]
        if len(names) != 1:
            raise ValueError(f"structured_outputs has {' and '.join(names) or 'none'} of {', '.join(KINDS)}; give one")
        if isinstance(self.json, type) and hasattr(self.json, "model_json_schema"):
            self.json = self.json.model_json_schema()
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise refuse(
                self.json, "structured_outputs.json", "a schema, as a dict or its text, or a pydantic model's class"
            )
        for name, text in (("regex", self.regex), ("grammar", self.grammar)):
            if text is not None and (not isinstance(text, str) or not text):
                raise refuse(text, f"structured_outputs.{name}", "a string, and not empty")
        if self.choice is not None:
            limit = "a list of different strings, none of them empty"
            choice = as_list(self.choice, "structured_outputs.choice", limit)
            if not choice or not all(isinstance(c, str) and c for c in choice) or len({*choice}) < len(choice):
                raise refuse(choice, "structured_outputs.choice", limit)
            self.choice = choice
        if self.json_object is not None and self.json_object is not True:
            raise refuse(self.json_object, "structured_outputs.json_object", "True, or left out")

    @classmethod
    def convert(cls, value: Any) -> "StructuredOutputsParams":
        """Return a checked copy of `value`, which is a StructuredOutputsParams or a dict of its attributes."""
        if isinstance(value, cls):
            return replace(value)
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise refuse(value, "structured_outputs", "a StructuredOutputsParams, or a dict of its attributes")
        return cls(**value)


GuidedDecodingParams = StructuredOutputsParams
"""vLLM's older name."""


def _as_token_id(key: Any) -> int:
    """Read a key of logit_bias. In JSON such a key is always a string."""
    is_number = isinstance(key, str) and key.isdecimal() and len(key) < 20  # int() refuses thousands of digits
    return int(key) if is_number else as_integer(key, "a token id of logit_bias")


def change_defaults(defaults: "SamplingParams", changes: Mapping[str, Any]) -> "SamplingParams":
    """Return a model's default parameters with changes.

    If `changes` ask for fewer tokens than the model's `min_tokens`, then `min_tokens` is as low as that.
    """
    params = replace(defaults, **{"min_tokens": 0, **changes})
    if "min_tokens" not in changes:
        most = params.max_tokens
        params.min_tokens = defaults.min_tokens if most is None else min(defaults.min_tokens, most)
    return params


def _as_bad_word(value: Any, limit: str) -> str | tuple[int, ...]:
    """Return a word of `bad_words`: a text, "" if it has only white space, or a tuple of token ids."""
    if isinstance(value, str):
        return value if value.strip() else ""
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise refuse(value, "a word of bad_words", limit)
    return tuple(as_integer(i, "a token id of bad_words") for i in value)


def _list_bad_tokens(generation_config: Mapping[str, Any]) -> list[list[int]]:
    """Return what `bad_words_ids` and `suppress_tokens` of a generation_config.json forbid, as `bad_words` has it.

    As in transformers, `bad_words_ids` cannot forbid an end-of-sequence token by itself.
    """
    ends = generation_config.get("eos_token_id")
    lone_ends = [[i] for i in (ends if isinstance(ends, list) else [ends])]
    limit = "a list of lists of token ids"
    words = as_list(generation_config.get("bad_words_ids"), "bad_words_ids", limit)
    words = [as_list(word, "bad_words_ids", limit) for word in words]
    suppressed = as_list(generation_config.get("suppress_tokens"), "suppress_tokens", "a list of token ids")
    return [word for word in words if word not in lone_ends] + [[i] for i in suppressed]


@accept_vllm_names
@dataclass(slots=True)
class SamplingParams:
    """How the tokens of one request are sampled, and when it ends.

    The values are checked here, and once more by each request, which takes a copy.

    The logits are changed in this order: masks, biases, penalties, temperature, top-k, top-p on the tokens that top-k
    kept, min-p. min-p compares with the most likely token, so no other filter changes its result.
    `nanovllm/features/edits/edit_logits.py` and `nanovllm/ops/sample.py` state the rules exactly.

    Attributes:
        temperature: divides the logits; 0 always takes the most likely token. Finite.
        max_tokens: the most tokens to generate. The engine's max_model_len always holds; None sets no other limit.
            0 only scores the prompt, needs prompt_logprobs, and allows a prompt of max_model_len + 1 tokens; or it
            embeds the prompt.
        ignore_eos: go on after an end-of-sequence token. The stop_token_ids still end the output.
        top_k: keep the k most likely tokens, and tokens as likely as the last of them; 0 or -1 is off.
        top_p: keep the most likely tokens until their probabilities sum to p or more; in (0, 1].
        min_p: keep tokens at least min_p times as likely as the most likely one; in [0, 1].
        stop: a string or strings that end the output. The text ends before the match, which may span several tokens.
            Of several strings the one that is complete first counts; of those that end together, the first of the list.
            A match may have special tokens, such as "<|im_end|>", also where they are left out of the text. It may
            begin or end inside a further one.
        stop_token_ids: further token ids that end the output.
        seed: makes the request repeatable whatever else runs beside it; taken modulo 2**64. None takes a hash of the
            engine's seed and the request's number. The engine counts its requests on from call to call, so a second
            `generate` of the same prompt draws other tokens. -1 means None, as in vLLM and llama.cpp.
        logprobs: k returns, for each token of the output, the log-probabilities of the k most likely tokens and of
            itself; None is off.
        skip_special_tokens: leave special tokens out of the text.
        prompt_logprobs: the same as logprobs, for each token of the prompt after the first.
        prompt_logprob_start: score the prompt from this token on. Whole blocks before it may come from the prefix
            cache. vLLM has no such field, and does not read its cache for a request with prompt_logprobs.
        embed: return the vector of the prompt, as `LLM.embed` does with normalize=False, but without a last division
            by its length, and without a cut. It needs max_tokens=0.
        n: number of completions of the prompt. Each has a seed of its own; the first has `seed`. More than 1 needs a
            temperature above 0.
        presence_penalty: subtracted once from the logit of each token that the output contains; in [-2, 2], 0 is off.
        frequency_penalty: subtracted from a token's logit for each time that the output contains it; in [-2, 2], 0 is
            off.
        repetition_penalty: divides the positive logits of tokens that prompt or output contain, and multiplies their
            other logits; above 0, 1 is off.
        min_tokens: before the output has so many tokens, no end of sequence and no stop ends it. A grammar that allows
            no further token still does.
        logit_bias: {token id: number to add to its logit}.
        allowed_token_ids: only these tokens are sampled; None allows all.
        bad_words: texts of at most 200 characters that no tokens in a row write, with a space before it or without. A
            list of token ids in place of a text forbids these tokens in a row, the end of the prompt included.
        include_stop_str_in_output: let the text end with the stop string, or the text of the stop token, that ended it.
        detokenize: False leaves the text empty; `stop` cannot be used then.
        structured_outputs: the form of the output: a `StructuredOutputsParams`, or a dict of its attributes.

    Raises:
        ValueError: a value is out of range; the message names the value and its limit.
        TypeError: a name is unknown; the message names the nearest known one.
    """

    __struct_fields__: ClassVar[tuple[str, ...]]
    """The names of the fields. The attribute has vLLM's name, which is msgspec's."""

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    _: KW_ONLY
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    seed: int | None = None
    logprobs: int | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    prompt_logprob_start: int = 0
    embed: bool = False
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any, is_good: bool = True, limit: str = "") -> None:
            """Set a field to its checked value, or raise the ValueError that names the limit."""
            if not is_good:
                raise refuse(getattr(self, name), name, limit)
            setattr(self, name, value)

        temperature = as_number(self.temperature, "temperature")
        put("temperature", temperature, temperature >= 0 and math.isfinite(temperature), "0 (greedy) or more, finite")
        top_k = as_integer(self.top_k, "top_k")
        put("top_k", min(max(top_k, 0), _INT32_MAX), top_k >= -1, "at least 1, or 0 or -1 (off)")
        top_p = as_number(self.top_p, "top_p")
        put("top_p", top_p, 0 < top_p <= 1, "in (0, 1]; 1 is off")
        min_p = as_number(self.min_p, "min_p")
        put("min_p", min_p, 0 <= min_p <= 1, "in [0, 1]; 0 is off")
        if self.max_tokens is not None:
            limit = "at least 1, None (to max_model_len), or 0 with prompt_logprobs or embed"
            max_tokens = as_integer(self.max_tokens, "max_tokens")
            needs_output = self.prompt_logprobs is None and not self.embed
            put("max_tokens", max_tokens, max_tokens >= (1 if needs_output else 0), limit)
        strings = "a string or strings, none of them empty"
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(as_list(self.stop, "stop", strings))
        put("stop", stop, all(isinstance(s, str) and s for s in stop), strings)
        stop_token_ids = as_list(self.stop_token_ids, "stop_token_ids", "a list of integers")
        put("stop_token_ids", tuple(as_integer(i, "stop_token_ids") for i in stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize", "embed"):
            as_bool(getattr(self, name), name)
        is_alone = self.max_tokens == 0 and self.prompt_logprobs is None
        put("embed", self.embed, is_alone or not self.embed, "False unless max_tokens is 0 and prompt_logprobs is None")
        if self.seed is not None:
            seed = as_integer(self.seed, "seed")
            put("seed", None if seed == -1 else seed)
        self._check_edits(put)
        n = as_integer(self.n, "n", 1, _MAX_N)
        is_drawn = self.temperature > 0 and self.max_tokens != 0
        put("n", n, n == 1 or is_drawn, "1 at temperature 0, and with max_tokens=0")
        put("detokenize", self.detokenize, self.detokenize or not self.stop, "True if there are stop strings")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                count = as_integer(value, name)
                put(name, min(count, _INT32_MAX), count >= 0, "None (off), or 0 or more")
        start = self.prompt_logprob_start
        start = 0 if start is None else as_integer(start, "prompt_logprob_start", 0)  # vLLM writes None for 0
        is_scored = start == 0 or self.prompt_logprobs is not None
        put("prompt_logprob_start", start, is_scored, "0 unless prompt_logprobs is given")

    def _check_edits(self, put: Callable[..., None]) -> None:
        """Check the fields that change the logits; put is the function in `__post_init__`."""
        if self.structured_outputs is not None:
            put("structured_outputs", StructuredOutputsParams.convert(self.structured_outputs))
            put("ignore_eos", self.ignore_eos, not self.ignore_eos, "False with structured_outputs, which have an end")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = as_number(getattr(self, name), name)
            put(name, penalty, -2 <= penalty <= 2, "in [-2, 2]; 0 is off")
        penalty = as_number(self.repetition_penalty, "repetition_penalty")
        put("repetition_penalty", penalty, 0 < penalty < math.inf, "above 0 and finite; 1 is off")
        min_tokens = as_integer(self.min_tokens, "min_tokens", 0)
        most = math.inf if self.max_tokens is None else self.max_tokens
        put("min_tokens", min_tokens, min_tokens <= most, f"at most max_tokens={self.max_tokens}")
        limit = "a dict of token ids and finite numbers"
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise refuse(bias, "logit_bias", limit)
        bias = {_as_token_id(i): as_number(value, "logit_bias") for i, value in bias.items()}
        put("logit_bias", bias or None, all(map(math.isfinite, bias.values())), limit)
        if self.allowed_token_ids is not None:
            limit = "None, or a list of at least one token id"
            allowed = as_list(self.allowed_token_ids, "allowed_token_ids", limit)
            put("allowed_token_ids", tuple(as_integer(i, "allowed_token_ids") for i in allowed), bool(allowed), limit)
        limit = "a list of strings or of lists of token ids, none of them empty"
        words = [_as_bad_word(word, limit) for word in as_list(self.bad_words, "bad_words", limit)]
        put("bad_words", tuple(words), all(words), limit)

    @property
    def edits_logits(self) -> bool:
        """Whether any field changes the logits before temperature and filters do."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        lists = (self.logit_bias, self.bad_words, self.allowed_token_ids)
        return penalties != (1, 0, 0) or self.min_tokens > 0 or any(lists) or self.structured_outputs is not None

    def clone(self) -> "SamplingParams":
        """Return a copy, checked once more, because fields may have been assigned since it was made."""
        return replace(self)

    @classmethod
    def from_optional(cls, **given: Any) -> "SamplingParams":
        """Return the parameters that are given. None stands for a field's default. The method has vLLM's name.

        Of `max_tokens`, None keeps its own meaning: there is no limit but max_model_len.
        """
        means_default = cls.__dataclass_fields__.keys() - {"max_tokens"}
        return cls(**{name: value for name, value in given.items() if value is not None or name not in means_default})

    @classmethod
    def from_generation_config(cls, generation_config: Mapping[str, Any]) -> "SamplingParams":
        """Return the parameters that a model's generation_config.json asks for; greedy if it has `do_sample: false`.

        `bad_words` holds its `bad_words_ids` and its `suppress_tokens`.

        Raises:
            ValueError: a value is out of range.
        """
        is_greedy = generation_config.get("do_sample") is False
        names = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
        names["min_new_tokens"] = "min_tokens"
        if not is_greedy:
            names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
        found = {ours: generation_config.get(name) for name, ours in names.items()}
        if is_greedy:
            found["temperature"] = 0.0
        found["bad_words"] = _list_bad_tokens(generation_config)
        return cls(**{name: value for name, value in found.items() if value is not None})


SamplingParams.__struct_fields__ = tuple(field.name for field in fields(SamplingParams))


def refuse_sampling(given: Mapping[str, Any], what: str) -> None:
    """Raise a TypeError if a name in `given` is a field of SamplingParams, or another name of one."""
    for name, value in translate_names(given, "SamplingParams").items():
        if name in SamplingParams.__dataclass_fields__:
            raise TypeError(
                f"{what} has no {name}, because it belongs to a request: generate(prompts, "
                f"SamplingParams({name}={quote(value)}))"
            )
