"""The engine's loop: it queues requests, plans and launches steps, and appends the tokens that they sampled.

docs/architecture.md explains the words that the files of engine/ use.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

from nanovllm.config import ResolvedConfig
from nanovllm.engine.claim import Activity, Claim, ClosedError
from nanovllm.engine.interfaces import Editor, Handle, Runner, StepObserver
from nanovllm.engine.interrupt import HoldInterrupt
from nanovllm.engine.output import ParseOutput, make_output
from nanovllm.engine.plan import StepResult
from nanovllm.engine.pooling import LAST_TOKEN_POOLING, Pooling
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import MASK_64, Request, Sequence, check_request, derive_seed
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.checks import quote, refuse
from nanovllm.utils.clock import Clock

logger = logging.getLogger(__name__)

OPEN_RUN = Activity(
    name="another generate() or stream()",
    advice="of this engine is open: finish or close it first; several threads or asyncio tasks use submit()",
)
"""The run of `generate`, `stream`, and whoever else gives no name to a run."""


@dataclass(frozen=True)
class ModelFacts:
    """Tells an engine about its model.

    Attributes:
        embedding_size: the number of elements of a prompt's vector.
        has_lm_head: False for a model that only embeds.
        eos_token_ids: the token ids that end a sequence, unless its request ignores them.
        default_params: the parameters of requests that give none.
        refused_defaults: why there are no such parameters; "" if there are.
        pooling: makes the vectors of prompts that are embedded.
        origin: the model's folder, or the name of a preset (a configuration without weights).
        stand_ins: {a token id: the key of config.json by which it stands for a picture, a video or a sound}.
        stamps: the checkpoint's files as they were when they were read, each with its size and the time of its last
            change: see `ModelFolder.stamps`.
    """

    embedding_size: int = 0
    has_lm_head: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    default_params: SamplingParams = field(default_factory=SamplingParams)
    refused_defaults: str = ""
    pooling: Pooling = LAST_TOKEN_POOLING
    origin: Path | str = ""
    stand_ins: Mapping[int, str] = field(default_factory=dict)
    stamps: tuple[tuple[Path, int, int, int], ...] = ()

    def refuse_pictures(self, token_ids: Collection[int]) -> None:
        """Raise a ValueError if a prompt asks for a picture."""
        for token_id, name in self.stand_ins.items():
            if token_id in token_ids:
                raise ValueError(
                    f"the prompt has token id {token_id}, which is the {name} of config.json: it stands for a picture, "
                    "a video or a sound, and this engine reads text alone"
                )

    def find_defaults(self) -> SamplingParams:
        """Return `default_params`; ValueError if the model's files ask for what the engine does not have."""
        if self.refused_defaults:
            raise ValueError(self.refused_defaults)
        return self.default_params


