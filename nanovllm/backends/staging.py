"""The buffer through which each step's arrays reach the device."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.plan import IntArray


class Staging:
    """Copies each step's arrays from the host to a fixed place on the device, in one piece."""

    def __init__(self, size: int, device: torch.device) -> None:
        """
        Args:
            size: the most int32 values that a step sends.
        """
        self._host = torch.zeros(size, dtype=torch.int32)
        self.buffer = self._host.to(device)
        """int32 [size] on the device, always at the same address: CUDA graphs and recorded steps read from there. On a
        CPU it is the host's memory itself."""

    def send(self, parts: Seq[IntArray]) -> Tensor:
        """Copy parts, int32 and 1-d, to the device one after another; returns the part of `buffer` that holds them."""
        size = sum(map(len, parts))
        np.concatenate(parts, out=self._host.numpy()[:size])
        if self.buffer is not self._host:
            self.buffer[:size].copy_(self._host[:size])
        return self.buffer[:size]
