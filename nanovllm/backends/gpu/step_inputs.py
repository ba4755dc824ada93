"""Makes the inputs of a step in one Triton kernel. The reference is `step_inputs_reference` in ops/step_inputs.py."""

import functools

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.ops.step_inputs import StepInputs, empty_step_inputs


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
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    block_tables_ptr,
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

    table_ptr = tables_ptr + row * table_width
    for start in range(0, table_width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        block = tl.load(table_ptr + index, mask=index < table_width)
        tl.store(block_tables_ptr + seq.to(tl.int64) * table_width + index, block, mask=index < table_width)
    last_token = tl.load(last_token_ptr + row)
    for start in range(0, scheduled, BLOCK):
        index = start + tl.arange(0, BLOCK)
        exists = index < scheduled
        planned_id = tl.load(planned_ids_ptr + first + index, mask=exists)
        tl.store(token_ids_ptr + first + index, tl.where(planned_id < 0, last_token, planned_id), mask=exists)
        position = computed + index
        tl.store(positions_ptr + first + index, position, mask=exists)
        block = tl.load(table_ptr + position // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        slot = tl.where(row == padding_row, -1, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(slots_ptr + first + index, slot, mask=exists)


def step_inputs_config(num_seqs: int, block_size: int) -> dict[str, int]:
    """Return the constants to compile with. MAX_SEQS has few values, so that few batch sizes compile a new kernel."""
    max_seqs = max(256, next_power_of_2(num_seqs))
    return {"BLOCK_SIZE": block_size, "MAX_SEQS": max_seqs, "BLOCK": 256, "num_warps": 4}


def step_inputs(
    rows: Tensor,
    num_computed: Tensor,
    num_scheduled: Tensor,
    token_ids: Tensor,
    block_tables: Tensor,
    last_token: Tensor,
    block_size: int,
) -> StepInputs:
    """Do what `step_inputs_reference` does, in one kernel."""
    num_seqs = len(rows)
    max_blocks = block_tables.shape[1]
    made = empty_step_inputs(rows, len(token_ids), max_blocks, functools.partial(torch.empty, device=rows.device))
    given = (rows, num_computed, num_scheduled, token_ids, block_tables, last_token)
    results = (made.token_ids, made.positions, made.slots, made.cu_seqlens, made.seq_lens, made.block_tables)
    args = (*given, *results, num_seqs, len(last_token) - 1, max_blocks)
    launch(_step_inputs_kernel, (num_seqs,), args, step_inputs_config(num_seqs, block_size))
    return made
