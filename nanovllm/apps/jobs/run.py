"""Runs a batch job, from its input to its exit status."""

import logging
import os
import shlex
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, fields
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from nanovllm.apps.jobs.answering import Answering
from nanovllm.apps.jobs.compact_sets import LineSet
from nanovllm.apps.jobs.counts import JobCounts
from nanovllm.apps.jobs.job import IncompleteError, Job, OutputError, Status
from nanovllm.apps.jobs.line_adapters import LineAdapters
from nanovllm.apps.jobs.manifest import Manifest, read_manifest, write_json
from nanovllm.apps.jobs.request_lines import LineError, find_foreign_model, read_request_line
from nanovllm.apps.jobs.result_lines import ResultLine
from nanovllm.apps.jobs.result_shards import ArrayReader, ResultShards
from nanovllm.apps.jobs.results_file import open_results
from nanovllm.apps.jobs.reuse import KnownAnswers
from nanovllm.apps.jobs.source import STANDARD, InputDigest, InputError, Reading, Source, is_file
from nanovllm.config import EngineConfig
from nanovllm.utils.checks import LONGEST_QUOTE, quote
from nanovllm.utils.digests import digest_adapter, find_lacking

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.llm import LLM

logger = logging.getLogger(__name__)

RESOLVED = {"model", "revision", "tokenizer", "dtype", "device", "attention_backend", "lora", "quantization"}
"""Options that the manifest's section of the engine has as they turned out."""


def load_llm(config: EngineConfig) -> "LLM":
    """Load the engine of a job."""
    # On CPUs, oneDNN compiles bfloat16 code for each shape, and keeps the code of the last 1024 shapes; torch keeps it
    # once more. A long job has a shape for every number of tokens in a step, which takes a gigabyte. Measured: keeping
    # 64 is as fast.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")
    from nanovllm.llm import LLM

    options = asdict(config)
    return LLM(options.pop("model"), **options)


# ---- the files of a job


