"""A planned step, the sequences that receive its results, and the prompt tokens that it scores."""

import math
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nanovllm.engine.plan import IntArray, StepPlan
from nanovllm.engine.rows import Rows
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import FinishReason

NO_TARGETS = np.empty(0, np.int32)


class Scored(NamedTuple):
    """A sequence that a step scores: how many of the plan's targets are its own, and whether it ends with them."""

    seq: Sequence
    num_targets: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan and the sequences that receive its results: `seqs` the sampled tokens, `scored` the scores.

    A step is read one or more steps after it was planned. By then a sequence may have ended or been preempted, and its
    row may have a new owner: `num_releases`, taken from the row table when the step was planned, tells.

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
        """Yield each of `seqs` with the plan's tokens that it is sampled after: its last known one, and its drafts."""
        plan = self.plan
        sampled = np.flatnonzero(plan.num_sampled)
        ends = plan.num_scheduled.cumsum()[sampled].tolist()
        counts = plan.num_sampled[sampled].tolist()
        for seq, end, count in zip(self.seqs, ends, counts, strict=True):
            yield seq, plan.token_ids[end - count : end]

    def share_scores(self, scores: Seq[dict[int, float]]) -> list[tuple[Sequence, FinishReason]]:
        """Append each sequence's share of the scores to its prompt_logprobs, also if it was preempted since.

        Returns the sequences that end with them, and why.
        """
        ended: list[tuple[Sequence, FinishReason]] = []
        start = 0
        for seq, num_targets, is_last in self.scored:
            own = scores[start : start + num_targets]
            start += num_targets
            if seq.finish_reason is not None:
                continue
            if any(math.isnan(logprob) for logprobs in own for logprob in logprobs.values()):
                ended.append((seq, "error"))
                continue
            seq.prompt_logprobs.extend(own)
            if is_last:
                ended.append((seq, "length"))
        return ended


def choose_targets(
    scoring: dict[int, Sequence], rows: Rows, ends: IntArray, num_sampled: IntArray
) -> tuple[IntArray, IntArray, list[Scored], IntArray]:
    """Choose the prompt tokens that a step scores which computes each row's tokens up to `ends`.

    The logits of a token score the one after it, so the step's last token scores one that is not in the step.

    Args:
        scoring: by row, the sequences whose prompt is still to be scored, and those that are only scored. A sequence
            that goes on to sample is taken out when its last target is chosen.
        num_sampled: int32 [num_seqs], how many tokens each row would sample.

    Returns:
        The plan's num_sampled (0 for sequences that are only scored), its num_scored, the sequences, and its targets.
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
        own = seq.token_ids[seq.next_scored : min(int(ends[i]) + 1, seq.num_prompt_tokens)]
        targets.extend(own)
        num_scored[i] = len(own)
        seq.next_scored += len(own)
        scored.append(Scored(seq, len(own), seq.is_only_scored and ends[i] == seq.num_needed))
    return num_sampled, num_scored, scored, np.array(targets, np.int32)
