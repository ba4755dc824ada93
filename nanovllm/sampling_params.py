"""How one request is sampled, and when it ends."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

from nanovllm.utils.checks import as_bool, as_integer, as_list, as_number, refuse, refuse_unknown
from nanovllm.vllm_names import SAMPLING, drop_harmless

_INT32_MAX = 2**31 - 1  # what plans carry; both values mean the whole vocabulary long before
logger = logging.getLogger(__name__)

_NOT_YET = {
    "n": "one completion a prompt; repeat the prompt instead (its KV cache is shared)",
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), "penalties are not implemented"),
    **dict.fromkeys(("min_tokens", "bad_words", "logit_bias", "allowed_token_ids"), "it is not implemented"),
    **dict.fromkeys(("detokenize", "include_stop_str_in_output"), "it is not implemented"),
    "structured_outputs": "structured output is not implemented",
}
"""Fields that may only be what they are by default, and why."""


class _Checked(type):
    """Makes a SamplingParams of a call's arguments after a look at their names."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kwargs = drop_harmless(kwargs, SAMPLING, cls.__name__)
        refuse_unknown(kwargs, [field.name for field in fields(cls)], cls.__name__)  # type: ignore[arg-type]
        return super().__call__(*args, **kwargs)


@dataclass(slots=True)
class SamplingParams(metaclass=_Checked):
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
        seed: makes a request repeatable whatever else is in the batch; None takes one from the engine's seed.
        logprobs: None is off; k returns for each token the log-probabilities of the k most likely and of itself.
        skip_special_tokens: leave special tokens out of the text.
        prompt_logprobs: as logprobs, for each token of the prompt after the first.
        prompt_logprob_start: score the prompt from this token on. What lies whole blocks before it is taken from the
            prefix cache, if it is there; vLLM knows no such limit, and does not read the cache for such a request.

    The fields from `n` on are vLLM's: so far each must be what it is by default.

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
    structured_outputs: Any = None

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
        for name in ("ignore_eos", "skip_special_tokens"):
            as_bool(getattr(self, name), name)
        if self.seed is not None:
            put("seed", as_integer(self.seed, "seed"))
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                count = as_integer(value, name)
                put(name, min(count, _INT32_MAX), count >= 0, "None (off), or 0 or more")
        given = self.prompt_logprob_start if self.prompt_logprob_start is not None else 0  # None is how vLLM says it
        start = as_integer(given, "prompt_logprob_start", 0)
        ok = start == 0 or self.prompt_logprobs is not None
        put("prompt_logprob_start", start, ok, "0 unless prompt_logprobs is given")
        for field in fields(self):
            if (why := _NOT_YET.get(field.name)) is not None:
                value, neutral = getattr(self, field.name), field.default
                put(field.name, neutral, value == neutral or not (value or neutral), f"{neutral!r}: {why}")

    def clone(self) -> "SamplingParams":
        """A copy, checked once more: its fields may have been assigned since it was made."""
        return replace(self)

    @classmethod
    def from_generation_config(cls, generation_config: Mapping[str, Any]) -> "SamplingParams":
        """What a model's generation_config.json asks for; greedy if it says `do_sample: false`."""
        known = {"temperature", "top_k", "top_p", "min_p"}
        values = {name: generation_config[name] for name in known if generation_config.get(name) is not None}
        if generation_config.get("repetition_penalty") not in (None, 1, 1.0):
            logger.warning("the model's generation_config asks for a repetition_penalty, which is not implemented")
        if generation_config.get("do_sample") is False:
            values = {"temperature": 0.0}
        if generation_config.get("max_new_tokens") is not None:
            values["max_tokens"] = generation_config["max_new_tokens"]
        return cls(**values)
