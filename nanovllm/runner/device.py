"""The tables that stay on the device, and the buffer through which each step's arrays reach it."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.plan import NUM_PER_SEQ, ROW_SAMPLING, SAMPLING_COLUMNS, IntArray, StepPlan
from nanovllm.ops.step_inputs import DevicePlan


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


def split_head(head: Tensor, num_seqs: int, num_tokens: int, plan: StepPlan | None) -> DevicePlan:
    """Return the part of a plan that says what the layers compute.

    Args:
        head: int32, the plan's arrays on the device. The result has views of it.
        plan: its lengths choose the sizes of launches; None if every sequence computes one token, and the step is
            recorded: then it must not depend on the numbers of one plan.
    """
    end = NUM_PER_SEQ * num_seqs
    rows, num_computed, num_scheduled, *_ = head[:end].view(NUM_PER_SEQ, num_seqs).unbind(0)
    token_ids = head[end : end + num_tokens]
    if plan is None:
        return DevicePlan(rows, num_computed, num_scheduled, token_ids, num_seqs)
    lengths = (plan.num_scheduled, plan.num_computed + plan.num_scheduled)
    return DevicePlan(rows, num_computed, num_scheduled, token_ids, plan.num_decodes, *lengths)
