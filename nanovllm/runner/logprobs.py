"""Log-probabilities of the tokens that a step samples."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.backends import Backend
from nanovllm.engine.plan import IntArray, StepPlan
from nanovllm.engine.token_scores import TokenScores

LOGITS_AT_A_TIME = 1024
"""How many rows of logits are made at a time, where those of a whole prompt are wanted."""

MakeLogits = Callable[[Tensor], Tensor | None]
"""Returns logits [m, vocab] of m indices, int64 [m], on rank 0; None on the others."""


class Logprobs:
    """Log-probabilities from logits: of one given token of each row, and of the row's k most likely tokens."""

    def __init__(self, logits: Iterable[tuple[Tensor, Tensor]], counts: IntArray, backend: Backend) -> None:
        """
        Args:
            logits: pieces, each of logits [n, vocab] and the token of each row, int32 [n]. One piece is held at a time.
            counts: int32 [rows of all pieces], how many of the most likely tokens each row asks for. -1 counts as 0:
                rows of padding, which the memory profile scores, ask for none.
        """
        self._backend = backend
        self._counts: IntArray = np.maximum(counts, 0)
        self._most = int(self._counts.max())
        parts: list[tuple[Tensor, ...]] = []
        at = 0
        for piece in logits:
            for some, ids in zip(*(torch.split(x, LOGITS_AT_A_TIME) for x in piece), strict=True):
                parts.append(self._reduce(some, ids, self._counts[at : at + len(some)]))
                at += len(some)
        self._tensors = [backend.start_copy(torch.cat(values)) for values in zip(*parts, strict=True)]

    def _reduce(self, logits: Tensor, token_ids: Tensor, counts: IntArray) -> tuple[Tensor, ...]:
        """Return the three tensors of `TokenLogprobs`, then the highest logits float32 [n, k] of each row and their
        token ids int32 [n, k].

        A row's values do not depend on the other rows. So each k is taken by itself, because which of two equally
        likely tokens is among the k most likely depends on k.
        """
        given = self._backend.token_logprobs(logits, token_ids)
        if not self._most:
            n = len(token_ids)
            return *given, given.values.new_empty(n, 0), given.values.new_empty(n, 0, dtype=torch.int32)
        top, top_ids = self._backend.top_logits(logits, min(self._most, logits.shape[1]))
        for k in {*counts.tolist()} - {self._most, 0}:
            rows = self._backend.to_device(np.flatnonzero(counts == k))
            top[rows, :k], top_ids[rows, :k] = self._backend.top_logits(logits[rows], k)
        return *given, top, top_ids

    def read(self) -> TokenScores:
        """Return the values of all rows. Called once the step has ended on the device."""
        return TokenScores(*(tensor.numpy() for tensor in self._tensors))

    def read_rows(self) -> list[TokenScores]:
        """Return the values of each row by itself, as `read` does."""
        return self.read().copy_rows(self._counts.tolist())


def start_logprobs(
    plan: StepPlan,
    counts: IntArray,
    token_ids: Tensor,
    logits: Tensor | None,
    backend: Backend,
    asked: NDArray[Any] | None = None,
) -> tuple[Logprobs, NDArray[np.intp]] | None:
    """Compute the log-probabilities of the sampled tokens whose sequences ask for them; None if none does.

    Args:
        counts: int32 [num_seqs], how many of the most likely tokens each sequence asks for; -1: no log-probabilities.
        token_ids: int32 [n], all that the step sampled, 1 + num_drafts of each sequence.
        logits: [n, vocab], the raw logits that token_ids were sampled from; None on ranks other than 0.
        asked: ROW_SAMPLING [num_seqs]. If it is given, the logits are the edited ones, and the log-probabilities those
            after temperature and filters.

    Returns:
        The log-probabilities, and which of token_ids they belong to.
    """
    num_samples = 1 + plan.num_drafts
    counts = np.repeat(np.where(plan.num_sampled > 0, counts, -1), num_samples)
    asking = np.flatnonzero(counts >= 0)
    if not len(asking):
        return None
    if asked is not None:
        from nanovllm.runner.processed_logits import pair_processed_logits

        processed = pair_processed_logits(logits, asking, token_ids, np.repeat(asked, num_samples), backend)
        return Logprobs(processed, counts[asking], backend), asking
    indices = backend.to_device(asking)
    pieces = pair_logits(indices, token_ids[indices], lambda some: None if logits is None else logits[some])
    return Logprobs(pieces, counts[asking], backend), asking


def pair_logits(indices: Tensor, token_ids: Tensor, make_logits: MakeLogits) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (logits, token_ids) of LOGITS_AT_A_TIME indices at a time; nothing on ranks other than 0."""
    for some, ids in zip(*(torch.split(x, LOGITS_AT_A_TIME) for x in (indices, token_ids)), strict=True):
        logits = make_logits(some)
        if logits is not None:
            yield logits, ids
        del logits  # before the next are made
