"""Plans steps and handles their results.

`Scheduler.schedule` chooses which sequences run in the next step, and how many tokens of each. `Scheduler.update`
appends the sampled tokens to the sequences. docs/architecture.md explains the words.

A step of a few sequences is planned in about 15 us. numpy's `all`, `any` and `full` are written in Python and would
take 2 us more, so `np.count_nonzero` and `fill` stand for them here.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.interfaces import Scorer, Speculation
from nanovllm.engine.plan import FAILED, LAST_TOKEN, NO_TARGETS, IntArray, StepPlan, StepResult
from nanovllm.engine.rows import BlockTables, Rows, RowTable, pack_sampling
from nanovllm.engine.scheduled_step import ScheduledStep, Scored
from nanovllm.engine.sequence import NO_ROW, Sequence
from nanovllm.outputs import FinishReason


class Scheduler:
    """Holds all sequences that have not ended, plans steps for them, and appends the tokens that the steps sampled.

    There are no separate prefill and decode steps. Every step computes tokens that are not computed yet. Its budget is
    max_num_batched_tokens. Running sequences get tokens first, in order of admission. Then waiting sequences are
    admitted, in order. Drafts (guessed tokens that a step verifies) get what is left of the budget.

    A prompt that does not fit into the budget is computed in chunks, over several steps. Only the sequence that was
    admitted last can be in this state: a step admits a sequence only if budget is left when every earlier one has all
    its remaining tokens, and later each of these needs one token a step. (In a pipeline, which sets `choose_running`,
    other prompts may be computed in chunks, too.)

    A step that preempts a sequence admits no sequence: the first in the queue is the preempted sequence, which has just
    lost its blocks to others. The step verifies no drafts either, because drafts take blocks, too.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        make_scoring: Callable[[], Scorer],
    ) -> None:
        """
        Args:
            make_scoring: is called when the first request asks for scores or an embedding.
        """
        self.block_manager = block_manager
        self._make_scoring = make_scoring
        self.speculation: Speculation | None = None
        """load.py sets this later, because a speculation needs the scheduler when it is made."""
        self.scoring: Scorer | None = None
        """Made when the first request asks for scores or an embedding."""
        self.choose_running: Callable[[RowTable], Rows] | None = None
        """Chooses the running rows that the next step may compute, in order of admission; None: all of them. load.py
        sets it for a pipeline, which splits the layers between ranks. There a sampled token comes back to the first
        layers only after several steps. Until then the sequence must be left out of the steps."""
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.table = RowTable(max_num_seqs)
        self.blocks = BlockTables(block_manager, self.table)
        self.starting: list[Sequence] = []
        """Sequences that were admitted, and had no token of output when the last step was read."""
        self.edited_rows: set[int] = set()
        """Rows of sequences that ask for edits of their logits."""
        self.may_stop = np.zeros(vocab_size + 1, bool)
        """may_stop[id] is True if the token id is a stop token of any sequence ever added. No element is set back to
        False: the price is a needless call of `Sequence.check_end` now and then. If the element is False, the token is
        no stop token. It can still end a sequence by the length limit, a stop string or a grammar:
        `RowTable.unchecked_until` handles these cases. The last element is for FAILED, which is -1: numpy reads
        index -1 as the last element."""
        self.may_stop[FAILED] = True
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0

    def add(self, seq: Sequence) -> None:
        """Put a sequence at the end of the waiting queue."""
        self.may_stop[list(seq.stop_ids)] = True
        if seq.params.prompt_logprobs is not None or seq.params.embed:
            if self.scoring is None:
                self.scoring = self._make_scoring()
            self.scoring.add(seq)
        self.waiting.append(seq)

    @property
    def running(self) -> list[Sequence]:
        """Resident sequences in order of admission."""
        return self.table.running

    # ---- schedule

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step and return it. Return None if no sequence can compute a token now."""
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

        While the pool has too few free blocks, the sequence that was admitted last is preempted. It may be the very
        sequence that needs blocks. The loop ends, because the pool has blocks enough for any one sequence: `check_pool`
        (runner/kv_memory.py) refuses a smaller pool when the engine is made.

        Returns:
            rows: the chosen rows, in order of admission.
            ends: int32 [len(rows)]; each row computes its tokens before this index.
            has_preempted: whether a sequence was preempted.
        """
        table = self.table
        budget = self.max_num_batched_tokens
        has_preempted = False
        while True:
            rows = table.order if self.choose_running is None else self.choose_running(table)
            num_computed = table.num_computed[rows]
            # num_tokens counts the tokens that steps in flight will sample, too.
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
            self.num_preemptions += 1
            has_preempted = True
        self.blocks.grow(missing)
        self.blocks.register(rows, ends)
        if np.count_nonzero(num_scheduled) < len(rows):
            is_scheduled = num_scheduled > 0
            rows = rows[is_scheduled]
            ends = ends[is_scheduled]
        return rows, ends, has_preempted

    def _admit(self, rows: Rows, ends: IntArray) -> tuple[Rows, IntArray, list[Sequence]]:
        """Admit waiting sequences, in order, until rows, blocks or the budget run out, or the next one must wait.

        An admitted sequence takes at once the blocks for all its tokens, though never for more than `num_needed`. It
        does so even if this step computes only some of the tokens.

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
                # A preempted sequence is computed again: its prompt and its output so far. So the host must first read
                # the tokens that steps in flight sample for it. The loop does not skip it: sequences are admitted in
                # order.
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
            # At once, so that the next sequence of this loop can find these blocks.
            self.blocks.register(np.array([seq.row]), np.array([end], np.int32))
            admitted.append(seq)
            new_ends.append(end)
        if not admitted:
            return rows, ends, admitted
        new_rows = np.array([seq.row for seq in admitted], np.intp)
        return np.concatenate((rows, new_rows)), np.concatenate((ends, np.array(new_ends, np.int32))), admitted

    def _move_in(self, seq: Sequence, num_cached: int) -> None:
        """Give a sequence a row. The prefix cache has the keys and values of its first num_cached tokens."""
        self.table.move_in(seq, num_cached)
        if self.scoring is not None:
            self.scoring.move_in(seq)
        if seq.edits is not None:
            self.edited_rows.add(seq.row)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = num_cached
            self.starting.append(seq)
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
            # False sorts before True, and a stable sort keeps the order of equals. So sequences with one token come
            # first.
            order = np.argsort(num_scheduled > 1, kind="stable")
            rows = rows[order]
            ends = ends[order]
            num_computed = num_computed[order]
            num_scheduled = num_scheduled[order]
        num_before = table.num_tokens[rows]
        is_complete = ends >= num_before  # whether the step computes the row's last token, and so samples the next one
        num_scored = np.zeros(len(rows), np.int32)
        targets = NO_TARGETS
        scored: Seq[Scored] = ()
        if self.scoring is not None and self.scoring.seqs:
            num_scored, targets, scored, has_output = self.scoring.choose_targets(rows, ends)
            is_complete &= has_output
        # A complete row samples 1 token, and 1 more for each draft. `ends` counts drafts, and `num_before` does not:
        # with 5 tokens and 2 drafts they are 7 and 5, and the row samples 3 tokens.
        num_sampled = ends + 1 - num_before
        sampling = rows
        if np.count_nonzero(is_complete) < len(rows):
            sampling = rows[is_complete]
            num_sampled[~is_complete] = 0
        vocab_size = len(self.may_stop) - 1  # its last element is for FAILED
        plan = StepPlan(
            rows=rows.astype(np.int32),
            num_computed=num_computed,
            num_scheduled=num_scheduled,
            num_sampled=num_sampled,
            num_scored=num_scored,
            token_ids=self._fill_token_ids(rows, num_computed, ends, num_tokens),
            targets=targets,
            block_entries=self.blocks.take_new_entries(),
            new_rows=pack_sampling(admitted, vocab_size),
        )
        table.count_launched(rows, ends, num_before + num_sampled)
        # In most steps every resident sequence decodes: then `sampling` is still the array that the table made.
        seqs = table.running if sampling is table.order else table.sequences(sampling)
        return ScheduledStep(plan, seqs, rows=sampling, num_releases=table.num_releases, scored=scored)

    def _fill_token_ids(self, rows: Rows, starts: IntArray, ends: IntArray, num_tokens: int) -> IntArray:
        """Return the ids of the tokens that a step computes, int32 [num_tokens].

        The host sends the id of each token whose index in its sequence is below `RowTable.num_sent`: the tokens that
        were known at admission, or after drafts were last verified. Every other id is LAST_TOKEN. If the token is a
        draft, `LLMEngine._plan` replaces LAST_TOKEN by the draft's id. Otherwise the device replaces it by the token
        that it sampled last for the row.
        """
        table = self.table
        token_ids = np.empty(num_tokens, np.int32)
        token_ids.fill(LAST_TOKEN)
        is_sent = starts < table.num_sent[rows]
        if np.count_nonzero(is_sent):
            num_scheduled = ends - starts
            firsts = num_scheduled.cumsum() - num_scheduled
            for row, first, start, end in np.stack((rows, firsts, starts, ends), 1)[is_sent].tolist():
                known = table.resident[row].token_ids[start:end]
                token_ids[first : first + len(known)] = known
        return token_ids

    # ---- update

    def update(self, step: ScheduledStep, result: StepResult) -> list[Sequence]:
        """Append the tokens and scores of a step to its sequences.

        Returns:
            The sequences that have ended with this step. They no longer have rows or blocks.
        """
        table = self.table
        finished: list[Sequence] = []
        if self.scoring is not None:
            for seq, reason in self.scoring.give(step.scored, result):
                self.end(seq, reason)
                finished.append(seq)
        # i counts the step's sequences, and k the result's tokens. seqs[i] gets num_new[i] tokens, and may_end[i] says
        # whether one of them may end it. Token k goes to receivers[k]. If each sequence gets one token, i is k.
        seqs = step.seqs
        num_new = None  # one token for each sequence
        no_row_moved = step.num_releases == table.num_releases
        if no_row_moved and len(result.token_ids) == len(seqs):
            receivers = seqs  # token k is for seqs[k]
            may_end = table.add_known(step.rows, 1) | self.may_stop[result.token_ids]
        else:  # the step verified drafts, or some row was freed since the step was planned
            rows, num_new = self._find_receivers(step, result.token_ids)
            owners, result = step.keep(result, num_new)
            receivers = [seqs[i] for i in owners.tolist()]
            may_end = table.add_known(rows, num_new)
            # `result` no longer has rejected tokens or tokens of sequences that have ended. Token k is for
            # seqs[owners[k]], which a stop token may end.
            are_stops = self.may_stop[result.token_ids]
            may_end[owners[are_stops]] = True
        for k, values in result.logprobs.items():
            receivers[k].logprobs.append(values)
        for seq, token_id in zip(receivers, result.token_ids.tolist(), strict=True):
            seq.token_ids.append(token_id)
        self.num_generated_tokens += len(receivers)
        for i in may_end.nonzero()[0].tolist():
            if seqs[i].finish_reason is None and self._check_end(seqs[i], 1 if num_new is None else int(num_new[i])):
                finished.append(seqs[i])
        if self.speculation is not None:
            self.speculation.learn(step, finished)
        if self.starting:
            now = time.time()
            for seq in self.starting:
                if len(seq.token_ids) > seq.num_prompt_tokens:
                    seq.times.append(now)
            self.starting = [seq for seq in self.starting if len(seq.times) == 1 and seq.finish_reason is None]
        return finished

    def _find_receivers(self, step: ScheduledStep, drawn: IntArray) -> tuple[Rows, IntArray]:
        """Count how many of the sampled tokens each sequence gets, and take rejected drafts out of the row table.

        A sequence may have lost its row since the step was planned. If it was preempted, it gets its tokens. If it has
        ended, it gets no token. A sequence keeps the drafts that agree with the sampled tokens. The other drafts are
        rejected. They can be taken out of the counts, because a sequence with drafts is in no other step in flight: the
        depth is 1 with drafts, and in a pipeline a sequence waits until its sampled tokens are known.

        Returns:
            For each of the step's n sequences: its row, or NO_ROW if it has lost its row; and how many tokens it gets,
            int32 [n].
        """
        table = self.table
        num_drawn = step.num_drawn
        num_new = step.count_kept(drawn)
        is_late = table.released_at[step.rows] > step.num_releases
        rows = np.where(is_late, NO_ROW, step.rows)
        has_drafts = num_drawn > 1
        table.reject_drafts(rows[has_drafts], (num_drawn - num_new)[has_drafts])
        for i in is_late.nonzero()[0].tolist():
            step.seqs[i].num_in_flight -= int(num_drawn[i])
            if step.seqs[i].finish_reason is not None:
                num_new[i] = 0
        return rows, num_new

    def _check_end(self, seq: Sequence, num_new: int) -> bool:
        """Return whether a sequence ends with one of its new tokens: see `Sequence.check_end`. If so, it leaves its
        row."""
        num_tokens = len(seq.token_ids)
        if seq.check_end(num_new) is None:
            return False
        self.num_generated_tokens -= num_tokens - len(seq.token_ids)  # dropped tokens do not count
        self._leave(seq)
        return True

    # ---- leaving

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence now, unless it has ended. Tokens that steps in flight sample for it will be dropped."""
        if seq.finish_reason is None:
            seq.finish_reason = reason
            self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        """Take a sequence that has ended out of its row, or out of the queue.

        After an error its blocks are forgotten, because their keys and values may be wrong.
        """
        if seq.finish_reason == "error":
            self.block_manager.forget(seq)
        if seq.row != NO_ROW:
            self._release(seq)
        else:
            self.waiting.remove(seq)  # fast for preempted sequences: they are near the front

    def abort_all(self) -> None:
        """End every sequence. Before this, the caller must read or drop all steps in flight."""
        for seq in [*self.running, *self.waiting]:
            self.end(seq, "abort")
        self.starting.clear()
        self.blocks.take_new_entries()  # drops entries of a step that an error stopped between planning and launch

    def preempt_all(self) -> None:
        """Preempt every running sequence."""
        while self.running:
            self._preempt()

    def _preempt(self) -> None:
        """Take row and blocks from the sequence that was admitted last, and put it at the front of the queue.

        When it is admitted again, its tokens are computed again, but for those that the prefix cache still has.
        """
        table = self.table
        row, seq = next(reversed(table.resident.items()))  # the last item: a dict keeps the order of insertion
        seq.num_in_flight = int(table.num_tokens[row] - table.num_known[row])
        if not seq.has_output and table.num_computed[row] == seq.num_needed:
            # The step that computes the sequence's last scores, or its embedding, is in flight. These will end the
            # sequence, so it must not be admitted again before they arrive.
            seq.num_in_flight = 1
        self._release(seq)
        self.waiting.appendleft(seq)

    def _release(self, seq: Sequence) -> None:
        """Free a sequence's blocks and row at once.

        A step in flight may still write into these blocks. Example: a sequence ends with a stop token, and the next
        step is in flight and computes that token. The token's keys and values go to a block that may have a new owner
        by then. The step of the new owner is launched later, and the device runs steps in order, so the new owner's
        keys and values replace them.

        A second example: a sequence is preempted while the step in flight computes its prompt. Its blocks stay in the
        prefix cache, and another sequence finds one of them. The finder only reads this block, and the step in flight
        still writes into it. This is harmless: a block can be found only if the ids of all its tokens are known, so the
        write stores the same keys and values once more.
        """
        self.blocks.release(seq)
        if self.scoring is not None:
            self.scoring.release(seq.row)
        self.edited_rows.discard(seq.row)
        self.table.release(seq)
