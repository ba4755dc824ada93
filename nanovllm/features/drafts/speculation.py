"""Speculative decoding: a step also computes drafts, which are guessed tokens, and keeps those that prove right.

    known        ... a b c          c is not computed yet
    drafts               d e f      guessed: the step computes c d e f
    drawn              d e x y      by the sampler, from the logits after c, d, e, f
    kept               d e x        as long as draft and draw agree, and the first draw that differs

Each draw has the seed and the position that it would have without drafts. So the tokens are the same, if the same
logits have the same bits in a step of any size. (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, only keep the
distribution.)
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.config import ResolvedConfig
from nanovllm.engine.interfaces import Drafter
from nanovllm.engine.plan import IntArray
from nanovllm.engine.rows import Rows
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.features.drafts.costs import StepCosts, choose_num_drafts, measure_costs
from nanovllm.features.drafts.ngrams import NgramDrafter

if TYPE_CHECKING:
    from nanovllm.features.distributed.leader import LeadingRunner
    from nanovllm.runner.model_runner import ModelRunner

MISSES = 3
"""After so many steps in a row without a right draft, a sequence gets no drafts for a while."""
SHORTEST_PAUSE = 8
"""Tokens that a sequence's first pause lasts. Each further pause lasts twice as long."""
LONGEST_PAUSE = 128
INITIAL_RATE = 0.7
"""The share of drafts that counts as right before any was verified."""
HIGHEST_RATE = 0.99
"""No share of right drafts counts as more."""


@dataclass(slots=True)
class DraftRecord:
    """How the drafts of one sequence fared. `Sequence.drafting` holds it.

    Attributes:
        num_right, num_tried: drafts that were right, and drafts that were compared; recent steps count more.
        misses: steps in a row without a right draft.
        pause: tokens that the next pause will last.
        resumes_at: how many tokens the sequence has when its pause ends.
        num_offered: drafts that the drafter had for it in the last step.
        drafter_state: only the drafter uses it.
    """

    num_right: float = 1.0
    num_tried: float = 1.0
    misses: int = 0
    pause: int = SHORTEST_PAUSE
    resumes_at: int = 0
    num_offered: int = 0
    drafter_state: Any = None


