"""Opens a job: reads its input, its manifest and its earlier results, and checks them before a model is loaded."""

import logging
import os
import shlex
from collections import deque
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from typing import Any

from nanovllm.jobs.compact_sets import LineSet
from nanovllm.jobs.counts import JobCounts
from nanovllm.jobs.job import IncompleteError, Job
from nanovllm.jobs.manifest import Manifest
from nanovllm.jobs.request_lines import find_foreign_model
from nanovllm.jobs.result_lines import ResultLine
from nanovllm.jobs.results_file import open_results
from nanovllm.jobs.source import STANDARD, InputDigest, Reading, Source, is_file
from nanovllm.utils.checks import LONGEST_QUOTE, quote

logger = logging.getLogger(__name__)


class OpenJob:
    """A job while it runs.

    Attributes:
        first_reading: the input as it was read before anything ran; None if it can be read only once.
        done: the numbers of the lines that have a result.
        manifest: tells which job and which engine the results are of.
        num_left: lines that have no result yet; None if the input can be read only once.
    """

    def __init__(self, job: Job, counts: JobCounts) -> None:
        """Raises a ValueError or an InputError if the job cannot run, or if the results are another job's."""
        self.job = job
        self.counts = counts
        self.source = Source(job.input)
        _check_paths(job, self.source)
        self.first_reading = Reading(self.source) if self.source.is_file else None
        numbers = LineSet()
        identity = None
        if self.first_reading is not None:
            deque(self.first_reading, maxlen=0)  # reads it to its end
            numbers = self.first_reading.numbers
            counts.num_lines = len(numbers)
            _check_lines(job, self.source, len(numbers))
            if is_file(job.output):
                identity = _identify(job, self.first_reading.digest)
        if identity is None:
            logger.warning("a job from or to a pipe cannot be resumed: if it ends early, its work is lost")
        self.manifest = Manifest(Path(job.output), identity, job.accept_changes)
        self._results, earlier = open_results(job.output, self.manifest, numbers, job.overwrite)
        self.done = earlier.done
        counts.num_earlier = len(self.done)
        counts.num_failed = earlier.num_failed
        counts.num_succeeded = counts.num_earlier - counts.num_failed
        self.num_left = None if self.first_reading is None else len(numbers) - len(self.done)

    def write(self, result: ResultLine) -> None:
        """Append a line to the results, and count it. Raises an OutputError if it cannot be written."""
        if not self.done.add(result.number):
            raise RuntimeError(f"line {result.number} was answered twice")
        self._results.append(result.line)
        self.counts.count(result.usage)

    def check_complete(self, numbers: LineSet, digest: InputDigest) -> None:
        """Check that the input did not change during the run, and that each of its lines has a result.

        Args:
            numbers, digest: those of the second reading of the input, whose lines were answered.

        Raises:
            IncompleteError: the input changed, or lines have no result.
        """
        if self.first_reading is not None and digest != self.first_reading.digest:
            reason = f"the input {self.job.input} changed while the job ran"
            self.manifest.forbid_resume(reason)
            raise IncompleteError(f"{reason}: --overwrite answers it as it is now")
        if num_missing := len(numbers) - len(self.done):
            missing = ", ".join(map(str, islice(numbers.minus(self.done), 10)))
            raise IncompleteError(f"{num_missing} lines have no answer: {missing}{', ...' if num_missing > 10 else ''}")

    def close(self) -> None:
        """Bring the results to the disk. Raises an OutputError if that fails, or if they were moved or changed."""
        self._results.close()


def _identify(job: Job, digest: InputDigest) -> dict[str, Any]:
    """Return what must be the same when the job is resumed."""
    options = {f.name: getattr(job.config, f.name) for f in fields(job.config) if f.metadata["affects"] == "results"}
    return {"input": asdict(digest), "options": {**options, "served_model_name": job.model_name}}


def _check_lines(job: Job, source: Source, num_lines: int) -> None:
    """Raise a ValueError if no line can succeed, because they all ask for another model."""
    if not num_lines:
        logger.warning("the input %s has no requests", job.input)
    if (model := find_foreign_model(Reading(source), job.model_name)) is not None:
        raise ValueError(
            f"every line of {job.input} asks for the model {quote(model)}, but {quote(job.model_name)} would answer: "
            f"if that is meant, add --served-model-name {shlex.quote(model[:LONGEST_QUOTE])}"
        )


def _check_paths(job: Job, source: Source) -> None:
    """Raise a ValueError if a file to write cannot be written, is also read, or would be written twice."""
    manifest = str(Manifest.path_for(Path(job.output))) if job.output != STANDARD else None
    written = {"-o": job.output, "the manifest": manifest, "--stats": job.stats, "--trace": job.config.trace}
    places = [(os.path.realpath(file), "the input") for file in source.files]
    if job.output.endswith(".gz"):
        raise ValueError(f"-o {quote(job.output)}: results are written unpacked: compress them afterwards")
    for name, path in written.items():
        if path is None:
            continue
        if not is_file(path):
            if name != "-o":  # these files are replaced as a whole, which would put a file in the place of a device
                raise ValueError(f"{name} {quote(path)} is no file, and cannot become one")
            continue
        if path.startswith("/dev/") and not os.path.realpath(path).startswith("/dev/"):
            raise ValueError(
                f"{name} {quote(path)} leads into a file: name that file, or give -o - for standard output"
            )
        if not Path(path).absolute().parent.is_dir():
            raise ValueError(f"the folder of {name} {quote(path)} does not exist")
        if Path(path).is_dir():
            raise ValueError(f"{name} {quote(path)} is a folder; it must be a file")
        place = os.path.realpath(path)
        if source.is_folder and Path(place).is_relative_to(os.path.realpath(source.path)):
            raise ValueError(f"{name} {path} lies in the input {source.path}, whose files are all read as requests")
        for other, what in places:
            both_exist = os.path.exists(other) and os.path.exists(place)
            if place == other or (both_exist and os.path.samefile(other, place)):
                raise ValueError(f"{path} is {what} and {name}: choose another file")
        places.append((place, name))
