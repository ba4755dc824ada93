"""Which sequences run in the next step, and how many tokens of each."""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.block_tables import BlockTables
from nanovllm.engine.plan import IntArray, StepPlan
from nanovllm.engine.rows import Rows, RowTable, sampling_of
from nanovllm.engine.scoring import NO_TARGETS, Scored, choose_targets, deal_out
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep, Speculator
from nanovllm.outputs import FinishReason


class Scheduler:
    """Plans steps for the sequences it holds, and takes in what the steps sampled.

    One rule instead of phases: a step schedules the tokens of a sequence that are not computed yet, capped by what is
    left of the step's budget. Running sequences come first, in order of admission, then waiting ones, in order. As
    admission stops where the budget is spent, only the last running sequence can need more than one token, and at most
    one prompt of a step is cut; and as each running sequence costs a token, no more run than a budget serves.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
    ) -> None:
        self.block_manager = block_manager
        self.speculation: Speculator | None = None  # set once it is made: it knows its scheduler
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.table = RowTable(max_num_seqs)
        self.blocks = BlockTables(block_manager, self.table)
        self._scoring: dict[int, Sequence] = {}
        """By row, those whose prompt is still to be scored, and those that are only scored."""
        self.edited_rows: set[int] = set()
        """Rows whose logits are edited before a token is sampled."""
        self.may_stop = np.zeros(vocab_size + 1, bool)
        """Token ids that end at least one sequence ever added: others need no second look. The last is for -1."""
        self.may_stop[-1] = True
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0

    def add(self, seq: Sequence) -> None:
        self.may_stop[list(seq.stop_ids)] = True
        self.waiting.append(seq)

    @property
    def running(self) -> list[Sequence]:
        """Resident sequences in order of admission."""
        return list(self.table.resident.values())

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.table.resident)

    @property
    def needs_known_tokens(self) -> bool:
        """Whether the next step's edits of logits depend on tokens that the host must have read."""
        edits = (self.table.resident[row].edits for row in self.edited_rows)
        return any(of_row is not None and of_row.needs_known_tokens for of_row in edits)

    # ---- schedule

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, or None if nothing can be computed before a launched step is read."""
        rows, ends, has_preempted = self._schedule_running()
        admitted: list[Sequence] = []
        if not has_preempted:
            if self.waiting and self.table.has_free_row:
                rows, ends, admitted = self._admit(rows, ends)
            if self.speculation is not None and len(rows) > len(admitted):
                ends = self.speculation.plan(rows, ends, len(rows) - len(admitted))
        return self._make_step(rows, ends, admitted) if len(rows) else None

    def _schedule_running(self) -> tuple[Rows, IntArray, bool]:
        """The running rows that compute in this step, up to which token each, and whether room had to be made.

        While blocks are lacking, the most recently admitted sequence goes: possibly the one that asks for them. The
        first admitted always stays, and the pool holds at least one sequence of any allowed length.
        """
        table, budget = self.table, self.max_num_batched_tokens
        has_preempted = False
        while True:
            rows = table.order
            num_computed = table.num_computed[rows]
            ends = np.minimum(table.num_tokens[rows], table.num_needed[rows])
            num_scheduled = ends - num_computed
            if num_scheduled.sum() > budget:
                spent_before = num_scheduled.cumsum() - num_scheduled
                num_scheduled = np.clip(budget - spent_before, 0, num_scheduled).astype(np.int32)
                ends = num_computed + num_scheduled
            missing = self.blocks.missing(rows, ends)
            if self.blocks.can_grow(missing):
                break
            self._preempt()
            has_preempted = True
        self.blocks.grow(missing)
        self.blocks.register(rows, ends)
        if np.count_nonzero(num_scheduled) < len(rows):
            rows, ends = rows[num_scheduled > 0], ends[num_scheduled > 0]
        return rows, ends, has_preempted

    def _admit(self, rows: Rows, ends: IntArray) -> tuple[Rows, IntArray, list[Sequence]]:
        """Move waiting sequences in, in order, while rows, blocks and budget last; each gets all its blocks at once."""
        table, manager = self.table, self.block_manager
        budget = self.max_num_batched_tokens - int((ends - table.num_computed[rows]).sum())
        admitted, new_ends = list[Sequence](), list[int]()
        while self.waiting and table.has_free_row and budget > 0:
            seq = self.waiting[0]
            if seq.num_in_flight:
                break  # its next token is still to come: readmitting it now would recompute without it
            hits = manager.find_prefix(seq)
            num_wanted = min(len(seq.token_ids), seq.num_needed)
            num_new = manager.blocks_for(num_wanted) - len(hits)
            if not manager.can_take(num_new, hits):
                break
            self.waiting.popleft()
            num_cached = len(hits) * manager.block_size
            end = min(num_wanted, num_cached + budget)
            budget -= end - num_cached
            self._move_in(seq, num_cached)
            self.blocks.start(seq, hits, num_new)
            self.blocks.register(np.array([seq.row]), np.array([end], np.int32))
            admitted.append(seq)
            new_ends.append(end)
        new_rows = np.array([seq.row for seq in admitted], np.intp)
        return np.concatenate((rows, new_rows)), np.concatenate((ends, np.array(new_ends, np.int32))), admitted

    def _move_in(self, seq: Sequence, num_cached: int) -> None:
        """Give a sequence a row, its first num_cached tokens computed."""
        self.table.move_in(seq, num_cached)
        if seq.is_only_scored or seq.next_scored < seq.num_prompt_tokens:
            self._scoring[seq.row] = seq
        if seq.edits is not None:
            self.edited_rows.add(seq.row)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_cached
            if seq.lead is None:  # a prompt counts once, however often it is completed
                self.num_prompt_tokens += seq.num_prompt_tokens
                self.num_cached_tokens += num_cached

    def _make_step(self, rows: Rows, ends: IntArray, admitted: list[Sequence]) -> ScheduledStep:
        """The step that computes each row's tokens up to ends."""
        table = self.table
        num_computed = table.num_computed[rows]
        num_scheduled = ends - num_computed
        num_tokens = int(num_scheduled.sum())
        if num_tokens > len(rows):
            decodes_first = np.argsort(num_scheduled > 1, kind="stable")
            rows, ends = rows[decodes_first], ends[decodes_first]
            num_computed, num_scheduled = num_computed[decodes_first], num_scheduled[decodes_first]
        token_ids = np.full(num_tokens, -1, np.int32)
        is_sent = num_computed < table.num_sent[rows]
        if np.count_nonzero(is_sent):
            places, firsts = token_ids.data, num_scheduled.cumsum() - num_scheduled
            for row, at, start, end in np.stack((rows, firsts, num_computed, ends), 1)[is_sent].tolist():
                known = table.resident[row].token_ids[start:end]
                places[at : at + len(known)] = known  # drafts follow
        num_before = table.num_tokens[rows]
        num_sampled = np.maximum(ends + 1 - num_before, 0)  # more than 1: with drafts
        num_scored = np.zeros_like(num_sampled)
        scored: Seq[Scored] = ()
        targets = NO_TARGETS
        if self._scoring:
            num_sampled, num_scored, scored, targets = choose_targets(self._scoring, rows, ends, num_sampled)
        table.num_computed[rows] = ends
        table.num_tokens[rows] = num_before + num_sampled
        plan = StepPlan(
            rows=rows.astype(np.int32),
            num_computed=num_computed,
            num_scheduled=num_scheduled,
            num_sampled=num_sampled,
            num_scored=num_scored,
            token_ids=token_ids,
            targets=targets,
            block_entries=self.blocks.new_entries(),
            new_rows=sampling_of(admitted, len(self.may_stop) - 1),
        )
        sampled = rows if np.count_nonzero(num_sampled) == len(rows) else rows[num_sampled > 0]
        return ScheduledStep(plan, table.sequences(sampled), sampled, table.num_releases, scored)

    # ---- update

    def update(
        self,
        step: ScheduledStep,
        token_ids: IntArray,
        logprobs: Mapping[int, dict[int, float]] = {},
        scores: Seq[dict[int, float]] = (),
    ) -> list[Sequence]:
        """Append what a step sampled and return the sequences that ended by it; their rows and blocks are free.

        Args:
            token_ids: int32 [num_sampled in all]; -1 where the logits were no distribution, which ends a sequence.
            logprobs: of those whose request asked for them, by their place.
            scores: for each of the plan's targets.
        """
        table, rows, seqs = self.table, step.rows, step.seqs
        finished = self._take_in_scores(step, scores) if step.scored else []
        if self.speculation is not None and len(token_ids) > len(seqs):
            return finished + self.speculation.update(step, token_ids, logprobs)
        for i, values in logprobs.items():
            if seqs[i].finish_reason is None:
                seqs[i].logprobs.append(values)
        if table.num_releases > step.num_releases:
            is_resident = table.released_at[rows] <= step.num_releases
            for i in np.flatnonzero(~is_resident).tolist():
                if self._deliver_late(seqs[i], int(token_ids[i])):
                    finished.append(seqs[i])
            kept = np.flatnonzero(is_resident)
            rows, token_ids, seqs = rows[kept], token_ids[kept], [seqs[i] for i in kept.tolist()]
        for seq, token_id in zip(seqs, token_ids.tolist(), strict=True):
            seq.token_ids.append(token_id)
        self.num_generated_tokens += len(seqs)
        num_known = table.num_known[rows] + 1
        table.num_known[rows] = num_known
        suspect = self.may_stop[token_ids] | (num_known > table.num_unwatched[rows])
        ended = [seqs[i] for i in suspect.nonzero()[0].tolist() if self.note_end(seqs[i])]
        for seq in ended:
            self.release(seq)
        return finished + ended

    def _take_in_scores(self, step: ScheduledStep, scores: Seq[dict[int, float]]) -> list[Sequence]:
        """Deal out a step's scores; returns the sequences that end with them."""
        ended = deal_out(step.scored, scores)
        for seq, reason in ended:
            if reason == "error":
                self.block_manager.forget(seq)
            self.end(seq, reason)
        return [seq for seq, _ in ended]

    def _deliver_late(self, seq: Sequence, token_id: int) -> bool:
        """A token for a sequence that has lost its row since: dropped if it has ended, kept if it was preempted.

        True if the token ends it.
        """
        if seq.finish_reason is not None:
            return False
        seq.num_in_flight -= 1
        seq.token_ids.append(token_id)
        self.num_generated_tokens += 1
        if not self.note_end(seq):
            return False
        self.waiting.remove(seq)  # near the front, where the preempted are
        return True

    def note_end(self, seq: Sequence) -> bool:
        """Set the finish_reason of a sequence if the token that it was just given ends it; True if it does."""
        seq.finish_reason = seq.feed_last_token()
        if seq.finish_reason == "error":
            self.num_generated_tokens -= 1
            self.block_manager.forget(seq)
        return seq.finish_reason is not None

    # ---- leaving

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence now, unless it has ended. What launched steps sample for it is dropped when it arrives."""
        if seq.finish_reason is None:
            if seq.row >= 0:
                self.release(seq)
            else:
                self.waiting.remove(seq)  # a preempted one is near the front
            seq.finish_reason = reason

    def abort_all(self) -> None:
        """End every sequence. Only to be done when no launched step is left to be read."""
        for seq in [*self.running, *self.waiting]:
            self.end(seq, "abort")
        self.blocks.new_entries()

    def _preempt(self) -> None:
        """Take everything back from who was admitted last; it will be computed anew, from the front of the queue."""
        row, seq = next(reversed(self.table.resident.items()))
        table = self.table
        seq.num_in_flight = int(table.num_tokens[row] - table.num_known[row])
        if seq.is_only_scored and table.num_computed[row] == seq.num_needed:
            seq.num_in_flight = 1  # its last scores
        self.release(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def release(self, seq: Sequence) -> None:
        """Free a sequence's blocks and row at once: device work is in order, so later steps may have them."""
        self.block_manager.release(seq.block_table)
        seq.block_table = []
        self._scoring.pop(seq.row, None)
        self.edited_rows.discard(seq.row)
        self.table.release(seq)
