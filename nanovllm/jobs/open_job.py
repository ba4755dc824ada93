"""A job that can be run: its input, its results and its manifest, checked before anything is loaded."""

import logging
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.jobs.answers import Answer
from nanovllm.jobs.compact import LineSet
from nanovllm.jobs.journal import OutputError, open_journal
from nanovllm.jobs.manifest import Manifest, remove_stale
from nanovllm.jobs.protocol import foreign_model
from nanovllm.jobs.source import MAX_LINE_BYTES, STANDARD, InputDigest, Reading, Source, is_file
from nanovllm.jobs.tally import Tally
from nanovllm.utils.checks import LONGEST_QUOTE, quote

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, from where to where.

    Attributes:
        input, output: paths, or "-".
        model_name: the one `model` that lines may name; answers name it too.
        stats: where to write the summary as JSON.
        max_line_bytes: the most that a line of the input may have.
        accept_changes: resume also with other options or another engine than those of the answers that are there.
    """

    input: str
    output: str
    config: EngineConfig
    model_name: str
    overwrite: bool = False
    stats: str | None = None
    max_line_bytes: int = MAX_LINE_BYTES
    accept_changes: bool = False


class IncompleteError(Exception):
    """The results are not the answers to the input's lines, one to each."""


class OpenJob:
    """A job under way: what is read, what is answered already, and where answers go.

    Attributes:
        first: a reading of the input before anything runs; None if it can be read only once.
        num_left: lines that have no answer yet; None if the input can be read only once.
    """

    def __init__(self, job: Job, tally: Tally) -> None:
        """Raises a ValueError or an InputError if the job cannot be run, or the results are another job's."""
        self.job, self.tally = job, tally
        self.source = Source(job.input, job.max_line_bytes)
        _check_paths(job, self.source)
        self.first = Reading(self.source) if self.source.is_file else None
        digest, numbers = None, LineSet()
        if self.first is not None:
            digest, numbers = read_to_end(self.first), self.first.numbers
            tally.num_lines = digest.num_lines
            _check_lines(job, self.source, digest.num_lines)
        if digest is None or not is_file(job.output):
            logger.warning("a job from or to a pipe cannot be resumed: if it ends early, its work is lost")
        identity = None if digest is None else _identity(job, digest)
        self._manifest = Manifest(Path(job.output), identity, job.accept_changes)
        self._journal, state = open_journal(job.output, self._manifest, numbers, job.overwrite)
        if job.stats is not None:
            remove_stale(Path(job.stats))
        self.done = state.done
        tally.num_earlier, tally.num_failed = len(self.done), state.num_failed
        tally.num_succeeded = tally.num_earlier - tally.num_failed
        self.num_left = None if self.first is None else len(numbers) - len(self.done)

    def check_engine(self, engine: Mapping[str, Any]) -> None:
        """To be called before an engine's first answer; ValueError if others came from another one.

        Args:
            engine: see `LLM.provenance`.
        """
        self._record(lambda: self._manifest.check_engine(engine))

    def _record(self, write: Callable[[], None]) -> None:
        """Change the manifest, if there is one."""
        try:
            if is_file(self.job.output):
                write()
        except OSError as error:
            raise OutputError(f"{self._manifest.path} cannot be written: {error.strerror or error}") from error

    def emit(self, answer: Answer) -> None:
        """Take in an answer; OutputError if it cannot be written."""
        if not self.done.add(answer.number):
            raise RuntimeError(f"line {answer.number} was answered twice")
        self._journal.append(answer.line)
        self.tally.count(answer.usage)

    def check_complete(self, numbers: LineSet, digest: InputDigest) -> None:
        """Compare what was answered with what was read; IncompleteError if they differ.

        Args:
            numbers, digest: of the reading that was answered.
        """
        if self.first is not None and digest != self.first.digest:
            reason = f"the input {self.job.input} changed while the job ran"
            self._record(lambda: self._manifest.spoil(reason))
            raise IncompleteError(f"{reason}: --overwrite answers it as it is now")
        if len(numbers) != len(self.done):
            some = ", ".join(map(str, islice(numbers.minus(self.done), 10)))
            num_missing = len(numbers) - len(self.done)
            raise IncompleteError(f"{num_missing} lines have no answer: {some}{', ...' if num_missing > 10 else ''}")

    def close(self) -> None:
        self._journal.close()


def read_to_end(reading: Reading) -> InputDigest:
    """Read what is left; InputError if it cannot be read."""
    for _ in reading:
        pass
    return reading.digest


def _identity(job: Job, digest: InputDigest) -> dict[str, Any]:
    """What must be the same when the job is resumed."""
    own = {"served_model_name": job.model_name, "max_line_bytes": job.max_line_bytes}
    options = {f.name: getattr(job.config, f.name) for f in fields(job.config) if f.metadata["affects"] == "results"}
    return {"input": asdict(digest), "options": {**options, **own}}


def _check_lines(job: Job, source: Source, num_lines: int) -> None:
    """Raises a ValueError if no line can succeed, because they all ask for another model."""
    if not num_lines:
        logger.warning("the input %s has no requests", job.input)
    if (model := foreign_model(Reading(source), job.model_name)) is not None:
        raise ValueError(
            f"every line of {job.input} asks for the model {quote(model)}, and {quote(job.model_name)} would answer: "
            f"if that is meant, add --served-model-name {shlex.quote(model[:LONGEST_QUOTE])}"
        )


def _check_paths(job: Job, source: Source) -> None:
    """Raises a ValueError if a file to write cannot be one, is to be read, or is to be written twice."""
    manifest = str(Manifest.path_of(Path(job.output))) if job.output != STANDARD else None
    written = {"-o": job.output, "the manifest": manifest, "--stats": job.stats, "--trace": job.config.trace}
    places: dict[str, str] = {}
    if job.output.endswith(".gz"):
        raise ValueError(f"-o {quote(job.output)}: results are appended to, and not packed: compress them afterwards")
    for name, path in written.items():
        if path is None:
            continue
        if not is_file(path):
            if name != "-o":  # they are replaced whole, which would take away a device and put a file in its place
                raise ValueError(f"{name} {quote(path)} is no file, and cannot become one")
            continue
        if path.startswith("/dev/") and not os.path.realpath(path).startswith("/dev/"):
            raise ValueError(
                f"{name} {quote(path)} leads into a file: name that file, or give -o - for standard output"
            )
        if not Path(path).absolute().parent.is_dir():
            raise ValueError(f"the folder of {name} {quote(path)} does not exist")
        if name != "-o" and Path(path).is_dir():
            raise ValueError(f"{name} {quote(path)} is a folder")
        place = os.path.realpath(path)
        if source.is_folder and Path(place).is_relative_to(os.path.realpath(source.path)):
            raise ValueError(f"{name} {path} lies in the input {source.path}, whose files are all read as requests")
        for other, what in [*((file, "the input") for file in source.files), *places.items()]:
            if place == os.path.realpath(other) or (
                os.path.exists(other) and os.path.exists(path) and os.path.samefile(other, path)
            ):
                raise ValueError(f"{path} is {what} and {name}: choose another file")
        places[place] = name
