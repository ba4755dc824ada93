"""What crosses from planning to doing: plain arrays, packed into one."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanovllm.config import ResolvedConfig

IntArray = NDArray[np.int32]

ROW_SAMPLING = np.dtype(
    [
        ("row", "<i4"),
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("seed_low", "<u4"),
        ("seed_high", "<u4"),
        ("num_logprobs", "<i4"),  # -1: none asked for
        ("num_prompt_logprobs", "<i4"),
        ("is_edited", "<i4"),  # 1: its logits are edited before a token is sampled
    ]
)
"""The sampling values of a row, told once, when a sequence moves in. 4-byte fields, so that it packs as int32."""

HEADER = 6
NUM_PER_SEQ = 5
"""The arrays of a plan with an element for each sequence; they come first."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work. Decodes (num_scheduled == 1) come first, then longer rows, each in order of admission.

    A resident sequence owns one row of the device's tables from admission to release. Nothing tells the runner of a
    release: the next owner of a row overwrites what it needs.

    Attributes:
        rows: int32 [num_seqs], the row of each scheduled sequence.
        num_computed: int32 [num_seqs], tokens whose KV is in the cache before this step.
        num_scheduled: int32 [num_seqs], tokens to compute in this step, at least 1.
        num_logits: int32 [num_seqs], how many of the scheduled tokens, the last ones, want logits.
        num_sampled: int32 [num_seqs], from how many of these, the last ones, a token is to be sampled: where the step
            computes the sequence's last token 1 + the drafts that follow it, else 0. The others are scored.
        token_ids: int32 [num_tokens], the tokens to compute, sequence after sequence, drafts included. -1 is the token
            that was sampled last for that row: it is on the device, and the host may not know it yet.
        targets: int32 [num_scored], sequence after sequence, for each token that is scored the one that follows it in
            the prompt. That of a chunk's last token is not in the step.
        block_entries: int32 [n, 3], new (row, index, block) entries of the block tables.
        new_rows: ROW_SAMPLING [n], the sampling values of rows that have a new owner.
        of_draft: the draft model is to run it, whose keys and values lie in blocks of the same numbers.
    """

    rows: IntArray
    num_computed: IntArray
    num_scheduled: IntArray
    num_logits: IntArray
    num_sampled: IntArray
    token_ids: IntArray
    targets: IntArray
    block_entries: IntArray
    new_rows: NDArray[Any]
    of_draft: bool = field(default=False, kw_only=True)

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_decodes(self) -> int:
        return int(np.count_nonzero(self.num_scheduled == 1))

    @property
    def num_drawn(self) -> IntArray:
        """int32 [num_seqs], from how many of its last tokens the runner samples: of every sequence at least from one,
        though where num_sampled is 0 nobody reads it."""
        return np.maximum(self.num_sampled, 1)

    @property
    def head_size(self) -> int:
        """int32 elements of `arrays` that come before the block entries."""
        return NUM_PER_SEQ * self.num_seqs + self.num_tokens + len(self.targets)

    def arrays(self) -> list[IntArray]:
        """Everything as int32 [n] arrays, in the order in which it goes to the device and to the other ranks."""
        per_seq = [self.rows, self.num_computed, self.num_scheduled, self.num_logits, self.num_sampled]
        entries, new_rows = self.block_entries.reshape(-1), self.new_rows.view(np.int32)
        return [*per_seq, self.token_ids, self.targets, entries, new_rows]

    def pad(self, num_seqs: int, row: int) -> "StepPlan":
        """A plan of decodes alone, filled up to num_seqs by decodes of token 0 in a row that belongs to nobody."""
        arrays = self.arrays()
        padded = np.zeros((NUM_PER_SEQ + 1, num_seqs), np.int32)  # a hundredth of the time that np.pad takes
        padded[0, self.num_seqs :] = row
        padded[2] = 1
        for i, values in enumerate(padded):
            values[: self.num_seqs] = arrays[i]
        return StepPlan._of([*padded, *arrays[len(padded) :]])

    def pack(self) -> IntArray:
        """The plan as one int32 array: a header of counts, then its arrays one after another."""
        counts = (self.num_seqs, self.num_tokens, len(self.targets), len(self.block_entries), len(self.new_rows))
        return np.concatenate((np.array((*counts, self.of_draft), np.int32), *self.arrays()))

    @staticmethod
    def unpack(packed: IntArray) -> "StepPlan":
        """The plan that was packed; its arrays are views of `packed`."""
        num_seqs, num_tokens, num_targets, num_entries, num_new_rows, of_draft = packed[:HEADER].tolist()
        rest = [num_tokens, num_targets, 3 * num_entries, num_new_rows * ROW_SAMPLING.itemsize // 4]
        lengths = [num_seqs] * NUM_PER_SEQ + rest
        ends = (HEADER + np.cumsum(lengths)).tolist()
        parts = [packed[end - n : end] for end, n in zip(ends, lengths, strict=True)]
        return replace(StepPlan._of(parts), of_draft=bool(of_draft))

    @staticmethod
    def _of(arrays: Seq[IntArray]) -> "StepPlan":
        """The plan whose `arrays` they are."""
        *rest, entries, new_rows = arrays
        parts: list[NDArray[Any]] = [*rest, entries.reshape(-1, 3), new_rows.view(ROW_SAMPLING)]
        return StepPlan(*parts)

    @staticmethod
    def largest(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> "StepPlan":
        """The step that takes the most memory: all tokens, all scored or sampled, all sequences. For measuring."""
        num_seqs = min(max_num_seqs, max_num_batched_tokens)
        num_tokens = min(max_num_batched_tokens, num_seqs * max_model_len)
        num_scheduled = np.full(num_seqs, num_tokens // num_seqs, np.int32)
        num_scheduled[num_seqs - num_tokens % num_seqs :] += 1  # decodes stay first

        def zeros(count: int) -> IntArray:
            return np.zeros(count, np.int32)

        num_sampled = np.minimum(num_scheduled, 1 + num_drafts)
        per_seq = [zeros(num_seqs), zeros(num_seqs), num_scheduled, num_scheduled, num_sampled]
        targets = zeros(num_tokens - int(num_sampled.sum()))
        return StepPlan._of([*per_seq, zeros(num_tokens), targets, zeros(0), zeros(0)])

    @staticmethod
    def max_packed_size(config: ResolvedConfig) -> int:
        """int32 elements of the largest plan that a configuration allows."""
        per_seq = NUM_PER_SEQ + 3 * config.max_blocks_per_seq + ROW_SAMPLING.itemsize // 4
        return HEADER + 2 * config.max_num_batched_tokens + config.max_num_seqs * per_seq


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled and scored, in the plan's order.

    Attributes:
        token_ids: int32 [the plan's num_sampled in all].
        logprobs: of those whose request asked, by their place among them: {token id: log-probability}.
        scores: for each target {token id: log-probability}.
        prepare_seconds: how long the host took to bring the plan on its way.
        device_seconds: how long the device worked on the step.
        command_seconds: how long rank 0 took to tell the other ranks.
    """

    token_ids: IntArray
    logprobs: Mapping[int, dict[int, float]] = field(default_factory=dict)
    scores: Seq[dict[int, float]] = ()
    prepare_seconds: float = 0.0
    device_seconds: float = 0.0
    command_seconds: float = 0.0
