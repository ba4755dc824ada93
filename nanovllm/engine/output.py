"""From a sequence that has ended to the Output that the caller gets."""

import time
from collections.abc import Callable, Iterable

import numpy as np

from nanovllm.engine.pooling import LAST_TOKEN_POOLING, Pooling
from nanovllm.engine.sequence import PromptScores, Sequence
from nanovllm.outputs import Logprob, Output, RequestMetrics
from nanovllm.text.tokenizer import Tokenizer

ParseOutput = Callable[[Sequence, Output], None]
"""Reads more out of the output of one completion than its text. It changes the output."""


def make_output(
    seq: Sequence, tokenizer: Tokenizer | None, parse: ParseOutput | None = None, pooling: Pooling = LAST_TOKEN_POOLING
) -> Output:
    """Make the Output of a prompt whose completions have all ended.

    Args:
        seq: the first completion; with n > 1, seq.others are the rest.
        parse: called with each completion and its output; None: there is only text.
        pooling: makes the vector of a prompt that was embedded.
    """
    outputs = [_make_single(one, tokenizer, parse, pooling) for one in (seq, *seq.others)]
    output = outputs[0]
    output.request_id = str(seq.seq_id)
    output.metrics = RequestMetrics(seq.times[0], seq.times[1] if len(seq.times) > 1 else None, time.time())
    if seq.others:
        output["outputs"] = [one.make_completion(i) for i, one in enumerate(outputs)]
        if error := next((one.error for one in outputs if one.error), None):
            output["error"] = error
    return output


def _make_single(seq: Sequence, tokenizer: Tokenizer | None, parse: ParseOutput | None, pooling: Pooling) -> Output:
    output = Output(
        text=read_text(seq, tokenizer),
        token_ids=seq.output_token_ids,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        prompt=None if seq.prompt is None else str(seq.prompt),  # not a `ChatPrompt`
        prompt_token_ids=seq.prompt_token_ids,
        num_cached_tokens=seq.num_cached_tokens or 0,
    )
    if seq.params.logprobs is not None:
        output["logprobs"] = seq.logprobs.list_dicts(output.token_ids, seq.params.logprobs)
        set_decoder(output["logprobs"], tokenizer)
    if seq.scores is not None and seq.params.prompt_logprobs is not None:
        output["prompt_logprobs"] = list_prompt_logprobs(seq, seq.scores)
        set_decoder(output["prompt_logprobs"], tokenizer)
    if seq.scores is not None and seq.scores.embedding is not None:
        output["embedding"] = pooling.finish(seq.scores.embedding, seq.num_prompt_tokens)
        if not np.isfinite(output["embedding"]).all():  # weights of the folder's modules can do that
            output["finish_reason"] = "error"
            output["error"] = "the vector, or the scores, hold NaN or infinity"
    if seq.error is not None:
        output["error"] = seq.error
    if parse is not None:
        parse(seq, output)
    return output


def list_prompt_logprobs(seq: Sequence, scores: PromptScores) -> list[dict[int, Logprob] | None]:
    """Return {token id: log-probability} of each prompt token whose score was read, and None of those before them."""
    read: list[dict[int, Logprob]] = []
    if scores.tokens is not None:
        tokens = scores.tokens.cut(0, scores.num_read, scores.tokens.num_top)
        read = tokens.make_dicts(seq.token_ids[scores.first : scores.first + scores.num_read].tolist())
    return [*[None] * scores.first, *read]


def set_decoder(rows: Iterable[dict[int, Logprob] | None], tokenizer: Tokenizer | None) -> None:
    """Let each log-probability decode its token when a user reads `decoded_token`."""
    if tokenizer is None:
        return
    decode = tokenizer.decode_token
    for row in rows:
        if row is not None:
            for logprob in row.values():
                logprob.decode = decode


def read_text(seq: Sequence, tokenizer: Tokenizer | None, start: int = 0) -> str:
    """Return the text of a sequence's output so far; "" if there is no tokenizer, or detokenize is False.

    The stop token or stop string that ended it is left out, unless the request has include_stop_str_in_output.

    Args:
        start: the text begins with this token of the output.
    """
    if tokenizer is None or not seq.params.detokenize:
        return ""
    token_ids = seq.output_token_ids
    context = token_ids[:start] or seq.prompt_token_ids
    if seq.finish_reason == "stop":
        if token_ids[-1] in seq.stop_ids:
            if not seq.params.include_stop_str_in_output:
                token_ids = token_ids[:-1]
            elif (stop := tokenizer.decode_token(token_ids[-1])) in (seq.params.stop or ()):
                # The decoder may skip special tokens, but this one's text is to be included.
                return tokenizer.decode(token_ids[start:-1], seq.params.skip_special_tokens, context) + stop
        elif seq.stop_matcher is not None and seq.stop_matcher.found is not None:
            before = tokenizer.decode(token_ids[:start], seq.params.skip_special_tokens, seq.prompt_token_ids)
            return seq.stop_matcher.text[len(before) :]
    return tokenizer.decode(token_ids[start:], seq.params.skip_special_tokens, context)
