"""One engine for many threads, or for the tasks of an asyncio loop: all their requests run in the same steps."""

import atexit
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, as_completed
from contextlib import closing
from threading import RLock, Thread

from nanovllm.engine.claim import Activity
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.order import Order
from nanovllm.engine.sequence import Request
from nanovllm.outputs import Output

ACTIVITY = Activity("submit()", "has requests in this engine: wait for their futures first, or use submit() here, too")
"""The run of this thread."""
ENDING = "the program ends"


class EngineThread:
    """A queue in front of an engine, and a thread that runs the engine's loop for whoever submits requests.

    So the last sequences of one caller run beside the first of the next, and the KV cache stays full. The thread ends
    when no request is left, and the next request starts another one. While it runs, every other activity is refused by
    the engine's claim, and while the claim is another one's, the futures raise that.

    A program that ends does not wait for all requests: the thread stops between two steps.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._lock = RLock()  # reentrant, because a signal's handler may submit
        self._incoming: deque[tuple[Request, Future[Output]]] = deque()
        self._thread: Thread | None = None
        self._program_ends = False

    def submit(self, request: Request) -> "Future[Output]":
        """Queue a request and return at once. Many threads may call it at a time.

        The future's result is the request's output. If the engine fails or is closed, it raises the reason. A future
        that is cancelled before its request runs takes no step.

        Raises:
            RuntimeError: this process was forked, or the program ends.
        """
        self._engine.claim.check_process()  # before the lock
        future: Future[Output] = Future()
        with self._lock:
            if self._program_ends:
                raise RuntimeError(ENDING)
            if self._thread is None:
                thread = Thread(target=self._run, name="engine", daemon=True)
                thread.start()  # waits for the lock before it ends
                self._thread = thread
                # A daemon thread within C++ would abort the interpreter's exit. What is registered last runs first, so
                # the thread ends before the followers of this engine.
                atexit.register(self._end)
            self._incoming.append((request, future))
        return future

    def _end(self) -> None:
        """Stop the thread after its step, because the program ends."""
        if (thread := self._thread) is not None:
            self._program_ends = True
            thread.join()

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[int, Output]]:
        """Submit all requests at once, and yield (position, output) as each ends. Many threads may call it at a time.

        Raises:
            RuntimeError: the engine has stopped.
        """
        positions = {self.submit(request): position for position, request in enumerate(requests)}
        for future in as_completed(positions):
            if (error := future.exception()) is not None:
                raise RuntimeError(f"the engine has stopped: {error}") from error
            yield positions[future], future.result()

    def _run(self) -> None:
        """Run requests until none is left. If the engine fails, give the error to all who wait."""
        waiting: dict[int, Future[Output]] = {}
        done: list[tuple[Future[Output], Output]] = []
        try:
            while True:
                order = Order(self._engine, self._take_requests(waiting))
                with closing(self._engine.run(order, ACTIVITY)) as run:
                    for ended in run:
                        for seq in ended:
                            output = self._engine.make_output(seq)
                            done.append((waiting.pop(order.take_number(seq)), output))
                        if waiting or self._incoming:
                            _deliver(done)
                        if self._program_ends:
                            raise RuntimeError(ENDING)
                _deliver(done)  # whoever gets the last results finds the engine free
                with self._lock:
                    if not self._incoming:
                        self._forget_thread()
                        return
        except BaseException as error:
            with self._lock:
                queued = [future for _, future in self._incoming if future.set_running_or_notify_cancel()]
                self._incoming.clear()
                self._forget_thread()
            _deliver(done)
            for future in [*waiting.values(), *queued]:
                future.set_exception(error)

    def _forget_thread(self) -> None:
        self._thread = None
        atexit.unregister(self._end)

    def _take_requests(self, waiting: "dict[int, Future[Output]]") -> Iterator[Request | None]:
        """Yield the queued requests, and None whenever there is none at the moment.

        Args:
            waiting: receives the future of each request, by the number that `Order` gives to it.
        """
        number = 0
        while True:
            try:
                request, future = self._incoming.popleft()
            except IndexError:
                yield None
                continue
            if future.set_running_or_notify_cancel():
                waiting[number] = future
                number += 1
                yield request


def _deliver(done: list[tuple[Future[Output], Output]]) -> None:
    """Set the results of futures, and empty the list. A callback of a future may call `submit`."""
    while done:
        future, output = done.pop(0)
        future.set_result(output)