class LLMEngine:
    """Moves requests through the scheduler and the runner, and owns both.

        request -> Sequence -> waiting -> schedule() -> launch(plan) -> handle.result() -> update() -> output

    A request becomes one sequence for each of its completions. A step computes some tokens of several sequences.
    `run` takes requests and calls `step` until all requests have ended. At depth 1 the host launches a step and waits
    for its result. At depth 2 the host plans and launches step N + 1 while the device runs step N, so it reads tokens
    one step later. All depths run the same code; at depth 2 `_in_flight` has one more entry. If each rank
    has some of the layers (a pipeline), the depth is larger: see features/distributed/options.py.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        runner: Runner,
        scheduler: Scheduler,
        facts: ModelFacts,
        *,
        make_editor: Callable[[], Editor],
        tokenizer: Tokenizer | None = None,
        observers: Iterable[StepObserver] = (),
        parse: ParseOutput | None = None,
    ) -> None:
        """Put an engine together from its parts. load.py makes the parts.

        Args:
            runner: `ModelRunner` on one device; `LeadingRunner` (distributed/) for several ranks, which are processes
                that share one model.
            make_editor: called when the first request asks for edits: changes of logits, such as penalties or masks.
            parse: reads more out of an answer than its text, such as calls of tools; None: there is only text.
        """
        self.config = config
        self.runner = runner
        self.scheduler = scheduler
        self.facts = facts
        self.tokenizer = tokenizer
        self.depth = config.depth
        self.num_steps = 0
        self.observers = list(observers)
        self._parse = parse
        self.claim = Claim(free=self._free)
        self.identity = object()
        """A `Request` keeps this object to know its engine. If it kept the engine itself, the weights would
        stay in memory as long as the request."""
        self._make_editor = make_editor
        self._editor: Editor | None = None
        self._editor_lock = Lock()
        self._has_noted_limit = False
        """Whether a line of the log has told, in this run, that a request cannot reach its max_tokens."""
        self._has_noted_shortage = False
        """Whether a line of the log has told that the KV cache holds fewer sequences than may run."""
        self._num_requests = 0
        self._num_seqs = 0
        self._in_flight: deque[tuple[int, ScheduledStep, Handle, Clock]] = deque()
        """The launched steps whose results are not fetched yet, the oldest first, with their numbers."""
        self._ended: list[Sequence] = []
        """The leads of the requests that have ended in the present call of `step`, which returns them."""
        self._kept_error: BaseException | None = None
        """An error that waits until the requests that ended before it are handed out: one of `step`, whose next call
        raises it, or a Ctrl-C within `run`."""
        self.last_read: ScheduledStep | None = None
        """The last step whose results the scheduler got. `LLM.step` sets this to None before it calls `step`."""

    @property
    def editor(self) -> Editor:
        """The object that makes edits of logits. The first access creates it, in whichever thread prepares requests."""
        with self._editor_lock:
            if self._editor is None:
                self._editor = self._make_editor()
            return self._editor

    @property
    def closed(self) -> bool:
        """Whether the engine is closed, or belongs to another process."""
        return self.claim.is_closed

    # ---- requests

    def prepare(self, token_ids: list[int], params: SamplingParams | None, text: str | None = None) -> Request:
        """Validate one request and return it.

        Args:
            params: None means the model's defaults.
            text: the prompt's text, if it was given as text.

        Raises:
            ValueError: the engine cannot run the request. The message says what is wrong and what is
                allowed.
        """
        self.claim.check_process()  # in a forked process `editor` might wait for ever for its lock
        params = self.facts.find_defaults() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params is {quote(params)}; it must be a SamplingParams")
        if not self.facts.has_lm_head and not params.embed:
            rest = "score: use classify()" if self.facts.pooling.labels else "embed: use embed()"
            raise ValueError(f"this model has no LM head, so it can only {rest}")
        if params.embed:
            self.facts.pooling.check(len(token_ids))
        params = params.clone()  # the caller may change the original while the request runs
        limits = (self.config.vocab_size, self.config.max_model_len)
        packed = check_request(token_ids, params, self.tokenizer is not None, *limits)
        self.facts.refuse_pictures(packed)
        # `refused_params` has the fields of `SamplingValues` (ops/sample.py) that the backend's sampler does not read.
        for name in self.config.refused_params:
            if (value := getattr(params, name)) != getattr(SamplingParams(), name):
                raise refuse(value, name, f'left out with attention_backend="{self.config.attention_backend}"')
        edits = self.editor.read_request(params) if params.edits_logits else None
        return Request(packed, params, text, edits, self.identity)

    def add(self, request: Request) -> Sequence:
        """Queue a request: one sequence per completion. Return the first sequence, the `lead` of the others.

        Seeds are chosen here. The first completion gets the request's seed. If the request has none, its seed is a hash
        of the engine's seed and the request's number. Completion i > 0 gets a hash of its lead's seed and i.
        """
        params = request.params
        if not self._has_noted_limit:
            self._note_limit(request)
        number, seq_id = request.numbers or self.next_numbers(params.n)
        seed = derive_seed(self.config.seed, number) if params.seed is None else params.seed
        lead = self._queue(request, params, seq_id, seed & MASK_64)
        if params.n > 1:
            # All completions have the same prompt, so the first one alone scores it.
            params = replace(params, prompt_logprobs=None, prompt_logprob_start=0)
            seeds = [derive_seed(seed, i) for i in range(1, params.n)]
            lead.others = [self._queue(request, params, seq_id + i, s, lead) for i, s in enumerate(seeds, 1)]
        return lead

    def _note_limit(self, request: Request) -> None:
        """Log one line if max_model_len leaves a request less room than its max_tokens."""
        wanted = request.params.max_tokens or 0
        num_prompt = len(request.prompt_token_ids)
        room = max(self.config.max_model_len - num_prompt, 0)
        if wanted <= room or request.max_len is not None:
            return
        self._has_noted_limit = True
        logger.warning(
            "a request with max_tokens=%d can get %d tokens at most: its prompt has %d, and both together have at most "
            "max_model_len=%d. Raise that, or lower max_tokens. Further requests of this call are not checked",
            *(wanted, room, num_prompt, self.config.max_model_len),
        )

    def _note_shortage(self) -> None:
        """Log one line at the first preemption: how many sequences the KV cache holds, and what would hold more."""
        self._has_noted_shortage = True
        num_held = len(self.scheduler.running)
        num_wanted = min(num_held + len(self.scheduler.waiting), self.config.max_num_seqs)
        advice = "gpu_memory_utilization, kvcache_memory_bytes or num_kvcache_blocks"
        if self.config.kv_cache_dtype == "auto":
            times = 3.8 if self.config.dtype == "float32" else 1.9  # codes have scales beside them
            holds = "all" if times * num_held >= num_wanted else f"about {int(times * num_held)}"
            advice += f", or kv_cache_dtype='int8', which would hold {holds}"
        logger.warning(
            "the KV cache holds %d of %d sequences: the others wait, and one that must give up its room is computed "
            "again. To hold more: %s. This is said once",
            *(num_held, num_wanted, advice),
        )

    def next_numbers(self, num_seqs: int) -> tuple[int, int]:
        """Return the numbers of the next request and of its first sequence. The request has `num_seqs` sequences."""
        numbers = (self._num_requests, self._num_seqs)
        self._num_requests += 1
        self._num_seqs += num_seqs
        return numbers

    def _queue(
        self, request: Request, params: SamplingParams, seq_id: int, seed: int, lead: Sequence | None = None
    ) -> Sequence:
        tokenizer = self.tokenizer
        prompt = request.prompt_token_ids
        # An object of edits makes its masks when a step first needs them, and then keeps them. The sequences get a copy
        # of the object. So the masks are freed with the sequences, even if the caller keeps the request.
        edits = copy(request.edits) if lead is None else lead.edits
        seq = Sequence(
            seq_id,
            prompt,
            params,
            max_model_len=request.max_len or self.config.max_model_len,
            seed=seed,
            eos_token_ids=self.facts.eos_token_ids,
            stop_matcher=tokenizer.stop_matcher(params, prompt) if tokenizer is not None and params.stop else None,
            edits=edits,
            lead=lead,
            prompt=request.prompt,
            reason=request.reason,
            pooled=self.facts.pooling.choose_states(len(prompt)) if params.embed else None,
        )
        self.scheduler.add(seq)
        return seq

    # ---- the loop

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._in_flight or self._kept_error)

    def run(
        self, requests: Iterable[Request | None], activity: Activity = OPEN_RUN
    ) -> Generator[list[Sequence], None, None]:
        """Run requests. After each step, yield the leads of the requests that the step ended.

        If `requests` yields None, no request is ready now. Then `run` asks again after its next step. If all requests
        that it took have ended, there is no next step: then None ends the run, as the end of `requests` does.

        A Ctrl-C in a step is raised after the ended requests were yielded. A second Ctrl-C closes the engine and is
        raised at once. When the generator ends, even by an error, unfinished requests are aborted.

        Args:
            activity: what the run is part of: the claim has this name.
        """
        # The claim is held for the whole run. `work` is held during one step, so `close` from another thread waits for
        # that step alone.
        with self.claim.held_by(activity):
            self._has_noted_limit = False
            hold = HoldInterrupt(on_second=self.close)  # in a block `with hold`, a first Ctrl-C waits for the end
            unfinished: set[Sequence] = set()
            try:
                with self.claim.work():
                    # An earlier run may have left requests behind, if a Ctrl-C broke off its _end_run().
                    self._kept_error = None
                    self.abort_all()
                incoming = iter(requests)
                while self._take(incoming, unfinished):
                    ended: list[Sequence] = []
                    try:
                        with hold, self.claim.work():
                            ended = self.step()
                    except KeyboardInterrupt as interrupt:  # `hold` raises it when the step has ended
                        self._kept_error = interrupt
                    unfinished.difference_update(ended)
                    yield ended
                    self.raise_kept()
            finally:
                self._end_run(hold)

    def _end_run(self, hold: HoldInterrupt) -> None:
        """Abort what has not ended. If the caller left `run` before that raised a Ctrl-C, raise the Ctrl-C here."""
        kept = self._kept_error
        self._kept_error = None
        # One Ctrl-C does not stop abort_all() halfway. ClosedError: a closed engine has nothing to abort.
        with hold, suppress(ClosedError), self.claim.work():
            self.abort_all()
        if isinstance(kept, KeyboardInterrupt):
            raise kept

    def _take(self, incoming: Iterator[Request | None], unfinished: set[Sequence]) -> bool:
        """Queue requests while fewer than 2 x max_num_seqs sequences wait, and add their leads to `unfinished`.

        next() returns None if no request is ready now. At the end of `incoming` it returns None, too. Both cases are
        treated alike: `run` asks again after the next step, and ends when its requests have ended.

        Returns:
            Whether a request that this run took has not ended.
        """
        most_waiting = 2 * self.config.max_num_seqs
        while len(self.scheduler.waiting) < most_waiting and (request := next(incoming, None)):
            with self.claim.work():
                unfinished.add(self.add(request))
        return bool(unfinished)

    def step(self) -> list[Sequence]:
        """Launch the next step if one can be planned. Then read the oldest step in flight.

        If this call launched a step, and fewer than `depth` steps are in flight after that, it returns without reading.
        If a step fails, the engine drops all requests and empties the prefix cache. If the runner cannot go on, the
        engine is closed. Requests may have ended in steps that were read before the failure. Then this call returns
        these requests, and the next call raises the error.

        Returns:
            The lead of each request that ended.
        """
        self.raise_kept()
        self._ended = []
        try:
            clock = Clock()  # span() ends and names a part of the host's time; resume() leaves out the time before it
            step = self._plan(clock)
            if step is not None:
                is_edited = bool(self.scheduler.edited_rows)
                if is_edited and self.editor.lacks_tokens(step):
                    handle = self._launch_around_reading(step, clock)
                else:
                    handle = self.runner.launch(step.plan, self.editor.collect(step) if is_edited else None)
                clock.span("launch")
                self.num_steps += 1
                self._in_flight.append((self.num_steps, step, handle, clock))
            if not self._in_flight:
                raise RuntimeError(f"nothing can run: {self.stats()}, waiting: {list(self.scheduler.waiting)[:3]}")
            if step is None or len(self._in_flight) >= self.depth:
                self._read_oldest()
        except Exception as error:
            self._recover()
            if not self._ended:
                raise
            self._kept_error = error
        except BaseException:  # a KeyboardInterrupt does not wait
            self._recover()
            raise
        return self._ended

    def _plan(self, clock: Clock) -> ScheduledStep | None:
        """Return the next step, with its drafts: guessed tokens that it verifies. None if no step can be planned."""
        step = self.scheduler.schedule()
        if self.scheduler.num_preemptions and not self._has_noted_shortage:
            self._note_shortage()
        if step is None:
            return None
        clock.span("schedule")
        if (speculation := self.scheduler.speculation) is not None:
            speculation.drafter.write_drafts(step)
            clock.span("draft")
        planned_at = clock.spans[0][1]  # the first span is (name, start, duration) of schedule()
        for observer in self.observers:
            observer.planned(self.num_steps + 1, planned_at, step)
        clock.resume()
        return step

    def _launch_around_reading(self, step: ScheduledStep, clock: Clock) -> Handle:
        """Launch a step whose edits need tokens of the steps in flight. These steps are read while its layers run.

        The layers of a step need no edits: only its head does, which computes logits and samples. At depth 2, while
        step 1 runs:

            no edit waits    host    plan 2, launch 2, read 1
                             device  layers 1, head 1, layers 2, head 2

            an edit waits    host    plan 2, launch layers 2, read 1, make edits 2, launch head 2
                             device  layers 1, head 1, layers 2                     head 2
        """
        layers = self.runner.launch_layers(step.plan)
        clock.span("launch")
        while self._in_flight:
            self._read_oldest()
        clock.resume()
        return self.runner.launch_head(layers, self.editor.collect(step))

    def raise_kept(self) -> None:
        """Raise the kept error if there is one, and forget it."""
        error = self._kept_error
        self._kept_error = None
        if error is not None:
            raise error

    def _read_oldest(self) -> None:
        """Read the oldest step in flight, and append its tokens. `_ended` gets the lead of each request that ends."""
        number, step, clock, result = self._await_oldest()
        self.last_read = step
        ended = self.scheduler.update(step, result)
        for seq in ended:
            if seq.finish_reason == "error":
                num_output = len(seq.output_token_ids)
                place = f"sequence {seq.seq_id}, step {number}, after {num_output} tokens of output"
                seq.error = f"{place}: {seq.explain_error()}"
        # A request ends when all its completions have ended. The dict is a set that keeps the order of its elements.
        leads = dict.fromkeys(seq.lead or seq for seq in ended)
        self._ended += [lead for lead in leads if all(seq.finish_reason for seq in (lead, *lead.others))]
        clock.span("update")
        for observer in self.observers:  # one may raise an error, and `_ended` is whole by then
            observer.finished(number, step, clock, result)

    def _await_oldest(self) -> tuple[int, ScheduledStep, Clock, StepResult]:
        number, step, handle, clock = self._in_flight.popleft()
        clock.resume()
        result = handle.result()
        clock.span("wait")
        return number, step, clock, result

    def _recover(self) -> None:
        """Clean up after a failed step. Close the engine if the runner cannot go on.

        Otherwise drop every sequence and the prefix cache, because the KV cache may now hold wrong values.
        """
        if self.closed:
            # An observer, a second Ctrl-C or another thread has closed the engine during this step. Its memory is
            # freed when the caller's `with claim.work()` ends: that calls `_free`, which drops the steps in flight.
            return
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
                number, step, clock, result = self._await_oldest()
                for observer in self.observers:
                    observer.finished(number, step, clock, result)
            except Exception as error:
                logger.warning("another launched step failed, too: %s", error)
        self.scheduler.abort_all()

    def make_output(self, seq: Sequence) -> Output:
        """Return the output of a request that has ended, with all its completions. `seq` is the first completion."""
        return make_output(seq, self.tokenizer, self._parse, self.facts.pooling)

    def observe(self, observer: StepObserver) -> None:
        """Tell an observer about every step from now on."""
        self.observers.append(observer)

    def stats(self) -> dict[str, int]:
        """Return counts since the engine was made, the number of all blocks, and the number of free blocks."""
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
        """Free the model and the KV cache; see `Claim.close`. Closing twice is allowed."""
        self.claim.close()

    def _free(self) -> None:
        self._in_flight.clear()
        self._editor = None  # an editor may hold memory on the device
        try:
            self.scheduler.abort_all()
        finally:
            self.runner.close()
            for observer in self.observers:
                observer.close()
