"""Work on what comes next in a thread, while something else is done."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Thread
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


READ_AHEAD = 4 << 30
"""Bytes: what a fast disk reads while Python imports."""


def read_ahead(files: Iterable[Path]) -> None:
    """Have the system read the first of files into its cache, in a thread that nobody waits for.

    It is no more than a hint: whoever reads the files in earnest meets what is wrong with them.
    """

    def read() -> None:
        left = READ_AHEAD
        with suppress(OSError), open(os.devnull, "wb") as nowhere:
            for path in files:
                with path.open("rb") as file:  # sent, since that copies nothing, and leaves the interpreter alone
                    at = 0
                    while sent := os.sendfile(nowhere.fileno(), file.fileno(), at, left):
                        at, left = at + sent, left - sent

    Thread(target=read, daemon=True, name="read ahead").start()
