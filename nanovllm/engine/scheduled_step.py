"""A planned step, and the sequences that receive its results."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.plan import IntArray, StepPlan, StepResult
from nanovllm.engine.rows import Rows
from nanovllm.engine.sequence import Sequence


class Scored(NamedTuple):
    """A sequence that a step scores or embeds.

    Attributes:
        num_targets: how many of the plan's targets belong to it.
        is_last: whether the sequence ends after them.
    """

    seq: Sequence
    num_targets: int
    is_last: bool


class ScheduledStep(NamedTuple):
    """A plan and the sequences that receive its results.

    Other steps may be planned and read before the results of this step are read. Meanwhile a sequence may have ended or
    been preempted, and its row may have a new owner. `num_releases` is a copy of the row table's count at planning
    time; with this copy `Scheduler.update` finds out whether a row has lost its sequence.

    Attributes:
        seqs: the sequences that the step samples for, in the plan's order.
        rows: the rows of `seqs`.
        scored: the sequences that the step scores or embeds.
    """

    plan: StepPlan
    seqs: list[Sequence]
    rows: Rows
    num_releases: int
    scored: Seq[Scored] = ()

    @property
    def num_drawn(self) -> IntArray:
        """int32 [len(seqs)]: how many tokens the step draws for each sequence, one more than it has drafts."""
        num_sampled = self.plan.num_sampled
        return num_sampled[num_sampled > 0]

    def shares(self) -> Iterator[tuple[Sequence, IntArray]]:
        """Yield (sequence, token ids) for each of `seqs`. The ids are its last token and then its drafts: the step
        samples once after each of them. They are a view of the plan's, into which a `Drafter` writes."""
        plan = self.plan
        ends = plan.num_scheduled.cumsum()[plan.num_sampled > 0].tolist()
        for seq, end, count in zip(self.seqs, ends, self.num_drawn.tolist(), strict=True):
            yield seq, plan.token_ids[end - count : end]

    def count_kept(self, drawn: IntArray) -> IntArray:
        """Return how many of its draws each sequence keeps: those that agree with its drafts, and the next draw.

            computed by the step   c d e f      c was known, d e f are drafts
            drawn                  d e x y      d and e are accepted: d e x are kept, and c d e stay computed

        Args:
            drawn: int32 [sum of num_drawn], the tokens that the step drew.

        Returns:
            int32 [len(seqs)], at least 1.
        """
        if len(drawn) == len(self.seqs):
            return np.ones(len(drawn), np.int32)
        num_drawn = self.num_drawn
        ends = self.plan.num_scheduled.cumsum()[self.plan.num_sampled > 0]
        afters = num_drawn.cumsum()
        firsts = afters - num_drawn
        following = np.arange(1, len(drawn) + 1) + np.repeat(ends - afters, num_drawn)  # the draft after each draw
        differs = drawn != self.plan.token_ids.take(following, mode="clip")
        differs[afters - 1] = True  # the last draw of a sequence has no draft to agree with
        stops = np.flatnonzero(differs)
        return (stops[np.searchsorted(stops, firsts)] - firsts + 1).astype(np.int32)

    def keep(self, result: StepResult, num_kept: IntArray) -> tuple[NDArray[np.intp], StepResult]:
        """Drop all but the first num_kept draws of each sequence from a result.

        Returns:
            For each draw that is left, the index in `seqs` of its sequence; and the result with these draws alone.
        """
        num_drawn = self.num_drawn
        owners = np.repeat(np.arange(len(self.seqs)), num_drawn)
        places = np.arange(len(owners)) - (num_drawn.cumsum() - num_drawn)[owners]  # within the draws of its sequence
        kept = np.flatnonzero(places < num_kept[owners])
        logprobs = result.logprobs
        if logprobs:
            logprobs = {i: logprobs[draw] for i, draw in enumerate(kept.tolist()) if draw in logprobs}
        return owners[kept], replace(result, token_ids=result.token_ids[kept], logprobs=logprobs)
