"""The log-probabilities of tokens as arrays. Dicts are made of them for those who ask for dicts."""

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm.outputs import Logprob, make_logprobs


class TokenScores(NamedTuple):
    """Of n rows of logits: the log-probability of one given token, and what is known of the k most likely tokens.

    Attributes:
        logprobs: float32 [n], of the given tokens.
        log_sums: float32 [n], the logarithm of the sum of a row's exponentials.
        num_above: int32 [n], how many logits of the row are higher than that of the given token.
        top_logits: float32 [n, k], the highest first.
        top_ids: int32 [n, k], their token ids.
    """

    logprobs: NDArray[np.float32]
    log_sums: NDArray[np.float32]
    num_above: NDArray[np.int32]
    top_logits: NDArray[np.float32]
    top_ids: NDArray[np.int32]

    @staticmethod
    def allocate(num_rows: int, k: int) -> "TokenScores":
        """Return arrays that wait for their values."""
        shapes = {"top_logits": (num_rows, k), "top_ids": (num_rows, k)}
        kinds = {"num_above": np.int32, "top_ids": np.int32}
        fields = TokenScores._fields
        return TokenScores._make(np.empty(shapes.get(x, num_rows), kinds.get(x, np.float32)) for x in fields)

    @property
    def num_top(self) -> int:
        """k: of how many of the most likely tokens a row tells."""
        return int(self.top_ids.shape[1])

    @property
    def top_logprobs(self) -> NDArray[np.float32]:
        """float32 [n, k]: the log-probabilities of `top_ids`."""
        with np.errstate(invalid="ignore"):  # rows of broken logits have inf - inf
            values: NDArray[np.float32] = self.top_logits - self.log_sums[:, np.newaxis]
        return values

    @property
    def has_nan(self) -> bool:
        """Whether a log-probability is no number."""
        return bool(np.isnan(self.logprobs).any() or np.isnan(self.top_logprobs).any())

    def cut(self, start: int, stop: int, k: int) -> "TokenScores":
        """Return the rows from start to stop, with the k most likely tokens: a view."""
        rows = (values[start:stop] for values in self)
        return TokenScores._make(values if values.ndim == 1 else values[:, :k] for values in rows)

    def make_dicts(self, token_ids: Seq[int], counts: Seq[int]) -> list[dict[int, Logprob]]:
        """Return {token id: log-probability} of each row: of its given token, and of as many others as `counts` says.

        Args:
            token_ids: the given tokens.
        """
        # Equal logits have the same rank: that of the first of them.
        top = self.top_logits
        ranks = np.ones(top.shape, np.int64)
        ranks[:, 1:] = np.where(top[:, 1:] < top[:, :-1], np.arange(2, top.shape[1] + 1), 1)
        ranks = np.maximum.accumulate(ranks, axis=1)
        columns: list[NDArray[Any]] = [self.logprobs, self.num_above + 1, self.top_ids, self.top_logprobs, ranks]
        rows = zip(token_ids, counts, *(column.tolist() for column in columns), strict=True)
        return [
            make_logprobs([token_id, *ids[:k]], [value, *values[:k]], [rank, *others[:k]])
            for token_id, k, value, rank, ids, values, others in rows
        ]


NO_SCORES = TokenScores.allocate(0, 0)
