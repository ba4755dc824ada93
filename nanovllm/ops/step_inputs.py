"""Makes the inputs of a step on the device, from a plan and from the device's tables of the resident sequences."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class PlannedRows(NamedTuple):
    """Four arrays of a `StepPlan` (engine/plan.py), on the device.

    Attributes:
        rows, num_computed, num_scheduled: int32 [num_seqs].
        token_ids: int32 [num_tokens]; -1 stands for the row's last_token.
    """

    rows: Tensor
    num_computed: Tensor
    num_scheduled: Tensor
    token_ids: Tensor


class StepInputs(NamedTuple):
    """The inputs of the model and of its attention.

    Attributes:
        token_ids: int32 [num_tokens].
        positions: int32 [num_tokens], each token's index in its sequence.
        slots: int64 [num_tokens], each token's place in the KV cache; -1 for padding, which is not stored.
        cu_seqlens: int32 [num_seqs + 1], where each sequence's tokens begin among token_ids, and the end of all.
        seq_lens: int32 [num_seqs], tokens of each sequence after the step.
        block_tables: int32 [num_seqs, max_blocks].
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    seq_lens: Tensor
    block_tables: Tensor


def step_inputs_reference(
    planned: PlannedRows, block_tables: Tensor, last_token: Tensor, block_size: int
) -> StepInputs:
    """Derive positions, slots and lengths, and put each row's last token in place of -1.

    Args:
        block_tables: int32 [num_rows, max_blocks], of all rows. The last row belongs to no sequence: padding reads it.
        last_token: int32 [num_rows], of all rows.
    """
    rows, num_computed, num_scheduled, token_ids = planned
    num_seqs = len(rows)
    num_tokens = len(token_ids)
    padding_row = len(last_token) - 1
    ends = num_scheduled.cumsum(0, dtype=torch.int32)
    indices = torch.arange(max(num_seqs, num_tokens), dtype=torch.int32, device=rows.device)
    seq_of_token = indices[:num_seqs].repeat_interleave(num_scheduled, output_size=num_tokens)
    seq_lens = num_computed + num_scheduled
    positions = indices[:num_tokens] + (seq_lens - ends)[seq_of_token]
    block_tables = block_tables[rows]
    blocks = block_tables[seq_of_token, positions // block_size].long()
    slots = torch.where(rows[seq_of_token] == padding_row, -1, blocks * block_size + positions % block_size)
    token_ids = torch.where(token_ids < 0, last_token[rows[seq_of_token]], token_ids)
    return StepInputs(token_ids, positions, slots, F.pad(ends, (1, 0)), seq_lens, block_tables)


def empty_step_inputs(planned: PlannedRows, max_blocks: int, make_empty: Callable[..., Tensor]) -> StepInputs:
    """Return the inputs of a step, not filled yet. A kernel fills them.

    Args:
        make_empty: returns an uninitialised tensor on the device, as torch.empty does.
    """
    num_seqs = len(planned.rows)
    num_tokens = len(planned.token_ids)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return make_empty(*shape, dtype=dtype)

    return StepInputs(
        token_ids=empty(num_tokens),
        positions=empty(num_tokens),
        slots=empty(num_tokens, dtype=torch.int64),
        cu_seqlens=empty(num_seqs + 1),
        seq_lens=empty(num_seqs),
        block_tables=empty(num_seqs, max_blocks),
    )
