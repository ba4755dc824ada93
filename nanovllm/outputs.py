"""The outputs that users get: plain dicts that have the attributes of vLLM's objects, too."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nanovllm.inputs import LoRARequest

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: an end-of-sequence token, a stop token or a stop string. length: max_tokens or max_model_len. abort: the caller
ended it. error: the logits hold NaN or infinity, or allow no token."""


class Logprob(float):
    """A log-probability: a float that also has the attributes of vLLM's Logprob.

    >>> logprob == logprob.logprob, logprob.rank, logprob.decoded_token
    """

    __slots__ = ("_token", "decode", "rank")

    rank: int | None
    """1 for the most likely token; in general, 1 + how many tokens are more likely."""
    decode: Callable[[int], str] | None
    """Returns the text of a token id. None if there is no tokenizer."""
    _token: int | str | None
    """The token's id, or its text."""

    def __new__(cls, logprob: float, rank: int | None = None, decoded_token: str | None = None) -> "Logprob":
        made = super().__new__(cls, logprob)
        made.rank = rank
        made.decode = None
        made._token = decoded_token
        return made

    @property
    def logprob(self) -> float:
        return float(self)

    @property
    def decoded_token(self) -> str | None:
        """The text of the token by itself, decoded when it is asked for; None if the model has no tokenizer."""
        if isinstance(self._token, int):
            return None if self.decode is None else self.decode(self._token)
        return self._token

    def __reduce__(self) -> tuple[Any, ...]:
        return Logprob, (float(self), self.rank, self.decoded_token)  # a copy does not need the tokenizer


def make_logprobs(token_ids: Seq[int], values: Seq[float], ranks: Seq[int]) -> dict[int, Logprob]:
    """Return {token id: log-probability} of some tokens. A step makes thousands, so `__new__` is not run for each."""
    made = {}
    for token_id, value, rank in zip(token_ids, values, ranks, strict=True):
        logprob = float.__new__(Logprob, value)
        logprob.rank = rank
        logprob.decode = None
        logprob._token = token_id
        made[token_id] = logprob
    return made


@dataclass(frozen=True)
class RequestMetrics:
    """When a request came, had its first token and ended, in seconds since 1970. The names are vLLM's."""

    arrival_time: float
    first_token_ts: float | None
    """None if the request had no token."""
    last_token_ts: float

    @property
    def first_token_latency(self) -> float | None:
        return None if self.first_token_ts is None else self.first_token_ts - self.arrival_time


def _make_plain(value: Any) -> Any:
    """Return a value with lists for arrays, and a list of dicts for a token's log-probabilities."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        return [_make_plain(item) for item in value]
    if isinstance(value, dict) and any(isinstance(item, Logprob) for item in value.values()):
        return [
            {"token_id": i, "logprob": float(item), "rank": item.rank, "decoded_token": item.decoded_token}
            for i, item in value.items()
        ]
    if isinstance(value, dict):
        return {name: _make_plain(item) for name, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def _key(name: str) -> Any:
    """Return a property that reads and writes a key of a dict."""
    return property(itemgetter(name), lambda self, value: self.__setitem__(name, value))


def _optional(name: str) -> Any:
    """Return a property that reads and writes a key which a dict may lack; then the property is None."""
    return property(methodcaller("get", name), lambda self, value: self.__setitem__(name, value))


class _OfPrompt(dict[str, Any]):
    """The keys that Output and Embedding share."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, pandas and parquet: {id: log-probability} becomes a list of dicts."""
        return {name: _make_plain(value) for name, value in self.items()}

    prompt_token_ids: list[int] = _key("prompt_token_ids")

    num_cached_tokens: int = _key("num_cached_tokens")
    """Number of tokens of the prompt that were in the prefix cache when the request first began to run.

    It depends on the order in which requests ran, and so on the option `order`.
    """


OF_EVERY_COMPLETION = ("text", "token_ids", "finish_reason", "stop_reason", "logprobs")
OF_SOME_COMPLETIONS = ("reasoning", "tool_calls")
"""The keys of an output that are those of its first completion: each has the first, and some have the others."""


