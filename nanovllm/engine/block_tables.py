"""The blocks of resident sequences: more for what a step computes, and findable once they are full."""

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.plan import IntArray
from nanovllm.engine.rows import NEVER, Rows, RowTable
from nanovllm.engine.sequence import Sequence

_NO_ENTRIES = np.empty((0, 3), np.int32)


class BlockTables:
    """Grows the sequences' block tables and notes what is new in them, for the device's."""

    def __init__(self, block_manager: BlockManager, table: RowTable) -> None:
        self._manager, self._table = block_manager, table
        self._new_entries: list[tuple[int, int, int]] = []

    def new_entries(self) -> IntArray:
        """int32 [n, 3], the (row, index, block) entries since it was called last."""
        if not self._new_entries:  # as in most steps
            return _NO_ENTRIES
        entries = np.array(self._new_entries, np.int32)
        self._new_entries.clear()
        return entries

    def missing(self, rows: Rows, ends: IntArray) -> dict[int, int]:
        """By row, how many blocks are lacking for its first `ends` tokens; of rows that lack any."""
        num_lacking = ends - self._table.room[rows]
        short = (num_lacking > 0).nonzero()[0]
        lacking = zip(rows[short].tolist(), num_lacking[short].tolist(), strict=True)
        return {row: self._manager.blocks_for(num_tokens) for row, num_tokens in lacking}

    def can_grow(self, missing: dict[int, int]) -> bool:
        """Whether the blocks that are missing could be taken."""
        return sum(missing.values()) <= self._manager.num_free

    def grow(self, missing: dict[int, int]) -> None:
        """Take the blocks that are missing."""
        for row, count in missing.items():
            self.extend(self._table.resident[row], self._manager.take(count))

    def start(self, seq: Sequence, hits: list[int], num_new: int) -> None:
        """The first blocks of a sequence that has just moved in: those that were found, and new ones."""
        self._manager.reference(hits)
        self.extend(seq, hits + self._manager.take(num_new))
        can_be_found = self._manager.enable_prefix_caching
        self._table.next_full[seq.row] = (len(hits) + 1) * self._manager.block_size if can_be_found else NEVER

    def extend(self, seq: Sequence, blocks: list[int]) -> None:
        """Put blocks at the end of a sequence's table."""
        self._new_entries.extend((seq.row, index, block) for index, block in enumerate(blocks, len(seq.block_table)))
        seq.block_table.extend(blocks)
        self._table.room[seq.row] = len(seq.block_table) * self._manager.block_size

    def register(self, rows: Rows, ends: IntArray) -> None:
        """Make findable every full block among each row's first `ends` tokens whose ids are known.

        Those tokens are computed, or will be by this step. Every layer stores keys and values before it attends, so
        another sequence of the same step may already read them. A placeholder has no id to be found by.
        """
        table, size = self._table, self._manager.block_size
        known = np.minimum(ends, table.num_known[rows])
        for i in (known >= table.next_full[rows]).nonzero()[0].tolist():
            row, num_full = int(rows[i]), int(known[i]) // size
            seq, first = table.resident[row], int(table.next_full[row]) // size - 1
            are_found = all(self._manager.register(seq, index) for index in range(first, num_full))
            table.next_full[row] = (num_full + 1) * size if are_found else NEVER
