"""Scores and embeddings of prompts. The scheduler brings this in when the first request asks for one of them.

The logits of a token score the token after it. So a chunk of a prompt also scores the first token of the next chunk.
"""

import math
from array import array
from collections.abc import Sequence as Seq
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.plan import EMBED, IntArray, StepResult
from nanovllm.engine.pooling import add_states
from nanovllm.engine.rows import Rows
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import FinishReason, Logprob


class Scored(NamedTuple):
    """A sequence that a step scores or embeds.

    Attributes:
        num_targets: how many of the plan's targets belong to it.
        is_last: whether the sequence ends after them.
    """

    seq: Sequence
    num_targets: int
    is_last: bool


class Scoring:
    """Chooses the prompt tokens that each step scores (its targets), and gives sequences what was computed."""

    def __init__(self) -> None:
        self.seqs: dict[int, Sequence] = {}
        """{row: sequence} of sequences with prompt tokens that are not scored yet, and of all that are only scored."""

    def move_in(self, seq: Sequence) -> None:
        """Learn that a sequence has got a row."""
        if seq.wants_scoring:
            self.seqs[seq.row] = seq

    def release(self, row: int) -> None:
        """Learn that a row is free."""
        self.seqs.pop(row, None)

    def choose_targets(self, rows: Rows, ends: IntArray) -> tuple[IntArray, IntArray, list[Scored], NDArray[np.bool_]]:
        """Choose the targets of the next step, which computes each row's tokens before `ends`.

        Each sequence's `next_scored` moves on.

        Returns:
            num_scored: int32 [num_seqs], how many targets each row has.
            targets: int32, the token ids of all targets. EMBED stands for a hidden state.
            scored: the sequences that have targets.
            is_only_scored: bool [num_seqs], whether each row samples no token at all.
        """
        num_scored = np.zeros(len(rows), np.int32)
        is_only_scored = np.zeros(len(rows), bool)
        targets = array("i")
        scored: list[Scored] = []
        for i, row in enumerate(rows.tolist()):
            if (seq := self.seqs.get(row)) is None:
                continue
            end = int(ends[i])
            if seq.is_only_scored:
                is_only_scored[i] = True
            elif end >= seq.num_prompt_tokens:
                del self.seqs[row]
            if not seq.params.embed:
                own = seq.token_ids[seq.next_scored : min(end + 1, seq.num_prompt_tokens)]
            elif end >= seq.next_scored:
                own = array("i", [EMBED]) * (end + 1 - seq.next_scored)
            else:
                continue
            targets.extend(own)
            num_scored[i] = len(own)
            seq.next_scored += len(own)
            scored.append(Scored(seq, len(own), seq.is_only_scored and end == seq.num_needed))
        return num_scored, np.array(targets, np.int32), scored, is_only_scored

    def give(self, scored: Seq[Scored], result: StepResult) -> list[tuple[Sequence, FinishReason]]:
        """Give the sequences that a step scored their scores or embeddings, even those that were preempted meanwhile.

        Returns:
            The sequences that end with them, and how: "error" if scores are NaN or an embedding is not finite.
        """
        ending: list[tuple[Sequence, FinishReason]] = []
        scores = iter(result.scores)
        num_states = 0
        for seq, num_targets, is_last in scored:
            own: list[dict[int, Logprob]] = []
            if seq.params.embed:
                states = result.embeddings[num_states : num_states + num_targets]
                num_states += num_targets
                seq.embedding = add_states(seq.embedding, states)
                is_good = bool(np.isfinite(seq.embedding).all())
            else:
                own.extend(islice(scores, num_targets))
                is_good = not any(math.isnan(logprob) for logprobs in own for logprob in logprobs.values())
            if seq.finish_reason is not None:
                continue
            if is_good:
                seq.prompt_logprobs.extend(own)
            if is_last or not is_good:
                ending.append((seq, "length" if is_good else "error"))
        return ending
