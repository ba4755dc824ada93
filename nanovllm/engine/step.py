"""A planned step, the sequences that receive its results, and the prompt tokens that it scores."""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from nanovllm.engine.plan import EMBED, IntArray, StepPlan
from nanovllm.engine.rows import Rows
from nanovllm.engine.sequence import Sequence

NO_TARGETS = np.empty(0, np.int32)


class Scored(NamedTuple):
    """A sequence that a step scores, how many of the plan's targets belong to it, and whether it ends after them."""

    seq: Sequence
    num_targets: int
    is_last: bool


class ScheduledStep(NamedTuple):
    """A plan and the sequences that receive its results. `seqs` receive the sampled tokens, `scored` the scores.

    The results are read one or more steps after the step was planned. Meanwhile a sequence may have ended or been
    preempted, and its row may have a new owner. `num_releases` is a copy of the row table's count at planning time;
    with it `Scheduler.update` finds out whether that happened.

    Attributes:
        seqs: the sequences that the step samples for, in the plan's order. Without drafts seqs[i] gets the i-th token.
        rows: their rows.
    """

    plan: StepPlan
    seqs: list[Sequence]
    rows: Rows
    num_releases: int
    scored: Seq[Scored] = ()

    def shares(self) -> Iterator[tuple[Sequence, IntArray]]:
        """Yield (sequence, token ids) for each of `seqs`. The ids are its last token and then its drafts: the step
        samples once after each of them."""
        plan = self.plan
        sampled = np.flatnonzero(plan.num_sampled)
        ends = plan.num_scheduled.cumsum()[sampled].tolist()
        counts = plan.num_sampled[sampled].tolist()
        for seq, end, count in zip(self.seqs, ends, counts, strict=True):
            yield seq, plan.token_ids[end - count : end]


def choose_targets(
    scoring: dict[int, Sequence], rows: Rows, ends: IntArray, num_sampled: IntArray
) -> tuple[IntArray, IntArray, list[Scored], IntArray]:
    """Choose the prompt tokens that the next step scores (its targets). It computes each row's tokens up to `ends`.

    The logits of a token score the token after it. So the last target may be the first token of the next chunk. Each
    sequence's `next_scored` moves on.

    Args:
        scoring: {row: sequence}, the sequences with prompt tokens that are not scored yet, and those that are only
            scored. A sequence that will also generate tokens is removed when all of its prompt is computed.
        num_sampled: int32 [num_seqs], how many tokens each row samples. It becomes 0 for sequences that are only
            scored.

    Returns:
        num_sampled: 0 for sequences that are only scored, else as given.
        num_scored: int32 [num_seqs], how many targets each row has.
        scored: the sequences of `scoring` that are in the step, with their numbers of targets.
        targets: int32, the token ids of all targets.
    """
    num_sampled = num_sampled.copy()
    num_scored = np.zeros_like(num_sampled)
    scored: list[Scored] = []
    targets = array("i")
    for i, row in enumerate(rows.tolist()):
        if (seq := scoring.get(row)) is None:
            continue
        if seq.is_only_scored:
            num_sampled[i] = 0
        elif ends[i] >= seq.num_prompt_tokens:
            del scoring[row]
        if seq.params.embed:
            if ends[i] < seq.num_needed:
                continue
            own = array("i", [EMBED])
        else:
            own = seq.token_ids[seq.next_scored : min(int(ends[i]) + 1, seq.num_prompt_tokens)]
        targets.extend(own)
        num_scored[i] = len(own)
        seq.next_scored += len(own)
        scored.append(Scored(seq, len(own), seq.is_only_scored and ends[i] == seq.num_needed))
    return num_sampled, num_scored, scored, np.array(targets, np.int32)
