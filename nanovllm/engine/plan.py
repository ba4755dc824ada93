"""The plan of a step, which goes from the scheduler to the runner, and its result, which comes back. Both are plain
data."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.config import ResolvedConfig
from nanovllm.engine.token_scores import NO_SCORES, TokenScores

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

SAMPLER_COLUMNS = (("temperature", "<f4"), ("top_k", "<i4"), ("top_p", "<f4"), ("min_p", "<f4"))
"""(name, type) of each field of `SamplingParams` that the sampler reads on the device. `SamplingParams` has the
defaults."""

ROW_SAMPLING = np.dtype(
    [
        ("row", "<i4"),
        *SAMPLER_COLUMNS,
        ("seed_low", "<u4"),
        ("seed_high", "<u4"),
        ("num_logprobs", "<i4"),
        ("num_prompt_logprobs", "<i4"),
        ("is_edited", "<i4"),  # 1: its logits are edited before a token is sampled
    ]
)
"""The sampling values of a row. A plan carries them once, when a sequence moves in. Every field has 4 bytes. So an
array of n elements can be read as an int32 table with n rows and a column for each field: the packed sampling values.
The 32 bits of a float stand in this table as an integer. docs/recipes.md says how a parameter is added."""

SAMPLING_COLUMNS = {name: column for column, name in enumerate(ROW_SAMPLING.names or ())}
"""{a field of ROW_SAMPLING: its column in a table of packed sampling values, int32 [num_rows, all fields]}."""

# What -1 means, by the array that has it. The kernels of the backends know these values, too.
LAST_TOKEN = -1
"""A value of `StepPlan.token_ids`: the token that the device sampled last for the row."""
FAILED = -1
"""A value of `StepResult.token_ids`: the logits were not a valid distribution."""
EMBED = -1
"""A value of `StepPlan.targets`: it asks for the hidden state of a token of the prompt, and not for a score."""
NO_LOGPROBS = -1
"""A value of num_logprobs and num_prompt_logprobs in ROW_SAMPLING: the request asks for none."""
NOWHERE = -1
"""A value of `StepInputs.slots` (ops/step_inputs.py): the token is padding, and its keys and values are not stored."""


NO_TARGETS: IntArray = np.empty(0, np.int32)
NO_ENTRIES: IntArray = np.empty((0, 3), np.int32)
NO_NEW_ROWS: NDArray[Any] = np.empty(0, ROW_SAMPLING)
NO_EMBEDDINGS: FloatArray = np.empty((0, 0), np.float32)


class StepPlan(NamedTuple):
    """One step's work. Sequences that compute one token come first: those that decode without drafts, and prompts of
    which this step computes one token. Then come sequences that compute several tokens. Both kinds are in order of
    admission.

    A resident sequence owns one row of the device's tables from admission to release. The runner is not told when a row
    is released. The next owner overwrites what it needs.

    An example: one request alone, whose prompt has the token ids 10 to 15. It asks for prompt_logprobs, so the tokens
    of its prompt are scored, all but the first. The budget is 4 tokens a step. Two steps compute the prompt in two
    chunks, and the third step decodes:

        num_computed   num_scheduled   num_sampled   num_scored   token_ids     targets
             0               4              0            4        10 11 12 13   11 12 13 14
             4               2              1            1        14 15         15
             6               1              1            0        LAST_TOKEN

    The logits of a token score the token after it. So the first chunk scores 14, which the second chunk computes. The
    logits of 14 score 15. The first token of output is sampled from the logits of 15. It is on the device when the
    third step runs, so the plan has LAST_TOKEN in its place.

    The arrays go to the device, and to the other ranks, one after another in the order of the attributes. This class
    alone knows the order: `arrays` puts them into it, and `lengths` tells where each of them lies.

    Attributes:
        rows: int32 [num_seqs], the row of each scheduled sequence.
        num_computed: int32 [num_seqs], how many tokens of the sequence come before those that this step computes. Their
            KV is in the cache before this step, or another sequence of this step stores it there (a prefix that both
            share).
        num_scheduled: int32 [num_seqs], tokens to compute in this step, at least 1.
        num_sampled: int32 [num_seqs], how many samples are wanted. It is 0 if this step does not compute the sequence's
            last token, or if the prompt is only scored or embedded. Otherwise it is 1 + the number of drafts. The last
            num_sampled tokens that the sequence computes in this step give one sample each.
        num_scored: int32 [num_seqs], how many targets to score. Of the tokens that the sequence computes, the last
            num_sampled give samples, and the num_scored tokens just before these give scores.
        token_ids: int32 [num_tokens], the ids of the tokens to compute, sequence after sequence. The drafts of a
            sequence are its last ids. LAST_TOKEN stands for the token that the device sampled last for the row.
        targets: int32 [sum of num_scored], sequence after sequence: the prompt tokens whose log-probability is wanted.
            The token before a target scores it, so the last target may be the first token of the next chunk. EMBED in
            the place of a target asks for the hidden state of the token before it.
        block_entries: int32 [n, 3], new (row, index, block) entries of the block tables.
        new_rows: ROW_SAMPLING [n], the sampling values of rows that have a new owner.
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

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_decodes(self) -> int:
        """How many sequences compute one token. To the layers such a sequence is a decode, even if it is a prompt."""
        return int(np.count_nonzero(self.num_scheduled == 1))

    @property
    def num_drafts(self) -> IntArray:
        """int32 [num_seqs]: how many drafts each sequence has. They are the last of its scheduled tokens."""
        return np.maximum(self.num_sampled - 1, 0)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many sequences, tokens, targets, block entries and new rows the plan has. `find_lengths` takes them."""
        return len(self.rows), len(self.token_ids), len(self.targets), len(self.block_entries), len(self.new_rows)

    @property
    def lengths(self) -> list[int]:
        """How many elements each of `arrays` has."""
        return find_lengths(*self.counts)

    def arrays(self) -> list[IntArray]:
        """Return all arrays as int32 [n], in the order in which they go to the device and to the other ranks."""
        *arrays, entries, new_rows = self
        return [*arrays, entries.reshape(-1), new_rows.view(np.int32)]

    @staticmethod
    def unpack(packed: IntArray, counts: Seq[int]) -> "StepPlan":
        """Make a plan from its `arrays`, which lie one after another in `packed`. The plan's arrays are views.

        Args:
            counts: the plan's `counts`.
        """
        lengths = find_lengths(*counts)
        *arrays, entries, new_rows = (
            packed[end - n : end] for end, n in zip(accumulate(lengths), lengths, strict=True)
        )
        return StepPlan._make([*arrays, entries.reshape(-1, 3), new_rows.view(ROW_SAMPLING)])

    @staticmethod
    def make_padding(num_seqs: int, row: int) -> "StepPlan":
        """Return a plan whose sequences are all dummies. Each computes one token, with id 0.

        A CUDA graph has a fixed number of sequences. A step with fewer sequences is filled up with dummies. All dummies
        use one row that belongs to no sequence.
        """
        zeros = np.zeros((NUM_PER_SEQ + 1, num_seqs), np.int32)  # token_ids, too, has one element per dummy
        plan = StepPlan._make([*zeros, NO_TARGETS, NO_ENTRIES, NO_NEW_ROWS])
        plan.rows[:] = row
        plan.num_scheduled[:] = 1
        return plan

    def pad(self, num_seqs: int, row: int) -> "StepPlan":
        """Return this plan of decodes, filled up to num_seqs sequences: see `make_padding`."""
        padding = StepPlan.make_padding(num_seqs, row)
        padded = padding[: NUM_PER_SEQ + 1]  # in a plan of decodes token_ids, too, has one element per sequence
        for whole, values in zip(padded, self, strict=False):
            whole[: self.num_seqs] = values
        return StepPlan._make([*padded, *self[len(padded) :]])

    @staticmethod
    def largest(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, num_drafts: int = 0) -> "StepPlan":
        """Return the step that takes the most memory. It has the most sequences and the most tokens, and each token
        samples or scores."""
        num_seqs = min(max_num_seqs, max_num_batched_tokens)
        num_tokens = min(max_num_batched_tokens, num_seqs * max_model_len)
        num_scheduled = np.full(num_seqs, num_tokens // num_seqs, np.int32)
        num_scheduled[num_seqs - num_tokens % num_seqs :] += 1  # the last rows get what is left

        def zeros(count: int) -> IntArray:
            return np.zeros(count, np.int32)

        num_sampled = np.minimum(num_scheduled, 1 + num_drafts)
        num_scored = num_scheduled - num_sampled
        return StepPlan(
            rows=zeros(num_seqs),
            num_computed=zeros(num_seqs),
            num_scheduled=num_scheduled,
            num_sampled=num_sampled,
            num_scored=num_scored,
            token_ids=zeros(num_tokens),
            targets=zeros(int(num_scored.sum())),
            block_entries=NO_ENTRIES,
            new_rows=NO_NEW_ROWS,
        )

    @staticmethod
    def max_size(config: ResolvedConfig) -> int:
        """Return how many int32 elements the arrays of the largest plan of a configuration have.

        Each token has an id and may have a target. Each sequence may have new entries for all of its blocks.
        """
        per_seq = NUM_PER_SEQ + 3 * config.max_blocks_per_seq + len(SAMPLING_COLUMNS)
        return 2 * config.max_num_batched_tokens + config.max_num_seqs * per_seq


NUM_PER_SEQ = StepPlan._fields.index("token_ids")
"""How many arrays of a `StepPlan` have one element per sequence: those before token_ids."""


def find_lengths(
    num_seqs: int, num_tokens: int, num_targets: int = 0, num_entries: int = 0, num_new_rows: int = 0
) -> list[int]:
    """Return how many int32 elements each array of a plan with these counts has, in the order of the arrays."""
    after = [num_tokens, num_targets, 3 * num_entries, len(SAMPLING_COLUMNS) * num_new_rows]
    return [num_seqs] * NUM_PER_SEQ + after


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that a step sampled and the scores that it computed, in the plan's order.

    Attributes:
        token_ids: int32 [sum of the plan's num_sampled]; FAILED if the logits were not a valid distribution.
        logprobs: {index in token_ids: the scores of that token}, only for requests that asked for them.
        scores: of each of the plan's targets that is a token.
        embeddings: float32 [n, hidden], the hidden states of the n targets that are EMBED.
        prepare_seconds: how long the host took to pack the plan and send it to the device.
        device_seconds: how long the device worked on the step. In a pipeline, where each rank has some of the layers,
            this is how long rank 0 computed its own layers.
    """

    token_ids: IntArray
    logprobs: Mapping[int, TokenScores] = field(default_factory=dict)
    scores: TokenScores = NO_SCORES
    embeddings: FloatArray = field(default_factory=lambda: NO_EMBEDDINGS)
    prepare_seconds: float = 0.0
    device_seconds: float = 0.0
