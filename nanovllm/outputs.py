"""The outputs that users get: plain dicts that have the attributes of vLLM's objects, too."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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


class _OfPrompt(dict[str, Any]):
    """The keys that Output and Embedding share."""

    __slots__ = ()

    @property
    def prompt_token_ids(self) -> list[int]:
        return self["prompt_token_ids"]  # type: ignore[no-any-return]

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens of the prompt that were in the prefix cache when the request first began to run.

        It depends on the order in which requests ran, and so on the option `order`.
        """
        return self["num_cached_tokens"]  # type: ignore[no-any-return]


class _Generated(dict[str, Any]):
    """The keys that Output and Completion share. A value that was not asked for has no key; its property is None."""

    __slots__ = ()

    @property
    def text(self) -> str:
        """The text, without the end-of-sequence token or stop string that ended it; "" if there is no tokenizer."""
        return self["text"]  # type: ignore[no-any-return]

    @property
    def token_ids(self) -> list[int]:
        """The token ids, with the end-of-sequence token or the tokens of the stop string that ended them."""
        return self["token_ids"]  # type: ignore[no-any-return]

    @property
    def finish_reason(self) -> FinishReason:
        return self["finish_reason"]  # type: ignore[no-any-return]

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token id or the stop string that ended it; None if the model's end-of-sequence token did."""
        return self.get("stop_reason")

    @property
    def reasoning(self) -> str | None:
        """The thinking before the text; None if it did not think, or without the option reasoning_parser."""
        return self.get("reasoning")

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls of tools in the answer, in OpenAI's form; [] without the option tool_call_parser."""
        return self.get("tool_calls", [])  # type: ignore[no-any-return]

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """For each token, {id: log-probability} of itself and of the k likeliest, before temperature and filters."""
        return self.get("logprobs")

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of token_ids; None unless logprobs were asked for."""
        if (logprobs := self.logprobs) is None:
            return None
        return sum(values[token_id] for token_id, values in zip(self.token_ids, logprobs, strict=True))


class Completion(_Generated):
    """One of the n completions of a prompt, like vLLM's CompletionOutput. `index` is its number."""

    __slots__ = ()

    @property
    def index(self) -> int:
        return self["index"]  # type: ignore[no-any-return]


class Output(_OfPrompt, _Generated):
    """A prompt and its completions, like vLLM's RequestOutput. Text, token_ids ... are those of the first completion.

    >>> output["text"] == output.text == output.outputs[0].text
    """

    __slots__ = ("request_id",)

    finished = True

    request_id: str
    """The number of the request in its engine, as a string. It is no key, so that equal answers are equal dicts."""

    @property
    def prompt(self) -> str | None:
        """The text of the prompt; None if it was given as token ids."""
        return self.get("prompt")

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """As `logprobs`, for the tokens of the prompt. Tokens that were not scored have None; so has the first one."""
        return self.get("prompt_logprobs")

    @property
    def error(self) -> str | None:
        """The reason, if finish_reason is "error"."""
        return self.get("error")

    @property
    def outputs(self) -> list[Completion]:
        """The completions. There is a key only if there are several, so that nothing is stored twice."""
        if (outputs := self.get("outputs")) is not None:
            return outputs  # type: ignore[no-any-return]
        shared = {name: self.get(name) for name in ("text", "token_ids", "finish_reason", "stop_reason", "logprobs")}
        shared |= {name: self[name] for name in ("reasoning", "tool_calls") if name in self}
        return [Completion(index=0, **shared, cumulative_logprob=self.cumulative_logprob)]


class Score(TypedDict):
    """How likely a continuation is after its prompt, by the raw distribution (natural logarithms)."""

    logprobs: list[float]
    """The log-probability of each token."""
    logprob: float
    """Their sum."""
    is_greedy: bool
    """Whether each token is the most likely one, so that greedy decoding would give the continuation."""
    token_ids: list[int]


class Embedding(_OfPrompt):
    """The vector of one prompt, like vLLM's EmbeddingRequestOutput.

    >>> embedding["embedding"] is embedding.embedding is embedding.outputs.embedding
    """

    __slots__ = ()

    @property
    def embedding(self) -> "NDArray[np.float32]":
        """float32 [dimensions]."""
        return self["embedding"]  # type: ignore[no-any-return]

    @property
    def outputs(self) -> "Embedding":
        """This object: vLLM's has the vector one level deeper."""
        return self


RequestOutput = Output
CompletionOutput = Completion
"""vLLM's names."""
