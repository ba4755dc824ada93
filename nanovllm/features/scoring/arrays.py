"""Arrays of the scores of texts: a teacher's answers, from which a smaller model learns."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import ScoreArrays
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import list_prompts
from nanovllm.utils.checks import as_integer, refuse


def score_arrays(llm: Any, prompts: Any, top: int, show: bool) -> list[ScoreArrays]:
    """Score every token of prompts: see `LLM.score_arrays`.

    Args:
        llm: the `LLM`.
        show: draw progress bars.
    """
    llm.engine.claim.check()
    params = make_params(llm, top)
    requests = llm.prepare_requests(list_prompts(prompts), params, show=show)
    arrays = dict(llm.run_requests(requests, "Scoring", show, make_output=read_arrays))
    return [arrays[i] for i in range(len(arrays))]


def make_params(llm: Any, top: int) -> SamplingParams:
    """Return the sampling_params that ask for the scores of a text's tokens.

    Raises:
        ValueError: `top` is out of range, or the engine is several, whose scores come as dicts.
    """
    config = llm.engine.config
    if config.data_parallel_size > 1:
        raise refuse(config.data_parallel_size, "data_parallel_size", "1 for scores as arrays")
    return SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=as_integer(top, "top", 1, config.vocab_size))


def read_arrays(seq: Sequence) -> ScoreArrays:
    """Return the scores of a text that has ended; RuntimeError if it ended with an error."""
    if seq.error is not None:
        raise RuntimeError(seq.error)
    assert seq.scores is not None and seq.params.prompt_logprobs is not None
    first = seq.scores.first
    arrays = allocate(seq.token_ids[: seq.num_prompt_tokens], seq.params.prompt_logprobs)
    if (tokens := seq.scores.tokens) is not None:
        arrays.token_logprobs[first:] = tokens.logprobs
        arrays.ids[first:] = tokens.top_ids
        arrays.logprobs[first:] = tokens.top_logprobs
    return arrays


def read_output_arrays(seq: Sequence, top: int) -> ScoreArrays:
    """Return what was expected in the place of each token that a sequence generated, with the `top` most likely tokens.

    Its request must have asked for so many, or more, with `logprobs`.
    """
    scores = seq.logprobs.read(top)
    token_ids = np.array(seq.output_token_ids, np.int32)
    return ScoreArrays(token_ids, scores.logprobs, scores.top_ids, scores.top_logprobs)


def allocate(token_ids: Iterable[int], top: int) -> ScoreArrays:
    """Return the arrays of a text none of whose tokens is scored yet."""
    tokens = np.fromiter(token_ids, np.int32)
    shape = (len(tokens), top)
    return ScoreArrays(
        token_ids=tokens,
        token_logprobs=np.zeros(len(tokens), np.float32),
        ids=np.zeros(shape, np.int32),
        logprobs=np.full(shape, -np.inf, np.float32),
    )
