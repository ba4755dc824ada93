"""Outputs as they come: the requests of an endless iterable, and the text of one request piece by piece."""

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing
from functools import partial
from typing import Any

from nanovllm.engine.llm_engine import OPEN_RUN
from nanovllm.engine.output import read_text
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import list_prompts, name_errors, read_column
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.work_ahead import work_ahead


def stream_outputs(llm: Any, requests: Any, sampling_params: SamplingParams | None) -> Iterator[tuple[int, Output]]:
    """Run requests and yield (index, output) as each one ends: see `LLM.stream`.

    Args:
        llm: the `LLM`.
    """
    # A generator is read lazily, as it is. Anything else is read by `list_prompts`.
    requests = read_column(requests, "prompt")
    is_lazy = isinstance(requests, Iterable) and not isinstance(requests, Seq | Mapping)
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


class Pieces:
    """Reads the text of a running sequence piece by piece: see `LLM.stream_tokens`."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None:
            raise ValueError("this model has no tokenizer, so its tokens have no text: use generate()")
        if request.params.n > 1 or not request.params.detokenize:
            raise ValueError("a stream gives the text of one completion: n must be 1, and detokenize True")
        self._tokenizer = tokenizer
        self._num_held = max((len(stop) - 1 for stop in request.params.stop or ()), default=0)
        self._decoder = tokenizer.stop_matcher(request.params, request.prompt_token_ids)
        self._num_decoded = len(request.prompt_token_ids)
        self._num_given = 0

    def read(self, seq: Sequence) -> str:
        """Return the text that has come since the last call, but for what must be held back."""
        if seq.finish_reason is not None:
            return read_text(seq, self._tokenizer)[self._num_given :]
        for token_id in seq.token_ids[self._num_decoded :]:
            self._decoder.feed(token_id)
        self._num_decoded = len(seq.token_ids)
        piece = self._decoder.text[self._num_given : max(len(self._decoder.text) - self._num_held, 0)]
        self._num_given += len(piece)
        return piece


def stream_pieces(llm: Any, prompt: Any, sampling_params: SamplingParams | None) -> Iterator[str]:
    """Complete one prompt and yield its text piece by piece: see `LLM.stream_tokens`.

    Args:
        llm: the `LLM`.
    """
    engine = llm.engine
    request = llm.prepare(prompt, sampling_params)
    pieces = Pieces(request, engine.tokenizer)
    with closing(engine.run([request], OPEN_RUN._replace(name="stream_tokens()"))) as run:
        for ended in run:
            for seq in ended:
                yield pieces.read(seq)
                if seq.error is not None:
                    raise RuntimeError(seq.error)
                return
            for seq in engine.scheduler.running:
                if piece := pieces.read(seq):
                    yield piece
