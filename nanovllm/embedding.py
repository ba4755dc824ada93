"""Vectors of texts: the hidden state of each prompt's last token, cut and normalised."""

from typing import Any

import numpy as np

from nanovllm.engine.plan import FloatArray
from nanovllm.outputs import Embedding, Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import list_prompts
from nanovllm.utils.checks import as_bool, as_integer, refuse

EMBED = SamplingParams(max_tokens=0, embed=True)
"""Asks for the hidden state of a prompt's last token. Nothing is sampled, and no LM head is multiplied."""


def embed_prompts(llm: Any, prompts: Any, *, dimensions: int | None, normalize: bool, show: bool) -> list[Embedding]:
    """Embed every prompt: see `LLM.embed`.

    Args:
        llm: the `LLM`.
        show: draw progress bars.
    """
    llm.engine.check_idle()
    dimensions = check_dimensions(dimensions, llm.engine.embedding_size)
    as_bool(normalize, "normalize")
    requests = llm.prepare_requests(list_prompts(prompts), EMBED, show=show)
    outputs = dict(llm.run_requests(requests, "Embedding", show))
    return [read_embedding(outputs[i], dimensions, normalize) for i in range(len(outputs))]


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


def read_embedding(output: Output, dimensions: int, normalize: bool = True) -> Embedding:
    """Make the vector of one prompt from its output.

    Args:
        dimensions: keep the first so many elements. Models that were trained for it (Matryoshka representation
            learning, https://arxiv.org/abs/2205.13147) put the most important ones first.
        normalize: divide the vector, after the cut, by its Euclidean length.

    Raises:
        RuntimeError: the hidden state is NaN or infinite.
    """
    if output.error is not None:
        raise RuntimeError(output.error)
    vector: FloatArray = output["embedding"][:dimensions]
    if normalize:
        vector = vector / max(np.linalg.norm(vector), np.float32(1e-12))
    return Embedding(
        embedding=vector, prompt_token_ids=output.prompt_token_ids, num_cached_tokens=output.num_cached_tokens
    )
