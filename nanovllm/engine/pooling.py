"""How the hidden states of a prompt become its vector. features/scoring/pooling_files.py reads it from a folder."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.plan import FloatArray

SumArray = NDArray[np.float64]


def normalise(vector: FloatArray) -> FloatArray:
    """Divide a vector by its Euclidean length."""
    normalised: FloatArray = vector / max(np.linalg.norm(vector), np.float32(1e-12))
    return normalised


def add_states(total: SumArray | None, states: FloatArray) -> SumArray:
    """Add hidden states to a sum, one after another: the bits of the sum do not depend on how a prompt is cut.

    Args:
        total: the sum of the earlier states, float64 [hidden]; None if there are none.
        states: float32 [n, hidden].
    """
    rows = states.astype(np.float64)
    if total is not None:
        rows = np.concatenate((total[None], rows))
    added: SumArray = np.add.reduce(rows, axis=0)  # over the first axis numpy adds one row after another
    return added


@dataclass(frozen=True)
class Dense:
    """A linear layer, and perhaps an activation after it.

    Attributes:
        weight: float32 [out, in].
        bias: float32 [out]; None without one.
        has_tanh: whether the activation is tanh; otherwise there is none.
    """

    weight: FloatArray
    bias: FloatArray | None
    has_tanh: bool

    def apply(self, vector: FloatArray) -> FloatArray:
        out: FloatArray = self.weight @ vector
        if self.bias is not None:
            out = out + self.bias
        return np.tanh(out) if self.has_tanh else out


@dataclass(frozen=True)
class Pooling:
    """Makes the vector of a prompt: it chooses hidden states, takes their mean, and applies further modules.

    Attributes:
        mode: the hidden states that count: that of the last token, that of the first one, or all of them.
        modules: the modules after the pooling: a `Dense`, or "normalise", which divides by the length.
        ends_normalised: whether a last module divides by the length. It is not among `modules`: `LLM.embed` applies it
            if it does not divide by the length anyway.
        size: how many elements the vector has; 0 for as many as a hidden state.
        dimensions: how many elements are kept if the caller names no number; None for all.
        prompt: stands before each text that is embedded.
        max_tokens: the most tokens of a prompt; None if max_model_len alone limits it.
        refusal: why no vector can be made; "" if one can.
        labels: the names of the elements, if they are scores of a head (features/scoring/heads.py).
    """

    mode: Literal["last", "first", "mean"] = "last"
    modules: tuple[Dense | Literal["normalise"], ...] = ()
    ends_normalised: bool = False
    size: int = 0
    dimensions: int | None = None
    prompt: str = ""
    max_tokens: int | None = None
    refusal: str = ""
    labels: tuple[str, ...] = ()

    def check(self, num_tokens: int) -> None:
        """Raise a ValueError if a prompt of num_tokens tokens has no vector."""
        if self.refusal:
            raise ValueError(self.refusal)
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise ValueError(
                f"the prompt has {num_tokens} tokens, and the model's folder limits a text to {self.max_tokens} "
                "(max_seq_length in sentence_bert_config.json, or else model_max_length in tokenizer_config.json); "
                "sentence-transformers would cut it: shorten it, or raise that number"
            )

    def choose_states(self, num_tokens: int) -> range:
        """Return the indices of the tokens whose hidden states count, in a prompt of num_tokens tokens.

        No later token changes a hidden state. So if the first one counts, no other token needs to be computed.
        """
        if self.mode == "first":
            return range(1)
        return range(num_tokens) if self.mode == "mean" else range(num_tokens - 1, num_tokens)

    def finish(self, total: SumArray, num_tokens: int) -> FloatArray:
        """Return the vector, float32, of a prompt of num_tokens tokens from the sum of the states that count."""
        count = len(self.choose_states(num_tokens))
        vector: FloatArray = (total / count).astype(np.float32)
        for module in self.modules:
            vector = module.apply(vector) if isinstance(module, Dense) else normalise(vector)
        return vector


LAST_TOKEN_POOLING = Pooling()
"""The pooling of a folder that says nothing about it."""
