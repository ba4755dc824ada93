"""How likely texts are: from pairs of a prompt and a continuation to token ids, and from outputs to scores."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.outputs import Output, Score
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, list_prompts, name_errors, tokenise_prompts
from nanovllm.text.tokenizer import Tokenizer


def score_pairs(llm: Any, prompts: Any, continuations: Any, show: bool) -> list[Score]:
    """Score every continuation after its prompt: see `LLM.score`.

    Args:
        llm: the `LLM`.
        show: draw progress bars.
    """
    llm.engine.claim.check()
    starts = list_prompts(prompts)
    endings = list_prompts(continuations)
    pairs, params = join_pairs(starts, endings, llm.engine.tokenizer, show, llm.engine.facts.origin)
    requests = llm.prepare_requests(pairs, params, kind="pair")
    scores = {number: read_score(output) for number, output in llm.run_requests(requests, "Scoring", show)}
    return [scores[i] for i in range(len(scores))]


def join_pairs(
    prompts: Sequence[Prompt],
    continuations: Sequence[Prompt],
    tokenizer: Tokenizer | None,
    show: bool,
    origin: Path | str,
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Tokenise pairs, and make the sampling_params that score each continuation after its prompt.

    Two strings are joined and tokenised as one, as lm-evaluation-harness does; spaces at the end of the prompt then
    belong to the continuation. In all other pairs the continuation is tokenised by itself.

    Args:
        prompts: one for each continuation, or one for all.
        show: draw a progress bar if tokenising takes longer than a second.
        origin: the model's folder, for the error of a model without a tokenizer.

    Returns:
        The token ids of each prompt with its continuation, and the sampling_params of each.

    Raises:
        ValueError: the numbers of prompts and continuations differ, or a pair is bad; the message has its number.
    """
    prompts = [*prompts] * (len(continuations) if len(prompts) == 1 else 1)
    count = len(prompts)
    if len(continuations) != count:
        raise ValueError(f"{len(continuations)} continuations for {count} prompts; give one each")
    starts: list[Prompt] = []
    endings: list[Prompt] = []
    for i, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        if isinstance(prompt, str) and isinstance(continuation, str):
            starts.append(prompt.rstrip())
            endings.append(prompt + continuation)
            continue
        with name_errors("pair", i, count):
            (alone,) = tokenise_prompts([continuation], tokenizer, add_special_tokens=False, origin=origin)
        starts.append(prompt)
        endings.append(alone.token_ids)
    tokenised_starts = tokenise_prompts(starts, tokenizer, kind="pair", show=show, origin=origin)
    tokenised_endings = tokenise_prompts(endings, tokenizer, kind="pair", show=show, origin=origin)
    joined = []
    params = []
    for i, (start, ending) in enumerate(zip(tokenised_starts, tokenised_endings, strict=True)):
        is_joined = ending.text is not None
        whole = ending.token_ids if is_joined else start.token_ids + ending.token_ids
        num_context = len(start.token_ids)
        with name_errors("pair", i, count):
            for what, is_missing in (("prompt", num_context == 0), ("continuation", len(whole) <= num_context)):
                if is_missing:
                    raise ValueError(f"the {what} has no tokens; it must have at least one")
        joined.append(whole)
        params.append(SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1, prompt_logprob_start=num_context))
    return joined, params


def read_score(output: Output) -> Score:
    """Read the score of a pair of `join_pairs` from its output; RuntimeError if it ended with an error."""
    if output.error is not None:
        raise RuntimeError(output.error)
    assert output.prompt_logprobs is not None
    token_ids: list[int] = []
    logprobs: list[float] = []
    is_greedy = True
    for token_id, values in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True):
        if values is not None:  # None before the continuation
            token_ids.append(token_id)
            logprobs.append(values[token_id])
            # The most likely token is listed beside the actual one unless they are the same.
            is_greedy = is_greedy and len(values) == 1
    return Score(logprobs=logprobs, logprob=sum(logprobs), is_greedy=is_greedy, token_ids=token_ids)
