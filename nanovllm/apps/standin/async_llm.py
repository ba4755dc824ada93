"""vLLM's AsyncLLM: the outputs of many requests as they grow, for the tasks of an asyncio loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from nanovllm.apps.standin.names import check_arguments, explain_missing
from nanovllm.apps.standin.params import RequestOutputKind
from nanovllm.config import EngineConfig
from nanovllm.engine.claim import State
from nanovllm.engine.output import make_output, set_decoder
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.features.streaming import Pieces
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt
from nanovllm.utils.checks import as_choice

if TYPE_CHECKING:
    from nanovllm.apps.standin.llm import LLM


@dataclass(eq=False)
class Call:
    """One call of `generate`, also before its iterator is asked for the first output.

    Attributes:
        name: its request_id.
        seq: None until the engine's thread has added the request.
        is_aborted: whether `abort` has named it, or its task has left it.
    """

    name: str
    seq: Sequence | None = None
    is_aborted: bool = False


class AsyncLLM:
    """Runs the requests of many tasks in the same steps.

    Everything that uses the engine runs in one thread, one call after another. A task that waits for a token has that
    thread run a step, unless the step of another task has brought one.
    """

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._thread = ThreadPoolExecutor(1, "engine")
        self._calls: WeakSet[Call] = WeakSet()
        """The calls of `generate` that have not ended. An iterator holds its call, and may never be asked."""
        self._may_run = asyncio.Event()
        self._may_run.set()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **others: Any) -> "AsyncLLM":
        from nanovllm.apps.standin.llm import LLM

        check_arguments(cls.from_engine_args, others)
        return cls(LLM.from_engine_args(engine_args))

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str, **others: Any
    ) -> AsyncIterator[Output]:
        """Return the output of one request as it grows, as its `output_kind` says. The last one has `finished`.

        A task that leaves the iterator early aborts its request.

        Raises:
            ValueError: the request is not valid. It has one completion, with text.
            RuntimeError: the engine was closed, or the step of another task has failed.
        """
        call = Call(request_id)
        self._calls.add(call)
        return self._generate(call, prompt, sampling_params, others)

    async def _generate(
        self, call: Call, prompt: Prompt, sampling_params: SamplingParams, others: dict[str, Any]
    ) -> AsyncIterator[Output]:
        self._llm.engine.claim.check_open()
        try:
            check_arguments(type(self._llm).generate, others)
            request = self._llm.prepare(prompt, sampling_params)
            pieces = Pieces(request, self._llm.engine.tokenizer)
            kind = getattr(sampling_params, "output_kind", RequestOutputKind.CUMULATIVE)
            is_delta = kind is RequestOutputKind.DELTA
            num_seen = 0
            text = ""
            await self._run(call, self._add, call, request)
            while True:
                output, piece = await self._run(call, self._advance, call, pieces, num_seen)
                first = num_seen if is_delta else 0
                has_grown = len(output.token_ids) > num_seen
                num_seen = len(output.token_ids)
                text += piece
                output.request_id = call.name
                output["text"] = piece if is_delta else text
                output["token_ids"] = output.token_ids[first:]
                if output.logprobs is not None:
                    output["logprobs"] = output.logprobs[first:]
                if output.finished or (has_grown and kind is not RequestOutputKind.FINAL_ONLY):
                    yield output
                if output.finished:
                    return
        finally:
            self._calls.discard(call)
            call.is_aborted = True
            if not self._llm.engine.closed:
                self._thread.submit(self._end, [call])

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. The task of each gets its tokens so far, with the finish_reason "abort".

        A name counts from the call of `generate`. A name that no request has changes nothing.
        """
        await asyncio.sleep(0)  # tasks that exist and have not begun call `generate` now
        names = [request_id] if isinstance(request_id, str) else [*request_id]
        named = [call for call in self._calls if call.name in names]
        for call in named:
            call.is_aborted = True
        if not self._may_run.is_set():  # in a pause: whoever waits looks whether it is aborted
            self._may_run.set()
            self._may_run.clear()
        await self._in_thread(self._end, named)

    def _end(self, calls: list[Call]) -> None:
        """End what has not ended. Where the request is not added yet, `_add` ends it."""
        for call in calls:
            if call.seq is not None and call.seq.finish_reason is None:
                self._claimed(self._llm.engine.scheduler.end, call.seq, "abort")

    async def _run(self, call: Call, function: Callable[..., Any], *args: Any) -> Any:
        """Have the engine's thread call a function that may run a step. In a pause, only for an aborted call."""
        while not self._may_run.is_set() and not call.is_aborted:
            await self._may_run.wait()
        return await self._in_thread(self._claimed, function, *args)

    def _in_thread(self, function: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """Have the engine's thread call a function. RuntimeError if the engine is closed."""
        self._llm.engine.claim.check_open()
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _claimed(self, function: Callable[..., Any], *args: Any) -> Any:
        with self._llm.claim_loop("AsyncLLM"):
            return function(*args)

    def _add(self, call: Call, request: Request) -> None:
        call.seq = self._llm.engine.add(request)
        if call.is_aborted:
            self._llm.engine.scheduler.end(call.seq, "abort")

    def _advance(self, call: Call, pieces: Pieces, num_seen: int) -> tuple[Output, str]:
        """Run a step unless the sequence has more than `num_seen` tokens. Return its output, and its new text."""
        engine = self._llm.engine
        seq = call.seq
        assert seq is not None  # `_add` has run
        if seq.finish_reason is None and len(seq.output_token_ids) == num_seen:
            engine.step()
        if seq.finish_reason == "abort" and not call.is_aborted:
            engine.raise_kept()
            raise RuntimeError("the step of another task has failed, and the engine has dropped all requests")
        if seq.finish_reason is not None:
            return engine.make_output(seq), pieces.read(seq)
        output = make_output(seq, None)  # without its text, which `pieces` make
        output.finished = False
        set_decoder((output.logprobs or [])[num_seen:], engine.tokenizer)
        set_decoder(output.prompt_logprobs or [], engine.tokenizer)
        return output, pieces.read(seq)

    async def pause_generation(self, *, mode: str = "abort", **_: Any) -> None:
        """Run no step until `resume_generation`. Requests keep their tokens."""
        as_choice(mode, "the mode of pause_generation", ["keep"])
        step_in_hand = self._in_thread(int)
        self._may_run.clear()
        await step_in_hand

    async def resume_generation(self) -> None:
        self._llm.engine.claim.check_open()
        self._may_run.set()

    async def sleep(self, level: int = 1, **others: Any) -> None:
        """`LLM.sleep`. RuntimeError if requests are unfinished."""
        check_arguments(type(self._llm).sleep, others)
        await self._in_thread(self._llm.sleep, level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """`LLM.wake_up`."""
        await self._in_thread(self._llm.wake_up, tags)

    async def is_sleeping(self) -> bool:
        self._llm.engine.claim.check_open()
        return self._llm.engine.claim.state is State.ASLEEP

    async def get_tokenizer(self) -> Any:
        self._llm.engine.claim.check_open()
        return self._llm.get_tokenizer()

    def shutdown(self) -> None:
        """Close the engine. Tasks that wait, and every later call, get the error of a closed engine."""
        self._llm.close()
        self._may_run.set()
        self._thread.shutdown(wait=False)

    def __getattr__(self, name: str) -> Any:
        raise explain_missing("AsyncLLM", name)
