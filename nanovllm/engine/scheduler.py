"""Chooses which sequences run in the next step and how many tokens of each, and hands them what a step sampled."""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.hooks import Speculator
from nanovllm.engine.plan import IntArray, StepPlan
from nanovllm.engine.rows import BlockTables, Rows, RowTable, pack_sampling
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import NO_TARGETS, ScheduledStep, Scored, choose_targets
from nanovllm.outputs import FinishReason


class Scheduler:
    """Plans steps for the sequences it holds, and appends to them what the steps sampled.

    One rule instead of phases: a step computes the tokens of a sequence that are not computed yet, as far as the step's
    token budget lasts. Running sequences come first, in order of admission, then waiting ones, in order. Admission
    stops when the budget is spent. So only the last running sequence can need more than one token, at most one prompt
    of a step is cut, and no more sequences run than the budget has tokens.
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
        self.speculation: Speculator | None = None
        """load.py sets it afterwards, because a speculator is made with its scheduler."""
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.table = RowTable(max_num_seqs)
        self.blocks = BlockTables(block_manager, self.table)
        self._scoring: dict[int, Sequence] = {}
        """By row: the sequences whose prompt is still to be scored, and those that are only scored."""
        self.edited_rows: set[int] = set()
        """Rows of sequences that ask for edits of their logits."""
        self.may_stop = np.zeros(vocab_size + 1, bool)
        """By token id: whether it is a stop token of any sequence ever added. No other id needs `Sequence.check_end`,
        as long as num_known is at most `RowTable.unchecked_until`. The last element is for id -1, a failed sample."""
        self.may_stop[-1] = True
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0

    def add(self, seq: Sequence) -> None:
        """Put a sequence at the end of the waiting queue."""
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
        """True if the next step's edits of logits depend on tokens that launched steps are still sampling."""
        all_edits = (self.table.resident[row].edits for row in self.edited_rows)
        return any(edits is not None and edits.needs_known_tokens for edits in all_edits)

    # ---- schedule

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step and return it; None if nothing can be computed before a launched step is read."""
        rows, ends, has_preempted = self._schedule_running()
        admitted: list[Sequence] = []
        if not has_preempted:
            if self.waiting and self.table.has_free_row:
                rows, ends, admitted = self._admit(rows, ends)
            if self.speculation is not None and len(rows) > len(admitted):
                ends = self.speculation.plan_drafts(rows, ends, len(rows) - len(admitted))
        return self._make_step(rows, ends, admitted) if len(rows) else None

    def _schedule_running(self) -> tuple[Rows, IntArray, bool]:
        """Choose the running rows that compute in this step, and take the blocks that they lack.

        While the pool has too few blocks, the most recently admitted sequence is preempted, possibly the one that needs
        them. This ends: the pool holds at least one sequence of any allowed length.

        Returns:
            The rows, in order of admission; up to which token each computes; and whether a sequence was preempted.
        """
        table = self.table
        budget = self.max_num_batched_tokens
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
            is_scheduled = num_scheduled > 0
            rows = rows[is_scheduled]
            ends = ends[is_scheduled]
        return rows, ends, has_preempted

    def _admit(self, rows: Rows, ends: IntArray) -> tuple[Rows, IntArray, list[Sequence]]:
        """Admit waiting sequences, in order, while rows, blocks and budget last; each takes all its blocks at once.

        Args:
            rows: the running rows that compute in this step, up to the token `ends` of each.

        Returns:
            Rows and ends with those of the admitted sequences behind them, and the admitted sequences.
        """
        table = self.table
        manager = self.block_manager
        budget = self.max_num_batched_tokens - int((ends - table.num_computed[rows]).sum())
        admitted: list[Sequence] = []
        new_ends: list[int] = []
        while self.waiting and table.has_free_row and budget > 0:
            seq = self.waiting[0]
            if seq.num_in_flight:
                break  # it was preempted, and its next token is still to come: it would be computed without it
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
        """Give a sequence a row. The KV of its first num_cached tokens was found in the prefix cache."""
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
        """Make the step that computes each row's tokens up to `ends`, and count it in the row table as launched."""
        table = self.table
        num_computed = table.num_computed[rows]
        num_scheduled = ends - num_computed
        num_tokens = int(num_scheduled.sum())
        if num_tokens > len(rows):
            decodes_first = np.argsort(num_scheduled > 1, kind="stable")
            rows = rows[decodes_first]
            ends = ends[decodes_first]
            num_computed = num_computed[decodes_first]
            num_scheduled = num_scheduled[decodes_first]
        token_ids = np.full(num_tokens, -1, np.int32)
        is_sent = num_computed < table.num_sent[rows]
        if np.count_nonzero(is_sent):
            firsts = num_scheduled.cumsum() - num_scheduled
            for row, first, start, end in np.stack((rows, firsts, num_computed, ends), 1)[is_sent].tolist():
                known = table.resident[row].token_ids[start:end]
                token_ids[first : first + len(known)] = known  # the speculator writes the drafts that follow
        num_before = table.num_tokens[rows]
        num_sampled = np.maximum(ends + 1 - num_before, 0)  # drafts included
        num_scored = np.zeros(len(rows), np.int32)  # np.zeros_like takes ten times as long
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
            block_entries=self.blocks.take_new_entries(),
            new_rows=pack_sampling(admitted, len(self.may_stop) - 1),
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
        """Append what a step sampled and scored; return the sequences that ended by it, whose rows and blocks are free.

        Args:
            token_ids: int32 [num_sampled in all]; -1 where the logits were no distribution, which ends a sequence.
            logprobs: for tokens whose request asked for them, {index in token_ids: {token id: log-probability}}.
            scores: {token id: log-probability} for each of the plan's targets.
        """
        table = self.table
        rows = step.rows
        seqs = step.seqs
        finished = self._add_scores(step, scores) if step.scored else []
        if self.speculation is not None and len(token_ids) > len(seqs):
            return finished + self.speculation.update(step, token_ids, logprobs)
        for i, values in logprobs.items():
            if seqs[i].finish_reason is None:
                seqs[i].logprobs.append(values)
        if table.num_releases > step.num_releases:
            is_resident = table.released_at[rows] <= step.num_releases  # the release clock: see RowTable
            for i in np.flatnonzero(~is_resident).tolist():
                if self._deliver_late(seqs[i], int(token_ids[i])):
                    finished.append(seqs[i])
            kept = np.flatnonzero(is_resident)
            rows = rows[kept]
            token_ids = token_ids[kept]
            seqs = [seqs[i] for i in kept.tolist()]
        for seq, token_id in zip(seqs, token_ids.tolist(), strict=True):
            seq.token_ids.append(token_id)
        self.num_generated_tokens += len(seqs)
        num_known = table.num_known[rows] + 1
        table.num_known[rows] = num_known
        may_end = self.may_stop[token_ids] | (num_known > table.unchecked_until[rows])
        ended = [seqs[i] for i in may_end.nonzero()[0].tolist() if self.check_end(seqs[i])]
        for seq in ended:
            self.release(seq)
        return finished + ended

    def _add_scores(self, step: ScheduledStep, scores: Seq[dict[int, float]]) -> list[Sequence]:
        """Give the sequences of a step their scores; returns the sequences that end with them."""
        ended = step.share_scores(scores)
        for seq, reason in ended:
            if reason == "error":
                self.block_manager.forget(seq)
            self.end(seq, reason)
        return [seq for seq, _ in ended]

    def _deliver_late(self, seq: Sequence, token_id: int) -> bool:
        """Handle a token for a sequence that has lost its row since: drop it if the sequence has ended; append it if
        the sequence was preempted.

        Returns True if the token ends the sequence.
        """
        if seq.finish_reason is not None:
            return False
        seq.num_in_flight -= 1
        seq.token_ids.append(token_id)
        self.num_generated_tokens += 1
        if not self.check_end(seq):
            return False
        self.waiting.remove(seq)  # near the front, where the preempted are
        return True

    def check_end(self, seq: Sequence) -> bool:
        """Return whether the token that was just appended ends a sequence: see `Sequence.check_end`.

        After an error the token is not counted, and the sequence's blocks are forgotten: their KV may be broken, too.
        """
        reason = seq.check_end()
        if reason == "error":
            self.num_generated_tokens -= 1
            self.block_manager.forget(seq)
        return reason is not None

    # ---- leaving

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence now, unless it has ended. Tokens that launched steps still sample for it will be dropped."""
        if seq.finish_reason is None:
            if seq.row >= 0:
                self.release(seq)
            else:
                self.waiting.remove(seq)  # a preempted one is near the front
            seq.finish_reason = reason

    def abort_all(self) -> None:
        """End every sequence. The caller has read or dropped all launched steps."""
        for seq in [*self.running, *self.waiting]:
            self.end(seq, "abort")
        self.blocks.take_new_entries()  # of a step that was planned and, after an error, never launched

    def _preempt(self) -> None:
        """Take row and blocks from the sequence that was admitted last, and put it at the front of the queue.

        Its tokens are computed again when it is admitted again.
        """
        table = self.table
        row, seq = next(reversed(table.resident.items()))
        seq.num_in_flight = int(table.num_tokens[row] - table.num_known[row])
        if seq.is_only_scored and table.num_computed[row] == seq.num_needed:
            seq.num_in_flight = 1  # the step with its last scores
        self.release(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def release(self, seq: Sequence) -> None:
        """Free a sequence's blocks and row at once. Steps run in order, so a later step may already use them."""
        self.blocks.release(seq)
        self._scoring.pop(seq.row, None)
        self.edited_rows.discard(seq.row)
        self.table.release(seq)
