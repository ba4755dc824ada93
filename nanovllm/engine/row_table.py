"""What the scheduler keeps of the resident sequences, by row."""

import numpy as np

from nanovllm.engine.plan import IntArray


class RowTable:
    """The counts of resident sequences: flat arrays, because schedule and update visit all rows in each step.

        tokens of a row   0 .... num_computed .... num_known .... num_tokens .... limit
        num_computed      their KV is in the cache before the next step, once every launched one has run
        num_known         the host knows their ids
        num_tokens        known, and those that launched steps will sample (placeholders)

    `num_computed <= num_tokens` always. The next step should compute the difference, but never token `limit - 1`, the
    last that the sequence may have: no token comes after it.
    """

    def __init__(self, num_rows: int) -> None:
        def zeros() -> IntArray:
            return np.zeros(num_rows, np.int32)

        self.num_computed, self.num_known, self.num_tokens, self.limit = zeros(), zeros(), zeros(), zeros()
        self.num_sent = zeros()
        """Tokens known when the sequence moved in: plans carry their ids. Later ones are sampled on the device."""
        self.num_blocks = zeros()
        self.num_registered = zeros()
        """Full blocks that are findable, or never will be."""
        self.generation = zeros()
        """Counts a row's owners."""
        self.watches_text = np.zeros(num_rows, bool)
