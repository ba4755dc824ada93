"""How one request is sampled, and when it ends."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.utils.checks import as_bool, as_integer, as_list, as_number, refuse
from nanovllm.vllm_names import SAMPLING, names_checked

_MAX_N = 16384  # vLLM's limit
_INT32_MAX = 2**31 - 1  # what plans carry; both values mean the whole vocabulary long before


def _as_token_id(key: Any) -> int:
    """A key of logit_bias, which JSON can only write as a string."""
    return int(key) if isinstance(key, str) and key.isdecimal() else as_integer(key, "a token id of logit_bias")


@names_checked(SAMPLING)
@dataclass(slots=True)
class SamplingParams:
    """How one request is sampled, and when it ends. Checked when it is made, and again, and copied, by each request.

    Temperature comes first, then top-k, then top-p on what is left; min-p is relative to the most likely token.
    `nanovllm/kernels/sample.py` states the rule exactly.

    Attributes:
        temperature: 0 takes the most likely token; at most finite.
        max_tokens: the most tokens to generate; the engine also ends at max_model_len, which is what None means. 0 only
            scores the prompt, which may then have max_model_len + 1 tokens; needs prompt_logprobs.
        ignore_eos: go on after an end-of-sequence token (stop_token_ids still end).
        top_k: keep the k most likely tokens, ties included; 0 or -1 is off.
        top_p: keep the most likely tokens until their mass reaches p, the one that crosses included; in (0, 1].
        min_p: keep tokens at least min_p times as likely as the most likely one; in [0, 1].
        stop: a string or strings that end the text, before the match, also when one straddles tokens.
        stop_token_ids: further token ids that end a sequence.
        seed: makes a request repeatable whatever else is in the batch, modulo 2**64; None takes one from the engine's.
        logprobs: None is off; k returns for each token the log-probabilities of the k most likely and of itself.
        skip_special_tokens: leave special tokens out of the text.
        prompt_logprobs: as logprobs, for each token of the prompt after the first.
        prompt_logprob_start: score the prompt from this token on. What lies whole blocks before it is taken from the
            prefix cache, if it is there; vLLM knows no such limit, and does not read the cache for such a request.
        n: how many completions of the prompt, each with a seed of its own: the first has `seed`. More than 1 needs a
            temperature above 0.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens of the output, once and as often as
            they came; in [-2, 2], 0 is off.
        repetition_penalty: divides the logits of tokens of prompt and output if they are positive, multiplies others;
            above 0, 1 is off.
        min_tokens: nothing ends the output before it has so many tokens: neither an end of sequence nor a stop;
            only a grammar that allows nothing more does.
        logit_bias: {token id: what is added to its logit}.
        allowed_token_ids: nothing else is sampled; None allows all.
        bad_words: texts that are not generated, also after a space, as the tokens that spell them by themselves.
        include_stop_str_in_output: the text ends with the stop string, or the stop token's text, that ended it.
        detokenize: False leaves the text empty; there can be no `stop` then.
        structured_outputs: what the output must be: a `StructuredOutputsParams`, or a dict of its attributes.

    Masks come first, then biases, penalties, temperature and filters: `nanovllm/kernels/edit_logits.py` has the rule.

    Raises:
        ValueError: a value out of range, naming it and its limit.
        TypeError: an unknown name, with the nearest known one.
    """

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
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any, ok: bool = True, limit: str = "") -> None:
            if not ok:
                raise refuse(getattr(self, name), name, limit)
            setattr(self, name, value)

        temperature = as_number(self.temperature, "temperature")
        put("temperature", temperature, temperature >= 0 and math.isfinite(temperature), "0 (greedy) or more, finite")
        top_k = as_integer(self.top_k, "top_k")
        put("top_k", min(max(top_k, 0), _INT32_MAX), top_k >= -1, "at least 1, or 0 or -1 (off)")
        top_p, min_p = as_number(self.top_p, "top_p"), as_number(self.min_p, "min_p")
        put("top_p", top_p, 0 < top_p <= 1, "in (0, 1]; 1 is off")
        put("min_p", min_p, 0 <= min_p <= 1, "in [0, 1]; 0 is off")
        if self.max_tokens is not None:
            limit = "at least 1, None (to max_model_len), or 0 with prompt_logprobs"
            max_tokens = as_integer(self.max_tokens, "max_tokens")
            put("max_tokens", max_tokens, max_tokens >= (1 if self.prompt_logprobs is None else 0), limit)
        strings = "a string or strings, none of them empty"
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(as_list(self.stop, "stop", strings))
        put("stop", stop, all(isinstance(s, str) and s for s in stop), strings)
        stop_token_ids = as_list(self.stop_token_ids, "stop_token_ids", "a list of integers")
        put("stop_token_ids", tuple(as_integer(i, "stop_token_ids") for i in stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "detokenize"):
            as_bool(getattr(self, name), name)
        if self.seed is not None:
            put("seed", as_integer(self.seed, "seed"))
        self._check_edits(put)
        n = as_integer(self.n, "n", 1, _MAX_N)
        is_drawn = self.temperature > 0 and self.max_tokens != 0
        put("n", n, n == 1 or is_drawn, "1 at temperature 0, and with max_tokens=0")
        put("detokenize", self.detokenize, self.detokenize or not self.stop, "True if there are stop strings")
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                count = as_integer(value, name)
                put(name, min(count, _INT32_MAX), count >= 0, "None (off), or 0 or more")
        given = self.prompt_logprob_start if self.prompt_logprob_start is not None else 0  # None is how vLLM says it
        start = as_integer(given, "prompt_logprob_start", 0)
        ok = start == 0 or self.prompt_logprobs is not None
        put("prompt_logprob_start", start, ok, "0 unless prompt_logprobs is given")

    def _check_edits(self, put: Callable[..., None]) -> None:
        """Check and normalise what edits the logits."""
        if self.structured_outputs is not None:
            put("structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
            put("ignore_eos", self.ignore_eos, not self.ignore_eos, "False with structured_outputs, which have an end")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = as_number(getattr(self, name), name)
            put(name, penalty, -2 <= penalty <= 2, "in [-2, 2]; 0 is off")
        penalty = as_number(self.repetition_penalty, "repetition_penalty")
        put("repetition_penalty", penalty, 0 < penalty < math.inf, "above 0 and finite; 1 is off")
        min_tokens = as_integer(self.min_tokens, "min_tokens", 0)
        most = math.inf if self.max_tokens is None else self.max_tokens
        put("min_tokens", min_tokens, min_tokens <= most, f"at most max_tokens={self.max_tokens}")
        what = "a dict of token ids and finite numbers"
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            raise refuse(bias, "logit_bias", what)
        bias = {_as_token_id(i): as_number(value, "logit_bias") for i, value in bias.items()}
        put("logit_bias", bias or None, all(map(math.isfinite, bias.values())), what)
        if self.allowed_token_ids is not None:
            what = "None, or a list of at least one token id"
            allowed = as_list(self.allowed_token_ids, "allowed_token_ids", what)
            put("allowed_token_ids", tuple(as_integer(i, "allowed_token_ids") for i in allowed), bool(allowed), what)
        strings = "strings, none of them empty"
        words = as_list(self.bad_words, "bad_words", "a list of strings")
        put("bad_words", tuple(words), all(isinstance(w, str) and w.strip() for w in words), strings)

    @property
    def edits_logits(self) -> bool:
        """Whether anything is to be done to the logits before a token is sampled."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        lists = (self.logit_bias, self.bad_words, self.allowed_token_ids)
        return penalties != (1, 0, 0) or self.min_tokens > 0 or any(lists) or self.structured_outputs is not None

    def clone(self) -> "SamplingParams":
        """A copy, checked once more: its fields may have been assigned since it was made."""
        return replace(self)

    @classmethod
    def from_generation_config(cls, generation_config: Mapping[str, Any]) -> "SamplingParams":
        """What a model's generation_config.json asks for; greedy if it says `do_sample: false`."""
        is_greedy = generation_config.get("do_sample") is False
        names = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
        if not is_greedy:
            names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
        found = {ours: generation_config.get(name) for name, ours in names.items()}
        if is_greedy:
            found["temperature"] = 0.0
        return cls(**{name: value for name, value in found.items() if value is not None})
