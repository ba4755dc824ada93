"""The producer-consumer loop: requests in, steps planned and launched, tokens taken in, outputs out."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from nanovllm.config import ResolvedConfig
from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.engine.request import Prompt, Request, derive_seed, prepare_request
from nanovllm.engine.scheduler import Batch, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.tokenizer import Tokenizer
from nanovllm.engine.trace import Clock, Trace
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.interrupt import HoldInterrupt

logger = logging.getLogger(__name__)


class Handle(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step, and read what it sampled."""
        ...


class Runner(Protocol):
    """What does the plans' work: steps run in the order of their launch."""

    def launch(self, plan: StepPlan) -> Handle: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched and is still to be read."""

    number: int
    batch: Batch
    handle: Handle
    clock: Clock


class LLMEngine:
    """Owns the control plane and the runner, and moves requests through them.

        request -> Sequence -> waiting -> schedule() -> launch(plan) -> handle.result() -> update() -> output

    At depth 1 a launch is followed by its result. At depth 2 step N + 1 is planned and launched while the device
    runs step N, and the host reads tokens one step late: the same code, with one more handle in `_in_flight`.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        runner: Runner,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        default_params: SamplingParams | None = None,
        trace: Trace | None = None,
    ) -> None:
        """An engine of parts that were made elsewhere: see load.py."""
        self.config = config
        self.runner = runner
        self.scheduler = scheduler
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.default_params = default_params or SamplingParams()
        self.depth = config.depth
        self.num_steps = 0
        self.num_prefill_tokens = 0
        self.trace = trace
        self.closed = False
        self._num_requests = 0
        self._in_flight: deque[InFlight] = deque()
        self._running = False

    # ---- requests

    def prepare(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        """Tokenise and validate one request.

        Raises:
            ValueError: what is wrong with it, the limit, and the option to change.
        """
        params = self.default_params if params is None else params
        return prepare_request(prompt, params, self.tokenizer, self.vocab_size, self.config.max_model_len)

    def add(self, request: Request) -> Sequence:
        """Queue a request. Its seed is fixed here: its own, or one from the engine's seed and its number."""
        params = request.params
        seed = derive_seed(self.config.seed, self._num_requests) if params.seed is None else params.seed
        seq = Sequence(
            self._num_requests,
            request.prompt_token_ids,
            params,
            max_model_len=self.config.max_model_len,
            seed=seed & 0xFFFFFFFFFFFFFFFF,
            eos_token_ids=self.eos_token_ids,
            stop_matcher=self.tokenizer.stop_matcher(params) if self.tokenizer is not None else None,
            prompt=request.prompt,
        )
        self._num_requests += 1
        self.scheduler.add(seq)
        return seq

    # ---- the loop

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def step(self) -> list[Sequence]:
        """One turn of the loop: launch the next step if there is one, then read the oldest once the pipe is full.

        Returns the sequences that ended. An exception leaves an engine without requests and with an empty prefix
        cache, usable; after a CUDA error, which spoils the process's context, and under tensor parallelism, where
        nobody knows which ranks have run what, a closed one.
        """
        try:
            launched = self._launch_next()
            if launched and len(self._in_flight) < self.depth:
                return []
            if not self._in_flight:
                raise RuntimeError(f"nothing can run: {self.scheduler.describe()}")
            return self._read_oldest()
        except BaseException as error:
            self._recover(error)
            raise

    def _launch_next(self) -> bool:
        """Plan and launch the next step; False if nothing can be computed before a launched step is read."""
        clock = Clock()
        batch = self.scheduler.schedule()
        clock.lap("schedule")
        if batch is None:
            return False
        if self.trace is not None:
            self.trace.planned(clock.laps[0][1], batch, self.scheduler)
        clock.resume()
        handle = self.runner.launch(batch.plan)
        clock.lap("launch")
        self.num_steps += 1
        self._in_flight.append(InFlight(self.num_steps, batch, handle, clock))
        return True

    def _read_oldest(self) -> list[Sequence]:
        """Wait for the oldest launched step and take in its tokens; returns the sequences that ended."""
        step = self._in_flight.popleft()
        step.clock.resume()
        result = step.handle.result()
        step.clock.lap("wait")
        self.num_prefill_tokens += step.batch.plan.num_tokens - len(step.batch.seqs)
        finished = self.scheduler.update(step.batch, result.token_ids, result.logprobs)
        step.clock.lap("update")
        if self.trace is not None:
            self.trace.finished(step.number, step.clock, result)
        return finished

    def _recover(self, error: BaseException) -> None:
        """After a failed step: nobody knows what the cache holds, so forget it; drop every sequence."""
        if self.config.tensor_parallel_size > 1:
            logger.error("the engine is closed: after a failed step its ranks no longer agree")
            self.close()
            return
        self.abort_all()
        self.scheduler.block_manager.forget_all()
        is_cuda_error = isinstance(error, RuntimeError) and "CUDA" in str(error)
        if is_cuda_error and type(error).__name__ != "OutOfMemoryError":  # which leaves the device as it was
            logger.error("the engine is closed: after a CUDA error nothing on the device can be trusted")
            self.close()

    def abort_all(self) -> None:
        """Wait for what is in flight, drop its results, and end every sequence."""
        while self._in_flight:
            step = self._in_flight.popleft()
            step.clock.resume()
            try:
                result = step.handle.result()
                step.clock.lap("wait")
                if self.trace is not None:
                    self.trace.finished(step.number, step.clock, result)
            except Exception as error:
                logger.warning("a step in flight failed too: %s", error)
        self.scheduler.abort_all()

    def run(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Sequence]]:
        """Run requests, taken lazily, and yield (its number among them, ended sequence) as each ends.

        At most 2 x max_num_seqs are held waiting. Ctrl-C is held until the step in hand has ended. However this
        generator is left, no sequence stays behind. A source that has no request yet gives None, which is counted
        too, and is asked again after the next step; while none of its requests runs it should rather wait.

        Raises:
            RuntimeError: the engine is closed, or another run is open.
        """
        if self.closed:
            raise RuntimeError("the engine is closed")
        if self._running:
            raise RuntimeError("another generate() or stream() of this engine is open: finish or close it first")
        incoming = enumerate(requests)
        numbers: dict[Sequence, int] = {}
        exhausted = False
        hold = HoldInterrupt(on_second=self.close)
        try:
            self._running = True
            while True:
                while not exhausted and len(self.scheduler.waiting) < 2 * self.config.max_num_seqs:
                    number, request = next(incoming, (-1, None))
                    if number < 0:
                        exhausted = True
                    elif request is None:
                        break
                    else:
                        numbers[self.add(request)] = number
                if not numbers:
                    if exhausted:
                        return
                    continue
                finished, interrupt = [], None
                try:
                    with hold:
                        finished = self.step()
                except KeyboardInterrupt as error:
                    interrupt = error  # if it was held, what the step has brought to an end is not lost
                try:
                    for seq in finished:
                        yield numbers.pop(seq), seq
                finally:
                    if interrupt is not None:
                        raise interrupt
                if self.closed:
                    raise RuntimeError("the engine was closed while requests were running")
        finally:
            self._running = False
            if not self.closed:
                with hold:  # a second Ctrl-C, after the step, must not leave sequences half aborted
                    self.abort_all()

    def output(self, seq: Sequence) -> Output:
        """What the caller gets of an ended sequence."""
        token_ids = seq.output_token_ids
        output = Output(
            text=self._text(seq, token_ids),
            token_ids=token_ids,
            finish_reason=seq.finish_reason,
            stop_reason=self._stop_reason(seq),
            prompt=seq.prompt,
            prompt_token_ids=seq.prompt_token_ids,
            num_cached_tokens=seq.num_cached_tokens or 0,
        )
        if seq.params.logprobs is not None:
            output["logprobs"] = seq.logprobs
        return output

    def _text(self, seq: Sequence, token_ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        if seq.finish_reason == "stop":
            if token_ids[-1] in seq.stop_ids:
                token_ids = token_ids[:-1]
            elif seq.stop_matcher is not None:
                return seq.stop_matcher.text
        return self.tokenizer.decode(token_ids, seq.params.skip_special_tokens)

    def _stop_reason(self, seq: Sequence) -> int | str | None:
        """The stop string or the one of stop_token_ids that ended the sequence; None for the model's own end."""
        if seq.finish_reason != "stop":
            return None
        if (last := seq.token_ids[-1]) not in seq.stop_ids:
            return seq.stop_matcher.found if seq.stop_matcher is not None else None
        return None if last in self.eos_token_ids and not seq.params.ignore_eos else last

    def stats(self) -> dict[str, int]:
        """Cumulative counts since the engine was made, and the blocks as they are."""
        scheduler = self.scheduler
        return {
            "num_steps": self.num_steps,
            "num_prompt_tokens": scheduler.num_prompt_tokens,
            "num_cached_tokens": scheduler.num_cached_tokens,
            "num_generated_tokens": scheduler.num_generated_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "num_free_blocks": scheduler.block_manager.num_free,
            "num_blocks": scheduler.block_manager.num_blocks,
        }

    def close(self) -> None:
        """Free the model and the cache. Closing twice is allowed; anything else on a closed engine is refused."""
        if not self.closed:
            self.closed = True
            self._in_flight.clear()
            try:
                self.scheduler.abort_all()
            finally:
                self.runner.close()
                if self.trace is not None:
                    self.trace.close()