class OpenJob:
    """A job while it runs.

    Attributes:
        first_reading: the input as it was read before anything ran; None if it can be read only once.
        done: the numbers of the lines that have a result.
        options: the engine's options that decide the answers.
        manifest: tells which job and which engine the results are of.
        known: finds the answers of equal requests; None if the results go to a pipe, or have arrays beside them.
        shards: keeps the arrays of the results; None if nobody wants them.
        num_left: lines that have no result yet; None if the input can be read only once.
    """

    def __init__(self, job: Job, counts: JobCounts) -> None:
        """Raises a ValueError or an InputError if the job cannot run, or if the results are another job's."""
        self.job = job
        self.counts = counts
        self.source = Source(job.input)
        _check_paths(job, self.source)
        for path in job.reuse:
            read_manifest(Path(path))
        names = [field.name for field in fields(job.config) if field.metadata["affects"] == "results"]
        self.options = {name: getattr(job.config, name) for name in names}
        self.first_reading = Reading(self.source) if self.source.is_file else None
        numbers = LineSet()
        identity = None
        """It must be the same when the job is resumed."""
        if self.first_reading is not None:
            deque(self.first_reading, maxlen=0)  # reads it to its end
            numbers = self.first_reading.numbers
            counts.num_lines = len(numbers)
            _check_lines(job, self.source, len(numbers))
            if is_file(job.output):
                options = {**self.options, "served_model_name": job.model_name, **job.sampling}
                if job.shards is not None:
                    kind = {"top": job.shards.top, "format": job.shards.format, "dtype": job.shards.logprobs_dtype}
                    options["top_logprobs"] = kind
                identity = {"input": self.first_reading.digest._asdict(), "options": options}
        if identity is None:
            logger.warning("a job from or to a pipe cannot be resumed: if it ends early, its work is lost")
        self.manifest = Manifest(Path(job.output), identity, job.accept_changes)
        self.shards = None if job.shards is None else ResultShards(job.shards, job, self.source, identity)
        try:
            recover = {} if self.shards is None else {"recover": self.shards.recover}
            self._results, earlier = open_results(job.output, self.manifest, numbers, job.overwrite, **recover)
        except BaseException:
            if self.shards is not None:
                self.shards.close()
            raise
        self.done = earlier.done
        self.known = None
        if is_file(job.output) and self.shards is None:
            self.known = KnownAnswers(job.output, earlier.offsets, job.model_name)
        counts.num_earlier = len(self.done)
        counts.num_failed = earlier.num_failed
        counts.num_succeeded = counts.num_earlier - counts.num_failed
        self.num_left = None if self.first_reading is None else len(numbers) - len(self.done)

    def write(self, result: ResultLine) -> None:
        """Append a line to the results, or hold it until its shard is full. OutputError if it cannot be written."""
        if not self.done.add(result.number):
            raise RuntimeError(f"line {result.number} was answered twice")
        self.counts.advance()
        if self.shards is None:
            self._append(result)
        elif self.shards.hold(result):
            self._release()

    def _release(self) -> None:
        """Write the arrays of the held results, and then append these results."""
        if self.shards is not None:
            self._results.sync()  # a shard that is on the disk tells that all before it is
            for result in self.shards.release(self._results.size):
                self._append(result)

    def _append(self, result: ResultLine) -> None:
        """Append a line to the results, and count it."""
        offset = self._results.append(result.line)
        if self.known is not None and result.request_name:
            self.known.add(result.request_name, offset)
        self.counts.count(result)

    def note_engine(self, engine: "LLMEngine") -> None:
        """Compare the engine with that of the earlier answers, and record it. ValueError if it is another one."""
        from nanovllm.apps.jobs.provenance import describe_processor, read_provenance, read_teacher  # it imports torch

        found = [(self.manifest, read_provenance(engine))]
        if self.shards is not None:
            found.append((self.shards.manifest, read_teacher(engine)))
        for manifest, provenance in found:
            manifest.check_engine(provenance)
            manifest.note_processor(describe_processor(engine))

    def reuse_others(self, engine: "LLMEngine") -> None:
        """Note the answers of the jobs that may be reused.

        Raises:
            ValueError: the engine does not promise the same bits, or one of the files cannot be read.
        """
        if not self.job.reuse:
            return
        from nanovllm.apps.jobs.provenance import describe_processor, find_doubt, read_provenance

        if not self.job.reuse_close and (doubt := find_doubt(engine)):
            raise ValueError(
                f"--reuse needs an engine that gives the same bits in any company, and {doubt}: add --reuse-close to "
                "copy answers that may differ from what this run would compute"
            )
        if self.known is None:
            raise ValueError(f"--reuse needs a file for the results, and -o is {quote(self.job.output)}")
        options = {name: value for name, value in self.options.items() if name not in RESOLVED}
        decisive = {"options": options, "engine": read_provenance(engine)}
        processor = None if self.job.reuse_close else describe_processor(engine)
        for path in self.job.reuse:
            self.known.add_file(path, decisive, processor)

    def check_adapters(self, are_allowed: bool) -> None:
        """Check that each adapter of earlier answers is there, if a line without a result names it.

        Otherwise each of these lines would become an error, and an error is a result: it stays when the adapter comes
        back.

        Args:
            are_allowed: False if this run can have no adapter at all.

        Raises:
            ValueError: an adapter is not there, or not allowed. The message has the number of a line that names it.
        """
        lost = {}
        for folder in self.manifest.adapters:
            lacking = find_lacking(Path(folder).expanduser())
            if not are_allowed:
                lost[folder] = "an engine with --ray or --replicas has no adapters: leave these options out"
            elif lacking is not None:
                lost[folder] = f"the folder has no {lacking} now: bring it back, or give --overwrite to start anew"
        for line in Reading(self.source) if lost else ():
            if line.number in self.done:
                continue
            try:
                named = read_request_line(line).body.get("lora")
            except LineError:
                continue
            if isinstance(named, str) and named in lost:
                raise ValueError(
                    f"line {line.number} names the adapter {quote(named)}, which earlier answers had, and {lost[named]}"
                )

    def check_complete(self, numbers: LineSet, digest: InputDigest) -> None:
        """Check that the input did not change during the run, and that each of its lines has a result.

        Args:
            numbers, digest: what the second reading of the input found. Its lines were answered.

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
        if self.known is not None:
            self.known.close()
        with ExitStack() as closing_all:
            closing_all.callback(self._results.close)
            if self.shards is not None:
                closing_all.callback(self.shards.close)
                self._release()


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


# ---- from a job to its status


def run_job(job: Job) -> Status:
    """Run a job in this process, or resume it. Errors are logged, and told by the status."""
    return supervise(job, _answer_here)


def _answer_here(work: OpenJob) -> None:
    work.check_adapters(are_allowed=work.job.config.data_parallel_size == 1)
    reading = Reading(work.source)
    first = work.first_reading
    lines = (line for line in reading if first is None or line.number in first.numbers)
    since = time.perf_counter()
    with closing(load_llm(work.job.config)) as llm, work.counts.show(llm.stats) as bar:
        work.counts.load_seconds = time.perf_counter() - since
        llm.engine.observers.append(bar)
        work.note_engine(llm.engine)
        work.reuse_others(llm.engine)
        # An adapter that no line needs any more may be gone: `OpenJob.check_adapters` has checked the others.
        present = [folder for folder in work.manifest.adapters if find_lacking(Path(folder).expanduser()) is None]
        earlier = {folder: digest_adapter(folder) for folder in present}
        work.manifest.check_adapters(earlier)
        job = work.job
        adapters = LineAdapters(llm, work.manifest.check_adapters, earlier)
        answering = Answering(llm, work.write, job.model_name, job.sampling, adapters, work.done, known=work.known)
        if job.shards is not None:
            answering.arrays = ArrayReader(llm, job.shards.top)
        if first is not None and job.config.order == "auto":  # whoever writes into a pipe may wait for answers
            from nanovllm.engine.admission import Admission

            answering.admission = Admission(llm.engine, lambda line: line.body.get("lora"))
        try:
            answering.answer(lines)
        except ValueError as error:  # no line can cause it, and supervise() takes a ValueError for a usage error
            if len(work.done) == work.counts.num_earlier:
                raise
            raise RuntimeError(str(error)) from error
    work.check_complete(reading.numbers, reading.digest)


def supervise(job: Any, answer: Callable[[Any], None], open_job: Callable[[Any, JobCounts], Any] = OpenJob) -> Status:
    """Open a job, have its lines answered, and turn every error into a message and a status.

    Args:
        answer: answers the lines. It raises a ValueError if nothing can be run, and other errors later.
        open_job: opens the files of the job.
    """
    counts = JobCounts()
    is_open = False
    with _term_as_interrupt() as terms:
        try:
            with closing(open_job(job, counts)) as work:
                is_open = True
                if work.num_left != 0:
                    if work.done:
                        logger.info("%s: resumed after %d answers", job.output, len(work.done))
                    answer(work)
            status = Status.LINES_FAILED if counts.num_failed else Status.OK
        except KeyboardInterrupt:
            status = Status.TERMINATED if terms else Status.INTERRUPTED
            if is_file(job.input) and is_file(job.output):
                logger.info("%s: stopped; the same command goes on where this one ended", job.output)
        except (OutputError, IncompleteError) as error:
            logger.error("%s", error)
            status = error.status
        except (InputError, ValueError) as error:
            logger.error("%s", error)
            if isinstance(error, ValueError) or not is_open:
                return Status.USAGE
            status = Status.BROKEN
        except Exception:
            logger.exception("the job broke")
            status = Status.BROKEN
    for line in counts.describe().splitlines():
        logger.info("%s", line)
    if job.stats is not None:
        try:
            write_json(Path(job.stats), {"status": int(status), **counts.as_dict()})
        except OSError as error:
            logger.error("%s cannot be written: %s", job.stats, error)
            return status or Status.OUTPUT_FAILED
    return status


@contextmanager
def _term_as_interrupt() -> Iterator[list[int]]:
    """Within this block a SIGTERM acts as a Ctrl-C, so that the engine holds it until the running step has ended.

    Yields a list that gets an entry for each SIGTERM.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        on_interrupt = signal.getsignal(signal.SIGINT)
        if not callable(on_interrupt):  # SIGINT is ignored, as for a job in a shell's background
            raise KeyboardInterrupt
        on_interrupt(signal.SIGINT, frame)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGTERM, before)
