"""A ring of slots in shared memory: rank 0 writes plans, every follower reads every one of them, in order."""

import errno
import mmap
import os
import resource
import tempfile
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import xxhash

from nanovllm.config import ResolvedConfig
from nanovllm.engine.plan import IntArray, StepPlan

NUM_SLOTS = 4
"""The fewest slots of a ring."""
CACHE_LINE = 8
"""int64 elements of a cache line. Each process writes to cache lines of its own."""
LONGEST_SPIN = 100e-6
"""Seconds for which an end polls without sleeping."""
LONGEST_SLEEP = 2e-3
"""Seconds of the longest sleep between two polls."""

HEADER = 5
"""How many counts stand at the beginning of a packed plan."""
SMALLEST_CAPACITY = 16 << 10
"""int32 elements of a slot at least: a command of 64 KiB fits, which names two folders, or one tensor of the model."""

T = TypeVar("T")


def pack_plan(plan: StepPlan) -> IntArray:
    """Return the plan as one int32 array: a header of counts, then its arrays one after another."""
    return np.concatenate((np.array(plan.counts, np.int32), *plan.arrays()))


def unpack_plan(packed: IntArray) -> StepPlan:
    """Return the plan that `pack_plan` packed; its arrays are views of `packed`."""
    return StepPlan.unpack(packed[HEADER:], packed[:HEADER].tolist())


def make_anonymous_file() -> int:
    """Return a descriptor of memory without a name: only who inherits it can map it, and no file can be left behind."""
    if hasattr(os, "memfd_create"):
        fd: int = os.memfd_create("nanovllm-plans")
        os.fchmod(fd, 0o600)
        return fd
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def resize(fd: int, size: int) -> None:
    """Give a file its size; ValueError if a limit forbids it."""
    try:
        os.ftruncate(fd, size)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        raise ValueError(
            f"rank 0 passes its plans to the other ranks in shared memory of {size} bytes, and RLIMIT_FSIZE, the limit "
            f"of a file's size, is {limit} bytes: raise it (`ulimit -f`, in units of 1,024 bytes)"
        ) from error


def make_ring(config: ResolvedConfig, fd: int) -> "Ring":
    """Return one end of the ring for an engine's plans. It has a slot for each plan in flight, and one more.

    The plan of a draft model has a mark before it, which takes one element.
    """
    slots = max(NUM_SLOTS, config.depth + 1)
    capacity = max(1 + HEADER + StepPlan.max_size(config), SMALLEST_CAPACITY)
    return Ring(fd, config.num_ranks - 1, capacity, slots)


class Ring:
    """One end of the ring. Rank 0 calls only `write`, followers call only `read`.

        acknowledgements   int64 [num_readers]           how many messages each reader has taken
        headers            int64 [num_slots]             sequence number, length, digest
        slots              int32 [num_slots, capacity]   message n (from 1) lies in slot n % num_slots

    Each acknowledgement and each header has a cache line of its own. The writer reuses a slot only when every reader
    has acknowledged its message, so no message is lost, however slow a reader is. A reader accepts slot n % num_slots
    when its sequence number is n *and* the digest fits what was copied. So it does not matter in which order one core's
    writes reach another, which some processors do not guarantee.
    """

    def __init__(self, fd: int, num_readers: int, capacity: int, num_slots: int = NUM_SLOTS) -> None:
        """
        Args:
            fd: the file that `make_anonymous_file` made. It may be closed afterwards. The first end sets its size.
            capacity: int32 elements of the longest message.
        """
        capacity += capacity % 2  # so that each slot starts at a multiple of 8 bytes
        ack_bytes = 8 * CACHE_LINE * num_readers
        header_bytes = 8 * CACHE_LINE * num_slots
        size = ack_bytes + header_bytes + 4 * capacity * num_slots
        if os.fstat(fd).st_size < size:
            resize(fd, size)
        memory = memoryview(mmap.mmap(fd, size))
        self.capacity = capacity
        self._num_slots = num_slots
        self._acknowledged = memory[:ack_bytes].cast("q")
        self._headers = memory[ack_bytes : ack_bytes + header_bytes].cast("Q")
        slots = np.frombuffer(memory[ack_bytes + header_bytes :], np.int32)
        self._slots: IntArray = slots.reshape(num_slots, capacity)
        self._readers = [reader * CACHE_LINE for reader in range(num_readers)]
        self._count = 0  # messages that this end has written, or read

    def write(self, message: IntArray, check_readers: Callable[[], None]) -> None:
        """Wait until the next slot is free, and write a message into it.

        Args:
            message: int32 [at most capacity].
            check_readers: called while waiting for a reader; raises if waiting on is useless.

        Raises:
            RuntimeError: the message is longer than a slot; nothing has been written.
        """
        length = len(message)
        if length > self.capacity:
            raise RuntimeError(f"a message of {length} elements does not fit a slot of {self.capacity}")
        n = self._count + 1
        self.wait_for_readers(check_readers, self._num_slots - 1)
        slot = n % self._num_slots
        self._slots[slot, :length] = message
        header = slot * CACHE_LINE
        self._headers[header + 1] = length
        self._headers[header + 2] = xxhash.xxh3_64_intdigest(message.data, seed=n)
        self._headers[header] = n
        self._count = n

    def wait_for_readers(self, check_readers: Callable[[], None], num_unread: int = 0) -> None:
        """Wait until every reader has read all messages but the last num_unread."""
        last = self._count - num_unread
        _poll(lambda: all(self._acknowledged[i] >= last for i in self._readers) or None, check_readers)

    def read(self, reader: int) -> IntArray:
        """Wait for the next message and return a copy of it. It does not end if rank 0 does: see worker.py."""
        n = self._count + 1
        message = _poll(lambda: self._try_read(n))
        self._acknowledged[reader * CACHE_LINE] = n
        self._count = n
        return message

    def _try_read(self, n: int) -> IntArray | None:
        """Return message n, or None if it has not arrived as a whole."""
        slot = n % self._num_slots
        header = slot * CACHE_LINE
        if self._headers[header] != n:
            return None
        message = self._slots[slot, : min(self._headers[header + 1], self.capacity)].copy()
        return message if xxhash.xxh3_64_intdigest(message.data, seed=n) == self._headers[header + 2] else None


def _poll(attempt: Callable[[], T | None], check: Callable[[], None] = lambda: None) -> T:
    """Call `attempt` until it returns something else than None, and return that: without sleeps at first, then with.

    A sleep is an eighth of the time waited so far, so it makes the wait at most an eighth longer.
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
