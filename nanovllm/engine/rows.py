"""The resident sequences: who has which row, how far each has come, and which blocks each has."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.plan import NO_ENTRIES, NO_LOGPROBS, NO_NEW_ROWS, ROW_SAMPLING, SAMPLER_COLUMNS, IntArray
from nanovllm.engine.sequence import NO_ROW, Sequence

Rows = NDArray[np.intp]
"""Row numbers. numpy uses this type for indices; it would convert an array of int32 at each use."""

NEVER = np.iinfo(np.int32).max


class RowTable:
    """Holds the resident sequences by row, and counts of their tokens.

    The counts are flat arrays, because each step visits all rows:

        num_computed      tokens whose KV is in the cache when all launched steps have run: before the next step
        num_known         tokens whose ids the host has read
        num_tokens        known tokens, and placeholders: tokens that launched steps will sample
        num_needed        the most tokens that are ever computed: `Sequence.num_needed`

    The counts of a sequence whose prompt had 5 tokens, and whose first token of output the host has read:

        steps in flight   num_computed   num_known   num_tokens
              0                 5            6            6
              1                 6            6            7
              2                 7            6            8

    `num_computed <= num_tokens` always holds. The next step computes the difference, at most up to num_needed. With two
    steps in flight the device computes a token whose id the host has not read yet.

    When the results of a step arrive, a row of the step may have been freed since the step was planned.
    `num_releases` counts all releases of rows, and `released_at[row]` is that count after the row's last release. A
    step keeps the count of its planning. A row with a larger `released_at` was freed since.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        num_elements = num_rows + 1  # the last element is for NO_ROW
        self.num_computed = np.zeros(num_elements, np.int32)
        self.num_known = np.zeros(num_elements, np.int32)
        self.num_tokens = np.zeros(num_elements, np.int32)
        self.num_needed = np.zeros(num_elements, np.int32)
        self.num_sent = np.zeros(num_elements, np.int32)
        """The host sends the ids of tokens with an index below this. For later tokens that are no drafts it sends
        LAST_TOKEN, and the device uses the token that it sampled last."""
        self.unchecked_until = np.zeros(num_elements, np.int32)
        """While num_known is at most this, only a stop token or a failed sample can end the sequence. Beyond it,
        `Sequence.check_end` must see the row's new tokens. Usually it is one token below the length limit. It is 0 with
        stop strings or a grammar, which must see every token. For NO_ROW it is below every count: each token of a
        sequence without a row is seen, too."""
        self.unchecked_until[NO_ROW] = np.iinfo(np.int32).min
        self.released_at = np.zeros(num_elements, np.int64)
        self.num_releases = 0
        self.resident: dict[int, Sequence] = {}
        """{row: sequence}. The dict keeps the order of admission."""
        self._order: Rows | None = None
        """The keys of `resident`, and `_running` its values. Both are kept until a sequence comes or leaves."""
        self._running: list[Sequence] | None = None
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def has_free_row(self) -> bool:
        return bool(self._free)

    @property
    def order(self) -> Rows:
        """The rows of the resident sequences, in order of admission. Nobody may change the array."""
        if self._order is None:
            self._order = np.fromiter(self.resident, np.intp, len(self.resident))
        return self._order

    @property
    def running(self) -> list[Sequence]:
        """The resident sequences in order of admission. Nobody may change the list."""
        if self._running is None:
            self._running = list(self.resident.values())
        return self._running

    def sequences(self, rows: Rows) -> list[Sequence]:
        """Return the sequence of each of the rows."""
        return [self.resident[row] for row in rows.tolist()]

    def move_in(self, seq: Sequence, num_cached: int) -> None:
        """Give a sequence a row. The KV of its first num_cached tokens was found in the prefix cache."""
        row = self._free.pop()
        seq.row = row
        self.resident[row] = seq
        self._order = None
        self._running = None
        self.num_known[row] = len(seq.token_ids)
        self.num_tokens[row] = len(seq.token_ids)
        self.num_sent[row] = len(seq.token_ids)
        self.num_computed[row] = num_cached
        self.num_needed[row] = seq.num_needed
        needs_every_token = seq.stop_matcher is not None or seq.grammar is not None
        self.unchecked_until[row] = 0 if needs_every_token else seq.num_needed

    def count_launched(self, rows: Rows, num_computed: IntArray, num_tokens: IntArray) -> None:
        """Note the counts that rows will have when the step that is planned now has run."""
        self.num_computed[rows] = num_computed
        self.num_tokens[rows] = num_tokens

    def add_known(self, rows: Rows, num_new: IntArray | int) -> NDArray[np.bool_]:
        """Count the tokens that the host has just read: num_new for each row.

        Returns:
            bool [len(rows)]: whether one of the row's new tokens may end the sequence, even if it is no stop token.
        """
        num_known = self.num_known[rows] + num_new
        self.num_known[rows] = num_known
        may_end: NDArray[np.bool_] = num_known > self.unchecked_until[rows]
        return may_end

    def reject_drafts(self, rows: Rows, num_rejected: IntArray) -> None:
        """Take rejected drafts out of the counts of rows that had drafts. The sequences keep the blocks.

        The device does not know which of its samples was accepted last. So the next plan sends the id of that token.
        """
        self.num_computed[rows] -= num_rejected
        self.num_tokens[rows] -= num_rejected
        self.num_sent[rows] = self.num_tokens[rows]

    def release(self, seq: Sequence) -> None:
        """Free a sequence's row."""
        self.num_releases += 1
        self.released_at[seq.row] = self.num_releases
        del self.resident[seq.row]
        self._free.append(seq.row)
        self._order = None
        self._running = None
        seq.row = NO_ROW


