"""What the scheduler keeps of the resident sequences, by row."""

import numpy as np

from nanovllm.engine.plan import IntArray


class RowTable:
    """The counts of resident sequences: flat arrays, because schedule and update visit all rows in each step.

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
        self.num_blocks = zeros()
        self.num_registered = zeros()
        """Full blocks that are findable, or never will be."""
        self.generation = zeros()
        """Counts a row's owners."""
        self.watches_text = np.zeros(num_rows, bool)
