"""The engine's loop: it queues requests, plans and launches steps, and appends what they sampled."""

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path

from nanovllm.config import ResolvedConfig
from nanovllm.engine.hooks import Handle, LogitEditor, Runner, StepObserver
from nanovllm.engine.output import make_output
from nanovllm.engine.plan import StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import MASK_64, Request, Sequence, check_request, derive_seed
from nanovllm.engine.step import ScheduledStep
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import quote
from nanovllm.utils.clock import Clock
from nanovllm.utils.interrupt import HoldInterrupt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was launched and is not read yet."""

    number: int
    step: ScheduledStep
    handle: Handle
    clock: Clock


class LLMEngine:
    """Owns the control plane and the runner, and moves requests through them.

        request -> Sequence -> waiting -> schedule() -> launch(plan) -> handle.result() -> update() -> output

    `run` takes requests and makes steps until all have ended; `step` is one turn of that loop. At depth 1 a launch is
    followed by its result. At depth 2 step N + 1 is planned and launched while the device runs step N, and the host
    reads tokens one step late: the same code, with one more entry in `_in_flight`.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        runner: Runner,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        make_editor: Callable[[], LogitEditor],
        tokenizer: Tokenizer | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        default_params: SamplingParams | None = None,
        observers: Iterable[StepObserver] = (),
        origin: Path | str = "",
    ) -> None:
        """Put an engine together from its parts. load.py makes them.

        Args:
            make_editor: called when the first request asks for edits of its logits.
            origin: the model's folder, or the name of a preset shape.
        """
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
        self.closed = False
        self.identity = object()
        """Requests remember this object instead of the engine: they may outlive it, and must not keep its weights."""
        self._make_editor = make_editor
        self._editor: LogitEditor | None = None
        self._num_requests = 0
        self._num_seqs = 0
        self._in_flight: deque[InFlight] = deque()
        self._running = False
        self._pid = os.getpid()
        self.last_read: ScheduledStep | None = None
        """The step that was read last."""

    @property
    def editor(self) -> LogitEditor:
        """Makes the edits of logits. It is made itself when the first request asks for any."""
        if self._editor is None:
            self._editor = self._make_editor()
        return self._editor

    # ---- requests

    def check_free(self) -> None:
        """Raise a RuntimeError if no run may begin: the engine is closed, of another process, or has a run open."""
        if self.closed:
            raise RuntimeError("the engine is closed")
        if os.getpid() != self._pid:
            raise RuntimeError("this process was forked from the one that made the engine: make an engine of its own")
        if self._running:
            raise RuntimeError("another generate() or stream() of this engine is open: finish or close it first")

    def check_idle(self) -> None:
        """Raise a RuntimeError if no run may begin: see `check_free`, or requests of add_request() are unfinished."""
        self.check_free()
        if self.has_work:
            raise RuntimeError("requests of add_request() are unfinished: call step() until is_finished()")

    def prepare(self, token_ids: list[int], params: SamplingParams | None, text: str | None = None) -> Request:
        """Validate one request and return it.

        Args:
            params: None means the model's defaults.
            text: the prompt's text, if it was given as text.

        Raises:
            ValueError: the engine cannot run it; names what is wrong, the limit, and the option to change.
        """
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is {quote(params)}; it must be a SamplingParams")
        params = params.clone()  # the caller may change theirs while the request runs
        check_request(token_ids, params, self.tokenizer is not None, self.vocab_size, self.config.max_model_len)
        edits = self.editor.read_request(params) if params.edits_logits else None
        return Request(token_ids, params, text, edits, self.identity)

    def add(self, request: Request) -> Sequence:
        """Queue a request: one sequence for each of its n completions. Returns the first, their `lead`.

        Seeds are fixed here. The first completion has the request's own seed, or one derived from the engine's seed and
        the request's number; completion i > 0 has hash(seed, i).
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
        tokenizer = self.tokenizer
        prompt = request.prompt_token_ids
        # Edits cache masks: with a copy, that memory is freed with the sequences, however long the request is kept.
        edits = copy(request.edits) if lead is None else lead.edits
        seq = Sequence(
            self._num_seqs,
            prompt,
            params,
            max_model_len=self.config.max_model_len,
            seed=seed,
            eos_token_ids=self.eos_token_ids,
            stop_matcher=tokenizer.stop_matcher(params, prompt) if tokenizer is not None else None,
            edits=edits,
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

    def run(self, requests: Iterable[Request | None]) -> Generator[list[tuple[int, Sequence]], None, None]:
        """Run requests; after each step, yield (its number among them, sequence) of every request that the step ended.

        Requests are taken as they are needed: at most 2 x max_num_seqs wait. None stands for "none at the moment", and
        the next is asked for after a step; the run ends when none comes and none runs. Ctrl-C is held during a step,
        and raised after what the step ended was yielded. However this generator is left, no sequence stays behind.
        """
        self.check_idle()
        self._running = True
        hold = HoldInterrupt(on_second=self.close)
        interrupt: KeyboardInterrupt | None = None
        numbers: dict[Sequence, int] = {}
        num_taken = 0
        try:
            incoming = iter(requests)
            while interrupt is None:
                while len(self.scheduler.waiting) < 2 * self.config.max_num_seqs and (request := next(incoming, None)):
                    numbers[self.add(request)] = num_taken
                    num_taken += 1
                if not numbers:
                    return
                if self.closed:
                    raise RuntimeError("the engine was closed while requests were running")
                finished: list[Sequence] = []
                try:
                    with hold:
                        finished = self.step()
                except KeyboardInterrupt as error:
                    interrupt = error
                yield [(numbers.pop(seq), seq) for seq in finished]
        finally:
            self._running = False
            if not self.closed:
                with hold:  # a second Ctrl-C, after the step, must not leave sequences half aborted
                    self.abort_all()
            if interrupt is not None:
                raise interrupt

    def step(self) -> list[Sequence]:
        """Make one turn of the loop: launch the next step if there is one, then read the oldest if the pipe is full.

        Returns the sequences that ended. After an exception the engine has no requests and an empty prefix cache; it
        is closed if its runner has a reason to.
        """
        scheduler = self.scheduler
        try:
            clock = Clock()
            # The edits of the next step may depend on a token that is in flight: then that token is read first.
            must_read_first = self._in_flight and scheduler.needs_known_tokens
            step = None if must_read_first else scheduler.schedule()
            if step is not None:
                clock.span("schedule")
                if scheduler.speculation is not None:
                    scheduler.speculation.write_drafts(step)
                    clock.span("draft")
                for observer in self.observers:
                    observer.planned(self.num_steps + 1, clock.spans[0][1], step)
                clock.resume()
                edits = self.editor.collect(step) if scheduler.edited_rows else None
                handle = self.runner.launch(step.plan, edits)
                clock.span("launch")
                self.num_steps += 1
                self._in_flight.append(InFlight(self.num_steps, step, handle, clock))
                if len(self._in_flight) < self.depth:
                    return []
            if not self._in_flight:
                raise RuntimeError(f"nothing can run: {self.stats()}, waiting: {list(scheduler.waiting)[:3]}")
            return self._read_oldest()
        except BaseException:
            self._recover()
            raise

    def _read_oldest(self) -> list[Sequence]:
        """Wait for the oldest launched step and append its tokens; returns the lead of each request that ended."""
        launched, result = self._await_oldest()
        self.last_read = launched.step
        speculation = self.scheduler.speculation
        finished = self.scheduler.update(launched.step, result.token_ids, result.logprobs, result.scores)
        for seq in finished:
            if speculation is not None:
                speculation.note_end(seq)
            if seq.finish_reason == "error":
                grammar_error = seq.grammar.get_error().split("\n")[0] if seq.grammar is not None else ""
                reason = grammar_error or "the logits hold NaN or infinity, or no token that may come"
                num_output = len(seq.output_token_ids)
                seq.error = (
                    f"request {seq.seq_id}, step {launched.number}, after {num_output} tokens of output: {reason}"
                )
        launched.clock.span("update")
        for observer in self.observers:
            observer.finished(launched.number, launched.step, launched.clock, result)
        # A request with several completions ends with the last of them.
        leads = dict.fromkeys(seq.lead or seq for seq in finished)
        return [lead for lead in leads if all(seq.finish_reason for seq in (lead, *lead.others))]

    def _await_oldest(self) -> tuple[InFlight, StepResult]:
        launched = self._in_flight.popleft()
        launched.clock.resume()
        result = launched.handle.result()
        launched.clock.span("wait")
        return launched, result

    def _recover(self) -> None:
        """After a failed step, drop every sequence and the prefix cache: nobody knows what the KV cache holds."""
        if (reason := self.runner.reason_to_close()) is not None:
            logger.error("the engine is closed: %s", reason)
            self.close()
            return
        self.abort_all()
        self.scheduler.block_manager.forget_all()

    def abort_all(self) -> None:
        """Wait for the steps in flight, drop their results, and end every sequence."""
        while self._in_flight:
            try:
                launched, result = self._await_oldest()
                for observer in self.observers:
                    observer.finished(launched.number, launched.step, launched.clock, result)
            except Exception as error:
                logger.warning("a step in flight failed too: %s", error)
        self.scheduler.abort_all()

    def make_output(self, seq: Sequence) -> Output:
        """Return the output of a request that has ended, all its completions included; `seq` is its lead."""
        return make_output(seq, self.tokenizer)

    def stats(self) -> dict[str, int]:
        """Return cumulative counts since the engine was made, and the blocks that are free now."""
        scheduler = self.scheduler
        speculation = scheduler.speculation
        return {
            "num_steps": self.num_steps,
            "num_prompt_tokens": scheduler.num_prompt_tokens,
            "num_cached_tokens": scheduler.num_cached_tokens,
            "num_generated_tokens": scheduler.num_generated_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "num_draft_tokens": speculation.num_draft_tokens if speculation else 0,
            "num_accepted_tokens": speculation.num_accepted_tokens if speculation else 0,
            "num_free_blocks": scheduler.block_manager.num_free,
            "num_blocks": scheduler.block_manager.num_blocks,
        }

    def close(self) -> None:
        """Free the model and the cache. Closing twice is allowed; anything else on a closed engine is refused."""
        if not self.closed:
            self.closed = True
            self._in_flight.clear()
            self._editor = None  # it may hold memory on the device
            try:
                self.scheduler.abort_all()
            finally:
                self.runner.close()
                for observer in self.observers:
                    observer.close()
