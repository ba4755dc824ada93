"""A planned step with those it is for, and what may add drafts to it."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from nanovllm.engine.plan import IntArray, StepPlan
from nanovllm.engine.rows import Rows
from nanovllm.engine.scoring import Scored
from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan, and for whom its results are: `seqs` share what is sampled, `scored` the scores.

    Without drafts `seqs[i]` gets the i-th sampled token. A step is read one or more steps after it was planned; by
    then a sequence may have ended or been preempted, and its row may have a new owner. `num_releases` tells: so many
    rows had been released when it was planned.
    """

    plan: StepPlan
    seqs: list[Sequence]
    rows: Rows
    num_releases: int
    scored: Seq[Scored] = ()

    def shares(self) -> Iterator[tuple[Sequence, IntArray]]:
        """Each of seqs with the tokens of the plan that it is sampled from: its last known one, and its drafts."""
        plan = self.plan
        sampled = np.flatnonzero(plan.num_sampled)
        ends, counts = plan.num_scheduled.cumsum()[sampled].tolist(), plan.num_sampled[sampled].tolist()
        for seq, end, count in zip(self.seqs, ends, counts, strict=True):
            yield seq, plan.token_ids[end - count : end]


class Speculator(Protocol):
    """Guesses tokens, and says how many guesses a step of its scheduler verifies: see drafts/, which no engine needs.

    Attributes:
        num_draft_tokens, num_accepted_tokens: verified so far, and found right.
    """

    num_draft_tokens: int
    num_accepted_tokens: int

    def plan(self, rows: Rows, ends: IntArray, num_running: int) -> IntArray:
        """Up to where each of the rows computes in a step, drafts included, which does so up to `ends` without them.

        Args:
            num_running: so many of the rows, the first ones, ran before; the others were just admitted.
        """
        ...

    def draft(self, step: ScheduledStep) -> None:
        """Write the drafts into the plan: the shares of its step have room for as many as were planned."""
        ...

    def update(
        self, step: ScheduledStep, token_ids: IntArray, logprobs: Mapping[int, dict[int, float]]
    ) -> list[Sequence]:
        """`Scheduler.update` of a step with drafts."""
        ...

    def ended(self, seq: Sequence) -> None:
        """The sequence has its last token."""
        ...
