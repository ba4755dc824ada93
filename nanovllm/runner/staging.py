"""Plans on their way to the device, and tokens on their way back: pinned memory that is never reused too early."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.plan import IntArray


class Event(Protocol):
    """A point in the device's stream of work, as torch.cuda.Event."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def _cuda_event() -> Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


class Staging:
    """One packed copy a step from the host to a fixed place on the device, through two pinned buffers in turn.

    A pinned buffer is written again only after the copy out of it, two steps ago, has finished. The buffer on the
    device needs no such care: copies and the kernels that read them are in order on one stream.
    """

    def __init__(self, size: int, device: torch.device, make_event: Callable[[], Event] = _cuda_event) -> None:
        """size is the most int32 values that a step sends."""
        self._on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._direct = device.type == "cpu"
        if not self._direct:
            pin = device.type == "cuda"
            self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(2)]
            self._copied: list[Event | None] = [None, None]
            self._make_event = make_event
            self._turn = 0

    @property
    def buffer(self) -> Tensor:
        """The place on the device, always the same: int32 [size]."""
        return self._on_device

    def send(self, parts: Seq[IntArray]) -> Tensor:
        """Lay parts (int32, 1-d) side by side on the device; returns the part of the buffer that holds them."""
        size = sum(map(len, parts))
        if self._direct:
            np.concatenate(parts, out=self._on_device.numpy()[:size])
            return self._on_device[:size]
        turn = self._turn = 1 - self._turn
        if (copied := self._copied[turn]) is not None:
            copied.synchronize()
        np.concatenate(parts, out=self._pinned[turn].numpy()[:size])
        self._on_device[:size].copy_(self._pinned[turn][:size], non_blocking=True)
        event = self._copied[turn] = self._copied[turn] or self._make_event()
        event.record()
        return self._on_device[:size]


class ReturnBuffers:
    """Pinned buffers for sampled tokens: taken for a step, given back once it has been read."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        return self._free.pop() if self._free else torch.zeros(self._size, dtype=torch.int32, pin_memory=True)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)
