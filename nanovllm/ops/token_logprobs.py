"""For prompts that are scored and for `logprobs`: the log-probability and the rank of one given token of each row, and
the row's most likely tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

ROWS_AT_A_TIME = 64
"""How many rows the reference copies to float32 at a time: with a vocabulary of 151,936, one copy takes 40 MB."""


class TokenLogprobs(NamedTuple):
    """Of n rows of logits.

    Attributes:
        values: float32 [n], the log-probability of each row's token.
        log_sums: float32 [n], the logarithm of the sum of a row's exponentials. Any token's logit less this is its
            log-probability.
        num_above: int32 [n], how many logits of the row are higher than that of the row's token.
    """

    values: Tensor
    log_sums: Tensor
    num_above: Tensor


def top_logits_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest of logits [n, vocab], float32 [n, k], the highest first, and their token ids, int32 [n, k].

    Which of equal logits are among them may differ from backend to backend. k is at most the size of the vocabulary.
    """
    values, ids = logits.topk(k, dim=1)
    return values.float(), ids.int()


def token_logprobs_reference(logits: Tensor, token_ids: Tensor) -> TokenLogprobs:
    """Return the log-probabilities of token_ids int32 [n] by logits [n, vocab]. Id -1, for padding, counts as 0.

    A row's values do not depend on the other rows. A single row is computed as two: by itself, several threads would
    share its sum, which changes the order of additions.
    """
    values: list[Tensor] = []
    log_sums: list[Tensor] = []
    num_above: list[Tensor] = []
    for part, ids in zip(logits.split(ROWS_AT_A_TIME), token_ids.split(ROWS_AT_A_TIME), strict=True):  # type: ignore[no-untyped-call]
        x = part.float()
        several = x if len(x) > 1 else x.expand(2, -1)
        log_sum = several.logsumexp(1, keepdim=True)[: len(x)]
        own = x.gather(1, ids.long().clamp(min=0).unsqueeze(1))
        values.append((own - log_sum).squeeze(1))
        log_sums.append(log_sum.squeeze(1))
        # Row by row: with a dim, torch converts each boolean before it adds, which takes four times as long on a CPU.
        num_above.append(torch.stack([row.count_nonzero() for row in x > own]).int())
    return TokenLogprobs(torch.cat(values), torch.cat(log_sums), torch.cat(num_above))
