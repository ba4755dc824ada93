"""Copies from the host's memory to a GPU, through two pinned buffers in turn."""

from typing import Any

import torch
from torch import Tensor

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
            target: of the shape of source, and of any dtype: the host converts.
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
