"""Memory in huge pages. A step streams the weights, and with pages of 4 KiB it would often wait for the page table."""

import ctypes
import mmap
import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from nanovllm.utils.integers import ceil_div

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86-64."""

LIBC = ctypes.CDLL(None)
"""The C library of this process."""

BLOCK = 2**26
"""Bytes of address space that are asked for at a time. Only what is written to becomes memory."""

LINE = 64
"""Bytes of a cache line, at which every tensor starts."""


def map_memory(num_bytes: int) -> mmap.mmap:
    """Return new memory of zeros, in huge pages if it fills one and the system has them."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def advise_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages for a tensor of torch's. Small pages that were written to already stay as they are."""
    storage = tensor.untyped_storage()
    start = ceil_div(storage.data_ptr(), mmap.PAGESIZE) * mmap.PAGESIZE
    size = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0 and hasattr(mmap, "MADV_HUGEPAGE"):
        LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


class HugePages:
    """Lends memory that lies in huge pages to tensors of any size.

    A matrix with an allocation of its own begins and ends within a huge page, and Linux gives small pages to these
    parts. With matrices of 2 to 6 MB, as int8 makes them of a small model, that is most of the memory. So the tensors
    lie one after another in blocks. A block is freed when the last tensor in it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._block: weakref.ref[mmap.mmap] | None = None
        self._free = 0
        self._end = 0

    def empty(self, num_bytes: int) -> Tensor:
        """Return an uninitialised tensor, uint8 [num_bytes]."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            block = None if self._block is None else self._block()
            if block is None or self._free + num_bytes > self._end:
                block = self._open(max(BLOCK, num_bytes))
            start = self._free
            self._free += ceil_div(num_bytes, LINE) * LINE
            return torch.frombuffer(block, dtype=torch.uint8, count=num_bytes, offset=start)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor."""
        copied = self.empty(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        return copied.copy_(tensor)

    def _open(self, size: int) -> mmap.mmap:
        """Make a block from which tensors are cut: `size` bytes from the start of a huge page on."""
        block = map_memory(size + HUGE_PAGE)
        self._block = weakref.ref(block)
        self._free = -torch.frombuffer(block, dtype=torch.uint8).data_ptr() % HUGE_PAGE
        self._end = self._free + size
        return block


huge_pages = HugePages()
"""Lends memory to the packed matrices of this process."""


def return_freed_memory() -> None:
    """Give freed memory back to the system. glibc keeps freed pieces below 32 MB, and packed matrices lie elsewhere."""
    trim = getattr(LIBC, "malloc_trim", None)
    if trim is not None:
        trim(0)
