"""What a run did, step by step: for `nanovllm view`, and for chrome://tracing and https://ui.perfetto.dev.

The file is a JSON array of events, one a line, written as the run goes; the format allows its end to be missing, so
the trace of a run that was killed can still be read. Format: "Trace Event Format", Google. Beside the spans and charts
that Perfetto draws, a "plan" event and the arguments of an "update" span tell what happened to requests and blocks.
"""

import json
import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import Any, TextIO

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.plan import StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.clock import Clock

logger = logging.getLogger(__name__)

HOST, DEVICE = 1, 2
"""The two threads of the timeline."""

MAX_EVENTS = 100_000
"""No step is begun to be recorded once there are as many: what is beyond would neither be read nor drawn."""

BlockLog = list[tuple[str, Seq[int]]]


class RecordedBlocks(BlockManager):
    """A block manager that writes down, in order, what was done to which blocks."""

    def __init__(self, log: BlockLog, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self._log = log

    def reference(self, hits: Iterable[int]) -> None:
        blocks = list(hits)
        super().reference(blocks)
        self._log.append(("reference", blocks))

    def take(self, count: int) -> list[int]:
        blocks = super().take(count)
        self._log.append(("take", blocks))
        return blocks

    def release(self, blocks: Seq[int]) -> None:
        self._log.append(("release", list(blocks)))
        super().release(blocks)

    def register(self, seq: Sequence, index: int) -> bool:
        block = seq.block_table[index]
        was_findable = self._content[block] is not None
        registered = super().register(seq, index)
        if not was_findable and self._content[block] is not None:
            self._log.append(("register", [block]))
        return registered

    def forget(self, seq: Sequence) -> None:
        self._log.append(("forget", [self._findable[digest] for digest in seq.digests if digest in self._findable]))
        super().forget(seq)

    def forget_all(self) -> None:
        self._log.append(("forget", list(self._findable.values())))
        super().forget_all()


class Trace:
    """Writes the trace of one engine; a `StepObserver`."""

    def __init__(self, path: str, device: str, tokenizer: Tokenizer | None = None) -> None:
        """
        Args:
            device: the engine's.
            tokenizer: for the text of tokens.

        Raises:
            ValueError: the file cannot be written.
        """
        try:
            self._file: TextIO | None = open(path, "w", encoding="utf-8")  # noqa: SIM115  # lives as long as the engine
        except OSError as error:
            raise ValueError(f"trace file {path} cannot be written: {error}") from error
        self._path, self._tokenizer = path, tokenizer
        self._start = time.perf_counter()
        self._device_free_at = 0.0
        self._num_events = 0
        self._stopped_at: int | None = None
        self._log: BlockLog = []
        self._live: dict[int, Sequence] = {}
        """Requests that have not ended, by number."""
        self._num_told: dict[int, int] = {}
        """For each of them, how many of its tokens are in the file."""
        self._resident: set[int] = set()
        self._owners: dict[int, int] = {}
        """The number of the request that has a row."""
        self._told_texts: set[int] = set()
        self._lines = ["[\n", _line("engine", "M", HOST, json.dumps({"device": device}))]
        for thread, name in ((HOST, "host"), (DEVICE, "device")):
            self._lines.append(_line("thread_name", "M", thread, json.dumps({"name": name})))
        self._flush()

    def block_manager(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> BlockManager:
        """The block manager of the engine that is traced."""
        return RecordedBlocks(self._log, num_blocks, block_size, enable_prefix_caching)

    def watch(self, scheduler: Scheduler) -> None:
        """Set the engine's scheduler, whose queues and blocks are recorded. To be called before the first step."""
        self._scheduler = scheduler

    # ---- what the engine tells

    def planned(self, number: int, at: float, step: ScheduledStep) -> None:
        """What a step is made of, and the state it was planned in."""
        if self._num_events >= MAX_EVENTS and self._stopped_at is None:
            self._stopped_at = number
        if self._stopped_at is not None:
            if self._file is None:
                self._log.clear()
            return
        plan = step.plan
        scheduler = self._scheduler
        manager = scheduler.block_manager
        if not self._owners:
            pool = {"num_blocks": manager.num_blocks, "block_size": manager.block_size}
            pool["budget"] = scheduler.max_num_batched_tokens
            self._lines.append(_line("pool", "M", HOST, json.dumps(pool)))
        # Verified ones, whose drafts are sampled from as well, decode, too; they lie between the others and prompts.
        num_drafts = plan.num_drafts
        num_decodes = int(np.count_nonzero(plan.num_scheduled == 1 + num_drafts))
        kinds = {"decode": num_decodes, "prefill": plan.num_tokens - num_decodes - int(num_drafts.sum())}
        if scheduler.speculation is not None:
            kinds["draft"] = int(num_drafts.sum())
        stamp = f', "ts": {self._microseconds(at)}'
        charts = (
            ("tokens", json.dumps(kinds)),
            ("sequences", f'{{"running": {len(scheduler.running)}, "waiting": {len(scheduler.waiting)}}}'),
            ("KV blocks", f'{{"used": {manager.num_used}, "free": {manager.num_free}}}'),
            ("prompt tokens", f'{{"cached": {scheduler.num_cached_tokens}, "all": {scheduler.num_prompt_tokens}}}'),
        )
        told = {"step": number, **self._requests(step, num_decodes, scheduler), **self._blocks()}
        if len(plan.block_entries):
            told |= self._tables(plan.block_entries.tolist())
        self._lines += [_line(name, "C", HOST, args, stamp) for name, args in charts]
        self._lines.append(_line("plan", "i", HOST, json.dumps(told), stamp + ', "s": "t"'))

    def finished(self, number: int, step: ScheduledStep, clock: Clock, result: StepResult) -> None:
        """The spans of a step that has been read: what the host did for it, and the device's work; and its tokens.

        The device's work is timed but not placed: it began once launched, and not before the step before had ended.
        """
        if self._stopped_at is not None and number >= self._stopped_at:
            self._stop()
            return
        args, lines = f'{{"step": {number}}}', self._lines
        for name, start, seconds in clock.spans:
            if name == "launch":
                lines.append(self._span("prepare", HOST, start, result.prepare_seconds, args))
                start, seconds = start + result.prepare_seconds, seconds - result.prepare_seconds
                began = max(start, self._device_free_at)
                self._device_free_at = began + result.device_seconds
                lines.append(self._span("step", DEVICE, began, result.device_seconds, args))
            if name == "update":
                args = json.dumps({"step": number, **self._progress(step.seqs)})
            lines.append(self._span(name, HOST, start, seconds, args))
        self._flush()

    def close(self) -> None:
        """Finish the file. Closing twice is allowed."""
        if self._file is not None:
            args = {"stopped": self._stopped_at is not None, "ended": self._endings(list(self._live)), **self._blocks()}
            self._lines.append(_line("end", "i", HOST, json.dumps(args), ', "ts": 0, "s": "g"').replace(",\n", "\n]\n"))
            self._flush()
        file, self._file = self._file, None
        if file is not None:
            file.close()

    # ---- what becomes of requests and blocks

    def _requests(self, step: ScheduledStep, num_decodes: int, scheduler: Scheduler) -> dict[str, Any]:
        """Who came, who was preempted, who moved in, and what the step computes of whom."""
        plan, resident = step.plan, self._resident
        arrived = []
        for seq in reversed(scheduler.waiting):
            if seq.seq_id in self._live:
                break
            arrived.append(seq)
        moved_in = scheduler.running[len(scheduler.running) - len(plan.new_rows) :]
        arrived += [seq for seq in reversed(moved_in) if seq.seq_id not in self._live]
        for seq in arrived:
            self._live[seq.seq_id] = seq
            self._num_told[seq.seq_id] = 0
        preempted = [seq.seq_id for seq in moved_in if seq.seq_id in resident]  # and moved in again since
        resident.update(seq.seq_id for seq in moved_in)
        ended = []
        if len(resident) != len(scheduler.running):
            gone = [i for i in resident if self._live[i].row < 0]
            preempted += [i for i in gone if self._live[i].finish_reason is None]
            resident.difference_update(gone)
        if len(self._live) != len(scheduler.running) + len(scheduler.waiting):
            ended = self._endings([i for i, seq in self._live.items() if seq.finish_reason is not None])
        for seq in moved_in:
            self._owners[seq.row] = seq.seq_id
        owners = [self._owners[row] for row in plan.rows.tolist()]
        told: dict[str, Any] = {"decode": owners[:num_decodes]}
        if (plan.num_sampled > 1).any():
            drafts = zip(owners, plan.num_sampled.tolist(), strict=True)
            told["drafts"] = [(owner, count - 1) for owner, count in drafts if count > 1]
        if preempted:
            told["preempted"] = sorted(preempted, reverse=True)
        if ended:
            told["ended"] = ended
        if num_decodes < len(owners):
            starts, counts = plan.num_computed.tolist(), plan.num_scheduled.tolist()
            told["prefill"] = list(zip(owners, starts, counts, strict=True))[num_decodes:]
        if moved_in:
            starts = dict(zip(owners, plan.num_computed.tolist(), strict=True))
            told["moved_in"] = [(seq.seq_id, starts[seq.seq_id]) for seq in moved_in]
        if arrived:
            arrived.reverse()
            told["arrived"] = [(seq.seq_id, seq.num_prompt_tokens) for seq in arrived]
            told |= self._tokens(arrived)
        return told

    def _progress(self, seqs: Iterable[Sequence]) -> dict[str, Any]:
        """The tokens that a step brought, and the requests that ended by it."""
        told = self._tokens(seqs)
        if ended := [seq.seq_id for seq in seqs if seq.finish_reason is not None and seq.seq_id in self._live]:
            told["ended"] = self._endings(ended)
        return told | self._blocks()

    def _tokens(self, seqs: Iterable[Sequence]) -> dict[str, Any]:
        """Tokens of the sequences that are not yet in the file, and the text of those that never were."""
        tokens = []
        texts: dict[int, str] = {}
        for seq in seqs:
            if (told := self._num_told.get(seq.seq_id)) is not None and told < len(seq.token_ids):
                token_ids = seq.token_ids[told:].tolist()
                self._num_told[seq.seq_id] = len(seq.token_ids)
                tokens.append((seq.seq_id, *token_ids))
                if self._tokenizer is not None and not self._told_texts.issuperset(token_ids):
                    texts |= {i: self._tokenizer.decode([i], False) for i in token_ids if i not in self._told_texts}
                    self._told_texts.update(token_ids)
        return {"tokens": tokens, "texts": texts} if texts else {"tokens": tokens}

    def _endings(self, numbers: list[int]) -> list[list[Any]]:
        for i in numbers:
            del self._num_told[i]
            self._resident.discard(i)
        return [[i, self._live.pop(i).finish_reason] for i in numbers]

    def _blocks(self) -> dict[str, Any]:
        """What was done to blocks since it was told last."""
        told = {"blocks": self._log.copy()} if self._log else {}
        self._log.clear()
        return told

    def _tables(self, entries: Iterable[tuple[int, int, int]]) -> dict[str, Any]:
        """The new (row, index, block) entries of the block tables, by request."""
        tables: dict[int, list[int]] = {}
        for row, _, block in entries:
            tables.setdefault(self._owners[row], []).append(block)
        return {"tables": list(tables.items())} if tables else {}

    # ---- the file

    def _stop(self) -> None:
        if self._file is not None:
            logger.warning("%s has %d events: the rest of the run is not recorded", self._path, self._num_events)
            self.close()

    def _span(self, name: str, thread: int, start: float, seconds: float, args: str) -> str:
        return _line(name, "X", thread, args, f', "ts": {self._microseconds(start)}, "dur": {seconds * 1e6:.1f}')

    def _microseconds(self, at: float) -> float:
        return round((at - self._start) * 1e6, 1)

    def _flush(self) -> None:
        """Hand what is told to the operating system: a killed run loses at most the steps in hand."""
        if self._file is not None:
            try:
                self._file.write("".join(self._lines))
                self._file.flush()
            except OSError as error:
                logger.warning("%s ends here, it cannot be written; the run goes on: %s", self._path, error)
                file, self._file = self._file, None
                with suppress(OSError):  # it tries again what is not yet written
                    file.close()
        self._num_events += len(self._lines)
        self._lines.clear()


def _line(name: str, phase: str, thread: int, args: str, more: str = "") -> str:
    """An event, with arguments that are JSON already."""
    return f'{{"name": "{name}", "ph": "{phase}", "pid": 1, "tid": {thread}{more}, "args": {args}}},\n'
