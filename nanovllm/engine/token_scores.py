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

    def copy_rows(self, counts: Seq[int]) -> list["TokenScores"]:
        """Return each row by itself, with as many of the most likely tokens as `counts` says."""
        rows = (self.cut(i, i + 1, k) for i, k in enumerate(counts))
        return [TokenScores._make(values.copy() for values in row) for row in rows]

    def make_dicts(self, token_ids: Seq[int]) -> list[dict[int, Logprob]]:
        """Return {token id: log-probability} of each row: of its given token, and of the k most likely ones.

        Args:
            token_ids: the given tokens.
        """
        # Equal logits have the same rank: that of the first of them.
        top = self.top_logits
        ranks = np.ones(top.shape, np.int64)
        ranks[:, 1:] = np.where(top[:, 1:] < top[:, :-1], np.arange(2, top.shape[1] + 1), 1)
        ranks = np.maximum.accumulate(ranks, axis=1)
        columns: list[NDArray[Any]] = [self.logprobs, self.num_above + 1, self.top_ids, self.top_logprobs, ranks]
        rows = zip(token_ids, *(column.tolist() for column in columns), strict=True)
        return [
            make_logprobs([token_id, *ids], [value, *values], [rank, *others])
            for token_id, value, rank, ids, values, others in rows
        ]


NO_SCORES = TokenScores.allocate(0, 0)


class OutputScores:
    """The scores of the tokens of an output. Dicts are made only for those who ask for dicts, once of each token."""

    def __init__(self) -> None:
        self._rows: list[TokenScores] = []
        self._dicts: list[dict[int, Logprob]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: TokenScores) -> None:
        """Add the scores of the next token."""
        self._rows.append(row)

    def drop(self, first: int) -> None:
        """Forget the tokens from `first` on."""
        del self._rows[first:]
        del self._dicts[first:]

    def read(self, k: int, first: int = 0) -> TokenScores:
        """Return the scores of the tokens from `first` on, with the k most likely ones or as many as there are."""
        rows = self._rows[first:]
        if not rows:
            return TokenScores.allocate(0, k)
        return TokenScores._make(map(np.concatenate, zip(*rows, strict=True))).cut(0, len(rows), k)

    def list_dicts(self, token_ids: Seq[int], k: int) -> list[dict[int, Logprob]]:
        """Return {token id: log-probability} of each token: see `TokenScores.make_dicts`. k is the same each time."""
        first = len(self._dicts)
        self._dicts += self.read(k, first).make_dicts(token_ids[first:])
        return [*self._dicts]
