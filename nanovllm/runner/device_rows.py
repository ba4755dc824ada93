"""The tables of the resident sequences that stay on the device."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.plan import ROW_SAMPLING, SAMPLING_COLUMNS, StepPlan


class DeviceRows:
    """Block tables, last tokens and sampling values of rows 0..max_num_seqs-1, and of one extra row.

    Each resident sequence owns a row. A plan brings only what changes. Every step reads the rest here.

    The last row, `padding_row`, belongs to no sequence. When a step is padded to the size of a CUDA graph, the padding
    reads and writes this row. Its block table stays all zeros. `step_inputs` gives its tokens the slot -1 (a slot is a
    token's place in the KV cache), so nothing of them is stored.

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
