"""A thread that works ahead on the items that come next."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, local
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

_thread = local()


def is_unwanted() -> bool:
    """Tell whether nobody waits for this thread's work any more: the `work_ahead` that started the thread was closed.

    Work that takes long asks from time to time, and raises any exception to end. Nobody sees the exception.
    """
    closed: Event | None = getattr(_thread, "closed", None)
    return closed is not None and closed.is_set()


def work_ahead(items: Iterable[S], work: Callable[[S], T], count: int) -> Generator[tuple[S, "Future[T]"], None, None]:
    """Yield each item with a future of work(item), in order. One thread does the work while the caller goes on.

    The items are taken in the caller's thread, up to `count` of them before the first is yielded. Close the generator:
    that waits for the work in hand, which can ask `is_unwanted`, and drops the rest.
    """
    coming: deque[tuple[S, Future[T]]] = deque()
    closed = Event()
    pool = ThreadPoolExecutor(1, thread_name_prefix="ahead", initializer=setattr, initargs=(_thread, "closed", closed))
    try:
        for item in items:
            coming.append((item, pool.submit(work, item)))
            if len(coming) > count:
                yield coming.popleft()
        while coming:
            yield coming.popleft()
    finally:
        closed.set()
        pool.shutdown(cancel_futures=True)
