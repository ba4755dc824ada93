"""The producer-consumer loop: requests in, steps planned and launched, tokens taken in, outputs out."""

import logging
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.config import ResolvedConfig
from nanovllm.engine.hooks import Handle, Runner, StepObserver
from nanovllm.engine.output import make_output
from nanovllm.engine.plan import StepResult
from nanovllm.engine.request import MASK_64, Request, derive_seed, prepare_request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.clock import Clock
from nanovllm.utils.interrupt import HoldInterrupt

if TYPE_CHECKING:
    from nanovllm.edits.editing import Editing

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched and is still to be read."""

    number: int
    step: ScheduledStep
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
        observers: Iterable[StepObserver] = (),
        origin: Path | str = "",
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
        self.observers = list(observers)
        self.origin = origin
        """The model's folder, or the name of a shape."""
        self.closed, self.identity = False, object()
        self._num_requests = self._num_seqs = 0
        self._in_flight: deque[InFlight] = deque()
        self._running = False
        self._pid = os.getpid()
        self.last_read: ScheduledStep | None = None
        """The step that was read last."""

    # ---- requests

    def check_free(self) -> None:
        """Raise a RuntimeError unless a run may begin: the engine is open, in its own process, and has no other."""
        if self.closed:
            raise RuntimeError("the engine is closed")
        if os.getpid() != self._pid:
            raise RuntimeError("this process was forked from the one that made the engine: make an engine of its own")
        if self._running:
            raise RuntimeError("another generate() or stream() of this engine is open: finish or close it first")

    def check_idle(self) -> None:
        """Raise a RuntimeError unless a run of its own requests alone may begin: see `check_free`."""
        self.check_free()
        if self.has_work:
            raise RuntimeError("requests of add_request() are unfinished: call step() until is_finished()")

    def prepare(self, token_ids: list[int], params: SamplingParams | None, text: str | None = None) -> Request:
        """Validate one request.

        Args:
            text: that was tokenised, if it was a text.

        Raises:
            ValueError: what is wrong with it, the limit, and the option to change.
        """
        params, has_tokenizer = self.default_params if params is None else params, self.tokenizer is not None
        request = prepare_request(token_ids, params, has_tokenizer, self.vocab_size, self.config.max_model_len)
        edits = self.editing.of_request(request.params) if request.params.edits_logits else None
        return replace(request, prompt=text, edits=edits, engine=self.identity)

    @cached_property
    def editing(self) -> "Editing":
        """Edits of logits, for the requests that ask for any."""
        from nanovllm.edits.editing import Editing

        return Editing(self.tokenizer, self.vocab_size, self.eos_token_ids, self.config.max_model_len)

    def add(self, request: Request) -> Sequence:
        """Queue a request, which is a sequence for each of its n completions; returns the first.

        Seeds are fixed here: the request's own, or one from the engine's seed and its number; hash(seed, i) for a
        further completion i.
        """
        params = request.params
        seed = derive_seed(self.config.seed, self._num_requests) if params.seed is None else params.seed
        self._num_requests += 1
        lead = self._queue(request, params, seed & MASK_64)
        if params.n > 1:
            params = replace(params, prompt_logprobs=None, prompt_logprob_start=0)
            lead.others = [self._queue(request, params, derive_seed(seed, i), lead) for i in range(1, params.n)]
        return lead

    def _queue(self, request: Request, params: SamplingParams, seed: int, lead: Sequence | None = None) -> Sequence:
        tokenizer, prompt = self.tokenizer, request.prompt_token_ids
        seq = Sequence(
            self._num_seqs,
            prompt,
            params,
            max_model_len=self.config.max_model_len,
            seed=seed,
            eos_token_ids=self.eos_token_ids,
            stop_matcher=tokenizer.stop_matcher(params, prompt) if tokenizer is not None else None,
            edits=lead.edits if lead is not None else copy(request.edits),  # its masks go with the sequences
            lead=lead,
            prompt=request.prompt,
        )
        self._num_seqs += 1
        self.scheduler.add(seq)
        return seq

    # ---- the loop

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def step(self) -> list[Sequence]:
        """One turn of the loop: launch the next step if there is one, then read the oldest once the pipe is full.

        Returns the sequences that ended. After an exception the engine has no requests and an empty prefix cache, and
        is usable unless its runner has a reason to close.
        """
        try:
            if self._in_flight and self.scheduler.needs_known_tokens:
                return self._read_oldest()  # what may come next depends on it
            launched = self._launch_next()
            if launched and len(self._in_flight) < self.depth:
                return []
            if not self._in_flight:
                raise RuntimeError(f"nothing can run: {self.stats()}, waiting: {list(self.scheduler.waiting)[:3]}")
            return self._read_oldest()
        except BaseException:
            self._recover()
            raise

    def _launch_next(self) -> bool:
        """Plan and launch the next step; False if nothing can be computed before a launched step is read."""
        clock = Clock()
        step = self.scheduler.schedule()
        clock.span("schedule")
        if step is None:
            return False
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.draft(step)
            clock.span("draft")
        for observer in self.observers:
            observer.planned(self.num_steps + 1, clock.spans[0][1], step, self.scheduler)
        clock.resume()
        handle = self.runner.launch(step.plan, self.editing.of_step(step) if self.scheduler.edited_rows else None)
        clock.span("launch")
        self.num_steps += 1
        self._in_flight.append(InFlight(self.num_steps, step, handle, clock))
        return True

    def _read_oldest(self) -> list[Sequence]:
        """Wait for the oldest launched step and take in its tokens; returns the sequences that ended."""
        launched, result = self._await_oldest()
        self.last_read = launched.step
        finished = self.scheduler.update(launched.step, result.token_ids, result.logprobs, result.scores)
        for seq in finished:
            if self.scheduler.speculation is not None:
                self.scheduler.speculation.ended(seq)
            if seq.finish_reason == "error":
                where = (
                    f"request {seq.seq_id}, step {launched.number}, after {len(seq.output_token_ids)} tokens of output"
                )
                grammar = seq.grammar.get_error().split("\n")[0] if seq.grammar is not None else ""
                seq.error = f"{where}: {grammar or 'the logits hold NaN or infinity, or no token that may come'}"
        launched.clock.span("update")
        for observer in self.observers:
            observer.finished(launched.number, launched.step, launched.clock, result)
        # Who has several completions ends with the last of them.
        leads = dict.fromkeys(seq.lead or seq for seq in finished)
        return [lead for lead in leads if all(seq.finish_reason for seq in (lead, *lead.others))]

    def _await_oldest(self) -> tuple[InFlight, StepResult]:
        launched = self._in_flight.popleft()
        launched.clock.resume()
        result = launched.handle.result()
        launched.clock.span("wait")
        return launched, result

    def _recover(self) -> None:
        """After a failed step: drop every sequence and the prefix cache, for what the KV cache holds is unknown."""
        if (reason := self.runner.reason_to_close()) is not None:
            logger.error("the engine is closed: %s", reason)
            self.close()
            return
        self.abort_all()
        self.scheduler.block_manager.forget_all()

    def abort_all(self) -> None:
        """Wait for what is in flight, drop its results, and end every sequence."""
        while self._in_flight:
            try:
                launched, result = self._await_oldest()
                for observer in self.observers:
                    observer.finished(launched.number, launched.step, launched.clock, result)
            except Exception as error:
                logger.warning("a step in flight failed too: %s", error)
        self.scheduler.abort_all()

    def run(self, requests: Iterable[Request]) -> Generator[tuple[int, Sequence], None, None]:
        """Run requests, taken lazily, and yield (its number among them, ended sequence) as each ends.

        At most 2 x max_num_seqs are held waiting. Ctrl-C is held until the step in hand has ended, and what that
        step has brought to an end is still yielded. However this generator is left, no sequence stays behind.

        Raises:
            RuntimeError: the engine is closed, or another run is open.
        """
        with closing(self.steps(requests)) as steps:
            for ended in steps:
                yield from ended

    def steps(self, requests: Iterable[Request]) -> Generator[list[tuple[int, Sequence]], None, None]:
        """As `run`, but yields after every step those that it ended."""
        self.check_idle()
        incoming = enumerate(requests)
        numbers: dict[Sequence, int] = {}
        hold = HoldInterrupt(on_second=self.close)
        interrupt: KeyboardInterrupt | None = None
        try:
            self._running = True
            while self._take_in(incoming, numbers):
                if self.closed:
                    raise RuntimeError("the engine was closed while requests were running")
                finished, interrupt = self._step_holding(hold)
                yield [(numbers.pop(seq), seq) for seq in finished]
                if interrupt is not None:
                    return
        finally:
            self._running = False
            if not self.closed:
                with hold:  # a second Ctrl-C, after the step, must not leave sequences half aborted
                    self.abort_all()
            if interrupt is not None:
                raise interrupt

    def _take_in(self, incoming: Iterator[tuple[int, Request]], numbers: dict[Sequence, int]) -> bool:
        """Queue the next requests and note their numbers; False if there is nothing left to run."""
        while len(self.scheduler.waiting) < 2 * self.config.max_num_seqs:
            if (numbered := next(incoming, None)) is None:
                break
            number, request = numbered
            numbers[self.add(request)] = number
        return bool(numbers)

    def _step_holding(self, hold: HoldInterrupt) -> tuple[list[Sequence], KeyboardInterrupt | None]:
        """A step, and the Ctrl-C that was held meanwhile: what the step has brought to an end is not lost to it."""
        finished: list[Sequence] = []
        try:
            with hold:
                finished = self.step()
        except KeyboardInterrupt as error:
            return finished, error
        return finished, None

    def output(self, seq: Sequence) -> Output:
        """What the caller gets of an ended sequence, and of the prompt's other completions."""
        return make_output(seq, self.tokenizer, self.eos_token_ids)

    def stats(self) -> dict[str, int]:
        """Cumulative counts since the engine was made, and the blocks as they are."""
        scheduler, drafted = self.scheduler, self.scheduler.speculation
        return {
            "num_steps": self.num_steps,
            "num_prompt_tokens": scheduler.num_prompt_tokens,
            "num_cached_tokens": scheduler.num_cached_tokens,
            "num_generated_tokens": scheduler.num_generated_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "num_draft_tokens": drafted.num_draft_tokens if drafted else 0,
            "num_accepted_tokens": drafted.num_accepted_tokens if drafted else 0,
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
                for observer in self.observers:
                    observer.close()
