"""Memory for what operators return, used again as soon as nobody holds it."""

import ctypes
import math
import mmap
import weakref

import torch
from torch import Tensor

SMALLEST = 32 << 20
"""Bytes from which a tensor is lent. What is smaller, malloc comes to keep by itself."""

HUGE_PAGE = 2 << 20


class Scratch:
    """Lends memory to tensors and takes it back when the last view of one is gone.

    glibc's malloc gives every block of 32 MiB or more back to the system when it is freed, so that each step's would be
    cleared again, page by page, while they are written.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, as torch.empty gives.

        The smallest memory that fits is lent. Where none does, a larger one takes the place of the largest, so that
        never more lie here than were held at once.
        """
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < SMALLEST or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=dtype)
        fitting = [memory for memory in self._free if len(memory) >= size]
        if fitting:
            memory = min(fitting, key=len)
            self._free.remove(memory)
        else:
            if self._free:
                self._free.remove(max(self._free, key=len))
            whole = -(-size // HUGE_PAGE) * HUGE_PAGE
            memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
        loan = (ctypes.c_char * len(memory)).from_buffer(memory)
        weakref.finalize(loan, self._free.append, memory).atexit = False
        return torch.frombuffer(loan, dtype=dtype, count=count).view(shape)
