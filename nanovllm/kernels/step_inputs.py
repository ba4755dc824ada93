"""Makes the inputs of a step on the device, from a plan and from the device's tables of the resident sequences."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.launch import launch, wait_for_predecessor
from nanovllm.kernels.sample import SamplingValues
from nanovllm.kernels.triton_shim import next_power_of_2, tl, triton


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


@triton.jit(
    do_not_specialize=["num_seqs", "padding_row"],
    # Triton would compile the kernel again for each alignment of an address. These arrays lie side by side in one
    # buffer, so their alignments vary.
    do_not_specialize_on_alignment=["rows_ptr", "num_computed_ptr", "num_scheduled_ptr", "planned_ids_ptr"],
)
def _step_inputs_kernel(
    rows_ptr,
    num_computed_ptr,
    num_scheduled_ptr,
    planned_ids_ptr,
    tables_ptr,
    last_token_ptr,
    temperatures_ptr,
    top_ks_ptr,
    top_ps_ptr,
    min_ps_ptr,
    all_seeds_ptr,
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    num_seqs,
    padding_row,
    table_width,
    BLOCK_SIZE: tl.constexpr,
    MAX_SEQS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_seqs,).
    # A program owns one sequence: its tokens, BLOCK at a time, and its row of each table.
    # Tokens of the padding row get slot -1, so that they are not stored.
    wait_for_predecessor(PDL)
    seq = tl.program_id(0)
    row = tl.load(rows_ptr + seq).to(tl.int64)
    computed = tl.load(num_computed_ptr + seq)
    scheduled = tl.load(num_scheduled_ptr + seq)
    other = tl.arange(0, MAX_SEQS)
    first = tl.sum(tl.load(num_scheduled_ptr + other, mask=other < seq, other=0), 0)
    tl.store(cu_seqlens_ptr + seq, first)
    if seq == num_seqs - 1:
        tl.store(cu_seqlens_ptr + num_seqs, first + scheduled)
    tl.store(seq_lens_ptr + seq, computed + scheduled)
    tl.store(temperature_ptr + seq, tl.load(temperatures_ptr + row))
    tl.store(top_k_ptr + seq, tl.load(top_ks_ptr + row))
    tl.store(top_p_ptr + seq, tl.load(top_ps_ptr + row))
    tl.store(min_p_ptr + seq, tl.load(min_ps_ptr + row))
    tl.store(seeds_ptr + seq, tl.load(all_seeds_ptr + row))

    table_ptr = tables_ptr + row * table_width
    for start in range(0, table_width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        block = tl.load(table_ptr + index, mask=index < table_width)
        tl.store(block_tables_ptr + seq.to(tl.int64) * table_width + index, block, mask=index < table_width)
    sampled = tl.load(last_token_ptr + row)
    for start in range(0, scheduled, BLOCK):
        index = start + tl.arange(0, BLOCK)
        exists = index < scheduled
        planned_id = tl.load(planned_ids_ptr + first + index, mask=exists)
        tl.store(token_ids_ptr + first + index, tl.where(planned_id < 0, sampled, planned_id), mask=exists)
        position = computed + index
        tl.store(positions_ptr + first + index, position, mask=exists)
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        slot = tl.where(row == padding_row, -1, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(slots_ptr + first + index, slot, mask=exists)


def step_inputs_config(num_seqs: int, block_size: int) -> dict[str, int]:
    """Return the constants to compile with. MAX_SEQS has few values, so that few batch sizes compile a new kernel."""
    max_seqs = max(256, next_power_of_2(num_seqs))
    return {"BLOCK_SIZE": block_size, "MAX_SEQS": max_seqs, "BLOCK": 256, "num_warps": 4}


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


def step_inputs(planned: PlannedRows, tables: RowTables, block_size: int) -> StepInputs:
    """Do what `step_inputs_reference` does, in one kernel."""
    num_seqs = len(planned.rows)
    made = empty_step_inputs(planned, tables, functools.partial(torch.empty, device=planned.rows.device))
    sizes = (num_seqs, len(tables.last_token) - 1, tables.block_tables.shape[1])
    args = (*planned, *tables, *made[:6], *made.sampling[:5], *sizes)
    launch(_step_inputs_kernel, (num_seqs,), args, step_inputs_config(num_seqs, block_size))
    return made
