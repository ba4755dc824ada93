"""Outputs as they come: the requests of an endless iterable, and the text of one request piece by piece."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from nanovllm.engine.llm_engine import OPEN_RUN
from nanovllm.engine.output import read_text
from nanovllm.engine.sequence import Request
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import list_prompts, name_errors, read_column
from nanovllm.utils.work_ahead import work_ahead


def stream_outputs(llm: Any, requests: Any, sampling_params: SamplingParams | None) -> Iterator[tuple[int, Output]]:
    """Run requests and yield (index, output) as each one ends: see `LLM.stream`.

    Args:
        llm: the `LLM`.
    """
    # A generator is read lazily, as it is. Anything else is read by `list_prompts`.
    requests = read_column(requests, "prompt")
    is_lazy = isinstance(requests, Iterable) and not isinstance(requests, Sequence | Mapping)
    prompts = requests if is_lazy else list_prompts(requests)
    prepare = partial(llm.prepare, sampling_params=sampling_params)
    num_ahead = 2 * llm.engine.config.max_num_seqs
    with closing(work_ahead(prompts, prepare, num_ahead)) as preparing:

        def wait_for_each() -> Iterator[Request]:
            for i, (_, future) in enumerate(preparing):
                with name_errors("prompt", i):
                    request = future.result()
                yield request

        yield from llm.run_requests(wait_for_each())


def stream_pieces(llm: Any, prompt: Any, sampling_params: SamplingParams | None) -> Iterator[str]:
    """Complete one prompt and yield its text piece by piece: see `LLM.stream_tokens`.

    Args:
        llm: the `LLM`.
    """
    engine = llm.engine
    tokenizer = engine.tokenizer
    request = llm.prepare(prompt, sampling_params)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, so its tokens have no text: use generate()")
    if request.params.n > 1 or not request.params.detokenize:
        raise ValueError("stream_tokens gives the text of one completion: n must be 1, and detokenize True")
    num_held = max((len(stop) - 1 for stop in request.params.stop or ()), default=0)
    decoder = tokenizer.stop_matcher(request.params, request.prompt_token_ids)
    num_decoded = len(request.prompt_token_ids)
    num_given = 0
    with closing(engine.run([request], OPEN_RUN._replace(name="stream_tokens()"))) as run:
        for ended in run:
            for _, seq in ended:
                yield read_text(seq, tokenizer)[num_given:]
                if seq.error is not None:
                    raise RuntimeError(seq.error)
                return
            for seq in engine.scheduler.running:
                for token_id in seq.token_ids[num_decoded:]:
                    decoder.feed(token_id)
                num_decoded = len(seq.token_ids)
                if piece := decoder.text[num_given : max(len(decoder.text) - num_held, 0)]:
                    num_given += len(piece)
                    yield piece
