"""Runs a job that teaches, from its input to its exit status. The same command resumes it after its last shard."""

import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nanovllm.apps.jobs.compact_sets import DigestSet
from nanovllm.apps.jobs.counts import JobCounts
from nanovllm.apps.jobs.job import IncompleteError, ShardOptions, Status
from nanovllm.apps.jobs.manifest import Manifest
from nanovllm.apps.jobs.request_lines import LineError, read_request_line
from nanovllm.apps.jobs.result_lines import ResultLine, Usage
from nanovllm.apps.jobs.run import load_llm, supervise
from nanovllm.apps.jobs.shards import ScoredText, Shards
from nanovllm.apps.jobs.source import Line, Reading, Source
from nanovllm.apps.teach.texts import PLAIN, Text, prepare_text
from nanovllm.config import EngineConfig
from nanovllm.features.scoring.arrays import allocate, make_params, read_arrays
from nanovllm.utils.checks import as_integer, quote
from nanovllm.utils.work_ahead import work_ahead

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Request
    from nanovllm.llm import LLM

LINES_PREPARED = 64
"""A thread reads and tokenises up to this many lines ahead, while steps run."""


@dataclass(frozen=True, slots=True)
class TeachJob:
    """The files, options and engine of a job that teaches.

    Attributes:
        input: a file, or a folder of files, with lines as `run-batch` reads them.
        output: the folder of the shards.
        top, format, logprobs_dtype, shard_tokens: as in `ShardOptions`.
        only_assistant: of a conversation, only the messages of the assistant count.
        overwrite, accept_changes, stats: as in `Job`.
    """

    input: str
    output: str
    config: EngineConfig
    model_name: str
    top: int = 64
    format: str = "safetensors"
    logprobs_dtype: str = "float16"
    only_assistant: bool = False
    shard_tokens: int = 1 << 17
    overwrite: bool = False
    accept_changes: bool = False
    stats: str | None = None


OF_JOB = ("model_name", "top", "format", "logprobs_dtype", "only_assistant", "shard_tokens")
"""The fields of a job that decide what the shards hold."""


@dataclass
class Progress:
    """Tells what is done when a shard is written.

    Attributes:
        last_line: the number of the last line that the shards hold; 0 if there is none.
        num_lines, num_failed: how many lines they hold, and how many of these are errors.
    """

    last_line: int = 0
    num_lines: int = 0
    num_failed: int = 0


class OpenTeaching:
    """A job while it runs.

    Attributes:
        done: counts the lines that earlier runs have written.
        num_left: lines that are in no shard yet.
    """

    def __init__(self, job: TeachJob, counts: JobCounts) -> None:
        """Raises a ValueError or an InputError if the job cannot run, or if the shards are another job's."""
        as_integer(job.top, "--top", 1)
        self.job = job
        self.counts = counts
        self.source = Source(job.input)
        if not self.source.is_file:
            raise ValueError(
                f"the input {quote(job.input)} is a pipe, which cannot be read again: write it into a file"
            )
        self.first_reading = Reading(self.source)
        counts.num_lines = sum(1 for _ in self.first_reading)
        names = [field.name for field in fields(job.config) if field.metadata["affects"] == "results"]
        options = {name: getattr(job.config, name) for name in names} | {name: getattr(job, name) for name in OF_JOB}
        identity = {"input": self.first_reading.digest._asdict(), "options": options}
        self.manifest = Manifest(Path(job.output) / "teach", identity, job.accept_changes)
        shards = ShardOptions(job.output, job.top, job.format, job.logprobs_dtype, job.shard_tokens)
        self.shards = Shards(shards, self.manifest, self.source, Progress, job.overwrite)
        progress = self.shards.progress
        self.done = range(progress.num_lines)
        counts.num_earlier = progress.num_lines
        counts.num_failed = progress.num_failed
        counts.num_succeeded = progress.num_lines - progress.num_failed
        self.num_left = counts.num_lines - progress.num_lines

    def write(self, texts: list[ScoredText]) -> None:
        """Write a shard, and count its lines."""
        before = self.shards.progress
        num_failed = before.num_failed + sum(text.error is not None for text in texts)
        self.shards.write(texts, Progress(texts[-1].number, before.num_lines + len(texts), num_failed))
        for text in texts:
            usage = Usage(len(text.mask), 0, 0) if text.error is None else None
            self.counts.count(ResultLine(text.number, b"", usage, text.error))

    def check_complete(self, lines: Reading) -> None:
        """Raise an IncompleteError if the input changed while the job ran. `lines` has read it a second time."""
        if lines.digest != self.first_reading.digest:
            reason = f"the input {self.job.input} changed while the job ran"
            self.manifest.forbid_resume(reason)
            raise IncompleteError(f"{reason}: --overwrite scores it as it is now")

    def close(self) -> None:
        """Give the lock back."""
        self.shards.close()


