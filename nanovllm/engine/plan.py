"""A step's plan goes from the scheduler to the runner, and its result comes back: plain arrays."""

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
"""The sampling values of a row. A plan carries them once, when a sequence moves in. All fields take 4 bytes, so that
they pack as int32."""

HEADER = 6
"""How many counts a packed plan begins with."""
NUM_PER_SEQ = 5
"""How many arrays of a plan have one element per sequence, rows to num_scored. They come first, then token_ids."""


def make_padding(num_seqs: int, row: int) -> IntArray:
    """Return the head of a plan of num_seqs decodes of token 0, all in one row that belongs to nobody.

    Shape [NUM_PER_SEQ + 1, num_seqs]: the arrays with one element per sequence, and token_ids. Where a step is padded
    to the size of a CUDA graph, these fill it up.
    """
    head = np.zeros((NUM_PER_SEQ + 1, num_seqs), np.int32)
    rows, _, num_scheduled, *_ = head
    rows[:] = row
    num_scheduled[:] = 1
    return head


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work. Decodes (num_scheduled == 1) come first, then longer rows, each in order of admission.

    A resident sequence owns one row of the device's tables from admission to release. Nothing tells the runner of a
    release: the next owner of a row overwrites what it needs.

    Attributes:
        rows: int32 [num_seqs], the row of each scheduled sequence.
        num_computed: int32 [num_seqs], tokens whose KV is in the cache before this step.
        num_scheduled: int32 [num_seqs], tokens to compute in this step, at least 1.
        num_sampled: int32 [num_seqs], how many tokens to sample: 1 + its drafts if this step computes the sequence's
            last known token, else 0. They are sampled from the logits of its last num_sampled scheduled tokens.
        num_scored: int32 [num_seqs], how many targets to score, from the logits of the tokens before those.
        token_ids: int32 [num_tokens], the tokens to compute, sequence after sequence, drafts included. -1 stands for
            the token that was sampled last for that row: it is on the device, and the host may not know it yet.
        targets: int32 [num_scored in all], sequence after sequence. The logits of a token score the token that
            follows it in the prompt; behind the last token of a chunk that one is not part of the step.
        block_entries: int32 [n, 3], new (row, index, block) entries of the block tables.
        new_rows: ROW_SAMPLING [n], the sampling values of rows that have a new owner.
        for_draft_model: True if the draft model runs the plan. Its keys and values lie in blocks of the same numbers.
    """

    rows: IntArray
    num_computed: IntArray
    num_scheduled: IntArray
    num_sampled: IntArray
    num_scored: IntArray
    token_ids: IntArray
    targets: IntArray
    block_entries: IntArray
    new_rows: NDArray[Any]
    for_draft_model: bool = field(default=False, kw_only=True)

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
    def num_drafts(self) -> IntArray:
        """int32 [num_seqs]: how many of each sequence's scheduled tokens, the last ones, are drafts.

        The runner samples 1 + num_drafts tokens of each sequence: one also where num_sampled is 0. See
        `ModelRunner`.
        """
        return np.maximum(self.num_sampled - 1, 0)

    @property
    def head_size(self) -> int:
        """How many int32 elements of `arrays()` come before the block entries."""
        return NUM_PER_SEQ * self.num_seqs + self.num_tokens + len(self.targets)

    def arrays(self) -> list[IntArray]:
        """Return all fields as int32 [n] arrays, in the order in which they go to the device and to other ranks."""
        per_seq = [self.rows, self.num_computed, self.num_scheduled, self.num_sampled, self.num_scored]
        entries = self.block_entries.reshape(-1)
        new_rows = self.new_rows.view(np.int32)
        return [*per_seq, self.token_ids, self.targets, entries, new_rows]

    def pad(self, num_seqs: int, row: int) -> "StepPlan":
        """Return this plan, which has decodes alone, filled up to num_seqs sequences by padding: see `make_padding`."""
        arrays = self.arrays()
        head = make_padding(num_seqs, row)  # a hundredth of the time that np.pad takes
        for padded, values in zip(head, arrays, strict=False):
            padded[: self.num_seqs] = values
        return StepPlan._from_arrays([*head, *arrays[len(head) :]])

    def pack(self) -> IntArray:
        """Return the plan as one int32 array: a header of counts, then its arrays one after another."""
        counts = (self.num_seqs, self.num_tokens, len(self.targets), len(self.block_entries), len(self.new_rows))
        return np.concatenate((np.array((*counts, self.for_draft_model), np.int32), *self.arrays()))

    @staticmethod
    def unpack(packed: IntArray) -> "StepPlan":
        """Return the plan that `pack` packed; its arrays are views of `packed`."""
        num_seqs, num_tokens, num_targets, num_entries, num_new_rows, for_draft_model = packed[:HEADER].tolist()
        rest = [num_tokens, num_targets, 3 * num_entries, num_new_rows * ROW_SAMPLING.itemsize // 4]
        lengths = [num_seqs] * NUM_PER_SEQ + rest
        ends = (HEADER + np.cumsum(lengths)).tolist()
        parts = [packed[end - n : end] for end, n in zip(ends, lengths, strict=True)]
        return replace(StepPlan._from_arrays(parts), for_draft_model=bool(for_draft_model))

    @staticmethod
    def _from_arrays(arrays: Seq[IntArray]) -> "StepPlan":
        """Return the plan whose `arrays()` these are."""
        *rest, entries, new_rows = arrays
        parts: list[NDArray[Any]] = [*rest, entries.reshape(-1, 3), new_rows.view(ROW_SAMPLING)]
        return StepPlan(*parts)

    @staticmethod
    def largest(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> "StepPlan":
        """Return the step that takes the most memory: all sequences, all tokens, each of them sampled or scored."""
        num_seqs = min(max_num_seqs, max_num_batched_tokens)
        num_tokens = min(max_num_batched_tokens, num_seqs * max_model_len)
        num_scheduled = np.full(num_seqs, num_tokens // num_seqs, np.int32)
        num_scheduled[num_seqs - num_tokens % num_seqs :] += 1  # decodes stay first

        def zeros(count: int) -> IntArray:
            return np.zeros(count, np.int32)

        num_sampled = np.minimum(num_scheduled, 1 + num_drafts)
        num_scored = num_scheduled - num_sampled
        per_seq = [zeros(num_seqs), zeros(num_seqs), num_scheduled, num_sampled, num_scored]
        targets = zeros(int(num_scored.sum()))
        return StepPlan._from_arrays([*per_seq, zeros(num_tokens), targets, zeros(0), zeros(0)])

    @staticmethod
    def max_packed_size(config: ResolvedConfig) -> int:
        """Return how many int32 elements the largest plan of a configuration has."""
        per_seq = NUM_PER_SEQ + 3 * config.max_blocks_per_seq + ROW_SAMPLING.itemsize // 4
        return HEADER + 2 * config.max_num_batched_tokens + config.max_num_seqs * per_seq


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that a step sampled and the scores that it computed, in the plan's order.

    Attributes:
        token_ids: int32 [the plan's num_sampled in all]; -1 where the logits were no distribution.
        logprobs: {token id: log-probability} of each token whose request asked for it, by its index in token_ids.
        scores: {token id: log-probability} of each of the plan's targets.
        prepare_seconds: how long the host took to pack the plan and send it to the device.
        device_seconds: how long the device worked on the step.
        command_seconds: how long rank 0 took to send the plan to the other ranks.
    """

    token_ids: IntArray
    logprobs: Mapping[int, dict[int, float]] = field(default_factory=dict)
    scores: Seq[dict[int, float]] = ()
    prepare_seconds: float = 0.0
    device_seconds: float = 0.0
    command_seconds: float = 0.0
