"""The text of one request while it is being generated, piece by piece."""

from collections.abc import Iterator
from contextlib import closing

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.output import read_text
from nanovllm.engine.request import Request


def pieces_of(engine: LLMEngine, request: Request) -> Iterator[str]:
    """Run a request, and yield its text as it comes: see `LLM.stream_tokens`."""
    if engine.tokenizer is None:
        raise ValueError("this model has no tokenizer, so its tokens have no text: use generate()")
    if request.params.n > 1 or not request.params.detokenize:
        raise ValueError("stream_tokens gives the text of one completion: n must be 1, and detokenize True")
    num_held = max((len(stop) - 1 for stop in request.params.stop or ()), default=0)
    given = ""
    with closing(engine.steps([request])) as steps:
        for ended in steps:
            for _, seq in ended:
                yield engine.output(seq).text[len(given) :]
                if seq.error is not None:
                    raise RuntimeError(seq.error)
                return
            for seq in engine.scheduler.running:
                sure = read_text(seq, engine.tokenizer).rstrip("\ufffd")
                if piece := sure[len(given) : max(len(sure) - num_held, 0)]:
                    given += piece
                    yield piece
