"""Plans steps and handles their results.

`Scheduler.schedule` chooses which sequences run in the next step, and how many tokens of each. `Scheduler.update`
appends the sampled tokens to the sequences. llm_engine.py explains the words.
"""

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import islice

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.interfaces import Speculator
from nanovllm.engine.plan import IntArray, StepPlan, StepResult
from nanovllm.engine.rows import BlockTables, Rows, RowTable, pack_sampling
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import NO_TARGETS, ScheduledStep, Scored, choose_targets
from nanovllm.outputs import FinishReason, Logprob


class Scheduler:
    """Holds all sequences that have not ended, plans steps for them, and appends the tokens that the steps sampled.

    There are no separate prefill and decode steps. Every step computes tokens that are not computed yet, until its
    token budget (max_num_batched_tokens) is spent. Running sequences come first, in order of admission; then waiting
    sequences are admitted, in order. Drafts get what is left of the budget. Without a pipeline, three things follow:

    * A sequence is admitted only if, in that step, all sequences before it compute all of their tokens. So afterwards
      only the last one may have an unfinished prompt. Each other one needs one token per step, drafts not counted.
    * So at most one prompt is cut in a step: the last one, which is computed in chunks.
    * A sequence is admitted only if a token of the budget is left after all running sequences. So there are never more
      running sequences than tokens in the budget. A row gets no token only if its last one is still in flight.

    In a pipeline a sequence is in one step in flight at most, unless the steps are chunks of its prompt. So each step
    leaves some running sequences to the others: `choose_ready` says which.

    A step that preempts a sequence admits nobody. The preempted sequence is now the first in the queue, and a moment
    ago there were no blocks for it. Such a step verifies no drafts either, because drafts take blocks, too.
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
        """load.py sets this later, because a speculator needs the scheduler when it is made."""
        self.choose_ready: Callable[[RowTable], Rows] | None = None
        """In a pipeline, load.py sets this. It chooses the running rows that the next step may compute. They come in
        order of admission."""
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.table = RowTable(max_num_seqs)
        self.blocks = BlockTables(block_manager, self.table)
        self._scoring: dict[int, Sequence] = {}
        """{row: sequence} of sequences with prompt tokens that are not scored yet, and of all that are only scored."""
        self.edited_rows: set[int] = set()
        """Rows of sequences that ask for edits of their logits."""
        self.may_stop = np.zeros(vocab_size + 1, bool)
        """may_stop[id] is True if the token id is a stop token of any sequence ever added. If it is False, and
        num_known is at most `RowTable.unchecked_until`, the token ends nothing, and `Sequence.check_end` is not called.
        The last element is for id -1, a failed sample: numpy reads index -1 as the last one."""
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

    # ---- schedule

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step and return it. Return None if every sequence must wait until a step in flight is read."""
        rows, ends, has_preempted = self._schedule_running()
        admitted: list[Sequence] = []
        if not has_preempted:
            if self.waiting and self.table.has_free_row:
                rows, ends, admitted = self._admit(rows, ends)
            if self.speculation is not None and len(rows) > len(admitted):
                ends = self.speculation.plan_drafts(rows, ends, len(rows) - len(admitted))
        return self._make_step(rows, ends, admitted) if len(rows) else None

    def _schedule_running(self) -> tuple[Rows, IntArray, bool]:
        """Choose the running rows that compute tokens in this step, and take the blocks that they need.

        While the pool has too few free blocks, the sequence that was admitted last is preempted, even if it is itself
        the one that needs blocks. The loop ends, because the pool has blocks enough for any one sequence.

        Returns:
            rows: the chosen rows, in order of admission.
            ends: int32 [len(rows)]; each row computes its tokens before this index.
            has_preempted: whether a sequence was preempted.
        """
        table = self.table
        budget = self.max_num_batched_tokens
        has_preempted = False
        while True:
            rows = table.order if self.choose_ready is None else self.choose_ready(table)
            num_computed = table.num_computed[rows]
            ends = np.minimum(table.num_tokens[rows], table.num_needed[rows])
            num_scheduled = ends - num_computed
            if num_scheduled.sum() > budget:
                # Each row gets at most what the rows before it leave of the budget, and at least 0.
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
        """Admit waiting sequences, in order, until rows, blocks or the budget run out.

        An admitted sequence takes the blocks for all its present tokens at once, even if this step computes only some.

        Args:
            rows: the running rows that compute tokens in this step.
            ends: int32 [len(rows)]; each row computes its tokens before this index.

        Returns:
            `rows` and `ends`, each followed by the values of the admitted sequences; and the admitted sequences.
        """
        table = self.table
        manager = self.block_manager
        budget = self.max_num_batched_tokens - int((ends - table.num_computed[rows]).sum())
        admitted: list[Sequence] = []
        new_ends: list[int] = []
        while self.waiting and table.has_free_row and budget > 0:
            seq = self.waiting[0]
            if seq.num_in_flight:
                # A preempted sequence waits until all its sampled tokens are read, because it is computed again with
                # them. The loop does not skip it: sequences are admitted in order, so nobody overtakes it.
                break
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
        """Give a sequence a row. The prefix cache has the keys and values of its first num_cached tokens."""
        self.table.move_in(seq, num_cached)
        if seq.is_only_scored or seq.next_scored < seq.num_prompt_tokens:
            self._scoring[seq.row] = seq
        if seq.edits is not None:
            self.edited_rows.add(seq.row)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_cached
            if seq.lead is None:  # with n > 1 a prompt counts only once: for its first completion
                self.num_prompt_tokens += seq.num_prompt_tokens
                self.num_cached_tokens += num_cached

    def _make_step(self, rows: Rows, ends: IntArray, admitted: list[Sequence]) -> ScheduledStep:
        """Make the step that computes each row's tokens before `ends`. The row table then counts the step as launched.

        Args:
            admitted: the sequences that are new in this step.
        """
        table = self.table
        num_computed = table.num_computed[rows]
        num_scheduled = ends - num_computed
        num_tokens = int(num_scheduled.sum())
        if num_tokens > len(rows):
            # False sorts before True, and a stable sort keeps the order of equals: so decodes come first.
            decodes_first = np.argsort(num_scheduled > 1, kind="stable")
            rows = rows[decodes_first]
            ends = ends[decodes_first]
            num_computed = num_computed[decodes_first]
            num_scheduled = num_scheduled[decodes_first]
        # The plan has the ids of tokens with an index below `num_sent` (see RowTable). A row beyond that computes one
        # token, which the device sampled in an earlier step: -1 stands for it.
        token_ids = np.empty(num_tokens, np.int32)
        token_ids.fill(-1)  # np.full takes twice as long
        is_sent = num_computed < table.num_sent[rows]
        if np.count_nonzero(is_sent):
            firsts = num_scheduled.cumsum() - num_scheduled
            for row, first, start, end in np.stack((rows, firsts, num_computed, ends), 1)[is_sent].tolist():
                known = table.resident[row].token_ids[start:end]
                token_ids[first : first + len(known)] = known  # later the speculator writes drafts after them
        # A row that computes its last token samples one token, and one more per draft. `ends` counts the drafts, too.
        # A row that computes only a part of its tokens samples none: for it ends + 1 - num_before is at most 0.
        num_before = table.num_tokens[rows]
        num_sampled = np.maximum(ends + 1 - num_before, 0)
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
        # Pass `rows` itself, not a copy, if possible: it may be the object `table.order`, see `RowTable.sequences`.
        sampled = rows if np.count_nonzero(num_sampled) == len(rows) else rows[num_sampled > 0]
        return ScheduledStep(plan, table.sequences(sampled), sampled, table.num_releases, scored)

    # ---- update

    def update(self, step: ScheduledStep, result: StepResult) -> list[Sequence]:
        """Append the tokens and scores of a step to its sequences.

        Returns:
            The sequences that have ended with this step. They no longer have rows or blocks.
        """
        table = self.table
        rows = step.rows
        seqs = step.seqs
        token_ids = result.token_ids
        finished = self._add_scores(step, result) if step.scored else []
        if self.speculation is not None and len(token_ids) > len(seqs):
            return finished + self.speculation.update(step, result)
        # This comes before the next `if`, which changes `seqs`: the keys of logprobs are indices of the whole list.
        for i, values in result.logprobs.items():
            if seqs[i].finish_reason is None:
                seqs[i].logprobs.append(values)
        if table.num_releases > step.num_releases:
            # Some sequences may have lost their row since this step was planned: RowTable explains the release clock.
            is_resident = table.released_at[rows] <= step.num_releases
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

    def _add_scores(self, step: ScheduledStep, result: StepResult) -> list[Sequence]:
        """Give the sequences that a step scores their scores or embeddings, even those that were preempted meanwhile.

        Returns the sequences that have ended now.
        """
        ended: list[Sequence] = []
        scores = iter(result.scores)
        embeddings = iter(result.embeddings)
        for seq, num_targets, is_last in step.scored:
            own: list[dict[int, Logprob]] = []
            if seq.params.embed:
                seq.embedding = next(embeddings)
                is_good = bool(np.isfinite(seq.embedding).all())
            else:
                own.extend(islice(scores, num_targets))
                is_good = not any(math.isnan(logprob) for logprobs in own for logprob in logprobs.values())
            if seq.finish_reason is not None:
                continue
            if is_good:
                seq.prompt_logprobs.extend(own)
            else:
                self.block_manager.forget(seq)
            if is_last or not is_good:
                self.end(seq, "length" if is_good else "error")
                ended.append(seq)
        return ended

    def _deliver_late(self, seq: Sequence, token_id: int) -> bool:
        """Handle a token for a sequence that lost its row after the step was planned.

        If the sequence has ended, drop the token. If it was preempted, append the token.

        Returns:
            Whether the token ends the sequence.
        """
        if seq.finish_reason is not None:
            return False
        seq.num_in_flight -= 1
        seq.token_ids.append(token_id)
        self.num_generated_tokens += 1
        if not self.check_end(seq):
            return False
        self.leave(seq)
        return True

    def check_end(self, seq: Sequence) -> bool:
        """Return whether the token that was appended last ends the sequence: see `Sequence.check_end`.

        After an error the token is not counted. The sequence's blocks are forgotten, because their keys and values may
        be wrong, too.
        """
        reason = seq.check_end()
        if reason == "error":
            self.num_generated_tokens -= 1
            self.block_manager.forget(seq)
        return reason is not None

    # ---- leaving

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence now, unless it has ended. Tokens that steps in flight sample for it will be dropped."""
        if seq.finish_reason is None:
            self.leave(seq)
            seq.finish_reason = reason

    def leave(self, seq: Sequence) -> None:
        """Take a sequence that ends out of its row, or out of the queue."""
        if seq.row >= 0:
            self.release(seq)
        else:
            self.waiting.remove(seq)  # fast for preempted sequences: they are near the front

    def abort_all(self) -> None:
        """End every sequence. Before this, the caller must read or drop all steps in flight."""
        for seq in [*self.running, *self.waiting]:
            self.end(seq, "abort")
        self.blocks.take_new_entries()  # drops entries of a step that an error stopped between planning and launch

    def _preempt(self) -> None:
        """Take row and blocks from the sequence that was admitted last, and put it at the front of the queue.

        Its tokens are computed again when it is admitted again.
        """
        table = self.table
        row, seq = next(reversed(table.resident.items()))  # the last item: a dict keeps the order of insertion
        seq.num_in_flight = int(table.num_tokens[row] - table.num_known[row])
        if seq.is_only_scored and table.num_computed[row] == seq.num_needed:
            # The step with its last scores is in flight. They will end it, so it must not be admitted again before.
            seq.num_in_flight = 1
        self.release(seq)
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def release(self, seq: Sequence) -> None:
        """Free a sequence's blocks and row at once.

        A step in flight may still write into these blocks. The step of a new owner is launched later, and the device
        runs steps in order, so the new owner's data replace what was written.
        """
        self.blocks.release(seq)
        self._scoring.pop(seq.row, None)
        self.edited_rows.discard(seq.row)
        self.table.release(seq)
