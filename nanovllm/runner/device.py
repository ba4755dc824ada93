"""The tables that stay on the device, and copies between host and device for which the host does not wait."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import ROW_SAMPLING, SAMPLING_COLUMNS, IntArray, StepPlan


class DeviceRows:
    """Block tables, last tokens and sampling values of rows 0..max_num_seqs-1, and of one extra row.

    Each resident sequence owns a row. A plan brings only what changes. Every step reads the rest here.

    The last row, `padding_row`, belongs to no sequence. When a step is padded to the size of a CUDA graph, the padding
    reads and writes this row. Its block table stays all zeros. Its slots are -1, so nothing is stored in the KV cache.

    Attributes:
        block_tables: int32 [num_rows, max_blocks].
        last_token: int32 [num_rows], the token that was sampled last. It is the input of the row's next decode.
        sampling: int32 [num_rows, width], the packed sampling values: see ROW_SAMPLING.
        sampling_cpu: ROW_SAMPLING [num_rows], the host's copy of `sampling`, for decisions that the host makes.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, device: torch.device) -> None:
        rows = max_num_seqs + 1
        self.padding_row = max_num_seqs
        self.block_tables = torch.zeros(rows, max_blocks_per_seq, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        self.sampling = torch.zeros(rows, len(SAMPLING_COLUMNS), dtype=torch.int32, device=device)
        self.sampling_cpu = np.zeros(rows, ROW_SAMPLING)
        self.sampling_cpu["num_logprobs"] = -1
        self.sampling_cpu["num_prompt_logprobs"] = -1

    def update(self, plan: StepPlan, packed: Tensor) -> None:
        """Write the plan's new block entries and new rows into the tables.

        Args:
            packed: int32, block_entries and new_rows on the device, one after the other.
        """
        num_entries = len(plan.block_entries)
        if num_entries:
            row, index, block = packed[: 3 * num_entries].view(num_entries, 3).unbind(1)
            self.block_tables[row, index] = block
        if len(plan.new_rows):
            new_rows = packed[3 * num_entries :].view(-1, len(SAMPLING_COLUMNS))
            self.sampling[new_rows[:, SAMPLING_COLUMNS["row"]]] = new_rows
            self.sampling_cpu[plan.new_rows["row"]] = plan.new_rows


class Staging:
    """Copies each step's arrays from the host to a fixed place on the device: a GPU has two pinned buffers for that.

    Pinned memory is host memory that the device reads directly, while the host goes on. So a copy may still be running
    when the next step is prepared; that step uses the other buffer. A buffer is written again two steps later, after
    its event shows that its copy has ended. The buffer on the device needs no event, because copies and the kernels
    that read them run in order on one stream.
    """

    def __init__(self, size: int, device: torch.device, make_event: Callable[[], Any] = torch.cuda.Event) -> None:
        """
        Args:
            size: the most int32 values that a step sends.
            make_event: returns an object with the methods of torch.cuda.Event.
        """
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        """int32 [size] on the device, always at the same address: CUDA graphs and recorded steps read from there."""
        self._direct = device.type == "cpu"
        if not self._direct:
            pin = device.type == "cuda"
            self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=pin) for _ in range(2)]
            self._copied: list[Any] = [None, None]
            self._make_event = make_event
            self._turn = 0

    def send(self, parts: Seq[IntArray]) -> Tensor:
        """Copy parts, int32 and 1-d, to the device one after another; returns the part of `buffer` that holds them."""
        size = sum(map(len, parts))
        if self._direct:
            np.concatenate(parts, out=self.buffer.numpy()[:size])
            return self.buffer[:size]
        turn = 1 - self._turn
        self._turn = turn
        if (copied := self._copied[turn]) is not None:
            copied.synchronize()
        np.concatenate(parts, out=self._pinned[turn].numpy()[:size])
        self.buffer[:size].copy_(self._pinned[turn][:size], non_blocking=True)
        event = copied or self._make_event()
        event.record()
        self._copied[turn] = event
        return self.buffer[:size]


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """Start a copy from the host to the device and return the copy. The host does not wait for it.

    The pinned tensor is dropped here at once. That is safe, because torch reuses its memory only when the copy has
    ended.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def start_copy(values: Tensor) -> Tensor:
    """Start a copy to the host and return it. Its values may be read when the device has ended the step.

    A graph, or a recorded step, writes its results to the same place each time.
    """
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
