"""How likely texts are: pairs of a prompt and a continuation, to token ids and back from log-probabilities."""

from collections.abc import Sequence
from typing import Any, TypedDict

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, each, tokenise_prompt, tokenise_texts
from nanovllm.text.tokenizer import Tokenizer


class Score(TypedDict):
    """Of a continuation: the log-probability of each of its tokens, their sum, and whether each was the likeliest."""

    logprobs: list[float]
    logprob: float
    is_greedy: bool
    token_ids: list[int]


def texts_of(prompt: Prompt, continuation: Prompt) -> tuple[Prompt, str | None]:
    """What to tokenise of a pair: the prompt, and of two strings both as one, as lm-evaluation-harness has it.

    Its trailing spaces have then gone over from the prompt to the continuation.
    """
    if isinstance(prompt, str) and isinstance(continuation, str):
        return prompt.rstrip(), prompt + continuation
    return prompt, None


def score_requests(
    engine: LLMEngine, prompts: Sequence[Prompt], continuations: Sequence[Prompt], show: bool
) -> list[Request]:
    """The requests that score each continuation after its prompt; prompt_logprob_start is where that begins.

    Args:
        show: a bar, if tokenising takes long.

    Raises:
        ValueError: there are not as many of one as of the other, or a bad pair, naming which.
    """
    if len(prompts) != len(continuations):
        raise ValueError(f"{len(continuations)} continuations for {len(prompts)} prompts; give one each")
    tokenizer, max_model_len = engine.tokenizer, engine.config.max_model_len
    texts = zip(*map(texts_of, prompts, continuations), strict=True)
    tokenised = (tokenise_texts(some, tokenizer, max_model_len, show, "pair") for some in texts)

    def prepare(pair: tuple[Any, Any, Prompt]) -> Request:
        context, whole = pair_ids(*pair, tokenizer, max_model_len)
        params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1, prompt_logprob_start=len(context))
        return engine.prepare(whole, params)

    return each("pair", list(zip(*tokenised, continuations, strict=True)), prepare)


def pair_ids(
    prompt: Prompt, both: Prompt | None, continuation: Prompt, tokenizer: Tokenizer | None, max_model_len: int
) -> tuple[list[int], list[int]]:
    """The token ids of a prompt, and of a prompt with its continuation.

    Args:
        prompt, both: see `texts_of`. What the prompt's own tokens leave of both is the continuation.

    Raises:
        ValueError: either has no tokens.
    """
    _, context = tokenise_prompt(prompt, tokenizer, max_model_len)
    if both is not None:
        _, whole = tokenise_prompt(both, tokenizer, max_model_len)
    else:
        whole = context + tokenise_prompt(continuation, tokenizer, max_model_len, add_special_tokens=False)[1]
    for what, missing in (("prompt", not context), ("continuation", len(whole) <= len(context))):
        if missing:
            raise ValueError(f"the {what} has no tokens; it must have at least one")
    return context, whole


def read_score(output: Output) -> Score:
    """What one of `score_requests` gave; RuntimeError if it ended with an error."""
    if output.error is not None:
        raise RuntimeError(output.error)
    ids, values = output.prompt_token_ids, output.prompt_logprobs
    assert values is not None
    scored = [(token_id, of_token) for token_id, of_token in zip(ids, values, strict=True) if of_token is not None]
    logprobs = [of_token[token_id] for token_id, of_token in scored]
    return {
        "logprobs": logprobs,
        "logprob": sum(logprobs),
        "is_greedy": all(len(of_token) == 1 for _, of_token in scored),  # the likeliest, of equals the first, is itself
        "token_ids": [token_id for token_id, _ in scored],
    }
