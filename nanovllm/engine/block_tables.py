"""The blocks of resident sequences: more for what a step computes, and findable once they are full."""

from collections.abc import Mapping

import numpy as np

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.plan import IntArray
from nanovllm.engine.row_table import RowTable
from nanovllm.engine.sequence import Sequence

_NO_ENTRIES = np.empty((0, 3), np.int32)


class BlockTables:
    """Grows the sequences' block tables and notes what is new in them, for the device's."""

    def __init__(self, block_manager: BlockManager, table: RowTable, resident: Mapping[int, Sequence]) -> None:
        """resident: by row; the scheduler's."""
        self._manager, self._table, self._resident = block_manager, table, resident
        self._new_entries: list[tuple[int, int, int]] = []

    def new_entries(self) -> IntArray:
        """int32 [n, 3], the (row, index, block) entries since it was called last."""
        if not self._new_entries:  # as in most steps
            return _NO_ENTRIES
        entries = np.array(self._new_entries, np.int32)
        self._new_entries.clear()
        return entries

    def grow(self, rows: IntArray, ends: IntArray) -> None:
        """Take the blocks that each row needs for its first `ends` tokens."""
        num_needed = -(-ends // self._manager.block_size)
        for i in np.flatnonzero(num_needed > self._table.num_blocks[rows]).tolist():
            seq = self._resident[int(rows[i])]
            self.extend(seq, self._manager.take(int(num_needed[i]) - len(seq.block_table)))

    def extend(self, seq: Sequence, blocks: list[int]) -> None:
        """Put blocks at the end of a sequence's table."""
        self._new_entries.extend((seq.row, index, block) for index, block in enumerate(blocks, len(seq.block_table)))
        seq.block_table.extend(blocks)
        self._table.num_blocks[seq.row] = len(seq.block_table)

    def register(self, rows: IntArray, ends: IntArray) -> None:
        """Make findable every full block among each row's first `ends` tokens whose ids are known.

        Those tokens are computed, or will be by this step. Every layer stores keys and values before it attends, so
        another sequence of the same step may already read them. A placeholder has no id to be found by.
        """
        if not self._manager.enable_prefix_caching:
            return
        table = self._table
        num_full = np.minimum(ends, table.num_known[rows]) // self._manager.block_size
        for i in np.flatnonzero(num_full > table.num_registered[rows]).tolist():
            row = int(rows[i])
            seq = self._resident[row]
            for index in range(int(table.num_registered[row]), int(num_full[i])):
                if not self._manager.register(seq, index):
                    table.num_registered[row] = np.iinfo(np.int32).max
                    break
            else:
                table.num_registered[row] = num_full[i]
