"""Graphs that note work instead of doing it, and do it again and again over the same tensors."""

import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from helpers.rehearsal.memory import Memory, Pool
from helpers.rehearsal.timeline import RehearsalError, Stream

if TYPE_CHECKING:
    from helpers.rehearsal.card import Card

_numbers = itertools.count(1)


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self, card: "Card") -> None:
        self._card = card
        self.number = next(_numbers)
        """Graphs are numbered in the order of their making, which is that of their capture."""
        self.nodes: list[Callable[[], None]] = []
        self._pool: Pool | None = None
        self._outside: dict[int, weakref.ref[Memory]] = {}
        """By id: what the work uses, and was allocated before the capture."""
        self._inside: list[weakref.ref[Memory]] = []
        self._is_ready = False

    def begin(self, pool: Pool | None) -> None:
        if self._pool is not None:
            raise RehearsalError("a graph is captured twice")
        self._pool = pool or Pool()
        if self._pool not in self._card.memory.pools:
            self._card.memory.pools.append(self._pool)
        self._pool.graphs += 1

    def end(self) -> None:
        self._is_ready = True
        if not self.nodes:
            raise RehearsalError("a graph was captured that does nothing")
        for memory in self._memories(self._inside):
            memory.stale = f"graph {self.number} computes, and that has not run yet"

    def pool(self) -> Pool:
        assert self._pool is not None
        return self._pool

    def allocate(self, num_bytes: int) -> Memory:
        """Return memory that is allocated within the capture."""
        memory = Memory(num_bytes, self._card.memory, self.pool(), self.number)
        self._inside.append(weakref.ref(memory))
        self._card.captured.append(weakref.ref(memory))
        return memory

    def add(self, node: Callable[[], None], memories: list[Memory]) -> None:
        """Note a piece of work, and the memory that it uses."""
        self.nodes.append(node)
        for memory in memories:
            if memory.captured_by != self.number:
                self._outside[id(memory)] = weakref.ref(memory)

    def replay(self) -> None:
        if not self._is_ready:
            raise RehearsalError("a graph is replayed that was not captured, or was reset")
        card = self._card
        card.check_no_capture("replays a graph")
        outside = [reference() for reference in self._outside.values()]
        if None in outside:
            raise RehearsalError("a graph is replayed that uses a tensor which has been freed since its capture")
        card.use([memory for memory in outside if memory is not None])
        # A graph that was captured later may have got memory which this one no longer held at the end of its capture.
        for memory in self._memories(card.captured):
            if memory.captured_by > self.number and memory.pool is self._pool:
                memory.stale = f"graph {self.number} of the same pool has overwritten"
        inside = self._memories(self._inside)
        for memory in inside:
            memory.stale = None
        card.use(inside)
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode():
            for node in self.nodes:
                node()

    def reset(self) -> None:
        if self._pool is not None:
            self._pool.graphs -= 1
        self._pool = None
        self._is_ready = False
        self.nodes.clear()

    @staticmethod
    def _memories(references: list[weakref.ref[Memory]]) -> list[Memory]:
        return [memory for memory in (reference() for reference in references) if memory is not None]


class capture(AbstractContextManager["capture"]):
    """Stands in for torch.cuda.graph."""

    def __init__(
        self, card: "Card", graph: Graph, pool: Pool | None, stream: Stream | None, capture_error_mode: str
    ) -> None:
        if stream is None:
            raise RehearsalError("a capture without a stream takes torch's own, which stays on one device")
        if capture_error_mode != "thread_local":
            raise RehearsalError("the CUDA calls of other threads would end this capture")
        self._card = card
        self._graph = graph
        self._pool = pool
        self._stream = stream

    def __enter__(self) -> "capture":
        self._card.timeline.synchronize()
        self._before = self._card.local.stream
        self._card.local.stream = self._stream
        self._card.local.graph = self._graph
        self._graph.begin(self._pool)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._card.local.graph = None
        self._card.local.stream = self._before
        if kind is None:
            self._graph.end()
