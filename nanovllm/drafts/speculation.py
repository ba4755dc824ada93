"""Speculative decoding: a step also computes tokens that were guessed, and keeps those that the sampler draws, too.

    known        ... a b c          c is not computed yet
    drafts               d e f      guessed: the step computes c d e f
    drawn              d e x y      by the sampler, each from the logits after c, d, e, f
    kept               d e x        as long as draft and draw agree, and the first draw that differs

Each draw has the seed and the position that it would have without drafts, so the tokens are the same, where logits
have the same bits in any company. (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, keep the distribution.)
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.plan import IntArray
from nanovllm.engine.rows import Rows
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep

MISSES = 3
"""Steps in a row that confirm no draft of a sequence before it gets none for a while."""
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 128
"""Tokens without drafts, twice as many each time."""
HOPE = 0.7
"""The share of drafts that is taken to be right before any was verified."""
WORTHWHILE = 1.02
"""How much faster a step must be expected to be, per token, for drafts to be verified."""
SURE = 0.99
"""No share of right drafts counts as more."""

FloatArray = NDArray[np.float64]


class Drafter(Protocol):
    """Guesses the tokens that come next."""

    def offer(self, seqs: Seq[Sequence], most: IntArray) -> IntArray:
        """How many drafts it has for each sequence, at most `most`. 0 where it has no idea."""
        ...

    def draft(self, step: ScheduledStep) -> None:
        """See `Speculator.draft`."""
        ...

    def ended(self, seq: Sequence) -> None:
        """See `Speculator.ended`."""
        ...


@dataclass(frozen=True)
class RowCosts:
    """What steps cost, as measured at the start, in seconds.

    Attributes:
        rows: ascending, tokens that a step computes.
        plain, verified: seconds of a step of so many, without drafts and with.
        drafting: seconds of a pass of the drafter over so many sequences; 0 if it has none.
    """

    rows: FloatArray
    plain: FloatArray
    verified: FloatArray
    drafting: FloatArray

    def at(self, num_rows: NDArray[np.integer[Any]], seconds: FloatArray) -> FloatArray:
        """Between what was measured, along straight lines; beyond it each row costs what one of the last step's did."""
        beyond = np.maximum(num_rows / self.rows[-1], 1.0)
        return np.interp(num_rows, self.rows, seconds) * beyond  # type: ignore[no-any-return]


