"""Scoring prompts: which tokens a step scores, and whose the scores are."""

import math
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from nanovllm.engine.plan import IntArray
from nanovllm.engine.rows import Rows
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import FinishReason

NO_TARGETS = np.empty(0, np.int32)


class Scored(NamedTuple):
    """How many of a plan's targets are of a sequence, and whether it ends with them."""

    seq: Sequence
    num_targets: int
    is_last: bool


def choose_targets(
    scoring: dict[int, Sequence], rows: Rows, ends: IntArray, num_sampled: IntArray
) -> tuple[IntArray, IntArray, list[Scored], IntArray]:
    """Choose what a step scores that computes each row's tokens up to ends: num_sampled, num_scored, who, targets.

    The logits of a token score the one after it, so the step's last token scores one that is not in the step.

    Args:
        scoring: by row, those whose prompt is still to be scored, from which they are taken with their last part, and
            those that are only scored.
    """
    num_sampled = num_sampled.copy()
    num_scored = np.zeros_like(num_sampled)
    scored: list[Scored] = []
    targets = array("i")
    for i, row in enumerate(rows.tolist()):
        if (seq := scoring.get(row)) is None:
            continue
        if seq.is_only_scored:
            num_sampled[i] = 0
        elif ends[i] >= seq.num_prompt_tokens:
            del scoring[row]
        parts = seq.token_ids[seq.next_scored : min(int(ends[i]) + 1, seq.num_prompt_tokens)]
        targets.extend(parts)
        num_scored[i] = len(parts)
        seq.next_scored += len(parts)
        scored.append(Scored(seq, len(parts), seq.is_only_scored and ends[i] == seq.num_needed))
    return num_sampled, num_scored, scored, np.array(targets, np.int32)


def deal_out(scored: Iterable[Scored], scores: Seq[dict[int, float]]) -> list[tuple[Sequence, FinishReason]]:
    """Give each sequence its share of a step's scores, also the preempted; returns those that end with it, and how."""
    ended: list[tuple[Sequence, FinishReason]] = []
    start = 0
    for seq, num_targets, is_last in scored:
        own = scores[start : start + num_targets]
        start += num_targets
        if seq.finish_reason is not None:
            continue
        if any(math.isnan(value) for of_token in own for value in of_token.values()):
            ended.append((seq, "error"))
            continue
        seq.prompt_logprobs.extend(own)
        if is_last:
            ended.append((seq, "length"))
    return ended
