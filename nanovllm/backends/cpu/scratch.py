"""Memory that the results of CPU kernels borrow."""

import ctypes
import math
import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from nanovllm.backends.cpu.huge_pages import HUGE_PAGE, map_memory
from nanovllm.utils.integers import ceil_div

SMALLEST_LOAN = 32 << 20
"""Bytes of the smallest tensor whose memory is lent. glibc's malloc keeps smaller blocks by itself."""

SMALLEST_PIECE = 64 << 10
"""Bytes of the smallest piece of memory that `borrow_from` lends. Most results of a small step fit into it."""


class Scratch:
    """Lends memory to the tensors that operators return, and takes it back when the last view of one is gone.

    glibc's malloc gives every block of 32 MiB or more back to the system when it is freed. The next step would get new
    memory, which the system clears page by page while a kernel writes it.
    """

    def __init__(self, keeps_all: bool = False) -> None:
        """
        Args:
            keeps_all: keep every piece of memory as long as this object lives, so that its address stays valid.
        """
        self._free: list[mmap.mmap] = []
        self._keeps_all = keeps_all
        self._kept: list[mmap.mmap] = []  # with keeps_all every piece, lent or free

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor, as torch.empty does."""
        if (lender := _lender.get()) is not None:
            return lender.lend(*shape, dtype=dtype)
        if math.prod(shape) * dtype.itemsize < SMALLEST_LOAN or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=dtype)
        return self.lend(*shape, dtype=dtype)

    def lend(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor of at least one element.

        The smallest free memory that fits is lent. If none fits, new memory takes the place of the largest that is
        free, so this object never keeps more pieces than were lent at once. With `keeps_all` nothing is dropped.
        """
        count = math.prod(shape)
        size = count * dtype.itemsize
        if self._keeps_all:
            size = max(SMALLEST_PIECE, 1 << (size - 1).bit_length())  # few sizes, so that pieces fit others, too
        fitting = [memory for memory in self._free if len(memory) >= size]
        if fitting:
            memory = min(fitting, key=len)
            self._free.remove(memory)
        else:
            if self._free and not self._keeps_all:
                self._free.remove(max(self._free, key=len))
            memory = map_memory(ceil_div(size, HUGE_PAGE) * HUGE_PAGE if size > HUGE_PAGE else size)
            if self._keeps_all:
                self._kept.append(memory)
        # All views of the tensor share this ctypes array. When it is collected, nobody reads the memory any more.
        loan = (ctypes.c_char * len(memory)).from_buffer(memory)
        weakref.finalize(loan, self._free.append, memory).atexit = False
        return torch.frombuffer(loan, dtype=dtype, count=count).view(shape)


_lender: ContextVar[Scratch | None] = ContextVar("lender", default=None)
"""The Scratch that all results of this thread borrow from, if `borrow_from` says so."""


@contextmanager
def borrow_from(lender: Scratch) -> Iterator[None]:
    """Within, all results of this thread, even small ones, borrow from `lender`, also if another Scratch is asked."""
    try:
        _lender.set(lender)
        yield
    finally:
        _lender.set(None)
