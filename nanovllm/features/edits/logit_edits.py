"""The edits of one step's logits: the scheduler's side collects them, and rank 0's runner samples through them."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import IntArray
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.features.edits.after_thinking import AfterThinking, Place
from nanovllm.features.edits.edit_logits import EditOperators, MaskAndPenalties
from nanovllm.features.edits.row_edits import RowEdits
from nanovllm.ops.sample import Sampled
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from nanovllm.backends import Backend


Started = tuple[int, NDArray[np.int64], NDArray[np.int64]]
"""A row that samples for the first time since it moved in, and the tokens of prompt and output, which are counted."""


class PenaltyCounts:
    """How often each row with penalties has each token, on the device: the sampler counts what the host has not read.

    The counts of all rows take 4 bytes for each token of the vocabulary. They are made when the first row with
    penalties comes. `MaskAndPenalties` says what a count means.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._counts: Tensor | None = None

    def start(self, started: Seq[Started], vocab_size: int, backend: "Backend") -> Tensor:
        """Count the tokens of rows that have just moved in; returns all counts, int32 [num_rows, vocab]."""
        if self._counts is None:
            self._counts = torch.zeros(self._num_rows, vocab_size, dtype=torch.int32, device=backend.device)
        for row, prompt, output in started:
            counts = self._counts[row].zero_()
            counts[backend.to_device(prompt)] = 1
            counts.index_add_(0, backend.to_device(output), counts.new_full((len(output),), 2))
        return self._counts


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The edits of one step's logits; the engine passes them to rank 0's runner beside the plan. A `StepEdits`.

    Attributes:
        indices: int32 [m], which rows of the step's logits are edited, in ascending order; of the tokens that are read.
        rows: int32 [m], the sequences' rows on the device.
        masks: int32 [m, ceil(vocab / 32)]: bit t % 32 of word t // 32 is set if token t may come. None: all may.
        bias_index: int64, indices into the flattened logits to which `bias` (float32) is added.
        penalties: float32 [m, 3], repetition, frequency and presence; None if no row has any.
        started: rows with penalties whose counts begin anew.
        counts: the counts of all rows with penalties, which live from step to step.
    """

    indices: IntArray
    rows: IntArray
    masks: IntArray | None
    bias_index: NDArray[np.int64]
    bias: NDArray[np.float32]
    penalties: NDArray[np.float32] | None
    started: Seq[Started]
    counts: PenaltyCounts

    def sample(
        self, backend: "Backend", logits: Tensor, table: Tensor, rows: Tensor, positions: Tensor
    ) -> tuple[Sampled, Tensor]:
        """Sample as `Backend.sample` does, from the edited logits, and return these. Nothing waits for the device.

        In float32, in which a row without edits gives the same token as without this.
        """
        # A copy: log-probabilities are taken from the logits as they are.
        logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if len(self.bias):
            logits.view(-1)[backend.to_device(self.bias_index)] += backend.to_device(self.bias)
        indices = backend.to_device(self.indices)
        edited_rows = backend.to_device(self.rows)
        masks = None if self.masks is None else backend.to_device(self.masks)
        counts = penalties = None
        if self.penalties is not None:
            counts = self.counts.start(self.started, logits.shape[1], backend)
            penalties = backend.to_device(self.penalties)
        if masks is not None or counts is not None:
            operators = backend.find_operators(EditOperators, "edit_logits")
            operators.edit_logits(logits, MaskAndPenalties(indices, masks, edited_rows, counts, penalties))
        sampled = backend.sample(logits, table, rows, positions)
        if counts is not None:
            counts[edited_rows, sampled.token_ids[indices]] += 2  # of rows without penalties, too: nobody reads theirs
        return sampled, logits


class _Edited(NamedTuple):
    """An edited row of the step's logits.

    Attributes:
        number: the number of its sequence in the plan.
        num_output: how many tokens of output come before the one that it samples.
        logits_row: which row of the step's logits it is.
    """

    number: int
    seq: Sequence
    edits: RowEdits
    num_output: int
    logits_row: int


def lacks_tokens(step: ScheduledStep) -> bool:
    """Return whether an edit of a step depends on a token that is not known yet. Drafts count as known."""
    plan = step.plan
    num_before = (plan.num_computed + plan.num_scheduled - plan.num_drafts)[plan.num_sampled > 0]
    for seq, num_tokens in zip(step.seqs, num_before.tolist(), strict=True):
        edits = seq.edits
        if edits is not None and edits.needs_known_tokens and len(seq.token_ids) < num_tokens:
            return True
    return False


def collect_edits(step: ScheduledStep, vocab_size: int, counts: PenaltyCounts) -> LogitEdits | None:
    """Return the edits of the step that was planned last; None if there are none.

    If the step's model runs already, a sequence may have ended since it was planned. Nobody reads what it samples.
    """
    plan = step.plan
    last_logits = (1 + plan.num_drafts).cumsum() - 1
    chosen: list[_Edited] = []
    constrained: list[Place] = []
    openings: list[tuple[int, int]] = []  # (row of the masks, a token that may come beside those of the grammar)
    for i, (seq, (_, *drafts)) in zip(np.flatnonzero(plan.num_sampled).tolist(), step.shares(), strict=True):
        if seq.finish_reason is not None:
            continue
        num_output = int(plan.num_computed[i] + plan.num_scheduled[i]) - seq.num_prompt_tokens
        num_drafts = len(drafts)
        edits = seq.edits
        if edits is not None and (edits.has_penalties or len(edits.bias) or edits.forbids(num_output - num_drafts)):
            guesses = [int(token_id) for token_id in drafts]
            if isinstance(seq.grammar, AfterThinking):
                places, opening = seq.grammar.list_places(len(chosen), guesses)
                constrained += places
                openings += [] if opening is None else [(len(chosen), opening)]
            elif seq.grammar is not None:
                constrained.append((seq.grammar, len(chosen), guesses))
            back = range(num_drafts, -1, -1)
            chosen += [_Edited(i, seq, edits, num_output - j, int(last_logits[i]) - j) for j in back]
    if not chosen:
        return None
    masks = penalties = None
    if any(row.edits.forbids(row.num_output) for row in chosen):
        masks = np.full((len(chosen), ceil_div(vocab_size, 32)), -1, np.int32)
        if constrained:
            from nanovllm.features.edits.grammars import fill_masks

            fill_masks(masks, constrained)
        for i, token_id in openings:
            masks.view(np.uint32)[i, token_id // 32] |= np.uint32(1 << token_id % 32)
        for mask, row in zip(masks, chosen, strict=True):
            row.edits.forbid(mask, row.seq.token_ids, row.num_output)
    started = []
    if any(row.edits.has_penalties for row in chosen):
        penalties = np.array([row.edits.penalties for row in chosen], np.float32)
        ends = plan.num_scheduled.cumsum()
        for i, seq, edits, *_ in chosen:
            # A last token that the plan carries was not sampled on the device: the sequence has just moved in.
            if edits.has_penalties and plan.token_ids[ends[i] - 1] >= 0:
                tokens = np.array(seq.token_ids, np.int64)
                prompt, output = np.split(tokens, [seq.num_prompt_tokens])
                started.append((seq.row, prompt, output))
    return LogitEdits(
        indices=np.array([row.logits_row for row in chosen], np.int32),
        rows=plan.rows[[row.number for row in chosen]],
        masks=masks,
        bias_index=np.concatenate([row.edits.bias_ids + row.logits_row * vocab_size for row in chosen]),
        bias=np.concatenate([row.edits.bias for row in chosen]),
        penalties=penalties,
        started=started,
        counts=counts,
    )
