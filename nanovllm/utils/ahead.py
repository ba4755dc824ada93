"""Work on coming items in a thread, while others are used."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def work_ahead(items: Iterable[S], work: Callable[[S], T], count: int) -> Iterator[tuple[S, "Future[T]"]]:
    """Each item, in order, with the result of the work on it, which may still be under way in a thread of its own.

    The items are taken in the caller's thread, at most count before they are given out.
    """
    coming: deque[tuple[S, Future[T]]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="ahead")
    try:
        for item in items:
            coming.append((item, pool.submit(work, item)))
            if len(coming) > count:
                yield coming.popleft()
        while coming:
            yield coming.popleft()
    finally:
        pool.shutdown(cancel_futures=True)
