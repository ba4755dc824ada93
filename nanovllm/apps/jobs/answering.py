"""Answers the lines of a job: reads them, has the engine run their requests, and writes the results."""

from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.apps.jobs.compact_sets import DigestSet
from nanovllm.apps.jobs.forms import FORMS, prepare_line
from nanovllm.apps.jobs.line_adapters import LineAdapters
from nanovllm.apps.jobs.request_lines import LineError, RequestLine, add_defaults, read_request_line
from nanovllm.apps.jobs.result_lines import ResultLine, copy_result, make_error_line
from nanovllm.apps.jobs.result_shards import ArrayReader
from nanovllm.apps.jobs.reuse import KnownAnswers, name_request
from nanovllm.apps.jobs.source import Line
from nanovllm.utils.work_ahead import work_ahead

if TYPE_CHECKING:
    from nanovllm.engine.admission import Admission
    from nanovllm.engine.sequence import Request
    from nanovllm.llm import LLM
    from nanovllm.outputs import Output

LINES_PREPARED = 64
"""A thread reads and tokenises up to this many lines ahead, while steps run."""
MAX_WAITING = 4096
"""So many lines may wait for the answer of an equal request that runs. A further one is computed, too."""


class RunningLine(NamedTuple):
    """A line whose requests were handed to the engine, and the outputs of those that have ended, by position."""

    line: RequestLine
    num_requests: int
    outputs: "dict[int, Output]"


@dataclass
class Answering:
    """Answers lines with one engine. Lines are read lazily, and written in the order in which they end.

        lines -> read -> prepare (by a thread, ahead) -> reuse -> admission -> adapters -> engine -> write

    A wrong line leaves this path at the stage that finds the error. That stage writes the error as the line's result.
    A line whose request was answered leaves it at `reuse`, and one whose request runs waits there.

    Attributes:
        write: is called with each result.
        defaults: the sampling parameters of lines that have no value of their own.
        adapters: brings the adapter of each line into the weights.
        done: the numbers of the lines that have a result. Their ids still count as seen.
        stream: runs the requests, and yields (number, output) as each ends; None means `llm.run_requests`.
        admission: reads further ahead, and chooses the next line; None keeps the given order.
        known: finds the answers of equal requests; None if they cannot be read again.
        arrays: reads the most likely tokens of each answer; None if nobody wants them.
    """

    llm: "LLM"
    write: Callable[[ResultLine], None]
    model_name: str
    defaults: Mapping[str, Any]
    adapters: LineAdapters
    done: Container[int] = ()
    stream: Callable[[Iterable[Any]], Iterator[tuple[int, Any]]] | None = None
    admission: "Admission | None" = None
    known: KnownAnswers | None = None
    arrays: ArrayReader | None = None
    _ids: DigestSet = field(default_factory=DigestSet, init=False)
    """The ids that lines had so far."""
    _running: dict[int, tuple[RunningLine, int]] = field(default_factory=dict, init=False)
    """For each request that the engine has: its line, and its position among the requests of that line."""
    _waiting: dict[str, list[RequestLine]] = field(default_factory=dict, init=False)
    """{name of a request that has no answer yet: the further lines that ask for it, without their bodies}."""
    _num_waiting: int = field(default=0, init=False)

    def answer(self, lines: Iterable[Line]) -> None:
        """Answer every line that is not done."""
        stream = self.stream or (self.llm.run_requests if self.arrays is None else self.arrays.run)
        # After a Ctrl-C the traceback keeps generators alive, and one of these has a thread. They are closed here.
        with (
            closing(self._prepare(lines)) as prepared,
            closing(self._reuse(prepared)) as new,
            closing(self._take_requests(new)) as requests,
        ):
            for number, output in stream(requests):
                self._end(number, output)

    def _read(self, lines: Iterable[Line]) -> Iterator[RequestLine]:
        for line in lines:
            is_done = line.number in self.done
            try:
                request_line = read_request_line(line, self._ids.add)
                if not is_done:
                    yield add_defaults(request_line, self.defaults)
            except LineError as error:
                if not is_done:
                    self.write(make_error_line(line.number, error))

    def _prepare(self, lines: Iterable[Line]) -> "Generator[tuple[RequestLine, list[Request]] | None, None, None]":
        """Yield lines with their requests; None if the next line is not ready, and the job can go on without it."""
        tasks = work_ahead(
            self._read(lines), lambda line: prepare_line(line, self.llm, self.model_name), LINES_PREPARED
        )
        with closing(tasks):
            for line, task in tasks:
                while self.admission is not None and self.admission.need_not_wait and not task.done():
                    yield None
                try:
                    requests = task.result()
                except LineError as error:
                    self.write(make_error_line(line.number, error))
                else:
                    yield line, requests

    def _reuse(
        self, prepared: "Iterator[tuple[RequestLine, list[Request]] | None]"
    ) -> "Generator[tuple[RequestLine, list[Request]] | None, None, None]":
        """Yield the lines that must be computed, and None as it comes."""
        for item in prepared:
            if item is None:
                yield None
                continue
            line, requests = item
            line = replace(line, request_name=name_request(line, requests))
            name = line.request_name
            if name in self._waiting and self._num_waiting < MAX_WAITING:
                self._waiting[name].append(replace(line, body={}))
                self._num_waiting += 1
            elif self.known is not None and (result := self.known.find(line)) is not None:
                self.write(result)
            else:
                if name:
                    self._waiting.setdefault(name, [])
                yield line, requests

    def _finish(self, line: RequestLine, result: ResultLine, error: LineError | None = None) -> None:
        """Write the result of a line, and those of the lines that wait for it.

        Args:
            error: what the result reports, if that is an error.
        """
        self.write(result)
        waiting = self._waiting.pop(line.request_name, ())
        self._num_waiting -= len(waiting)
        for other in waiting:
            if error is None:
                self.write(copy_result(result.line, other, self.model_name)._replace(arrays=result.arrays))
            else:
                self.write(make_error_line(other.number, LineError(error.code, str(error), other.custom_id)))

    def _take_requests(
        self, prepared: "Iterator[tuple[RequestLine, list[Request]] | None]"
    ) -> "Generator[Request | None, None, None]":
        """Yield the requests for the engine; None while none may run."""
        number = 0
        for item in prepared if self.admission is None else self.admission.reorder(prepared):
            if item is None:
                continue
            line, requests = item
            try:
                yield from self.adapters.change(line)
            except LineError as error:
                self._finish(line, make_error_line(line.number, error), error)
                continue
            running_line = RunningLine(line, len(requests), {})
            for position, request in enumerate(requests):
                self._running[number] = (running_line, position)
                number += 1
                yield request if self.arrays is None else self.arrays.ask(request)

    def _end(self, number: int, ended: Any) -> None:
        """Note the output of a request. If all requests of its line have ended, write the line's result.

        Args:
            ended: what the stream yields: the output, or its sequence if arrays are read.
        """
        running_line, position = self._running.pop(number)
        line, num_requests, outputs = running_line
        output, arrays = (ended, None) if self.arrays is None else self.arrays.read(line, ended)
        outputs[position] = output
        if len(outputs) < num_requests:
            return
        failed = next(filter(None, (one.get("error") for one in outputs.values())), None)
        if failed is not None:
            error = LineError("engine_error", failed, line.custom_id)
            self._finish(line, make_error_line(line.number, error), error)
        else:
            in_order = [outputs[i] for i in range(num_requests)]
            result = FORMS[line.url].answer(line, in_order, self.llm, self.model_name)
            self._finish(line, result._replace(arrays=arrays))
