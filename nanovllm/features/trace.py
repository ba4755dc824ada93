"""Records what an engine does, step by step, for `nanovllm view`, chrome://tracing and https://ui.perfetto.dev.

The file is a JSON array of events, one a line, in Google's "Trace Event Format". The format allows the end of the array
to be missing, so the trace of a killed run can still be read. Perfetto draws the spans and charts. For `nanovllm view`,
a "plan" event and the arguments of an "update" span also tell what happened to requests and blocks.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from nanovllm.engine.plan import StepResult
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import NO_ROW, Sequence
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.clock import Clock

logger = logging.getLogger(__name__)

HOST = 1
DEVICE = 2
"""The numbers of the timeline's two threads. In a pipeline, DEVICE + 1 + r is the thread of rank r."""

MAX_EVENTS = 100_000
"""After this many events no further step is recorded: no browser could draw them."""


class Trace:
    """Writes the trace of one engine. It is a `StepObserver`."""

    def __init__(
        self,
        path: str,
        device: str,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None = None,
        take_spans: Callable[[], Iterable[tuple[int, str, int, float, float]]] = tuple,
    ) -> None:
        """
        Args:
            device: the engine's device.
            scheduler: the engine's scheduler. Its queues are recorded, and what its block manager does to blocks.
            tokenizer: gives the text of tokens.
            take_spans: returns what the ranks of a pipeline did since the last call: see `StageSpan`. The numbers of
                plans count from the step that was read last.

        Raises:
            ValueError: the file cannot be written.
        """
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # lives as long as the engine
        except OSError as error:
            raise ValueError(f"trace file {path} cannot be written: {error}") from error
        self._path = path
        self._tokenizer = tokenizer
        self._take_spans = take_spans
        self._start = time.perf_counter()
        self._device_free_at = 0.0
        self._num_events = 0
        self._ranks: set[int] = set()
        """The ranks of a pipeline that have a thread in the file."""
        self._stopped_at: int | None = None
        """The number of the first step that is not recorded, because there are too many events."""
        self._block_log: list[tuple[str, list[int]]] = []
        """The changes of blocks since the last event that tells them."""
        self._shortages: list[int] = []
        """How many blocks were lacking, each time that the scheduler was refused some since the last planned step."""
        log = self._block_log  # the manager refers to the lists alone: with `self` there would be a cycle
        scheduler.block_manager.on_change = lambda verb, blocks: log.append((verb, list(blocks)))
        scheduler.block_manager.on_refusal = self._shortages.append
        self._scheduler = scheduler
        self._live: dict[int, Sequence] = {}
        """The requests that have not ended, by number."""
        self._num_written: dict[int, int] = {}
        """How many tokens of each of them are in the file."""
        self._resident: dict[int, None] = {}
        """The numbers of the requests that had a row in the last step, in order of admission."""
        self._owners: dict[int, int] = {}
        """The number of the request that has each row."""
        self._written_texts: set[int] = set()
        """The ids of the tokens whose text is in the file."""
        self._lines = ["[\n", _format_event("engine", "M", HOST, json.dumps({"device": device}))]
        """Events that are not yet in the file."""
        for thread, name in ((HOST, "host"), (DEVICE, "device")):
            self._lines.append(_format_event("thread_name", "M", thread, json.dumps({"name": name})))
        self._flush()

    # ---- called by the engine

    def planned(self, number: int, at: float, step: ScheduledStep) -> None:
        """Record what a planned step computes, and the state in which it was planned."""
        if self._num_events >= MAX_EVENTS and self._stopped_at is None:
            self._stopped_at = number
        if self._stopped_at is not None:
            if self._file.closed:
                self._block_log.clear()
                self._shortages.clear()
            return
        plan = step.plan
        scheduler = self._scheduler
        manager = scheduler.block_manager
        if not self._owners:
            pool = {"num_blocks": manager.num_blocks, "block_size": manager.block_size}
            pool["budget"] = scheduler.max_num_batched_tokens
            pool["rows"] = scheduler.table.num_rows
            self._lines.append(_format_event("pool", "M", HOST, json.dumps(pool)))
        # The plan lists rows that decode one token, then rows that verify drafts (they decode, too), then prompts.
        num_drafts = plan.num_drafts
        num_decodes = int(np.count_nonzero(plan.num_scheduled == 1 + num_drafts))
        kinds = {"decode": num_decodes, "prefill": plan.num_tokens - num_decodes - int(num_drafts.sum())}
        if scheduler.speculation is not None:
            kinds["draft"] = int(num_drafts.sum())
        stamp = f', "ts": {self._to_microseconds(at)}'
        charts = (
            ("tokens", json.dumps(kinds)),
            ("sequences", f'{{"running": {len(scheduler.running)}, "waiting": {len(scheduler.waiting)}}}'),
            ("KV blocks", f'{{"used": {manager.num_used}, "free": {manager.num_free}}}'),
            ("prompt tokens", f'{{"cached": {scheduler.num_cached_tokens}, "all": {scheduler.num_prompt_tokens}}}'),
        )
        fields = {"step": number, **self._collect_requests(step, num_decodes), **self._collect_blocks()}
        if len(plan.block_entries):
            fields["tables"] = self._collect_tables(plan.block_entries.tolist())
        self._lines += [_format_event(name, "C", HOST, args, stamp) for name, args in charts]
        self._lines.append(_format_event("plan", "i", HOST, json.dumps(fields), stamp + ', "s": "t"'))

    def finished(self, number: int, step: ScheduledStep, clock: Clock, result: StepResult) -> None:
        """Record a step that was read: the spans of the host's and the device's work, and the tokens.

        The runner measures how long the device worked, but not when it began. The span begins after the launch, and
        after the span of the step before.
        """
        spans = self._take_spans()
        if self._stopped_at is not None and number >= self._stopped_at:
            if not self._file.closed:
                logger.warning("%s has %d events: the rest of the run is not recorded", self._path, self._num_events)
                self.close()
            return
        args = f'{{"step": {number}}}'
        lines = self._lines
        is_launched = False
        for name, start, seconds in clock.spans:
            if name == "launch" and not is_launched:  # a second one samples, where edits waited for another step
                is_launched = True
                lines.append(self._format_span("prepare", HOST, start, result.prepare_seconds, args))
                start += result.prepare_seconds
                seconds -= result.prepare_seconds
                began = max(start, self._device_free_at)
                self._device_free_at = began + result.device_seconds
                lines.append(self._format_span("step", DEVICE, began, result.device_seconds, args))
            if name == "update":
                args = json.dumps({"step": number, **self._collect_progress(step.seqs)})
            lines.append(self._format_span(name, HOST, start, seconds, args))
        self._record_ranks(number, spans)
        self._flush()

    def _record_ranks(self, number: int, spans: Iterable[tuple[int, str, int, float, float]]) -> None:
        """Record what the ranks of a pipeline did since the last step was read.

        Args:
            number: the number of the step that was read now.
            spans: what `take_spans` returned.
        """
        for rank, name, distance, start, seconds in spans:
            if number + distance < 1:
                continue  # a step that only measured costs, before the first one
            thread = DEVICE + 1 + rank
            if rank not in self._ranks:
                self._ranks.add(rank)
                self._lines.append(_format_event("thread_name", "M", thread, json.dumps({"name": f"rank {rank}"})))
            self._lines.append(self._format_span(name, thread, start, seconds, f'{{"step": {number + distance}}}'))

    def close(self) -> None:
        """Write the end of the file, and close it. Closing twice is allowed."""
        if not self._file.closed:
            is_stopped = self._stopped_at is not None
            fields = {"stopped": is_stopped, "ended": self._end_requests(list(self._live)), **self._collect_blocks()}
            event = _format_event("end", "i", HOST, json.dumps(fields), ', "ts": 0, "s": "g"')
            self._lines.append(event.replace(",\n", "\n]\n"))
            self._flush()
            self._file.close()

    # ---- what happened to requests and blocks

    def _collect_requests(self, step: ScheduledStep, num_decodes: int) -> dict[str, Any]:
        """Return which requests arrived, ended, and were preempted or admitted, and what the step computes of each."""
        plan = step.plan
        scheduler = self._scheduler
        resident = self._resident
        arrived = []
        for seq in reversed(scheduler.waiting):
            if seq.seq_id in self._live:
                break
            arrived.append(seq)
        admitted = scheduler.running[len(scheduler.running) - len(plan.new_rows) :]
        arrived += [seq for seq in reversed(admitted) if seq.seq_id not in self._live]
        for seq in arrived:
            self._live[seq.seq_id] = seq
            self._num_written[seq.seq_id] = 0
        preempted = {seq.seq_id for seq in admitted if seq.seq_id in resident}  # and admitted again since
        ended = []
        gone: list[int] = []
        if len(resident) + len(admitted) - len(preempted) != len(scheduler.running):
            gone = [number for number in resident if self._live[number].row == NO_ROW]
            preempted.update(number for number in gone if self._live[number].finish_reason is None)
        # Those that were admitted last are preempted first, each because of one refusal.
        victims = [number for number in reversed(resident) if number in preempted] if preempted else []
        for number in (*gone, *victims):
            resident.pop(number, None)
        resident.update(dict.fromkeys(seq.seq_id for seq in admitted))
        if len(self._live) != len(scheduler.running) + len(scheduler.waiting):
            ended = self._end_requests([i for i, seq in self._live.items() if seq.finish_reason is not None])
        for seq in admitted:
            self._owners[seq.row] = seq.seq_id
        owners = [self._owners[row] for row in plan.rows.tolist()]
        fields: dict[str, Any] = {"decode": owners[:num_decodes]}
        if (plan.num_sampled > 1).any():
            drafts = zip(owners, plan.num_sampled.tolist(), strict=True)
            fields["drafts"] = [(owner, count - 1) for owner, count in drafts if count > 1]
        if victims:
            fields["preempted"] = victims
            fields["lacking"] = self._shortages[-len(victims) :]
        elif self._shortages and scheduler.waiting:
            fields["held"] = [scheduler.waiting[0].seq_id, self._shortages[-1]]
        self._shortages.clear()
        if ended:
            fields["ended"] = ended
        if num_decodes < len(owners):
            parts = zip(owners, plan.num_computed.tolist(), plan.num_scheduled.tolist(), strict=True)
            fields["prefill"] = list(parts)[num_decodes:]
        if admitted:
            starts = dict(zip(owners, plan.num_computed.tolist(), strict=True))
            fields["moved_in"] = [(seq.seq_id, starts[seq.seq_id]) for seq in admitted]
            if reasons := [(seq.seq_id, seq.reason) for seq in admitted if seq.reason]:
                fields["reasons"] = reasons
        if arrived:
            arrived.reverse()
            fields["arrived"] = [(seq.seq_id, seq.num_prompt_tokens) for seq in arrived]
            fields |= self._collect_tokens(arrived)
        return fields

    def _collect_progress(self, seqs: Iterable[Sequence]) -> dict[str, Any]:
        """Return the tokens that a step sampled, and the requests that ended with it."""
        fields = self._collect_tokens(seqs)
        if ended := [seq.seq_id for seq in seqs if seq.finish_reason is not None and seq.seq_id in self._live]:
            fields["ended"] = self._end_requests(ended)
        return fields | self._collect_blocks()

    def _collect_tokens(self, seqs: Iterable[Sequence]) -> dict[str, Any]:
        """Return the tokens of the sequences that are not yet in the file, and the texts that are not."""
        tokens = []
        texts: dict[int, str] = {}
        for seq in seqs:
            num_written = self._num_written.get(seq.seq_id)
            if num_written is None or num_written == len(seq.token_ids):
                continue
            token_ids = seq.token_ids[num_written:].tolist()
            self._num_written[seq.seq_id] = len(seq.token_ids)
            tokens.append((seq.seq_id, *token_ids))
            if self._tokenizer is not None and not self._written_texts.issuperset(token_ids):
                texts |= {i: self._tokenizer.decode([i], False) for i in token_ids if i not in self._written_texts}
                self._written_texts.update(token_ids)
        return {"tokens": tokens, "texts": texts} if texts else {"tokens": tokens}

    def _end_requests(self, numbers: list[int]) -> list[list[Any]]:
        """Forget requests; return [number, finish reason] of each."""
        for number in numbers:
            del self._num_written[number]
            self._resident.pop(number, None)
        return [[number, self._live.pop(number).finish_reason] for number in numbers]

    def _collect_blocks(self) -> dict[str, Any]:
        """Return what was done to blocks since the last call."""
        fields = {"blocks": self._block_log.copy()} if self._block_log else {}
        self._block_log.clear()
        return fields

    def _collect_tables(self, entries: Iterable[tuple[int, int, int]]) -> list[tuple[int, list[int]]]:
        """Group the new (row, index, block) entries of the block tables: (request's number, its new blocks)."""
        tables: dict[int, list[int]] = {}
        for row, _, block in entries:
            tables.setdefault(self._owners[row], []).append(block)
        return list(tables.items())

    # ---- the file

    def _format_span(self, name: str, thread: int, start: float, seconds: float, args: str) -> str:
        times = f', "ts": {self._to_microseconds(start)}, "dur": {seconds * 1e6:.1f}'
        return _format_event(name, "X", thread, args, times)

    def _to_microseconds(self, at: float) -> float:
        return round((at - self._start) * 1e6, 1)

    def _flush(self) -> None:
        """Hand the events to the operating system, so that a killed run loses only the steps that were not read."""
        if not self._file.closed:
            try:
                self._file.write("".join(self._lines))
                self._file.flush()
            except OSError as error:
                logger.warning("%s cannot be written, and ends here; the run goes on: %s", self._path, error)
                with suppress(OSError):  # close() tries again to write what is left, and closes the file all the same
                    self._file.close()
        self._num_events += len(self._lines)
        self._lines.clear()


def _format_event(name: str, phase: str, thread: int, args: str, more: str = "") -> str:
    """Return an event as a line. `args` and `more` are JSON already."""
    return f'{{"name": "{name}", "ph": "{phase}", "pid": 1, "tid": {thread}{more}, "args": {args}}},\n'
