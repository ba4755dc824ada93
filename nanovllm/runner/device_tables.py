"""What the device knows of resident sequences, by row; told by plans, read by every step."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.engine.plan import ROW_SAMPLING, StepPlan
from nanovllm.kernels.sample import SamplingValues


class DeviceTables:
    """Block tables, last tokens and sampling values of rows 0..max_num_seqs-1, and one row more.

    The last row, `padding_row`, belongs to nobody: the padding of a CUDA graph's batch reads and writes there. Its
    block table is all zeros and stays so; what it would store in the KV cache is skipped (slot -1).
    """

    def __init__(self, max_num_seqs: int, max_blocks_per_seq: int, device: torch.device) -> None:
        rows = max_num_seqs + 1
        self.padding_row = max_num_seqs
        self.block_tables = torch.zeros(rows, max_blocks_per_seq, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(rows, dtype=torch.int32, device=device)
        """The token sampled last for each row: the input of its next decode."""
        self.temperature = torch.zeros(rows, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int32, device=device)
        self.top_p = torch.ones(rows, device=device)
        self.min_p = torch.zeros(rows, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.num_logprobs_cpu = np.full(rows, -1, np.int32)

    def update(self, plan: StepPlan, packed: Tensor) -> None:
        """Take in what the plan says of new blocks and new rows; packed is both on the device, one after the other."""
        num_entries, num_rows = len(plan.block_entries), len(plan.new_rows)
        if num_entries:
            row, index, block = packed[: 3 * num_entries].view(num_entries, 3).unbind(1)
            self.block_tables[row, index] = block
        if num_rows:
            fields = packed[3 * num_entries :].view(num_rows, ROW_SAMPLING.itemsize // 4).unbind(1)
            row, temperature, top_k, top_p, min_p, seed_low, seed_high, _ = fields
            self.temperature[row] = temperature.view(torch.float32)
            self.top_k[row] = top_k
            self.top_p[row] = top_p.view(torch.float32)
            self.min_p[row] = min_p.view(torch.float32)
            self.seeds[row] = (seed_low.long() & 0xFFFFFFFF) | (seed_high.long() << 32)
            self.num_logprobs_cpu[plan.new_rows["row"]] = plan.new_rows["num_logprobs"]

    def sampling(self, rows: Tensor, positions: Tensor) -> SamplingValues:
        """How each of rows is sampled, to be the token at positions."""
        return SamplingValues(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.seeds[rows], positions
        )

    def slots(self, rows: Tensor, block_tables: Tensor, of_token: Tensor, positions: Tensor, block_size: int) -> Tensor:
        """The cache slot of each token, int64 [num_tokens]; -1 for the padding row's.

        Args:
            rows: int32 [num_seqs]; block_tables is theirs, [num_seqs, max_blocks_per_seq].
            of_token, positions: int32 [num_tokens], each token's index into rows, and its place in its sequence.
        """
        blocks = block_tables[of_token, positions // block_size].long()
        slots = blocks * block_size + positions % block_size
        return torch.where(rows[of_token] == self.padding_row, -1, slots)
