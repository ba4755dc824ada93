"""What crosses between host and device: through pinned memory that is never reused too early."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import IntArray


class Staging:
    """One packed copy a step from the host to a fixed place on the device, through two pinned buffers in turn.

    A pinned buffer is written again only after the copy out of it, two steps ago, has finished. The buffer on the
    device needs no such care: copies and the kernels that read them are in order on one stream.
    """

    def __init__(self, size: int, device: torch.device, make_event: Callable[[], Any] = torch.cuda.Event) -> None:
        """size is the most int32 values that a step sends; make_event makes what torch.cuda.Event is."""
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        """The place on the device, always the same."""
        self._direct = device.type == "cpu"
        if not self._direct:
            pin = device.type == "cuda"
            self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(2)]
            self._copied: list[Any] = [None, None]
            self._make_event = make_event
            self._turn = 0

    def send(self, parts: Seq[IntArray]) -> Tensor:
        """Lay parts (int32, 1-d) side by side on the device; returns the part of the buffer that holds them."""
        size = sum(map(len, parts))
        if self._direct:
            np.concatenate(parts, out=self.buffer.numpy()[:size])
            return self.buffer[:size]
        turn = self._turn = 1 - self._turn
        if (copied := self._copied[turn]) is not None:
            copied.synchronize()
        np.concatenate(parts, out=self._pinned[turn].numpy()[:size])
        self.buffer[:size].copy_(self._pinned[turn][:size], non_blocking=True)
        event = self._copied[turn] = copied or self._make_event()
        event.record()
        return self.buffer[:size]


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Values of the host on the device, without waiting for it.

    Torch keeps pinned memory from being taken anew until the copies out of it, or into it, have ended.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def start_copy(values: Tensor) -> Tensor:
    """values on their way to the host: they are there once the device has reached the end of the step."""
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