class BlockTables:
    """Gives blocks to resident sequences, and makes their full blocks findable by prefix.

    Only this class changes `Sequence.block_table`. The device has a copy of all block tables, so this class collects
    the entries that the copy does not have yet. The block manager owns the blocks, and knows nothing of rows.
    """

    def __init__(self, block_manager: BlockManager, table: RowTable) -> None:
        self.manager = block_manager
        self._table = table
        self.room = np.zeros(table.num_rows, np.int32)
        """How many tokens fit into the row's blocks."""
        self._next_full = np.zeros(table.num_rows, np.int32)
        """Per row: the number of tokens up to the end of the first block that `register` has not handled. `register`
        handles this block when at least that many tokens are known and planned. Example, with blocks of 4 tokens: 8
        means that block 1 (tokens 4 to 7) is next. NEVER if no further block will become findable."""
        self._new_entries: list[tuple[int, int, int]] = []

    def take_new_entries(self) -> IntArray:
        """Return the (row, index, block) entries made since the last call, int32 [n, 3]."""
        if not self._new_entries:  # as in most steps
            return NO_ENTRIES
        entries = np.array(self._new_entries, np.int32)
        self._new_entries.clear()
        return entries

    def missing(self, rows: Rows, ends: IntArray) -> dict[int, int]:
        """Return {row: how many blocks it must get to hold its first `ends` tokens}. Rows that need none are left out.

        A row's blocks are full when it has `room` tokens. So the tokens beyond `room` need blocks of their own.
        """
        num_lacking = ends - self.room[rows]
        short = (num_lacking > 0).nonzero()[0]
        if not len(short):  # as in most steps
            return {}
        lacking = zip(rows[short].tolist(), num_lacking[short].tolist(), strict=True)
        return {row: self.manager.blocks_for(num_tokens) for row, num_tokens in lacking}

    def can_grow(self, missing: dict[int, int]) -> bool:
        """Return whether the pool has as many blocks as the rows of `missing` need."""
        return not missing or self.manager.can_take(sum(missing.values()))

    def grow(self, missing: dict[int, int]) -> None:
        """Give each row its missing blocks. Ask `can_grow` first."""
        for row, count in missing.items():
            self._extend(self._table.resident[row], self.manager.take(count))

    def start(self, seq: Sequence, hits: list[int], num_new: int) -> None:
        """Give the first blocks to a sequence that has just moved in. These are `hits`, which were found in the prefix
        cache, and then num_new other blocks."""
        self.manager.reference(hits)
        self._extend(seq, hits + self.manager.take(num_new))
        can_be_found = self.manager.enable_prefix_caching
        self._next_full[seq.row] = (len(hits) + 1) * self.manager.block_size if can_be_found else NEVER

    def release(self, seq: Sequence) -> None:
        """Give back all blocks of a sequence. Call it before the row is released."""
        self.manager.release(seq.block_table)
        seq.block_table = []

    def _extend(self, seq: Sequence, blocks: list[int]) -> None:
        self._new_entries.extend((seq.row, index, block) for index, block in enumerate(blocks, len(seq.block_table)))
        seq.block_table.extend(blocks)
        self.room[seq.row] = len(seq.block_table) * self.manager.block_size

    def register(self, rows: Rows, ends: IntArray) -> None:
        """Make the rows' full blocks findable by prefix, up to `ends`, if the ids of all their tokens are known.

        A block may become findable before it is computed: when the step that fills it is planned. Even another sequence
        of the same step may use it, because in each layer all keys and values are stored before attention reads them. A
        block with a placeholder cannot be found, because the id of that token is not known. At depth 2 the plan that
        computes a sampled token does not know its id yet. So if the last token of a block is sampled, the block becomes
        findable only with the next plan.
        """
        size = self.manager.block_size
        known = np.minimum(ends, self._table.num_known[rows])
        for i in (known >= self._next_full[rows]).nonzero()[0].tolist():
            row = int(rows[i])
            num_full = int(known[i]) // size
            seq = self._table.resident[row]
            first = int(self._next_full[row]) // size - 1  # the index of the block that ends at _next_full
            next_full = (num_full + 1) * size
            for index in range(first, num_full):
                if not self.manager.register(seq, index):
                    next_full = NEVER  # no later block could be found without this one
                    break
            self._next_full[row] = next_full


def pack_sampling(seqs: Seq[Sequence], vocab_size: int) -> NDArray[Any]:
    """Return ROW_SAMPLING [n]: the sampling values of sequences that have just moved in."""
    if not seqs:
        return NO_NEW_ROWS
    # The fields have 32 bits. So large values are cut with min(): a larger value has the same effect.
    limits = [(name, vocab_size if type == "<i4" else 1e30) for name, type in SAMPLER_COLUMNS]
    rows = []
    for seq in seqs:
        params = seq.params
        values = {name: min(getattr(params, name), limit) for name, limit in limits}
        if params.temperature < 1e-30:  # a kernel computes 1 / temperature, which would be infinite in float32
            values["temperature"] = 0.0
        seed = (seq.seed & 0xFFFFFFFF, seq.seed >> 32 & 0xFFFFFFFF)
        counts = (NO_LOGPROBS if k is None else min(k, vocab_size) for k in (params.logprobs, params.prompt_logprobs))
        is_edited = seq.edits is not None
        # In the order of the fields of ROW_SAMPLING.
        rows.append((seq.row, *values.values(), *seed, *counts, is_edited))
    return np.array(rows, ROW_SAMPLING)
