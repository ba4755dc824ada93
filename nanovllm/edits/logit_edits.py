"""What a step's requests ask to be done to their logits before a token is sampled: plain data, for rank 0 alone.

The engine imports this only while such a request is resident.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.edits.row_edits import RowEdits
from nanovllm.engine.plan import IntArray
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep


class Started(NamedTuple):
    """A row that samples for the first time since it moved in: the tokens that its penalties count."""

    row: int
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What is done to a step's logits. It goes to rank 0's runner beside the plan, and to no other rank.

    Attributes:
        indices: int32 [m], which rows of the step's logits are edited, in ascending order; of the tokens that are read.
        rows: int32 [m], their rows.
        masks: int32 [m, ceil(vocab / 32)]: bit t % 32 of word t // 32 is set if token t may come. None: all may.
        bias_index: int64, places in the flattened logits to which `bias` (float32) is added.
        penalties: float32 [m, 3], repetition, frequency and presence; None if no row has any.
        started: rows with penalties whose counts are to be made anew.
    """

    indices: IntArray
    rows: IntArray
    masks: IntArray | None
    bias_index: NDArray[np.int64]
    bias: NDArray[np.float32]
    penalties: NDArray[np.float32] | None
    started: Seq[Started] = ()


class _Edited(NamedTuple):
    """One of the step's rows of logits: `at`, after num_output tokens of the output of the plan's sequence `number`."""

    number: int
    seq: Sequence
    edits: RowEdits
    num_output: int
    at: int


def make_edits(step: ScheduledStep, vocab_size: int) -> LogitEdits | None:
    """The edits of the step that was planned last; None if there are none."""
    plan = step.plan
    last_logits = (1 + plan.num_drafts).cumsum() - 1
    chosen, constrained = list[_Edited](), []
    for i, (seq, (_, *drafts)) in zip(np.flatnonzero(plan.num_sampled).tolist(), step.shares(), strict=True):
        num_output = int(plan.num_computed[i] + plan.num_scheduled[i]) - seq.num_prompt_tokens
        edits, num_drafts = seq.edits, len(drafts)
        if edits is not None and (edits.has_penalties or len(edits.bias) or edits.forbids(num_output - num_drafts)):
            if seq.grammar is not None:
                constrained.append((seq.grammar, len(chosen), [int(token_id) for token_id in drafts]))
            back = range(num_drafts, -1, -1)
            chosen += [_Edited(i, seq, edits, num_output - j, int(last_logits[i]) - j) for j in back]
    if not chosen:
        return None
    masks = penalties = None
    if any(row.edits.forbids(row.num_output) for row in chosen):
        masks = np.full((len(chosen), -(-vocab_size // 32)), -1, np.int32)
        if constrained:
            from nanovllm.edits.grammars import fill_masks

            fill_masks(masks, constrained)
        for mask, row in zip(masks, chosen, strict=True):
            row.edits.forbid(mask, row.seq.token_ids, row.num_output)
    started = []
    if any(row.edits.has_penalties for row in chosen):
        penalties = np.array([row.edits.penalties for row in chosen], np.float32)
        ends = plan.num_scheduled.cumsum()
        for i, seq, edits, *_ in chosen:
            if edits.has_penalties and plan.token_ids[ends[i] - 1] >= 0:  # sent, not sampled: it has just moved in
                tokens = np.array(seq.token_ids, np.int64)
                started.append(Started(seq.row, *np.split(tokens, [seq.num_prompt_tokens])))
    return LogitEdits(
        indices=np.array([row.at for row in chosen], np.int32),
        rows=plan.rows[[row.number for row in chosen]],
        masks=masks,
        bias_index=np.concatenate([row.edits.bias_ids + row.at * vocab_size for row in chosen]),
        bias=np.concatenate([row.edits.bias for row in chosen]),
        penalties=penalties,
        started=started,
    )
