"""Which sequences run in the next step, and how many tokens of each."""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from nanovllm.engine.batch import Batch, Speculator
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.block_tables import BlockTables
from nanovllm.engine.plan import ROW_SAMPLING, IntArray, StepPlan
from nanovllm.engine.row_table import RowTable
from nanovllm.engine.scoring import NO_TARGETS, Scored, choose_targets, deal_out
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import FinishReason

_NO_NEW_ROWS = np.empty(0, ROW_SAMPLING)


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
        speculation: Speculator | None = None,
    ) -> None:
        self.block_manager, self.speculation = block_manager, speculation
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self._resident: dict[int, Sequence] = {}
        """By row, in order of admission."""
        self._order = np.empty(0, np.int32)
        """Their rows, when the last step was planned."""
        self._table = RowTable(max_num_seqs)
        self._blocks = BlockTables(block_manager, self._table, self._resident)
        self._scoring: dict[int, Sequence] = {}
        """By row, those whose prompt is still to be scored, and those that are only scored."""
        self.edited_rows: set[int] = set()
        """Rows whose logits are edited before a token is sampled."""
        self.stepwise_rows: set[int] = set()
        """Of those, the ones whose edits depend on tokens that the host must have read."""
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._may_stop = np.zeros(vocab_size, bool)
        """Token ids that end at least one sequence ever added: others need no second look."""
        self._new_rows: list[tuple[Any, ...]] = []
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0

    def add(self, seq: Sequence) -> None:
        self._may_stop[list(seq.stop_ids)] = True
        self.waiting.append(seq)

    @property
    def running(self) -> list[Sequence]:
        """Resident sequences in order of admission."""
        return list(self._resident.values())

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self._resident)

    # ---- schedule

    def schedule(self) -> Batch | None:
        """Plan the next step, or None if nothing can be computed before a launched step is read."""
        rows, num_scheduled, preempted = self._schedule_running()
        if self.speculation is not None and not preempted and len(rows):
            num_scheduled = num_scheduled + self._choose_drafts(self.speculation, rows, num_scheduled)
        ends = self._table.num_computed[rows] + num_scheduled
        self._blocks.grow(rows, ends)
        self._blocks.register(rows, ends)
        budget = self.max_num_batched_tokens - int(num_scheduled.sum())
        if not preempted and self.waiting and budget > 0:
            rows, num_scheduled = self._admit(budget, rows, num_scheduled)
        if len(rows) == 0:
            return None
        if not (num_scheduled == 1).all():
            decodes_first = np.argsort(num_scheduled > 1, kind="stable")
            rows, num_scheduled = rows[decodes_first], num_scheduled[decodes_first]
        return self._make_batch(rows, num_scheduled)

    def _schedule_running(self) -> tuple[IntArray, IntArray, bool]:
        """The running rows that compute in this step, how many tokens each, and whether room had to be made.

        While blocks are lacking, the most recently admitted sequence goes: possibly the one that asks for them. The
        first admitted always stays, and the pool holds at least one sequence of any allowed length.
        """
        table, manager = self._table, self.block_manager
        preempted = False
        while True:
            if len(self._order) != len(self._resident):  # rows are left at any time, and taken only in `_admit`
                self._set_order()
            rows = self._order
            num_computed = table.num_computed[rows]
            num_scheduled = np.minimum(table.num_tokens[rows], table.num_needed[rows]) - num_computed
            if len(rows) and num_scheduled.sum() > self.max_num_batched_tokens:
                spent_before = num_scheduled.cumsum() - num_scheduled
                num_scheduled = np.minimum(num_scheduled, np.maximum(self.max_num_batched_tokens - spent_before, 0))
            missing = -(-(num_computed + num_scheduled) // manager.block_size) - table.num_blocks[rows]
            if np.maximum(missing, 0).sum() <= manager.num_free:
                break
            self._preempt()
            preempted = True
        if not num_scheduled.all():
            rows, num_scheduled = rows[num_scheduled > 0], num_scheduled[num_scheduled > 0]
        return rows, num_scheduled.astype(np.int32, copy=False), preempted

    def _choose_drafts(self, speculation: Speculator, rows: IntArray, num_scheduled: IntArray) -> IntArray:
        """How many drafts each of the rows verifies, after its last known token: as many as speculation thinks fit.

        They may cost no sequence its blocks or its place in the step.
        """
        table, manager = self._table, self.block_manager
        num_tokens = table.num_tokens[rows]
        most = np.minimum(table.num_needed[rows] - num_tokens, speculation.most)
        missing = -(-(num_tokens + most) // manager.block_size) - table.num_blocks[rows]
        if np.maximum(missing, 0).sum() > manager.num_free:
            most = np.minimum(most, table.num_blocks[rows] * manager.block_size - num_tokens)
        if self.edited_rows:
            edits = {row: self._resident[row].edits for row in self.edited_rows}
            most[np.isin(rows, [row for row, of_row in edits.items() if of_row and not of_row.allows_drafts])] = 0
        decodes = np.flatnonzero((num_scheduled == 1) & (table.num_computed[rows] + 1 == num_tokens) & (most > 0))
        num_drafts, num_rows = np.zeros_like(num_scheduled), int(num_scheduled.sum())
        if len(decodes) and (room := (self.max_num_batched_tokens - num_rows) // len(decodes)):
            seqs = [self._resident[row] for row in rows[decodes].tolist()]
            num_drafts[decodes] = speculation.choose(seqs, np.minimum(most[decodes], room), num_rows)
        return num_drafts

    def _admit(self, budget: int, rows: IntArray, num_scheduled: IntArray) -> tuple[IntArray, IntArray]:
        """Move waiting sequences in, in order, while rows, blocks and budget last; each gets all its blocks at once."""
        manager = self.block_manager
        admitted: list[tuple[int, int]] = []
        while self.waiting and self._free_rows and budget > 0:
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
            count = min(num_wanted - num_cached, budget)
            budget -= count
            self._move_in(seq, num_cached)
            manager.reference(hits)
            self._blocks.extend(seq, hits + manager.take(num_new))
            self._blocks.register(np.array([seq.row], np.int32), np.array([num_cached + count], np.int32))
            admitted.append((seq.row, count))
        if admitted:
            self._set_order()
            new_rows, new_scheduled = np.array(admitted, np.int32).T
            rows, num_scheduled = np.concatenate((rows, new_rows)), np.concatenate((num_scheduled, new_scheduled))
        return rows, num_scheduled

    def _set_order(self) -> None:
        self._order = np.fromiter(self._resident, np.int32, len(self._resident))

    def _move_in(self, seq: Sequence, num_cached: int) -> None:
        """Give a sequence a row, its first num_cached tokens computed; its sampling values go out with the plan."""
        table, params = self._table, seq.params
        row = seq.row = self._free_rows.pop()
        self._resident[row] = seq
        table.num_known[row] = table.num_tokens[row] = table.num_sent[row] = len(seq.token_ids)
        table.num_computed[row], table.num_needed[row] = num_cached, seq.num_needed
        table.num_registered[row] = num_cached // self.block_manager.block_size
        table.watches_text[row] = seq.stop_matcher is not None or seq.grammar is not None
        if seq.is_only_scored or seq.next_scored < seq.num_prompt_tokens:
            self._scoring[row] = seq
        if seq.edits is not None:
            self.edited_rows.add(row)
            if seq.edits.needs_known_tokens:
                self.stepwise_rows.add(row)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_cached
            if seq.lead is None:  # a prompt counts once, however often it is completed
                self.num_prompt_tokens += seq.num_prompt_tokens
                self.num_cached_tokens += num_cached
        seed = (seq.seed & 0xFFFFFFFF, seq.seed >> 32 & 0xFFFFFFFF)
        # What is sent is 32 bits wide; beyond these limits a value means no more than at them.
        vocab_size = len(self._may_stop)
        temperature, top_k = min(params.temperature, 1e30), min(params.top_k, vocab_size)
        counts = (-1 if k is None else min(k, vocab_size) for k in (params.logprobs, params.prompt_logprobs))
        self._new_rows.append(
            (row, temperature, top_k, params.top_p, params.min_p, *seed, *counts, seq.edits is not None)
        )

    def _make_batch(self, rows: IntArray, num_scheduled: IntArray) -> Batch:
        table = self._table
        num_computed = table.num_computed[rows]
        ends = num_computed + num_scheduled
        token_ids = np.full(int(num_scheduled.sum()), -1, np.int32)
        is_sent = num_computed < table.num_sent[rows]
        if is_sent.any():
            places, starts = token_ids.data, num_scheduled.cumsum() - num_scheduled
            for row, at, start, end in np.stack((rows, starts, num_computed, ends), 1)[is_sent].tolist():
                known = self._resident[row].token_ids[start:end]
                places[at : at + len(known)] = known  # drafts follow
        num_logits = num_sampled = np.maximum(ends + 1 - table.num_tokens[rows], 0)  # more than 1: with drafts
        scored: Seq[Scored] = ()
        targets = NO_TARGETS
        if self._scoring:
            num_logits, num_sampled, scored, targets = choose_targets(self._scoring, rows, ends, num_sampled)
        table.num_computed[rows] = ends
        table.num_tokens[rows] += num_sampled
        plan = StepPlan(
            rows=rows,
            num_computed=num_computed,
            num_scheduled=num_scheduled,
            num_logits=num_logits,
            num_sampled=num_sampled,
            token_ids=token_ids,
            targets=targets,
            block_entries=self._blocks.new_entries(),
            new_rows=np.array(self._new_rows, ROW_SAMPLING) if self._new_rows else _NO_NEW_ROWS,
        )
        self._new_rows.clear()
        sampled = rows[num_sampled > 0]
        seqs = [self._resident[row] for row in sampled.tolist()]
        return Batch(plan, seqs, sampled, table.generation[sampled], scored)

    # ---- update

    def update(
        self,
        batch: Batch,
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
        table, rows, seqs = self._table, batch.rows, batch.seqs
        finished = self._take_in_scores(batch, scores)
        if len(token_ids) > len(seqs):
            return finished + self._take_in_verified(batch, token_ids, logprobs)
        for i, values in logprobs.items():
            if seqs[i].finish_reason is None:
                seqs[i].logprobs.append(values)
        resident = table.generation[rows] == batch.generations
        if not resident.all():
            for i in np.flatnonzero(~resident).tolist():
                if self._deliver_late(seqs[i], int(token_ids[i])):
                    finished.append(seqs[i])
            kept = np.flatnonzero(resident)
            rows, token_ids, seqs = rows[kept], token_ids[kept], [seqs[i] for i in kept.tolist()]
        for seq, token_id in zip(seqs, token_ids.tolist(), strict=True):
            seq.token_ids.append(token_id)
        self.num_generated_tokens += len(seqs)
        num_known = table.num_known[rows] + 1
        table.num_known[rows] = num_known
        suspect = self._may_stop[token_ids] | (num_known > table.num_needed[rows]) | table.watches_text[rows]
        suspect |= token_ids < 0
        ended = [seqs[i] for i in np.flatnonzero(suspect).tolist() if self._ends(seqs[i])]
        for seq in ended:
            self._release(seq)
        if ended:
            rows = rows[table.generation[rows] == batch.generations[resident]]
        self._blocks.register(rows, table.num_computed[rows])
        return finished + ended

    def _take_in_verified(
        self, batch: Batch, token_ids: IntArray, logprobs: Mapping[int, dict[int, float]]
    ) -> list[Sequence]:
        """`update` of a step with drafts, after which no other is in flight.

            computed by the step   c d e f      c was known, d e f are drafts
            drawn                  d e x y      d and e are accepted: d e x are kept, and c d e stay computed

        The blocks that the rejected ones were computed into stay with the sequence.
        """
        assert self.speculation is not None
        table, rows, plan, ended = self._table, batch.rows, batch.plan, []
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
        suspect = np.logical_or.reduceat(self._may_stop[token_ids] | (token_ids < 0), firsts)
        suspect |= (num_known > table.num_needed[rows]) | table.watches_text[rows]
        facts, drawn = (values.tolist() for values in (firsts, counts, kept, suspect)), token_ids.tolist()
        for seq, first, count, num_kept, may_end in zip(batch.seqs, *facts, strict=True):
            if seq.finish_reason is not None:  # by the same step's scores, which were no numbers
                continue
            for at in range(first, first + num_kept):
                seq.token_ids.append(drawn[at])
                if at in logprobs:
                    seq.logprobs.append(logprobs[at])
                if may_end and self._ends(seq):
                    self._release(seq)
                    ended.append(seq)
                    break
            self.num_generated_tokens += at + 1 - first
            if count > 1:  # drafts beyond the end are neither right nor wrong
                self.speculation.learn(seq, at - first if seq.finish_reason else count - 1, at - first)
        rows = rows[table.generation[rows] == batch.generations]
        # A draft model computes the last of its drafts in the next step only, if that is accepted.
        self._blocks.register(rows, table.num_computed[rows] - 1)
        return ended

    def _take_in_scores(self, batch: Batch, scores: Seq[dict[int, float]]) -> list[Sequence]:
        """Deal out a step's scores; returns the sequences that end with them."""
        ended = deal_out(batch.scored, scores)
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
        if not self._ends(seq):
            return False
        self.waiting.remove(seq)  # near the front, where the preempted are
        return True

    def _ends(self, seq: Sequence) -> bool:
        """Whether the token that a sequence was just given ends it."""
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
                self._release(seq)
            else:
                self.waiting.remove(seq)  # a preempted one is near the front
            seq.finish_reason = reason

    def abort_all(self) -> None:
        """End every sequence. Only to be done when no launched step is left to be read."""
        for seq in [*self.running, *self.waiting]:
            self.end(seq, "abort")
        self._blocks.new_entries()
        self._new_rows.clear()

    def _preempt(self) -> None:
        """Take everything back from who was admitted last; it will be computed anew, from the front of the queue."""
        row, seq = next(reversed(self._resident.items()))
        table = self._table
        seq.num_in_flight = int(table.num_tokens[row] - table.num_known[row])
        if seq.is_only_scored and table.num_computed[row] == seq.num_needed:
            seq.num_in_flight = 1  # its last scores
        self._release(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def _release(self, seq: Sequence) -> None:
        """Free a sequence's blocks and row at once: device work is in order, so later steps may have them."""
        self.block_manager.release(seq.block_table)
        seq.block_table = []
        del self._resident[seq.row]
        self._scoring.pop(seq.row, None)
        self.edited_rows.discard(seq.row)
        self.stepwise_rows.discard(seq.row)
        self._table.generation[seq.row] += 1
        self._free_rows.append(seq.row)
        seq.row = -1