class _Generated(dict[str, Any]):
    """The keys that Output and Completion share. A value that was not asked for has no key; its property is None."""

    __slots__ = ()

    text: str = _key("text")
    """The text, without the end-of-sequence token or stop string that ended it; "" if there is no tokenizer."""

    token_ids: list[int] = _key("token_ids")
    """The token ids, with the end-of-sequence token or the tokens of the stop string that ended them."""

    finish_reason: FinishReason = _key("finish_reason")

    stop_reason: int | str | None = _optional("stop_reason")
    """The stop token id or the stop string that ended it; None if the model's end-of-sequence token did."""

    reasoning: str | None = _optional("reasoning")
    """The thinking before the text; None if it did not think, or without the option reasoning_parser."""

    @cached_property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of tools in the answer, in OpenAI's form; [] without the option tool_call_parser."""
        return self.get("tool_calls", [])  # type: ignore[no-any-return]

    logprobs: list[dict[int, Logprob]] | None = _optional("logprobs")
    """For each token, {id: log-probability} of itself and of the k likeliest: see the option logprobs_mode."""

    @cached_property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of token_ids; None unless logprobs were asked for."""
        if (logprobs := self.logprobs) is None:
            return None
        return sum(values[token_id] for token_id, values in zip(self.token_ids, logprobs, strict=True))


class Completion(_Generated):
    """One of the n completions of a prompt, like vLLM's CompletionOutput. `index` is its number.

    A script may give it attributes of its own, as in `completion.reward = 1.0`. They are no keys.
    """

    __slots__ = ("__dict__",)  # made when the first attribute comes

    index: int = _key("index")


class Output(_OfPrompt, _Generated):
    """A prompt and its completions, like vLLM's RequestOutput. Text, token_ids ... are those of the first completion.

    >>> output["text"] == output.text == output.outputs[0].text

    A script may give it attributes of its own. They are no keys, and `to_dict` leaves them out.
    """

    __slots__ = ("__dict__", "metrics", "request_id")

    finished = True

    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    """vLLM's names. They stay None, because no model here has an encoder."""

    lora_request: "LoRARequest | None" = None
    """The adapter that `generate` or `chat` got for this prompt."""

    request_id: str
    """The number of the request in its engine, as a string. It is no key, so that equal answers are equal dicts."""

    metrics: RequestMetrics

    prompt: str | None = _optional("prompt")
    """The text of the prompt; None if it was given as token ids."""

    prompt_logprobs: list[dict[int, Logprob] | None] | None = _optional("prompt_logprobs")
    """As `logprobs`, for the tokens of the prompt, and always before temperature and filters. Tokens that were not
    scored have None; so has the first one."""

    error: str | None = _optional("error")
    """The reason, if finish_reason is "error"."""

    @cached_property
    def outputs(self) -> list[Completion]:
        """The completions. There is a key only if there are several, so that nothing is stored twice.

        A single completion is made at the first access, and has the values that the output has then.
        """
        if (outputs := self.get("outputs")) is not None:
            return outputs  # type: ignore[no-any-return]
        return [self.make_completion(0)]

    def make_completion(self, index: int) -> Completion:
        """Return the first completion as an object of its own, with this number."""
        shared = {name: self.get(name) for name in OF_EVERY_COMPLETION}
        shared |= {name: self[name] for name in OF_SOME_COMPLETIONS if name in self}
        return Completion(index=index, **shared, cumulative_logprob=self.cumulative_logprob)


class Score(dict[str, Any]):
    """How likely a continuation is after its prompt, by the raw distribution (natural logarithms): a dict.

    Its keys are `logprobs` (list[float], the log-probability of each token), `logprob` (float, their sum), `is_greedy`
    (bool, whether each token is the most likely one, so that greedy decoding would give the continuation), and
    `token_ids` (list[int]).
    """

    __slots__ = ()

    @property
    def outputs(self) -> NoReturn:
        raise AttributeError(
            "a Score has no outputs: vLLM's score is how relevant a document is, which a model with a head of its own "
            "says; this is the log-probability of a text after another one, score['logprob']"
        )


class ScoreArrays(NamedTuple):
    """The tokens that a model expects in the place of each of n tokens, by the raw distribution (natural logarithms).

    Row i is about token i, and was computed from the tokens before it. Of a token that was not scored, as the first
    one, `token_logprobs` has 0, `ids` has 0, and `logprobs` has -inf.

    Attributes:
        token_ids: int32 [n], the tokens of the text.
        token_logprobs: float32 [n], their log-probabilities.
        ids: int32 [n, k], the most likely tokens in the place of each, the most likely one first.
        logprobs: float32 [n, k], the log-probabilities of `ids`.
    """

    token_ids: "NDArray[np.int32]"
    token_logprobs: "NDArray[np.float32]"
    ids: "NDArray[np.int32]"
    logprobs: "NDArray[np.float32]"


class Embedding(_OfPrompt):
    """The vector of one prompt, like vLLM's EmbeddingRequestOutput.

    >>> embedding["embedding"] is embedding.embedding is embedding.outputs.embedding
    """

    __slots__ = ("__dict__",)

    embedding: "NDArray[np.float32]" = _key("embedding")
    """float32 [dimensions]."""

    @property
    def outputs(self) -> "Embedding":
        """This object: vLLM's has the vector one level deeper."""
        return self


class Classification(_OfPrompt):
    """The scores that a model's head gives one prompt, like vLLM's ClassificationRequestOutput.

    >>> result["probs"] is result.probs is result.outputs.probs
    """

    __slots__ = ("__dict__",)

    probs: "NDArray[np.float32]" = _key("probs")
    """float32 [labels]: probabilities; the scores themselves if config.json asks for no activation."""

    scores: "NDArray[np.float32]" = _key("scores")
    """float32 [labels]: what the head says, before any activation."""

    label: str = _key("label")
    """The label of the largest score, by config.json's id2label."""

    @property
    def outputs(self) -> "Classification":
        """This object: vLLM's has the probabilities one level deeper."""
        return self


class Ranking(dict[str, Any]):
    """A document of `LLM.rerank`: its `index` in the caller's list, its `relevance_score`, and the `document`."""

    __slots__ = ()

    index: int = _key("index")
    relevance_score: float = _key("relevance_score")
    document: str = _key("document")


class Metric(NamedTuple):
    """A count of `LLM.stats`, in the form of vLLM's metrics."""

    name: str
    value: int


METRICS = {name: type(name, (Metric,), {}) for name in ("Counter", "Gauge", "Vector", "Histogram")}
"""vLLM's kinds of metrics. Ours are Counters, which only grow, and Gauges."""


def list_metrics(stats: dict[str, int]) -> list[Metric]:
    """Return what `LLM.stats` returns as metrics."""
    gauges = ("num_blocks", "num_free_blocks")
    return [METRICS["Gauge" if name in gauges else "Counter"](name, count) for name, count in stats.items()]


RequestOutput = Output
CompletionOutput = Completion
"""vLLM's names."""
