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


class PinnedCopier:
    """Copies tensors to a GPU. While the GPU reads one buffer, the host fills the other.

    From other memory of the host, such as a file that is mapped, CUDA copies several times more slowly, and the host
    waits for it.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._device = device
        self._buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied: list[Any] = [None, None]
        """For each buffer the event after the last copy from it; None before the first."""
        self._turn = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start to copy source, on the host, to target, on the GPU. The source may be freed when this returns.

        Args:
            target: has the shape of source, and any dtype: the host converts.
        """
        row_bytes = max(target[:1].numel() * target.element_size(), 1)
        buffer_bytes = self._buffers[0].numel()
        if target.dim() > 1 and row_bytes > buffer_bytes:
            for row, source_row in zip(target, source, strict=True):
                self.copy(row, source_row)
            return
        num_rows = buffer_bytes // row_bytes
        for rows, source_rows in zip(torch.split(target, num_rows), torch.split(source, num_rows), strict=True):
            self._copy_piece(rows, source_rows)

    def _copy_piece(self, target: Tensor, source: Tensor) -> None:
        """Start to copy what fits into a buffer."""
        turn = self._turn
        self._turn = 1 - turn
        if (copied := self._copied[turn]) is not None:
            copied.synchronize()
        num_bytes = target.numel() * target.element_size()
        pinned = self._buffers[turn][:num_bytes].view(target.dtype).view(target.shape)
        pinned.copy_(source)
        target.copy_(pinned, non_blocking=True)
        event = copied or torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._copied[turn] = event


class PinnedStaging(Staging):
    """Sends each step's arrays by a copy for which the host does not wait.

    A copy may still be running when the next step is prepared; that step uses the other buffer. A buffer is written
    again two steps later, after its event shows that its copy has ended. The buffer on the device needs no event,
    because copies and the kernels that read them run in order on one stream.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._copied: list[Any] = [None, None]
        """For each buffer the event after the last copy from it; None before the first."""
        self._turn = 0

    def send(self, parts: Seq[IntArray]) -> Tensor:
        size = sum(map(len, parts))
        turn = 1 - self._turn
        self._turn = turn
        if (copied := self._copied[turn]) is not None:
            copied.synchronize()
        np.concatenate(parts, out=self._pinned[turn].numpy()[:size])
        self.buffer[:size].copy_(self._pinned[turn][:size], non_blocking=True)
        event = copied or torch.cuda.Event()
        event.record()
        self._copied[turn] = event
        return self.buffer[:size]
