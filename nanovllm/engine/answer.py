"""What the caller gets of a sequence that has ended."""

from collections.abc import Collection

from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import Completion, Output
from nanovllm.text.tokenizer import Tokenizer


def make_output(seq: Sequence, tokenizer: Tokenizer | None, eos_token_ids: Collection[int]) -> Output:
    """The output of an ended sequence, and of the prompt's other completions; eos_token_ids: the model's."""
    of_each = [_output(one, tokenizer, eos_token_ids) for one in (seq, *seq.others)]
    output = of_each[0]
    if seq.others:
        output["outputs"] = [Completion(one.outputs[0], index=i) for i, one in enumerate(of_each)]
        if error := next((one.error for one in of_each if one.error), None):
            output["error"] = error
    return output


def _output(seq: Sequence, tokenizer: Tokenizer | None, eos_token_ids: Collection[int]) -> Output:
    token_ids = seq.output_token_ids
    output = Output(
        text=text_of(seq, token_ids, tokenizer),
        token_ids=token_ids,
        finish_reason=seq.finish_reason,
        stop_reason=_stop_reason(seq, eos_token_ids),
        prompt=seq.prompt,
        prompt_token_ids=seq.prompt_token_ids,
        num_cached_tokens=seq.num_cached_tokens or 0,
    )
    if seq.params.logprobs is not None:
        output["logprobs"] = seq.logprobs
    if seq.params.prompt_logprobs is not None:
        output["prompt_logprobs"] = seq.prompt_logprobs
    if seq.error is not None:
        output["error"] = seq.error
    return output


def text_of(seq: Sequence, token_ids: list[int], tokenizer: Tokenizer | None) -> str:
    """The text of a sequence's tokens, without what ended it unless that is to be included; "" if there is none."""
    if tokenizer is None or not seq.params.detokenize:
        return ""
    if seq.finish_reason == "stop":
        if token_ids[-1] in seq.stop_ids:
            token_ids = token_ids if seq.params.include_stop_str_in_output else token_ids[:-1]
        elif seq.stop_matcher is not None and seq.stop_matcher.found is not None:
            return seq.stop_matcher.text
    return tokenizer.decode(token_ids, seq.params.skip_special_tokens, seq.prompt_token_ids)


def _stop_reason(seq: Sequence, eos_token_ids: Collection[int]) -> int | str | None:
    """The stop string or the one of stop_token_ids that ended the sequence; None for the model's own end."""
    if seq.finish_reason != "stop":
        return None
    if (last := seq.token_ids[-1]) not in seq.stop_ids:
        return seq.stop_matcher.found if seq.stop_matcher is not None else None
    return None if last in eos_token_ids and not seq.params.ignore_eos else last
