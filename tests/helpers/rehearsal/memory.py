"""The device's memory, counted: allocations of tensors, the pools that they come from, and a limit."""

import weakref

import torch

from helpers.rehearsal.timeline import RehearsalError, Stream, Time, Timeline

GRANULE = 512
"""Bytes: CUDA's allocator in torch gives multiples of it."""
GRAPH_BYTES = 1 << 16
"""Bytes that the nodes of one captured graph take."""


class Pool:
    """Memory that torch keeps; only `allocated` bytes of it hold tensors. Each group of graphs has one of its own."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self.graphs = 0
        """How many graphs use it."""


class Memory:
    """One allocation. Every tensor that lies in it refers to it; when the last one goes, the bytes are free again."""

    def __init__(
        self,
        num_bytes: int,
        counted: "CountedMemory | None",
        pool: Pool | None,
        captured_by: int,
        stream: Stream | None = None,
    ) -> None:
        """
        Args:
            counted: None for pinned memory of the host, which no device counts.
            captured_by: the number of the graph in whose capture this is allocated; 0 for none.
            stream: the current one. Once the memory is free, the next tensor of this stream may get it.
        """
        self.captured_by = captured_by
        self.pool = pool
        self.stale: str | None = None
        """Why the values must not be read; None if they may."""
        self._uses: Time = {}
        self._recorded: set[int] = set()
        if counted is not None and pool is not None:
            size = -(-num_bytes // GRANULE) * GRANULE
            counted.take(size, pool)
            weakref.finalize(self, counted.give_back, size, pool).atexit = False
            if stream is not None and not captured_by:
                note_end = weakref.finalize(self, counted.note_end, stream, self._uses, self._recorded)
                note_end.atexit = False

    def record(self, stream: Stream) -> None:
        """Do what Tensor.record_stream does: this memory is free only when the stream's work so far has ended."""
        self._recorded.add(stream.number)

    def use(self, stream: Stream, timeline: Timeline, time: Time) -> None:
        """Note that a piece of work on a stream, which ends at `time`, uses this memory."""
        if self.stale is not None:
            raise RehearsalError(f"a tensor is used that {self.stale}")
        for number, count in self._uses.items():
            if time.get(number, 0) < count:
                raise RehearsalError(
                    f"stream {stream.number} uses a tensor while stream {number} may still work on it: "
                    "no event, wait or synchronisation puts one after the other"
                )
        self._uses.clear()
        self._uses[stream.number] = time[stream.number]


class CountedMemory:
    """All memory of a device."""

    def __init__(self, total: int, others: int) -> None:
        """
        Args:
            total: bytes.
            others: bytes that CUDA itself and other processes hold.
        """
        self.total = total
        self.others = others
        self.pools = [Pool()]
        """The first is the one for tensors outside captures."""
        self.peak = 0
        self.complaints: list[str] = []
        """Uses of memory after it was freed; the next call raises them."""

    def note_end(self, stream: Stream, uses: Time, recorded: set[int]) -> None:
        """Complain if memory of a stream is freed while another one may still work on it.

        torch gives it to the stream's next tensor at once, unless `record_stream` has named the other stream.
        """
        late = [number for number, count in uses.items() if stream.knows().get(number, 0) < count]
        for number in set(late) - recorded:
            self.complaints.append(
                f"a tensor of stream {stream.number} is freed while stream {number} may still work on it: record_stream"
            )

    @property
    def allocated(self) -> int:
        return sum(pool.allocated for pool in self.pools)

    @property
    def reserved(self) -> int:
        return sum(pool.reserved for pool in self.pools)

    @property
    def free(self) -> int:
        graphs = sum(pool.graphs for pool in self.pools)
        return self.total - self.others - self.reserved - GRAPH_BYTES * graphs

    def take(self, size: int, pool: Pool) -> None:
        """Allocate bytes in a pool, which grows if it must; raises torch's error if the device has no more."""
        pool.allocated += size
        grown = max(pool.allocated - pool.reserved, 0)
        if grown > self.free:
            pool.allocated -= size
            raise torch.OutOfMemoryError(f"{size} bytes are asked for, and {self.free} are free")
        pool.reserved += grown
        self.peak = max(self.peak, self.allocated)

    def give_back(self, size: int, pool: Pool) -> None:
        pool.allocated -= size

    def empty_cache(self) -> None:
        """Give back what holds no tensor and belongs to no graph."""
        for pool in self.pools:
            if not pool.graphs:
                pool.reserved = pool.allocated