def allot(offers: IntArray, rates: FloatArray, num_seqs: int, num_rows: int, costs: RowCosts) -> IntArray:
    """How many drafts of each sequence to verify, so that the step makes the most tokens a second.

    The j-th draft of a sequence is kept with a probability of rate^j. The likeliest come first; the step takes as many
    as pay.

    Args:
        offers, rates: [n], the drafts that are to be had, and how likely one is right if those before it are.
        num_seqs, num_rows: sequences that get a token in this step anyway, and tokens that it computes anyway.
    """
    most = int(offers.max(initial=0))
    if not most:
        return np.zeros_like(offers)
    places = np.arange(1, most + 1)
    gains = np.where(places <= offers[:, None], rates[:, None] ** places, 0.0).ravel()
    order = np.argsort(-gains, kind="stable")[: int(offers.sum())]
    tokens = num_seqs + np.concatenate(([0.0], gains[order].cumsum()))
    # A drafter's pass is due in any step, and makes the first draft; each further place is another one.
    passes = np.maximum.accumulate(np.concatenate(([1], order % most + 1)))
    rows = num_rows + np.arange(len(tokens))
    seconds = costs.at(rows, costs.verified) + passes * costs.at(np.array([num_seqs]), costs.drafting)
    seconds[0] += (costs.at(rows[:1], costs.plain) - costs.at(rows[:1], costs.verified))[0]
    pace = tokens / seconds
    best = int(pace.argmax())
    if pace[best] < WORTHWHILE * pace[0]:
        best = 0
    return np.bincount(order[:best] // most, minlength=len(offers)).astype(np.int32)


class Record:
    """How the drafts of one sequence fared."""

    __slots__ = ("misses", "notes", "offered", "pause", "resumes_at", "right", "tried")

    def __init__(self) -> None:
        self.right = self.tried = 1.0  # counts that forget: what was lately counts more
        self.misses, self.pause, self.resumes_at = 0, SHORTEST_PAUSE, 0
        self.offered = 0
        self.notes: Any = None
        """The drafter's own."""


class Speculation:
    """The scheduler's `Speculator`: which sequences verify how many drafts, and how their drafts have fared."""

    def __init__(self, scheduler: Scheduler, drafter: Drafter, most: int, costs: RowCosts) -> None:
        """
        Args:
            most: drafts a sequence and step.
        """
        self._scheduler, self.drafter, self.most, self.costs = scheduler, drafter, most, costs
        self._right, self._tried = [8 * HOPE] * (most + 1), [8.0] * (most + 1)
        """Over all sequences, by the length of the offer."""
        self._asked, self._may_pay = (b"", 0), False
        """Whether certain drafts would have paid in the last step, which had room for so many: most look alike."""
        self.num_draft_tokens = self.num_accepted_tokens = 0

    def choose(self, seqs: Seq[Sequence], most: IntArray, num_rows: int) -> IntArray:
        """How many drafts each sequence of a step verifies.

        Args:
            seqs: those that decode in the step.
            most: int32 [n], how many each may, `self.most` at most.
            num_rows: tokens that the step computes anyway.
        """
        most = most.copy()
        for i, seq in enumerate(seqs):
            record = seq.drafting = seq.drafting or Record()
            if record.resumes_at > len(seq.token_ids):
                most[i] = 0
        if (asked := (most.tobytes(), num_rows)) != self._asked:
            self._asked, sure = asked, np.full(len(seqs), SURE)
            self._may_pay = bool(allot(most, sure, len(seqs), num_rows, self.costs).any())
        if not self._may_pay:
            return np.zeros_like(most)
        offers = self.drafter.offer(seqs, most)
        usual = [right / tried for right, tried in zip(self._right, self._tried, strict=True)]
        rates = []
        for seq, offer in zip(seqs, offers.tolist(), strict=True):
            record = seq.drafting
            record.offered = offer
            rates.append(min((record.right + 2 * usual[offer]) / (record.tried + 2), SURE))
        return allot(offers, np.array(rates), len(seqs), num_rows, self.costs)

    def plan(self, rows: Rows, ends: IntArray, num_running: int) -> IntArray:
        """Up to where each of the rows computes, with the drafts that it verifies after its last known token.

        They take their blocks here, and cost no sequence its own, nor its place in the step: who is admitted comes
        first, and while somebody waits for blocks, drafts take none. They are judged by the step without the admitted:
        beside a long prompt everything would seem to pay.
        """
        scheduler = self._scheduler
        table, blocks = scheduler.table, scheduler.blocks
        budget = scheduler.max_num_batched_tokens - int((ends - table.num_computed[rows])[num_running:].sum())
        all_ends, rows, ends = ends, rows[:num_running], ends[:num_running]  # drafts are added in place
        num_tokens, num_scheduled = table.num_tokens[rows], ends - table.num_computed[rows]
        most = np.minimum(table.num_needed[rows] - num_tokens, self.most)
        is_awaited = scheduler.waiting and table.has_free_row
        if is_awaited or not blocks.can_grow(blocks.missing(rows, num_tokens + most)):
            most = np.minimum(most, blocks.room[rows] - num_tokens)
        if scheduler.edited_rows:
            edits = {row: table.resident[row].edits for row in scheduler.edited_rows}
            most[np.isin(rows, [row for row, of_row in edits.items() if of_row and not of_row.allows_drafts])] = 0
        decodes = np.flatnonzero((num_scheduled == 1) & (ends == num_tokens) & (most > 0))
        num_rows = int(num_scheduled.sum())
        if len(decodes) and (room := (budget - num_rows) // len(decodes)):
            most = np.minimum(most[decodes], room)
            ends[decodes] += self.choose(table.sequences(rows[decodes]), most, num_rows)
            blocks.grow(blocks.missing(rows, ends))
        return all_ends

    def draft(self, step: ScheduledStep) -> None:
        self.drafter.draft(step)

    def update(
        self, step: ScheduledStep, token_ids: IntArray, logprobs: Mapping[int, dict[int, float]]
    ) -> list[Sequence]:
        """Append what agrees with the drafts, and the first draw that differs; no other step is in flight.

            computed by the step   c d e f      c was known, d e f are drafts
            drawn                  d e x y      d and e are accepted: d e x are kept, and c d e stay computed

        The blocks that the rejected ones were computed into stay with the sequence.
        """
        scheduler = self._scheduler
        table, rows, plan, ended = scheduler.table, step.rows, step.plan, list[Sequence]()
        is_sampled = plan.num_sampled > 0
        counts, ends = plan.num_sampled[is_sampled], plan.num_scheduled.cumsum()[is_sampled]
        afters = counts.cumsum()
        firsts = afters - counts
        places = np.arange(1, len(token_ids) + 1) + np.repeat(ends - afters, counts)  # of the draft after each draw
        differs = token_ids != plan.token_ids.take(places, mode="clip")
        differs[afters - 1] = True  # no draft is left
        stops = np.flatnonzero(differs)
        kept = stops[np.searchsorted(stops, firsts)] - firsts + 1
        num_known = table.num_known[rows] + kept
        table.num_known[rows] = table.num_tokens[rows] = num_known
        table.num_computed[rows] = num_known - 1
        # The device does not know which draw was the last one kept.
        table.num_sent[rows] = np.where(counts > 1, num_known, table.num_sent[rows])
        suspect = np.logical_or.reduceat(scheduler.may_stop[token_ids], firsts)
        suspect |= num_known > table.unchecked_until[rows]
        facts, drawn = (values.tolist() for values in (firsts, counts, kept, suspect)), token_ids.tolist()
        for seq, first, count, num_kept, may_end in zip(step.seqs, *facts, strict=True):
            if seq.finish_reason is not None:  # by the same step's scores, which were no numbers
                continue
            for at in range(first, first + num_kept):
                seq.token_ids.append(drawn[at])
                if at in logprobs:
                    seq.logprobs.append(logprobs[at])
                if may_end and scheduler.check_end(seq):
                    scheduler.release(seq)
                    ended.append(seq)
                    break
            scheduler.num_generated_tokens += at + 1 - first
            if count > 1:  # drafts beyond the end are neither right nor wrong
                self.learn(seq, at - first if seq.finish_reason else count - 1, at - first)
        return ended

    def ended(self, seq: Sequence) -> None:
        self.drafter.ended(seq)

    def learn(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """What a step made of the drafts of a sequence."""
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        record: Record = seq.drafting
        num_tried = min(num_accepted + 1, num_drafts)  # those after the first wrong one tell nothing
        record.right, record.tried = 0.8 * record.right + num_accepted, 0.8 * record.tried + num_tried
        offer = record.offered
        self._right[offer] = 0.98 * self._right[offer] + num_accepted
        self._tried[offer] = 0.98 * self._tried[offer] + num_tried
        if num_accepted:
            record.misses, record.pause = 0, SHORTEST_PAUSE
            return
        record.misses += 1
        if record.misses >= MISSES:
            record.resumes_at = len(seq.token_ids) + record.pause
            record.pause = min(2 * record.pause, LONGEST_PAUSE)
            record.misses = MISSES - 1  # one more miss after the pause is enough for the next
            record.right = record.tried = 1.0
