"""A batch job from its input to its exit status."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from nanovllm.config import EngineConfig
from nanovllm.jobs.answers import Answer, error_answer, result_answer
from nanovllm.jobs.compact import DigestSet
from nanovllm.jobs.journal import OutputError
from nanovllm.jobs.manifest import write_json
from nanovllm.jobs.open_job import IncompleteError, Job, OpenJob
from nanovllm.jobs.protocol import Envelope, LineError, prepare, read_envelope
from nanovllm.jobs.source import InputError, Line, Reading
from nanovllm.jobs.status import Status
from nanovllm.jobs.tally import Tally
from nanovllm.utils.ahead import work_ahead

if TYPE_CHECKING:
    from nanovllm.engine.request import Request
    from nanovllm.llm import LLM

logger = logging.getLogger(__name__)

LINES_AHEAD = 64
"""Lines that are read, and tokenised while steps run, before the engine asks for them."""


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
    with closing(load(job.config)) as llm, tally.show(llm.stats) as bar:
        llm.observe(bar)
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
