"""Makes the inputs of a step on the device, from a plan and from the tables of the resident sequences."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.engine.plan import LAST_TOKEN, NOWHERE, IntArray, StepPlan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of the layers in one step of num_seqs sequences. Query tokens are the tokens that the step computes.
    Sequences with one query token come first: here they are called decodes.

    Every layer stores K and V before attention reads them. So a sequence finds its own new tokens in the cache. Two
    sequences of a step may share a block. Then one of them may store the block's keys and values in this step, and the
    other finds them there.

    Attributes:
        token_ids: int32 [num_tokens].
        positions: int32 [num_tokens], each token's index in its sequence.
        slots: int64 [num_tokens], each token's place in the KV cache; NOWHERE for padding, which is not stored.
        cu_seqlens: int32 [num_seqs + 1], where each sequence's tokens begin among token_ids, and then num_tokens.
        seq_lens: int32 [num_seqs], tokens of each sequence in the cache after this step has stored its own.
        block_tables: int32 [num_seqs, max_blocks]; entries after a sequence's blocks are any valid block numbers.
        rows: int32 [num_seqs], the row of each sequence. Layers of linear attention keep a state for each row.
        num_decodes: how many sequences have one query token.
        query_lens_cpu, seq_lens_cpu: int32 [num_seqs] on the host: each sequence's number of query tokens, and a copy
            of seq_lens. None in a step that is recorded: there every sequence is a decode. A recording must not depend
            on the lengths of one plan.
        prepared: what `Backend.prepare_attention` has made for `attend`. Only the same backend reads it.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    rows: Tensor
    num_decodes: int
    query_lens_cpu: IntArray | None = None
    seq_lens_cpu: IntArray | None = None
    prepared: Any = None

    def with_lengths(self, plan: StepPlan) -> "StepInputs":
        """Return these inputs with the lengths of their plan, which the host knows."""
        seq_lens = plan.num_computed + plan.num_scheduled
        return replace(self, num_decodes=plan.num_decodes, query_lens_cpu=plan.num_scheduled, seq_lens_cpu=seq_lens)


def step_inputs_reference(
    rows: Tensor,
    num_computed: Tensor,
    num_scheduled: Tensor,
    token_ids: Tensor,
    block_tables: Tensor,
    last_token: Tensor,
    block_size: int,
) -> StepInputs:
    """Derive positions, slots and lengths, and put each row's last token in place of LAST_TOKEN.

    Args:
        rows, num_computed, num_scheduled: int32 [num_seqs], on the device: see `StepPlan`.
        token_ids: int32 [num_tokens], on the device: see `StepPlan`.
        block_tables: int32 [num_rows, max_blocks], of all rows. The last row belongs to no sequence: padding reads it.
        last_token: int32 [num_rows], of all rows.
    """
    num_seqs = len(rows)
    num_tokens = len(token_ids)
    padding_row = len(last_token) - 1
    ends = num_scheduled.cumsum(0, dtype=torch.int32)
    indices = torch.arange(num_tokens, dtype=torch.int32, device=rows.device)  # each sequence has a token or more
    seq_of_token = indices[:num_seqs].repeat_interleave(num_scheduled, output_size=num_tokens)
    seq_lens = num_computed + num_scheduled
    # A token's position minus its index in the step is the same number for all tokens of a sequence. For the last one
    # these are seq_lens - 1 and ends - 1, so the number is seq_lens - ends.
    positions = indices + (seq_lens - ends)[seq_of_token]
    block_tables = block_tables[rows]
    blocks = block_tables[seq_of_token, positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    return StepInputs(
        token_ids=torch.where(token_ids == LAST_TOKEN, last_token[rows[seq_of_token]], token_ids),
        positions=positions,
        slots=torch.where(rows[seq_of_token] == padding_row, NOWHERE, slots),
        cu_seqlens=F.pad(ends, (1, 0)),
        seq_lens=seq_lens,
        block_tables=block_tables,
        rows=rows,
        num_decodes=num_seqs,  # as in a step that is recorded; `with_lengths` has the number of any other step
    )


def empty_step_inputs(rows: Tensor, num_tokens: int, max_blocks: int, make_empty: Callable[..., Tensor]) -> StepInputs:
    """Return the inputs of a step, not filled yet. A kernel fills them.

    Args:
        make_empty: returns an uninitialised tensor on the device, as torch.empty does.
    """
    num_seqs = len(rows)
    return StepInputs(
        token_ids=make_empty(num_tokens, dtype=torch.int32),
        positions=make_empty(num_tokens, dtype=torch.int32),
        slots=make_empty(num_tokens, dtype=torch.int64),
        cu_seqlens=make_empty(num_seqs + 1, dtype=torch.int32),
        seq_lens=make_empty(num_seqs, dtype=torch.int32),
        block_tables=make_empty(num_seqs, max_blocks, dtype=torch.int32),
        rows=rows,
        num_decodes=num_seqs,
    )
