"""Who is resident, in which row, and how far each has come."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.plan import ROW_SAMPLING, IntArray
from nanovllm.engine.sequence import Sequence

Rows = NDArray[np.intp]
"""Rows as numpy wants an index: of int32, it would make a copy at each use."""

NEVER = np.iinfo(np.int32).max
_NO_NEW_ROWS = np.empty(0, ROW_SAMPLING)


class RowTable:
    """The resident sequences, by row, and their counts: flat arrays, because schedule and update visit all rows in
    each step.

        tokens of a row   0 .... num_computed .... num_known .... num_tokens .... num_needed + 1
        num_computed      their KV is in the cache before the next step, once every launched one has run
        num_known         the host knows their ids
        num_tokens        known, and those that launched steps will sample (placeholders)
        num_needed        the most whose KV is ever needed: nothing comes after the last token of all

    `num_computed <= num_tokens` always. The next step should compute the difference, as far as it is needed.
    """

    def __init__(self, num_rows: int) -> None:
        def zeros() -> IntArray:
            return np.zeros(num_rows, np.int32)

        self.num_computed, self.num_known, self.num_tokens, self.num_needed = zeros(), zeros(), zeros(), zeros()
        self.num_sent = zeros()
        """Tokens known when the sequence moved in: plans carry their ids. Later ones are sampled on the device."""
        self.num_unwatched = zeros()
        """Known tokens up to which nothing but the last one's id can end the sequence."""
        self.room = zeros()
        """Tokens that its blocks have room for."""
        self.next_full = zeros()
        """Tokens that fill the first of its blocks which is not findable yet; NEVER if none will be."""
        self.released_at = zeros()
        """The number of the release that freed the row last."""
        self.num_releases = 0
        self.resident: dict[int, Sequence] = {}
        """By row, in order of admission."""
        self._order: Rows | None = None
        self._free = list(range(num_rows - 1, -1, -1))

    @property
    def has_free_row(self) -> bool:
        return bool(self._free)

    @property
    def order(self) -> Rows:
        """The rows of the resident sequences, in order of admission."""
        if self._order is None:
            self._order = np.fromiter(self.resident, np.intp, len(self.resident))
        return self._order

    def sequences(self, rows: Rows) -> list[Sequence]:
        """The sequence of each of some rows."""
        if rows is self._order:  # as in most steps of decodes
            return list(self.resident.values())
        return [self.resident[row] for row in rows.tolist()]

    def move_in(self, seq: Sequence, num_cached: int) -> None:
        """Give a sequence a row, its first num_cached tokens computed."""
        row = seq.row = self._free.pop()
        self.resident[row], self._order = seq, None
        self.num_known[row] = self.num_tokens[row] = self.num_sent[row] = len(seq.token_ids)
        self.num_computed[row], self.num_needed[row] = num_cached, seq.num_needed
        is_watched = seq.stop_matcher is not None or seq.grammar is not None
        self.num_unwatched[row] = 0 if is_watched else seq.num_needed

    def release(self, seq: Sequence) -> None:
        """Free a sequence's row."""
        self.num_releases += 1
        self.released_at[seq.row] = self.num_releases
        del self.resident[seq.row]
        self._free.append(seq.row)
        seq.row, self._order = -1, None


def sampling_of(seqs: Seq[Sequence], vocab_size: int) -> NDArray[Any]:
    """ROW_SAMPLING [n] of sequences that have moved in."""
    if not seqs:
        return _NO_NEW_ROWS
    rows = []
    for seq in seqs:
        params = seq.params
        # What is sent is 32 bits wide; beyond these limits a value means no more than at them.
        temperature, top_k = min(params.temperature, 1e30), min(params.top_k, vocab_size)
        seed = (seq.seed & 0xFFFFFFFF, seq.seed >> 32 & 0xFFFFFFFF)
        counts = (-1 if k is None else min(k, vocab_size) for k in (params.logprobs, params.prompt_logprobs))
        is_edited = seq.edits is not None
        rows.append((seq.row, temperature, top_k, params.top_p, params.min_p, *seed, *counts, is_edited))
    return np.array(rows, ROW_SAMPLING)
