"""The tables of the resident sequences that stay on the device."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import NO_LOGPROBS, ROW_SAMPLING, SAMPLING_COLUMNS


class DeviceRows:
    """Block tables, last tokens and sampling values of rows 0..max_num_seqs-1, and of one extra row.

    Each resident sequence owns a row. A plan brings only what changes. Every step reads the rest here.

    The last row, `padding_row`, belongs to no sequence. When a step is padded to the size of a CUDA graph, the padding
    reads and writes this row. Its block table stays all zeros. `step_inputs` gives its tokens the slot NOWHERE, so
    nothing of them is stored. (A slot is a token's place in the KV cache.)

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
        self.sampling_cpu["num_logprobs"] = NO_LOGPROBS
        self.sampling_cpu["num_prompt_logprobs"] = NO_LOGPROBS

    def add_blocks(self, entries: Tensor) -> None:
        """Write new entries of the block tables: int32 [3 * n], the plan's block_entries on the device."""
        if len(entries):
            row, index, block = entries.view(-1, 3).unbind(1)
            self.block_tables[row, index] = block

    def move_in(self, new_rows: Tensor, new_rows_cpu: NDArray[Any]) -> None:
        """Write the sampling values of rows that have a new owner.

        Args:
            new_rows: int32, the plan's new_rows on the device.
            new_rows_cpu: the same rows on the host.
        """
        if len(new_rows_cpu):
            values = new_rows.view(-1, len(SAMPLING_COLUMNS))
            self.sampling[values[:, SAMPLING_COLUMNS["row"]]] = values
            self.sampling_cpu[new_rows_cpu["row"]] = new_rows_cpu
