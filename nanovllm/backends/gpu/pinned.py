"""Copies from the host's memory to a GPU, through two pinned buffers in turn.

Pinned memory is host memory that the device reads directly, while the host goes on.
"""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.staging import Staging
from nanovllm.engine.plan import IntArray

BUFFER_BYTES = 64 << 20
"""Bytes of each buffer. Starting a copy of so many costs nothing beside the copy itself."""


class PinnedPair:
    """Two pinned buffers that are filled in turn: while the GPU reads one, the host fills the other."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._buffers = [torch.zeros(size, dtype=dtype, pin_memory=True) for _ in range(2)]
        self._copied: list[Any] = [None, None]
        """For each buffer the event after the last copy from it; None before the first."""
        self._turn = 0

    def take(self) -> Tensor:
        """Return the other buffer, once the last copy from it has ended."""
        self._turn = 1 - self._turn
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()
        return self._buffers[self._turn]

    def note_copy(self) -> None:
        """Note that the device's current stream was given the copy from the buffer that was taken last."""
        event = self._copied[self._turn] or torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._copied[self._turn] = event


class PinnedCopier(PinnedPair):
    """Copies vectors and matrices to a GPU, as many rows at a time as fit into a buffer.

    From other memory of the host, such as a file that is mapped, CUDA copies several times more slowly, and the host
    waits for it.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        super().__init__(buffer_bytes, torch.uint8, device)
        self._buffer_bytes = buffer_bytes

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start to copy source, on the host, to target, on the GPU. The source may be freed when this returns.

        Args:
            target: has the shape of source, and any dtype: the host converts.
        """
        row_bytes = max(target[:1].numel() * target.element_size(), 1)
        num_rows = self._buffer_bytes // row_bytes
        for rows, source_rows in zip(torch.split(target, num_rows), torch.split(source, num_rows), strict=True):
            pinned = self.take()[: rows.numel() * rows.element_size()].view(rows.dtype).view(rows.shape)
            pinned.copy_(source_rows)
            rows.copy_(pinned, non_blocking=True)
            self.note_copy()


class PinnedStaging(Staging):
    """Sends each step's arrays by a copy for which the host does not wait.

    A copy may still be running when the next step is prepared; that step uses the other buffer. The buffer on the
    device needs no event, because copies and the kernels that read them run in order on one stream.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = PinnedPair(size, torch.int32, device)

    def send(self, parts: Seq[IntArray]) -> Tensor:
        size = sum(map(len, parts))
        pinned = self._pinned.take()[:size]
        np.concatenate(parts, out=pinned.numpy())
        self.buffer[:size].copy_(pinned, non_blocking=True)
        self._pinned.note_copy()
        return self.buffer[:size]
