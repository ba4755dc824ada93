"""The tables that stay on the device, and the buffer through which each step's arrays reach it."""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.plan import NUM_PER_SEQ, ROW_SAMPLING, IntArray, StepPlan
from nanovllm.ops.step_inputs import PlannedRows, RowTables


class DeviceTables:
    """Block tables, last tokens and sampling values of rows 0..max_num_seqs-1, and of one extra row.

    Each resident sequence owns a row. A plan brings only what changes. Every step reads the rest here.

    The last row, `padding_row`, belongs to no sequence. When a step is padded to the size of a CUDA graph, the padding
    reads and writes this row. Its block table stays all zeros. Its slots are -1, so nothing is stored in the KV cache.
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, device: torch.device) -> None:
        rows = max_num_seqs + 1
        self.padding_row = max_num_seqs
        self.row_tables = RowTables(
            block_tables=torch.zeros(rows, max_blocks_per_seq, dtype=torch.int32, device=device),
            last_token=torch.zeros(rows, dtype=torch.int32, device=device),
            temperature=torch.zeros(rows, dtype=torch.float32, device=device),
            top_k=torch.zeros(rows, dtype=torch.int32, device=device),
            top_p=torch.ones(rows, dtype=torch.float32, device=device),
            min_p=torch.zeros(rows, dtype=torch.float32, device=device),
            seeds=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        self.sampling_cpu = np.zeros(rows, ROW_SAMPLING)
        """ROW_SAMPLING [num_rows]: the host's copy of these values, for decisions that the host makes."""
        self.sampling_cpu["num_logprobs"] = -1
        self.sampling_cpu["num_prompt_logprobs"] = -1

    def update(self, plan: StepPlan, packed: Tensor) -> None:
        """Write the plan's new block entries and new rows into the tables.

        Args:
            packed: int32, block_entries and new_rows on the device, one after the other.
        """
        num_entries = len(plan.block_entries)
        num_rows = len(plan.new_rows)
        if num_entries:
            row, index, block = packed[: 3 * num_entries].view(num_entries, 3).unbind(1)
            self.row_tables.block_tables[row, index] = block
        if num_rows:
            # ROW_SAMPLING came as int32. `view` interprets an int32 as the float that has these bits. A seed comes as
            # two halves.
            fields = packed[3 * num_entries :].view(num_rows, ROW_SAMPLING.itemsize // 4).unbind(1)
            row, temperature, top_k, top_p, min_p, seed_low, seed_high, *_ = fields
            self.row_tables.temperature[row] = temperature.view(torch.float32)
            self.row_tables.top_k[row] = top_k
            self.row_tables.top_p[row] = top_p.view(torch.float32)
            self.row_tables.min_p[row] = min_p.view(torch.float32)
            self.row_tables.seeds[row] = (seed_low.long() & 0xFFFFFFFF) | (seed_high.long() << 32)
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


def split_head(head: Tensor, num_seqs: int, num_tokens: int) -> PlannedRows:
    """Return the arrays of a plan that make the inputs of its step.

    Args:
        head: int32, the plan's arrays on the device. The result has views of it.
    """
    end = NUM_PER_SEQ * num_seqs
    rows, num_computed, num_scheduled, *_ = head[:end].view(NUM_PER_SEQ, num_seqs).unbind(0)
    return PlannedRows(rows, num_computed, num_scheduled, head[end : end + num_tokens])
