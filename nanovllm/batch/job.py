"""A batch job from its input to its exit status."""

import logging
import os
import shlex
import signal
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from nanovllm.batch.answers import Answer, error_answer, result_answer
from nanovllm.batch.compact import DigestSet, LineSet
from nanovllm.batch.journal import OutputError, open_journal
from nanovllm.batch.manifest import Manifest, remove_stale, write_json
from nanovllm.batch.protocol import Envelope, LineError, foreign_model, prepare, read_envelope
from nanovllm.batch.source import MAX_LINE_BYTES, STANDARD, InputDigest, InputError, Line, Reading, Source, is_file
from nanovllm.batch.status import Status
from nanovllm.batch.tally import Tally
from nanovllm.config import EngineConfig
from nanovllm.utils.ahead import work_ahead
from nanovllm.utils.checks import LONGEST_QUOTE, quote

if TYPE_CHECKING:
    from nanovllm.engine.request import Request
    from nanovllm.llm import LLM

logger = logging.getLogger(__name__)

LINES_AHEAD = 64
"""Lines that are read, and tokenised while steps run, before the engine asks for them."""


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
    options = job.config.that_affect("results")
    return {"input": asdict(digest), "options": {**options, "served_model_name": job.model_name}}


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
        if path is None or not is_file(path):
            continue
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


def answer_lines(
    llm: "LLM",
    lines: Iterable[Line],
    emit: Callable[[Answer], None],
    model_name: str,
    done: Container[int] = (),
) -> None:
    """Answer every line that is not done, in the order of completion; lines are taken lazily.

    Args:
        emit: is called with each answer.
        done: numbers of the lines that have an answer. Their ids count as seen.
    """
    ids, running = DigestSet(), dict[int, Envelope]()

    def envelopes() -> Iterator[Envelope]:
        for line in lines:
            is_done = line.number in done
            try:
                envelope = read_envelope(line, ids.add)
                if not is_done:
                    yield envelope
            except LineError as error:
                if not is_done:
                    emit(error_answer(line.number, error))

    def requests() -> Iterator["Request"]:
        count = 0
        for envelope, preparing in work_ahead(envelopes(), lambda e: prepare(e, llm, model_name), LINES_AHEAD):
            try:
                request = preparing.result()
            except LineError as error:
                emit(error_answer(envelope.number, error))
            else:
                running[count] = envelope
                count += 1
                yield request

    for index, output in llm.stream(requests()):
        emit(result_answer(running.pop(index), output, model_name, llm.token_text))


def _load(config: EngineConfig) -> "LLM":
    # On CPUs, oneDNN multiplies bfloat16 with code made for each shape, and keeps, as torch does once more, that of the
    # last 1024. A long job has a shape for every number of tokens in a step: a gigabyte. 64 were measured as fast.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")
    from nanovllm.llm import LLM

    options = asdict(config)
    return LLM(options.pop("model"), **options)


def run_job(job: Job, load: "Callable[[EngineConfig], LLM]" = _load) -> Status:
    """Run a job in this process, or resume it. What went wrong is logged, and told by the status."""
    return supervise(job, lambda work: _answer_here(work, load))


def _answer_here(work: OpenJob, load: "Callable[[EngineConfig], LLM]") -> None:
    job, tally = work.job, work.tally
    reading = Reading(work.source)
    lines = (line for line in reading if work.first is None or line.number in work.first.numbers)
    with closing(load(job.config)) as llm, tally.show(llm.stats):
        work.check_engine(llm.provenance)
        try:
            answer_lines(llm, lines, work.emit, job.model_name, work.done)
        except ValueError as error:
            raise RuntimeError(str(error)) from error  # nothing that a line could cause
    work.check_complete(reading.numbers, reading.digest)


def supervise(job: Job, answer: Callable[[OpenJob], None]) -> Status:
    """Open a job, have its lines answered, and turn what goes wrong into a message and a status.

    Args:
        answer: raises a ValueError for what is wrong from the start, other errors for later ones.
    """
    tally, is_open = Tally(), False
    with _TermAsInterrupt() as term:
        try:
            with closing(OpenJob(job, tally)) as work:
                is_open = True
                if work.num_left != 0:
                    if work.done:
                        logger.info("%s: resumed after %d answers", job.output, len(work.done))
                    answer(work)
            status = Status.LINES_FAILED if tally.num_failed else Status.OK
        except KeyboardInterrupt:
            status = Status.TERMINATED if term.received else Status.INTERRUPTED
        except OutputError as error:
            logger.error("%s", error)
            status = Status.OUTPUT_FAILED
        except InputError as error:
            logger.error("%s", error)
            if not is_open:
                return Status.USAGE
            status = Status.BROKEN
        except IncompleteError as error:
            logger.error("%s", error)
            status = Status.INCOMPLETE
        except ValueError as error:
            logger.error("%s", error)
            return Status.USAGE
        except Exception:
            logger.exception("the job broke")
            status = Status.BROKEN
    for line in tally.describe().splitlines():
        logger.info("%s", line)
    if job.stats is not None:
        try:
            write_json(Path(job.stats), {"status": int(status), **tally.as_dict()})
        except OSError as error:
            logger.error("%s cannot be written: %s", job.stats, error)
            return status or Status.OUTPUT_FAILED
    return status


class _TermAsInterrupt:
    """Within this block a SIGTERM is a Ctrl-C, so that the engine holds it until the step in hand has ended."""

    received = False

    def _handle(self, _signal: int, frame: FrameType | None) -> None:
        self.received = True
        on_interrupt = signal.getsignal(signal.SIGINT)
        if not callable(on_interrupt):  # ignored, as in a shell's background
            raise KeyboardInterrupt
        on_interrupt(signal.SIGINT, frame)

    def __enter__(self) -> "_TermAsInterrupt":
        self._is_installed = threading.current_thread() is threading.main_thread()
        if self._is_installed:
            self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGTERM, self._before)
