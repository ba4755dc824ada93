"""Makes the inputs of a step on the device, from a plan and from the device's tables of the resident sequences."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.ops.sample import SamplingValues


class RowTables(NamedTuple):
    """The device's tables, by row. The last row belongs to no sequence: padding reads and writes there.

    Attributes:
        block_tables: int32 [num_rows, max_blocks].
        last_token: int32 [num_rows], the token that was sampled last. It is the input of the row's next decode.
        temperature, top_k, top_p, min_p, seeds: [num_rows], as in `SamplingValues`.
    """

    block_tables: Tensor
    last_token: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor


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
    """The inputs of the model, of its attention and of the sampler.

    Attributes:
        token_ids: int32 [num_tokens].
        positions: int32 [num_tokens], each token's index in its sequence.
        slots: int64 [num_tokens], each token's place in the KV cache; -1 for padding, which is not stored.
        cu_seqlens: int32 [num_seqs + 1], where each sequence's tokens begin among token_ids, and the end of all.
        seq_lens: int32 [num_seqs], tokens of each sequence after the step.
        block_tables: int32 [num_seqs, max_blocks].
        sampling: the sampling values of each sequence. Its positions are seq_lens, the index of the token to sample.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    sampling: SamplingValues


def step_inputs_reference(planned: PlannedRows, tables: RowTables, block_size: int) -> StepInputs:
    """Derive positions, slots, lengths and sampling values, and put each row's last token in place of -1."""
    rows, num_computed, num_scheduled, token_ids = planned
    num_seqs = len(rows)
    num_tokens = len(token_ids)
    padding_row = len(tables.last_token) - 1
    ends = num_scheduled.cumsum(0, dtype=torch.int32)
    indices = torch.arange(max(num_seqs, num_tokens), dtype=torch.int32, device=rows.device)
    seq_of_token = indices[:num_seqs].repeat_interleave(num_scheduled, output_size=num_tokens)
    seq_lens = num_computed + num_scheduled
    positions = indices[:num_tokens] + (seq_lens - ends)[seq_of_token]
    block_tables = tables.block_tables[rows]
    blocks = block_tables[seq_of_token, positions // block_size].long()
    slots = torch.where(rows[seq_of_token] == padding_row, -1, blocks * block_size + positions % block_size)
    token_ids = torch.where(token_ids < 0, tables.last_token[rows[seq_of_token]], token_ids)
    sampling = SamplingValues(*[*(column[rows] for column in tables[2:]), seq_lens])
    return StepInputs(token_ids, positions, slots, F.pad(ends, (1, 0)), seq_lens, block_tables, sampling)


def empty_step_inputs(planned: PlannedRows, tables: RowTables, make_empty: Callable[..., Tensor]) -> StepInputs:
    """Return the inputs of a step, not filled yet. A kernel fills them.

    Args:
        make_empty: returns an uninitialised tensor on the device, as torch.empty does.
    """
    num_seqs = len(planned.rows)
    num_tokens = len(planned.token_ids)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return make_empty(*shape, dtype=dtype)

    seq_lens = empty(num_seqs)
    sampling = SamplingValues(*[*(empty(num_seqs, dtype=column.dtype) for column in tables[2:]), seq_lens])
    return StepInputs(
        token_ids=empty(num_tokens),
        positions=empty(num_tokens),
        slots=empty(num_tokens, dtype=torch.int64),
        cu_seqlens=empty(num_seqs + 1),
        seq_lens=seq_lens,
        block_tables=empty(num_seqs, tables.block_tables.shape[1]),
        sampling=sampling,
    )
