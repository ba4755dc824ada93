"""Vectors of texts: the hidden state of each prompt's last token, cut and normalised."""

from typing import Any

import numpy as np

from nanovllm.engine.plan import FloatArray
from nanovllm.outputs import Embedding, Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import list_prompts
from nanovllm.utils.checks import as_bool, as_integer, refuse

EMBEDDING_PARAMS = SamplingParams(max_tokens=0, embed=True)
"""Asks for the hidden state of a prompt's last token. Nothing is sampled, and no LM head is multiplied."""


def embed_prompts(llm: Any, prompts: Any, *, dimensions: int | None, normalize: bool, show: bool) -> list[Embedding]:
    """Embed every prompt: see `LLM.embed`.

    Args:
        llm: the `LLM`.
        show: draw progress bars.
    """
    llm.engine.claim.check()
    check_dimensions(dimensions, llm.engine.facts.embedding_size)
    as_bool(normalize, "normalize")
    requests = llm.prepare_requests(list_prompts(prompts), EMBEDDING_PARAMS, show=show)
    outputs = dict(llm.run_requests(requests, "Embedding", show))
    return [read_embedding(outputs[i], dimensions, normalize) for i in range(len(outputs))]


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raise a ValueError if vectors of `size` elements cannot be cut to `dimensions`. None stands for no cut."""
    if dimensions is not None and as_integer(dimensions, "dimensions", 1) > size:
        raise refuse(dimensions, "dimensions", f"at most {size}, the size of this model's vectors, or None for all")


def read_embedding(output: Output, dimensions: int | None, normalize: bool = True) -> Embedding:
    """Make the vector of one prompt from its output.

    Args:
        dimensions: keep the first so many elements; None keeps all. Models that were trained for it put the most
            important ones first (Matryoshka representation learning, https://arxiv.org/abs/2205.13147).
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
