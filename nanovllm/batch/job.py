"""A batch job from its input to its exit status."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.batch.answers import error_line, result_line
from nanovllm.batch.compact import DigestSet, LineSet
from nanovllm.batch.journal import Journal, OutputError, open_journal, write_json
from nanovllm.batch.protocol import Envelope, LineError, prepare, read_envelope
from nanovllm.batch.source import is_file, read_lines, survey
from nanovllm.batch.status import Status
from nanovllm.batch.tally import Tally
from nanovllm.config import EngineConfig

if TYPE_CHECKING:
    from nanovllm.engine.request import Request
    from nanovllm.llm import LLM
    from nanovllm.outputs import Output

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """What to run, from where to where.

    Attributes:
        input, output: paths, or "-".
        model_name: the one `model` that lines may name; answers name it too.
        stats: where to write the summary as JSON.
    """

    input: str
    output: str
    config: EngineConfig
    model_name: str
    overwrite: bool = False
    stats: str | None = None


class Answer(NamedTuple):
    """A line of results; output is None if it is an error."""

    line: bytes
    output: "Output | None"


def answer_lines(
    llm: "LLM",
    lines: Iterable[tuple[int, bytes]],
    emit: Callable[[Answer], None],
    model_name: str,
    done: Container[int] = (),
) -> None:
    """Answer every line that is not done, in the order of completion; lines are taken lazily.

    Args:
        lines: (number, line).
        emit: is called with each answer.
        done: numbers of the lines that have an answer. Their ids count as seen.
    """
    ids, running = DigestSet(), dict[int, Envelope]()

    def requests() -> Iterator["Request"]:
        count = 0
        for number, raw in lines:
            try:
                envelope = read_envelope(raw, number, ids.add)
                if number not in done:
                    request = prepare(envelope, llm, model_name)
                    running[count] = envelope
                    count += 1
                    yield request
            except LineError as error:
                if number not in done:
                    emit(Answer(error_line(number, error), None))

    for index, output in llm.stream(requests()):
        emit(Answer(result_line(running.pop(index), output, model_name, llm.token_text), output))


def _load(config: EngineConfig) -> "LLM":
    # On CPUs, oneDNN multiplies bfloat16 with code made for each shape, and keeps, as torch does once more, that of the
    # last 1024. A long job has a shape for every number of tokens in a step: a gigabyte. 64 were measured as fast.
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")
    from nanovllm.llm import LLM

    options = asdict(config)
    return LLM(options.pop("model"), **options)


def run_job(job: Job, load: "Callable[[EngineConfig], LLM]" = _load) -> Status:
    """Run a job, or go on with it. What went wrong is logged, and told by the status."""
    return conclude(job, lambda tally: _run(job, tally, load))


def conclude(job: Job, run: Callable[[Tally], None]) -> Status:
    """Run a job by a function that raises a ValueError for what is wrong from the start, other errors for later ones.

    What went wrong is logged, and told by the status; the summary is logged and written.
    """
    tally = Tally()
    with _TermAsInterrupt() as term:
        try:
            if job.stats is not None and not Path(job.stats).absolute().parent.is_dir():
                raise ValueError(f"the folder of --stats {job.stats} does not exist")
            run(tally)
            status = Status.LINES_FAILED if tally.num_failed else Status.OK
        except KeyboardInterrupt:
            status = Status.TERMINATED if term.received else Status.INTERRUPTED
        except OutputError as error:
            logger.error("%s", error)
            status = Status.OUTPUT_FAILED
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


def _run(job: Job, tally: Tally, load: "Callable[[EngineConfig], LLM]") -> None:
    journal, done = _open(job, tally)
    try:
        if tally.num_lines == len(done):
            return
        if done:
            logger.info("%s: going on after %d answers", job.output, len(done))
        with closing(load(job.config)) as llm, tally.show(llm.stats):

            def emit(answer: Answer) -> None:
                journal.append(answer.line)
                tally.count(answer.output)

            try:
                answer_lines(llm, read_lines(job.input), emit, job.model_name, done)
            except ValueError as error:
                raise RuntimeError(str(error)) from error  # nothing that a line could cause
    finally:
        journal.close()


def _open(job: Job, tally: Tally) -> tuple[Journal, LineSet]:
    """The journal, and the lines that are done; ValueError if job and journal do not go together."""
    card = fingerprint(job, tally) if is_file(job.input) else None
    if not is_file(job.input) or not is_file(job.output):
        logger.warning("a job from or to a pipe cannot be gone on with: if it ends early, its work is lost")
    journal, earlier = open_journal(job.output, card, job.overwrite)
    tally.num_earlier, tally.num_failed = len(earlier.done), earlier.num_failed
    tally.num_succeeded = tally.num_earlier - tally.num_failed
    return journal, earlier.done


def fingerprint(job: Job, tally: Tally) -> dict[str, Any]:
    """Count the lines, and make the card that a job is known by when it is gone on with; ValueError if it cannot be."""
    if not Path(job.input).exists():
        raise ValueError(f"the input {job.input} does not exist")
    if Path(job.output).exists() and Path(job.output).samefile(job.input):
        raise ValueError(f"{job.input} is the input and the output")
    found = survey(job.input)
    tally.num_lines = found.num_lines
    options = job.config.that_affect("results")
    return {"input": asdict(found), "options": {**options, "served_model_name": job.model_name}}


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
