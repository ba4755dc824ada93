"""The order in which the engine gets the requests of one run, and the number of each request."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from nanovllm.engine.llm_engine import OPEN_RUN, LLMEngine
from nanovllm.engine.sequence import Request, Sequence


class Order:
    """Hands requests to `LLMEngine.run`, and tells the number of each request that has ended.

    The number is the request's place in the caller's order. Requests get the engine's numbers in the
    caller's order, too, and their seeds follow from these numbers. So its tokens are the same in any order.

    This class keeps the caller's order. engine/admission.py and features/adapters/groups.py have classes that change
    it: they override `list_requests`.
    """

    activity = OPEN_RUN
    """The name under which the run claims the engine: see `LLMEngine.run`."""

    def __init__(self, engine: LLMEngine, requests: Iterable[Request | None]) -> None:
        """
        Args:
            requests: may be endless. None says that no request is ready now.
        """
        self._engine = engine
        self._requests = requests
        self._numbers: dict[int, int] = {}
        """The numbers of the requests that the engine has, by the ids of their first sequences."""

    def __iter__(self) -> Iterator[Request | None]:
        for item in self.list_requests():
            if item is None:
                yield None
                continue
            number, request = item
            assert request.numbers is not None
            seq_id = request.numbers[1]
            self._numbers[seq_id] = number
            yield request

    def list_requests(self) -> Iterator[tuple[int, Request] | None]:
        """Yield each request with its number, in the order of this class. None says that no request is ready now."""
        number = 0
        for request in self._requests:
            if request is None:
                yield None
                continue
            yield number, replace(request, numbers=self._engine.next_numbers(request.params.n))
            number += 1

    def take_number(self, seq: Sequence) -> int:
        """Return the number of a request that has ended, and forget it.

        Args:
            seq: the request's first sequence.
        """
        return self._numbers.pop(seq.seq_id)
