"""Log-probabilities of the tokens that a step sampled, and of those that it scored."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import IntArray, StepPlan
from nanovllm.runner.device_tables import DeviceTables
from nanovllm.runner.staging import start_copy, to_device

LOGITS_AT_A_TIME = 1024
"""Rows of hidden states that the LM head turns into logits at a time, where all of a prompt's are wanted."""

ComputeLogits = Callable[[Tensor], Tensor | None]
"""Hidden states [n, hidden] -> logits [n, vocab] on rank 0, None on the others."""


class Logprobs:
    """Log-probabilities of raw distributions: of one token of each row of logits, and of the k most likely."""

    ROWS_AT_A_TIME = 64
    """Bounds the float32 copies of logits: 40 MB each for 151,936 tokens."""

    def __init__(self, logits: Iterable[tuple[Tensor, Tensor]], counts: IntArray) -> None:
        """
        Args:
            logits: piece by piece, [n, vocab], and the token of each row, int32 [n]. Only one piece is held at a time.
            counts: int32, how many of the most likely tokens each row of all the pieces wants. -1 counts as 0: rows of
                padding, which the memory profile scores, ask for none.
        """
        self._counts: IntArray = np.maximum(counts, 0)
        self._most = int(self._counts.max())
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        at = 0
        for piece in logits:
            for some, ids in zip(*(torch.split(x, self.ROWS_AT_A_TIME) for x in piece), strict=True):
                parts.append(self._reduce(some.float(), ids, self._counts[at : at + len(some)]))
                at += len(some)
        self._tensors = [start_copy(torch.cat(values)) for values in zip(*parts, strict=True)]

    def _reduce(self, logits: Tensor, token_ids: Tensor, counts: IntArray) -> tuple[Tensor, Tensor, Tensor]:
        """The log-probabilities of token_ids, and of the most likely tokens; and the ids of these.

        None depends on the other rows: several threads would share the sum of a row by itself, in another order, and
        which one of equals is among the k most likely depends on k.
        """
        several = logits if len(logits) > 1 else logits.expand(2, -1)
        total = several.logsumexp(1, keepdim=True)[: len(logits)]
        top, top_ids = logits.topk(min(self._most, logits.shape[1]), dim=1)
        for k in {*counts.tolist()} - {self._most, 0}:
            rows = to_device(np.flatnonzero(counts == k), logits.device)
            top[rows, :k], top_ids[rows, :k] = logits[rows].topk(k, dim=1)
        own = logits.gather(1, token_ids.long().clamp(min=0).unsqueeze(1))
        return (own - total).squeeze(1), top - total, top_ids

    def read(self, token_ids: IntArray) -> list[dict[int, float]]:
        """{token id: log-probability} of each row; only after the step has ended on the device."""
        of_token, top, top_ids = (values.tolist() for values in self._tensors)
        rows = zip(token_ids.tolist(), of_token, top_ids, top, self._counts.tolist(), strict=True)
        return [{own: value, **dict(zip(ids[:k], values[:k], strict=True))} for own, value, ids, values, k in rows]


def of_sampled(
    plan: StepPlan, tables: DeviceTables, token_ids: Tensor, hidden: Tensor, compute_logits: ComputeLogits
) -> tuple[Logprobs, NDArray[np.intp]] | None:
    """Those of the sampled tokens of sequences that ask, and which these are; token_ids, hidden: of all."""
    counts = tables.sampling_cpu["num_logprobs"][plan.rows]
    counts = np.repeat(np.where(plan.num_sampled > 0, counts, -1), 1 + plan.num_drafts)
    asking = np.flatnonzero(counts >= 0)
    if not len(asking):
        return None
    # Few ask for them, so graphs keep no logits (gigabytes, for graphs of all sizes): they are made again.
    indices = to_device(asking, hidden.device)
    return Logprobs(_logits(hidden[indices], token_ids[indices], compute_logits), counts[asking]), asking


def of_targets(
    plan: StepPlan, tables: DeviceTables, targets: Tensor, hidden: Tensor, compute_logits: ComputeLogits
) -> Logprobs | None:
    """Those of the plan's targets, after the tokens before them; hidden [num_tokens, hidden]."""
    if not len(targets):
        return None
    num_scored = plan.num_scored
    first = plan.num_scheduled.cumsum() - plan.num_sampled - num_scored
    indices = np.arange(len(targets)) + np.repeat(first - (num_scored.cumsum() - num_scored), num_scored)
    counts = np.repeat(tables.sampling_cpu["num_prompt_logprobs"][plan.rows], num_scored)
    return Logprobs(_logits(hidden[to_device(indices, hidden.device)], targets, compute_logits), counts)


def _logits(hidden: Tensor, token_ids: Tensor, compute_logits: ComputeLogits) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits, token_ids) of a bounded number of rows at a time; nothing on ranks other than 0."""
    for some, ids in zip(*(torch.split(x, LOGITS_AT_A_TIME) for x in (hidden, token_ids)), strict=True):
        logits = compute_logits(some)
        if logits is not None:
            yield logits, ids
        del logits  # before the next are made