class Teaching:
    """Scores lines with one engine, and writes them in the order of the input."""

    def __init__(self, work: OpenTeaching, llm: "LLM") -> None:
        """Raises a ValueError if the model has fewer tokens than are asked for."""
        self._work = work
        self._llm = llm
        self._params = make_params(llm, work.job.top)
        self._last = work.shards.progress.last_line
        """The last line that earlier runs have written."""
        self._ids = DigestSet()
        """The ids that lines had so far."""
        self._running: dict[int, tuple[Line, str | None, Text]] = {}
        """{number of a request: its line, with its id and its text}."""
        self._coming: dict[int, ScoredText | None] = {}
        """{number of a line: its scores, or None while it runs}, in order, from the first line that has not ended."""
        self._shard: list[ScoredText] = []
        """The lines before these that are in no shard yet."""
        self._num_tokens = 0
        """Those of `_shard`."""

    def teach(self, lines: Reading) -> None:
        """Score every line that is in no shard yet."""
        with closing(self._take_requests(lines)) as requests:
            for number, scores in self._llm.run_requests(
                requests, make_output=lambda seq: seq.error or read_arrays(seq)
            ):
                line, custom_id, text = self._running.pop(number)
                if isinstance(scores, str):
                    self._fail(line, LineError("engine_error", scores, custom_id))
                else:
                    self._end(ScoredText(line.number, custom_id, scores, text.mask))
        if self._shard:
            self._work.write(self._shard)

    def _prepare(self, line: Line) -> tuple[str | None, Text] | LineError | None:
        """Return the id and the text of a line, or what is wrong with it; None if it is done."""
        job = self._work.job
        try:
            request_line = read_request_line(line, self._ids.add, PLAIN)
            if line.number <= self._last:
                return None
            text = prepare_text(request_line, self._llm, self._params, job.model_name, job.only_assistant)
        except LineError as error:
            return None if line.number <= self._last else error
        return request_line.custom_id, text

    def _take_requests(self, lines: Reading) -> "Generator[Request, None, None]":
        """Yield the requests for the engine."""
        number = 0
        with closing(work_ahead(lines, self._prepare, LINES_PREPARED)) as tasks:
            for line, task in tasks:
                prepared = task.result()
                if prepared is None:
                    continue
                self._coming[line.number] = None
                if isinstance(prepared, LineError):
                    self._fail(line, prepared)
                    continue
                self._running[number] = (line, *prepared)
                number += 1
                yield prepared[1].request

    def _fail(self, line: Line, error: LineError) -> None:
        nothing = allocate((), self._work.job.top)
        message = (error.code, f"line {line.number}: {error}")
        self._end(ScoredText(line.number, error.custom_id, nothing, np.empty(0, np.bool_), message))

    def _end(self, text: ScoredText) -> None:
        """Note what became of a line. Move the lines before the first that still runs into the shard."""
        self._coming[text.number] = text
        self._work.counts.advance()
        while self._coming and (first := next(iter(self._coming.values()))) is not None:
            del self._coming[first.number]
            self._shard.append(first)
            self._num_tokens += len(first.mask)
            if self._num_tokens >= self._work.job.shard_tokens:
                self._work.write(self._shard)
                self._shard = []
                self._num_tokens = 0


def run_teach_job(job: TeachJob) -> Status:
    """Run a job in this process, or resume it. Errors are logged, and told by the status."""
    return supervise(job, _teach_here, OpenTeaching)


def _teach_here(work: OpenTeaching) -> None:
    from nanovllm.apps.jobs.provenance import describe_processor, read_teacher  # it imports torch

    since = time.perf_counter()
    with closing(load_llm(work.job.config)) as llm, work.counts.show(llm.stats) as bar:
        work.counts.load_seconds = time.perf_counter() - since
        llm.engine.observers.append(bar)
        work.manifest.check_engine(read_teacher(llm.engine))
        work.manifest.note_processor(describe_processor(llm.engine))
        teaching = Teaching(work, llm)
        lines = Reading(work.source)
        try:
            teaching.teach(lines)
        except ValueError as error:  # no line can cause it, and supervise() takes a ValueError for a usage error
            raise RuntimeError(str(error)) from error
    work.check_complete(lines)
