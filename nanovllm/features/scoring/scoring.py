"""Scores and embeddings of prompts. The scheduler asks for this when the first request asks for one of them.

The logits of a token score the token after it. So a chunk of a prompt also scores the first token of the next chunk.
"""

from array import array
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.plan import EMBED, IntArray, StepResult
from nanovllm.engine.pooling import add_states
from nanovllm.engine.rows import Rows
from nanovllm.engine.scheduled_step import Scored
from nanovllm.engine.sequence import PromptScores, Sequence
from nanovllm.outputs import FinishReason


class Scoring:
    """Chooses the prompt tokens that each step scores (its targets), and gives sequences what was computed."""

    def __init__(self) -> None:
        self.seqs: dict[int, Sequence] = {}
        """{row: sequence} of sequences with prompt tokens that are not scored yet, and of all without output."""

    def add(self, seq: Sequence) -> None:
        """Learn of a new sequence that asks for scores or an embedding."""
        params = seq.params
        first = seq.num_prompt_tokens if params.prompt_logprobs is None else max(params.prompt_logprob_start, 1)
        if params.embed:
            first = seq.pooled.start + 1
        seq.scores = PromptScores(first, first)

    def move_in(self, seq: Sequence) -> None:
        """Learn that a sequence has got a row."""
        if seq.scores is not None and (not seq.has_output or seq.scores.next_target < seq.num_prompt_tokens):
            self.seqs[seq.row] = seq

    def release(self, row: int) -> None:
        """Learn that a row is free."""
        self.seqs.pop(row, None)

    def choose_targets(self, rows: Rows, ends: IntArray) -> tuple[IntArray, IntArray, list[Scored], NDArray[np.bool_]]:
        """Choose the targets of the next step, which computes each row's tokens before `ends`.

        Each sequence's `next_target` moves on.

        Returns:
            num_scored: int32 [num_seqs], how many targets each row has.
            targets: int32, the token ids of all targets. EMBED stands for a hidden state.
            scored: the sequences that have targets.
            has_output: bool [num_seqs], whether the row's sequence has output.
        """
        num_scored = np.zeros(len(rows), np.int32)
        has_output = np.ones(len(rows), bool)
        targets = array("i")
        scored: list[Scored] = []
        for i, row in enumerate(rows.tolist()):
            if (seq := self.seqs.get(row)) is None:
                continue
            assert seq.scores is not None
            end = int(ends[i])
            if not seq.has_output:
                has_output[i] = False
            elif end >= seq.num_prompt_tokens:
                del self.seqs[row]
            if not seq.params.embed:
                own = seq.token_ids[seq.scores.next_target : min(end + 1, seq.num_prompt_tokens)]
            elif end >= seq.scores.next_target:
                own = array("i", [EMBED]) * (end + 1 - seq.scores.next_target)
            else:
                continue
            targets.extend(own)
            num_scored[i] = len(own)
            seq.scores.next_target += len(own)
            scored.append(Scored(seq, len(own), not seq.has_output and end == seq.num_needed))
        return num_scored, np.array(targets, np.int32), scored, has_output

    def give(self, scored: Seq[Scored], result: StepResult) -> list[tuple[Sequence, FinishReason]]:
        """Give the sequences that a step scored their scores or embeddings, even those that were preempted meanwhile.

        Returns:
            The sequences that end with them, and how: "error" if scores are NaN or an embedding is not finite.
        """
        ending: list[tuple[Sequence, FinishReason]] = []
        num_states = 0
        num_scores = 0
        for seq, num_targets, is_last in scored:
            assert seq.scores is not None
            if seq.params.embed:
                states = result.embeddings[num_states : num_states + num_targets]
                num_states += num_targets
                seq.scores.embedding = add_states(seq.scores.embedding, states)
                is_good = bool(np.isfinite(seq.scores.embedding).all())
            else:
                assert seq.params.prompt_logprobs is not None
                own = result.scores.cut(num_scores, num_scores + num_targets, seq.params.prompt_logprobs)
                num_scores += num_targets
                is_good = not own.has_nan
                if is_good and num_targets and seq.finish_reason is None:
                    seq.scores.add(own, seq.num_prompt_tokens)
            if seq.finish_reason is not None:
                continue
            if is_last or not is_good:
                ending.append((seq, "length" if is_good else "error"))
        return ending
