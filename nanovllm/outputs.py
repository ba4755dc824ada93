"""What comes back: plain dicts that also answer as vLLM's objects do."""

from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]
"""An end of sequence or a stop; max_tokens or max_model_len; the caller's wish; logits that are no numbers."""

Logprobs = list[dict[int, float]]
"""For each token {id: log-probability} of itself and of the k most likely, of the distribution before any filter."""


class _Answer(dict[str, Any]):
    """What an Output and a Completion share. A key that was not asked for is absent, and its property None."""

    __slots__ = ()

    @property
    def text(self) -> str:
        """Without the ending end-of-sequence token or stop string; "" without a tokenizer."""
        return self["text"]  # type: ignore[no-any-return]

    @property
    def token_ids(self) -> list[int]:
        """With the ending end-of-sequence token, or the tokens of the stop string."""
        return self["token_ids"]  # type: ignore[no-any-return]

    @property
    def finish_reason(self) -> FinishReason:
        return self["finish_reason"]  # type: ignore[no-any-return]

    @property
    def stop_reason(self) -> int | str | None:
        """The one of stop_token_ids or of stop that ended it; None for the model's own end of sequence."""
        return self.get("stop_reason")

    @property
    def logprobs(self) -> Logprobs | None:
        return self.get("logprobs")

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the log-probabilities of token_ids; None unless logprobs were asked for."""
        if (logprobs := self.logprobs) is None:
            return None
        return sum(values[token_id] for token_id, values in zip(self.token_ids, logprobs, strict=True))


class Completion(_Answer):
    """One of the n completions of a prompt, with `index`; as vLLM's CompletionOutput."""

    __slots__ = ()

    @property
    def index(self) -> int:
        return self["index"]  # type: ignore[no-any-return]


class Output(_Answer):
    """A prompt and what became of it; as vLLM's RequestOutput. Its own text, token_ids ... are the first completion's.

    >>> output["text"] == output.text == output.outputs[0].text
    """

    __slots__ = ()

    finished = True

    @property
    def prompt(self) -> str | None:
        """The text that was tokenised; None for a prompt of token ids."""
        return self.get("prompt")

    @property
    def prompt_token_ids(self) -> list[int]:
        return self["prompt_token_ids"]  # type: ignore[no-any-return]

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose keys and values were in the prefix cache when it was first admitted."""
        return self["num_cached_tokens"]  # type: ignore[no-any-return]

    @property
    def prompt_logprobs(self) -> list[dict[int, float] | None] | None:
        """As `logprobs`, for the prompt's tokens; None for the first, which nothing predicts, and where not asked."""
        return self.get("prompt_logprobs")

    @property
    def error(self) -> str | None:
        """What went wrong, if finish_reason is "error"."""
        return self.get("error")

    @property
    def outputs(self) -> list[Completion]:
        """The completions. A key only where there are several, so that nothing is stored twice."""
        if (outputs := self.get("outputs")) is not None:
            return outputs  # type: ignore[no-any-return]
        shared = {name: self.get(name) for name in ("text", "token_ids", "finish_reason", "stop_reason", "logprobs")}
        return [Completion(index=0, **shared, cumulative_logprob=self.cumulative_logprob)]