class Speculation:
    """Chooses how many drafts each sequence verifies, and learns how they fare.

    Attributes:
        num_draft_tokens: the number of drafts that were verified.
        num_accepted_tokens: the number of those that were right.
    """

    def __init__(self, scheduler: Scheduler, drafter: Drafter, max_drafts: int, costs: StepCosts) -> None:
        """
        Args:
            max_drafts: the most drafts of a sequence in a step.
        """
        self._scheduler = scheduler
        self.drafter = drafter
        self.max_drafts = max_drafts
        self.costs = costs
        self._num_right = [8 * INITIAL_RATE] * (max_drafts + 1)
        self._num_tried = [8.0] * (max_drafts + 1)
        """As in `DraftRecord`, over all sequences, by the number of drafts that were offered."""
        self._last_limits = (b"", 0)
        """The limits of the last step's drafts, and how many tokens it computed anyway. Most steps have the same, and
        then `_may_pay` still holds."""
        self._may_pay = False
        """Whether drafts that are always right would have paid in the last step."""
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    # ---- before the step

    def plan_drafts(self, rows: Rows, ends: IntArray, num_running: int) -> IntArray:
        """Return up to which token each row computes in a step, drafts included. Their blocks are taken here.

        Drafts yield to sequences: those that were admitted to the step have their tokens and blocks first, and while
        one waits for blocks, drafts take none. Whether drafts pay is judged without the admitted sequences: beside a
        long prompt anything would seem to pay.

        Args:
            ends: int32 [len(rows)], up to which token each row computes without drafts.
            num_running: how many of the rows ran before. The rows after them were just admitted.
        """
        scheduler = self._scheduler
        table = scheduler.table
        blocks = scheduler.blocks
        budget = scheduler.max_num_batched_tokens - int((ends - table.num_computed[rows])[num_running:].sum())
        running = rows[:num_running]
        ends = ends.copy()
        running_ends = ends[:num_running]  # a view of ends: what is added here is returned
        num_tokens = table.num_tokens[running]
        num_scheduled = running_ends - table.num_computed[running]
        limits = np.minimum(table.num_needed[running] - num_tokens, self.max_drafts)
        is_awaited = scheduler.waiting and table.has_free_row
        if is_awaited or not blocks.can_grow(blocks.missing(running, num_tokens + limits)):
            limits = np.minimum(limits, blocks.room[running] - num_tokens)
        if scheduler.edited_rows:
            edits = {row: table.resident[row].edits for row in scheduler.edited_rows}
            without_drafts = [row for row, own in edits.items() if own is not None and not own.allows_drafts]
            limits[np.isin(running, without_drafts)] = 0
        decodes = np.flatnonzero((num_scheduled == 1) & (running_ends == num_tokens) & (limits > 0))
        num_planned = int(num_scheduled.sum())
        if len(decodes) and (each := (budget - num_planned) // len(decodes)):
            limits = np.minimum(limits[decodes], each)
            running_ends[decodes] += self.choose(table.sequences(running[decodes]), limits, num_planned)
            blocks.grow(blocks.missing(running, running_ends))
        return ends

    def choose(self, seqs: Seq[Sequence], limits: IntArray, num_tokens: int) -> IntArray:
        """Choose how many drafts each sequence of a step verifies.

        Args:
            seqs: the sequences that decode in the step.
            limits: int32 [n], the most drafts of each; none is above `max_drafts`.
            num_tokens: tokens that the step computes anyway.

        Returns:
            int32 [n].
        """
        limits = limits.copy()
        for i, seq in enumerate(seqs):
            record = seq.drafting = seq.drafting or DraftRecord()
            if record.resumes_at > len(seq.token_ids):
                limits[i] = 0
        if (limits.tobytes(), num_tokens) != self._last_limits:
            self._last_limits = (limits.tobytes(), num_tokens)
            always_right = np.full(len(seqs), HIGHEST_RATE)
            self._may_pay = bool(choose_num_drafts(limits, always_right, len(seqs), num_tokens, self.costs).any())
        if not self._may_pay:
            return np.zeros_like(limits)
        offers = self.drafter.offer(seqs, limits)
        usual_rates = [right / tried for right, tried in zip(self._num_right, self._num_tried, strict=True)]
        rates = []
        for seq, offer in zip(seqs, offers.tolist(), strict=True):
            record = seq.drafting
            record.num_offered = offer
            rates.append(min((record.num_right + 2 * usual_rates[offer]) / (record.num_tried + 2), HIGHEST_RATE))
        return choose_num_drafts(offers, np.array(rates), len(seqs), num_tokens, self.costs)

    # ---- after the step

    def learn(self, step: ScheduledStep, ended: Iterable[Sequence]) -> None:
        """Learn how the drafts of a step fared, whose tokens are in the sequences now.

        Args:
            ended: the sequences that have ended with the step.
        """
        plan = step.plan
        if plan.num_sampled.max() > 1:
            num_known = (plan.num_computed + plan.num_scheduled - plan.num_drafts)[plan.num_sampled > 0]
            for seq, num_before, num_drawn in zip(step.seqs, num_known.tolist(), step.num_drawn.tolist(), strict=True):
                num_right = len(seq.token_ids) - num_before  # and one that no draft foretold, if it is a valid token
                num_right -= seq.finish_reason != "error"
                if num_drawn > 1 and num_right >= 0:  # else it had ended before
                    # Drafts beyond the end of a sequence count neither as right nor as wrong.
                    self._learn(seq, num_right if seq.finish_reason else num_drawn - 1, num_right)
        for seq in ended:
            self.drafter.note_end(seq)

    def _learn(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Count how the drafts of a sequence fared in a step."""
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        num_tried = min(num_accepted + 1, num_drafts)  # nothing is known about those after the first wrong one
        record: DraftRecord = seq.drafting
        record.num_right = 0.8 * record.num_right + num_accepted
        record.num_tried = 0.8 * record.num_tried + num_tried
        offer = record.num_offered
        self._num_right[offer] = 0.98 * self._num_right[offer] + num_accepted
        self._num_tried[offer] = 0.98 * self._num_tried[offer] + num_tried
        if num_accepted:
            record.misses = 0
            record.pause = SHORTEST_PAUSE
            return
        record.misses += 1
        if record.misses >= MISSES:
            record.resumes_at = len(seq.token_ids) + record.pause
            record.pause = min(2 * record.pause, LONGEST_PAUSE)
            record.misses = MISSES - 1  # after the pause a single miss starts the next one
            record.num_right = 1.0
            record.num_tried = 1.0


def start_speculation(
    config: ResolvedConfig, runner: "ModelRunner | LeadingRunner", scheduler: Scheduler
) -> Speculation:
    """Measure the costs of steps, and return the speculation that `config.speculative_config` asks for.

    Args:
        runner: the engine's runner, which has made its cache.
    """
    options = config.speculative_config or {}
    max_drafts = min(config.num_speculative_tokens, config.max_model_len - 1)
    drafter: Drafter
    if config.draft is None or runner.draft is None:
        drafter = NgramDrafter(options["prompt_lookup_min"], options["prompt_lookup_max"])
    else:
        from nanovllm.features.drafts.draft_model import ModelDrafter

        sizes = (config.vocab_size, config.draft["config"]["vocab_size"])
        drafter = ModelDrafter(runner.draft, config.max_num_seqs, *sizes)
    return Speculation(scheduler, drafter, max_drafts, measure_costs(runner, config, max_drafts, runner.draft))
