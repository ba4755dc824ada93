"""Vectors of texts: hidden states of each prompt, pooled as the model's folder says, cut and normalised."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from nanovllm.engine.plan import FloatArray
from nanovllm.engine.pooling import Pooling, normalise
from nanovllm.outputs import Embedding, Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import list_prompts
from nanovllm.utils.checks import as_bool, as_integer, refuse

EMBEDDING_PARAMS = SamplingParams(max_tokens=0, embed=True)
"""Asks for the vector of a prompt. Nothing is sampled, and no LM head is multiplied."""


def embed_prompts(llm: Any, prompts: Any, *, dimensions: int | None, normalize: bool, show: bool) -> list[Embedding]:
    """Embed every prompt: see `LLM.embed`.

    Args:
        llm: the `LLM`.
        show: draw progress bars.
    """
    llm.engine.claim.check()
    refuse_heads(llm.engine.facts.pooling)
    check_dimensions(dimensions, llm.engine.facts.embedding_size)
    as_bool(normalize, "normalize")
    requests = llm.prepare_requests(list_prompts(prompts), EMBEDDING_PARAMS, show=show)
    outputs = dict(llm.run_requests(requests, "Embedding", show))
    pooling = llm.engine.facts.pooling
    return [read_embedding(outputs[i], pooling, dimensions, normalize) for i in range(len(outputs))]


def add_default_prompt(prompts: Seq[Any], params: Seq[SamplingParams | None], default: str) -> list[Any]:
    """Return prompts with the default prompt of the model's folder before each text that is to be embedded.

    Prompts of token ids stay as they are. So does everything that is no prompt, for whoever reads it to refuse.
    """

    def add(prompt: Any) -> Any:
        if isinstance(prompt, str):
            return default + prompt
        if not isinstance(prompt, Mapping) or prompt.get("prompt_token_ids") is not None:
            return prompt
        text = prompt.get("prompt")
        return {**prompt, "prompt": default + text} if isinstance(text, str) else prompt

    return [
        add(prompt) if own is not None and own.embed else prompt for prompt, own in zip(prompts, params, strict=True)
    ]


def refuse_heads(pooling: Pooling) -> None:
    """Raise a ValueError if a model makes scores in place of vectors."""
    if pooling.labels:
        raise ValueError(f"this model scores texts ({len(pooling.labels)} labels), and makes no vectors: use classify")


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raise a ValueError if vectors of `size` elements cannot be cut to `dimensions`. None stands for no cut."""
    if dimensions is not None and as_integer(dimensions, "dimensions", 1) > size:
        raise refuse(dimensions, "dimensions", f"at most {size}, the size of this model's vectors, or None for all")


def read_embedding(
    output: Output, pooling: Pooling, dimensions: int | None = None, normalize: bool = True
) -> Embedding:
    """Make the vector of one prompt from its output.

    Args:
        pooling: that of the model.
        dimensions: keep the first so many elements; None keeps all, or as many as the model's folder says. Models that
            were trained for it put the most important ones first (Matryoshka representation learning,
            https://arxiv.org/abs/2205.13147).
        normalize: divide the vector, after the cut, by its Euclidean length. False: divide it before the cut, if the
            model's folder asks for it.

    Raises:
        RuntimeError: the hidden state is NaN or infinite.
    """
    if output.error is not None:
        raise RuntimeError(output.error)
    vector: FloatArray = output["embedding"]
    if pooling.ends_normalised and not normalize:
        vector = normalise(vector)
    vector = vector[: dimensions or pooling.dimensions]
    if normalize:
        vector = normalise(vector)
    return Embedding(
        embedding=vector, prompt_token_ids=output.prompt_token_ids, num_cached_tokens=output.num_cached_tokens
    )
