"""Vectors of texts: from the hidden state of a prompt's last token to the `Embedding` that users get."""

from typing import Any

import numpy as np

from nanovllm.engine.plan import FloatArray
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import as_bool, as_integer, refuse

EMBED = SamplingParams(max_tokens=0, embed=True)
"""Asks for the hidden state of a prompt's last token. Nothing is sampled, and no LM head is multiplied."""


class Embedding(dict[str, Any]):
    """The vector of one prompt, like vLLM's EmbeddingRequestOutput.

    >>> embedding["embedding"] is embedding.embedding is embedding.outputs.embedding
    """

    __slots__ = ()

    @property
    def embedding(self) -> FloatArray:
        """float32 [dimensions]."""
        return self["embedding"]  # type: ignore[no-any-return]

    @property
    def prompt_token_ids(self) -> list[int]:
        return self["prompt_token_ids"]  # type: ignore[no-any-return]

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens of the prompt that were in the prefix cache when it first began to run."""
        return self["num_cached_tokens"]  # type: ignore[no-any-return]

    @property
    def outputs(self) -> "Embedding":
        """This object: vLLM's has the vector one level deeper."""
        return self


def check_dimensions(dimensions: int | None, size: int) -> int:
    """Return how many elements a vector gets: `dimensions`, or all.

    Raises:
        ValueError: the model's vectors, of `size` elements, cannot be cut so.
    """
    if dimensions is None:
        return size
    dimensions = as_integer(dimensions, "dimensions", 1)
    if dimensions > size:
        raise refuse(dimensions, "dimensions", f"at most {size}, the size of this model's vectors, or None for all")
    return dimensions


def read_embedding(output: Output, dimensions: int, normalize: bool) -> Embedding:
    """Make the vector of one prompt from its output.

    Args:
        dimensions: keep the first so many elements. Models that were trained for it (Matryoshka representation
            learning, https://arxiv.org/abs/2205.13147) put the most important ones first.
        normalize: divide the vector, after the cut, by its Euclidean length.

    Raises:
        RuntimeError: the hidden state is NaN or infinite.
    """
    as_bool(normalize, "normalize")
    if output.error is not None:
        raise RuntimeError(output.error)
    vector: FloatArray = output["embedding"][:dimensions]
    if normalize:
        vector = vector / max(np.linalg.norm(vector), np.float32(1e-12))
    return Embedding(
        embedding=vector, prompt_token_ids=output.prompt_token_ids, num_cached_tokens=output.num_cached_tokens
    )
