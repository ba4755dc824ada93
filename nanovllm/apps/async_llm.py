"""vLLM's AsyncLLM: the outputs of many requests as they grow, for the tasks of an asyncio loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig
from nanovllm.engine.output import make_output, set_decoder
from nanovllm.engine.sequence import Sequence
from nanovllm.features.streaming import Pieces
from nanovllm.inputs import translate_arguments
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt
from nanovllm.utils.checks import as_choice
from nanovllm.utils.foreign_names import explain_missing

if TYPE_CHECKING:
    from nanovllm.llm import LLM

RequestOutputKind = Enum("RequestOutputKind", ["CUMULATIVE", "DELTA", "FINAL_ONLY"], start=0)
"""An AsyncLLM yields all tokens so far, the tokens since the last time, or one output at the end."""


class AsyncLLM:
    """Runs the requests of many tasks in the same steps.

    Everything that uses the engine runs in one thread, one call after another. A task that waits for a token has that
    thread run a step, unless the step of another task has brought one.
    """

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._thread = ThreadPoolExecutor(1, "engine")
        self._running: dict[Sequence, str] = {}
        """The requests of tasks, with their names, but for those that `abort` has ended."""
        self._may_run = asyncio.Event()
        self._may_run.set()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "AsyncLLM":
        from nanovllm.llm import LLM

        return cls(LLM.from_engine_args(engine_args))

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, **others: Any
    ) -> AsyncIterator[Output]:
        """Yield the output of one request as it grows, as its `output_kind` says. The last one has `finished`.

        A task that leaves the iterator early aborts its request.

        Raises:
            ValueError: the request is not valid. It has one completion, with text.
            RuntimeError: the engine was closed, or the step of another task has failed.
        """
        self._llm.engine.claim.check_open()
        translate_arguments(type(self._llm).generate, others)
        request = self._llm.prepare(prompt, sampling_params)
        pieces = Pieces(request, self._llm.engine.tokenizer)
        kind = getattr(sampling_params, "output_kind", RequestOutputKind.CUMULATIVE)
        is_delta = kind is RequestOutputKind.DELTA
        num_seen = 0
        text = ""
        added: list[Sequence] = []  # whether or not this task still waits for the call
        try:
            await self._call(lambda: added.append(self._llm.engine.add(request)))
            (seq,) = added
            self._running[seq] = request_id
            while True:
                output, piece = await self._call(self._advance, seq, pieces, num_seen)
                first = num_seen if is_delta else 0
                has_grown = len(output.token_ids) > num_seen
                num_seen = len(output.token_ids)
                text += piece
                output.request_id = request_id
                output["text"] = piece if is_delta else text
                output["token_ids"] = output.token_ids[first:]
                if output.logprobs is not None:
                    output["logprobs"] = output.logprobs[first:]
                if output.finished or (has_grown and kind is not RequestOutputKind.FINAL_ONLY):
                    yield output
                if output.finished:
                    return
        finally:
            for seq in added:
                self._running.pop(seq, None)
            if not self._llm.engine.closed:
                self._thread.submit(self._abort, added)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. The task of each gets its tokens so far, with the finish_reason "abort".

        A name that no request has changes nothing.
        """
        names = [request_id] if isinstance(request_id, str) else [*request_id]
        seqs = [seq for seq, name in self._running.items() if name in names]
        for seq in seqs:
            del self._running[seq]
        await asyncio.get_running_loop().run_in_executor(self._thread, self._abort, seqs)

    def _abort(self, added: list[Sequence]) -> None:
        """End what has not ended. It runs after the call that adds, because calls run one after another."""
        for seq in added:
            if seq.finish_reason is None:
                self._claimed(self._llm.engine.scheduler.end, seq, "abort")

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the engine's thread."""
        await self._may_run.wait()
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._claimed, function, *args)

    def _claimed(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._llm.claim_loop("AsyncLLM"):
            return function(*args)

    def _advance(self, seq: Sequence, pieces: Pieces, num_seen: int) -> tuple[Output, str]:
        """Run a step unless the sequence has more than `num_seen` tokens. Return its output, and its new text."""
        engine = self._llm.engine
        if seq.finish_reason is None and len(seq.output_token_ids) == num_seen:
            engine.step()
        if seq.finish_reason == "abort" and seq in self._running:
            engine.raise_kept()
            raise RuntimeError("the step of another task has failed, and the engine has dropped all requests")
        if seq.finish_reason is not None:
            return engine.make_output(seq), pieces.read(seq)
        output = make_output(seq, None)  # without its text, which `pieces` make
        output.finished = False
        if output.logprobs is not None:
            output["logprobs"] = [*output.logprobs]  # the sequence's own list grows in the steps of other tasks
        set_decoder((output.logprobs or [])[num_seen:], engine.tokenizer)
        set_decoder(output.prompt_logprobs or [], engine.tokenizer)
        return output, pieces.read(seq)

    async def pause_generation(self, *, mode: str = "abort", **_: Any) -> None:
        """Run no step until `resume_generation`. Requests keep their tokens."""
        as_choice(mode, "the mode of pause_generation", ["keep"])
        self._may_run.clear()
        await asyncio.get_running_loop().run_in_executor(self._thread, int)  # waits for the step in hand

    async def resume_generation(self) -> None:
        self._may_run.set()

    async def get_tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    def shutdown(self) -> None:
        """Close the engine. Tasks that wait get an error."""
        self._llm.close()
        self._may_run.set()
        self._thread.shutdown(wait=False)

    def __getattr__(self, name: str) -> Any:
        raise explain_missing("AsyncLLM", name)
