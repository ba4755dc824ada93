"""What the device knows of resident sequences, by row; told by plans, read by every step."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.plan import ROW_SAMPLING, StepPlan
from nanovllm.kernels.step_inputs import RowTables


class DeviceTables:
    """Block tables, last tokens and sampling values of rows 0..max_num_seqs-1, and one row more.

    The last row, `padding_row`, belongs to nobody: the padding of a CUDA graph's batch reads and writes there. Its
    block table is all zeros and stays so; what it would store in the KV cache is skipped (slot -1).
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, device: torch.device) -> None:
        rows = max_num_seqs + 1
        self.padding_row = max_num_seqs
        self.of_rows = RowTables(
            block_tables=torch.zeros(rows, max_blocks_per_seq, dtype=torch.int32, device=device),
            last_token=torch.zeros(rows, dtype=torch.int32, device=device),
            temperature=torch.zeros(rows, dtype=torch.float32, device=device),
            top_k=torch.zeros(rows, dtype=torch.int32, device=device),
            top_p=torch.ones(rows, dtype=torch.float32, device=device),
            min_p=torch.zeros(rows, dtype=torch.float32, device=device),
            seeds=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        self.sampling_cpu = np.zeros(rows, ROW_SAMPLING)
        """What plans told of each row, for what the host decides by it."""
        self.sampling_cpu["num_logprobs"] = self.sampling_cpu["num_prompt_logprobs"] = -1

    def update(self, plan: StepPlan, packed: Tensor) -> None:
        """Take in what the plan says of new blocks and new rows; packed is both on the device, one after the other."""
        num_entries, num_rows = len(plan.block_entries), len(plan.new_rows)
        if num_entries:
            row, index, block = packed[: 3 * num_entries].view(num_entries, 3).unbind(1)
            self.of_rows.block_tables[row, index] = block
        if num_rows:
            fields = packed[3 * num_entries :].view(num_rows, ROW_SAMPLING.itemsize // 4).unbind(1)
            row, temperature, top_k, top_p, min_p, seed_low, seed_high, *_ = fields
            self.of_rows.temperature[row] = temperature.view(torch.float32)
            self.of_rows.top_k[row] = top_k
            self.of_rows.top_p[row] = top_p.view(torch.float32)
            self.of_rows.min_p[row] = min_p.view(torch.float32)
            self.of_rows.seeds[row] = (seed_low.long() & 0xFFFFFFFF) | (seed_high.long() << 32)
            self.sampling_cpu[plan.new_rows["row"]] = plan.new_rows
