"""A ring of slots in shared memory: rank 0 writes plans, every follower reads every one of them, in order."""

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import xxhash

from nanovllm.engine.plan import IntArray

NUM_SLOTS = 4
CACHE_LINE = 8
"""int64 elements of one; what different processes write lies on different lines."""
LONGEST_SPIN, LONGEST_SLEEP = 100e-6, 2e-3
"""Seconds, while waiting for the other end."""

T = TypeVar("T")


def anonymous_file() -> int:
    """A descriptor of memory that has no name: only those who are handed it can map it, and nothing can leak."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("nanovllm-plans")
        os.fchmod(fd, 0o600)
        return fd
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Ring:
    """One end of the ring; the writer's and the readers' differ only in which methods they call.

        acknowledgements   [num_readers]           how many messages the reader has taken
        headers            [NUM_SLOTS]             sequence number, length, digest
        slots              [NUM_SLOTS, capacity]   message n (from 1) lies in slot n % NUM_SLOTS

    A slot is written again only when every reader has acknowledged what lies in it, so nothing is lost, however slow
    a reader is. A reader takes slot n % NUM_SLOTS when its sequence number is n *and* the digest is that of what it
    copied: so nothing depends on the order in which one core's writes reach another, which some processors relax.
    """

    def __init__(self, fd: int, num_readers: int, capacity: int) -> None:
        """
        Args:
            fd: of a file; it may be closed afterwards. The first to come makes it as large as it must be.
            capacity: int32 elements of the longest message.
        """
        capacity += capacity % 2  # so that each slot starts at a multiple of 8 bytes
        ack_bytes, header_bytes = 8 * CACHE_LINE * num_readers, 8 * CACHE_LINE * NUM_SLOTS
        size = ack_bytes + header_bytes + 4 * capacity * NUM_SLOTS
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        memory = memoryview(mmap.mmap(fd, size))
        self.capacity = capacity
        self._acknowledged = memory[:ack_bytes].cast("q")
        self._headers = memory[ack_bytes : ack_bytes + header_bytes].cast("Q")
        slots = np.frombuffer(memory[ack_bytes + header_bytes :], np.int32)
        self._slots: IntArray = slots.reshape(NUM_SLOTS, capacity)
        self._readers = [reader * CACHE_LINE for reader in range(num_readers)]
        self._count = 0  # messages written, or taken, by this end

    def write(self, message: IntArray, check: Callable[[], None]) -> None:
        """Put a message into the next slot, once it is free.

        Args:
            message: int32 [at most capacity].
            check: called while waiting for a reader; raises when there is no use in waiting on.

        Raises:
            RuntimeError: the message is longer than a slot; nothing has been written.
        """
        length = len(message)
        if length > self.capacity:
            raise RuntimeError(f"a message of {length} elements does not fit a slot of {self.capacity}")
        n = self._count + 1
        _poll(lambda: self._all_took(n - NUM_SLOTS) or None, check)
        slot = n % NUM_SLOTS
        self._slots[slot, :length] = message
        header = slot * CACHE_LINE
        self._headers[header + 1] = length
        self._headers[header + 2] = xxhash.xxh3_64_intdigest(message.data, seed=n)
        self._headers[header] = n
        self._count = n

    def read(self, reader: int, check: Callable[[], None] = lambda: None) -> IntArray:
        """Wait for the next message, and take it: the array is the caller's own."""
        n = self._count + 1
        message = _poll(lambda: self._try_read(n), check)
        self._acknowledged[reader * CACHE_LINE] = n
        self._count = n
        return message

    def _try_read(self, n: int) -> IntArray | None:
        slot = n % NUM_SLOTS
        header = slot * CACHE_LINE
        if self._headers[header] != n:
            return None
        message = self._slots[slot, : min(self._headers[header + 1], self.capacity)].copy()
        return message if xxhash.xxh3_64_intdigest(message.data, seed=n) == self._headers[header + 2] else None

    def _all_took(self, n: int) -> bool:
        return all(self._acknowledged[reader] >= n for reader in self._readers)


def _poll(attempt: Callable[[], T | None], check: Callable[[], None]) -> T:
    """The first result that is not None: asked for busily at first, then with sleeps.

    A sleep is an eighth of the time waited so far, so it never makes the wait much longer than it had to be.
    """
    if (result := attempt()) is not None:
        return result
    since = time.perf_counter()
    while (result := attempt()) is None:
        waited = time.perf_counter() - since
        if waited < LONGEST_SPIN:
            os.sched_yield()
        else:
            check()
            time.sleep(min(waited / 8, LONGEST_SLEEP))
    return result
