"""The links of a pipeline over NCCL: each carries hidden states in one direction, from one stage to another.

A send of NCCL ends when the receiver takes the tensor. With two stages, rank 0 sends step after step to rank 1 and
receives from it meanwhile. On one stream, or in one communicator, each rank could wait for the other's receive, which
stands behind the other's send. So each direction has a group of two ranks and a stream of its own, and none of a
rank's links waits for another.

The host waits for nothing here. Streams wait for each other by events: a send for what has been computed, and what is
computed next for a receive. A receive waits for no computation, so it may come while the step before is computed.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Link:
    """One direction between two ranks, as one of them sees it. The sender is rank 0 of the group of the two."""

    def __init__(self, group: Any, device: torch.device) -> None:
        """
        Args:
            group: a ProcessGroupNCCL of the two ranks.
            device: the device of this rank.
        """
        self.group = group
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        # torch runs NCCL's sends and receives on streams of its own. A broadcast between two ranks is the same
        # transfer, and runs on the stream that is current.
        self._options = dist.BroadcastOptions()
        self._options.asyncOp = False

    def send(self, x: Tensor) -> None:
        """Start to send x, contiguous, once the current stream has computed it."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            self.group.broadcast([x], self._options)
        x.record_stream(self.stream)  # its memory is not used again before it is sent

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next tensor, which the current stream may use: it waits until the tensor has come."""
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self.stream):
            x = torch.empty(shape, dtype=dtype, device=self._device)
            self.group.broadcast([x], self._options)
        current.wait_stream(self.stream)
        x.record_stream(current)
        return x
