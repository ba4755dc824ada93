"""Edits logits as requests ask: masks and penalties, after biases and before temperature and filters.

The order is vLLM's. The host makes one mask of everything that forbids tokens: a grammar, allowed ids, bad words,
min_tokens. Biases are added before the mask, which changes nothing: a forbidden token stays forbidden. Then

    repetition   for tokens of prompt and output: a positive logit is divided by the penalty, another is multiplied
                 (Keskar et al. 2019, "CTRL"; the rule for negative logits is transformers')
    frequency    the penalty is subtracted as often as the token is in the output
    presence     the penalty is subtracted once if the token is in the output

A NaN or +inf stays as it is, even if its token is forbidden. The sampler then flags the row as broken.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class MaskAndPenalties(NamedTuple):
    """The edits of m rows of logits. The mask may be missing, and so may the penalties with their counts.

    Attributes:
        indices: int32 [m], which rows of the logits are edited.
        masks: int32 [m, ceil(vocab / 32)]; bit t % 32 of word t // 32 is set if token t is allowed.
        rows: int32 [m], the row of `counts` for each.
        counts: int32 [num_rows, vocab], twice the number of times that a token is in the output, plus 1 if it is in the
            prompt.
        penalties: float32 [m, 3]: repetition, frequency, presence.
    """

    indices: Tensor
    masks: Tensor | None
    rows: Tensor
    counts: Tensor | None
    penalties: Tensor | None


def edit_logits_reference(logits: Tensor, edits: MaskAndPenalties) -> None:
    """Edit logits float32 [n, vocab] in place."""
    indices, masks, rows, counts, penalties = edits
    for i in torch.arange(len(indices)).split(16):  # type: ignore[no-untyped-call]  # a few rows: copies stay small
        x = logits[indices[i]]
        if masks is not None:
            bits = masks[i].unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=masks.device)
            is_allowed = (bits & 1).flatten(1)[:, : x.shape[1]].bool()
            x = torch.where(is_allowed | ~(x < math.inf), x, -math.inf)
        if counts is not None and penalties is not None:
            count = counts[rows[i]]
            repetition, frequency, presence = penalties[i].unsqueeze(2).unbind(1)
            x = torch.where(count > 0, torch.where(x > 0, x / repetition, x * repetition), x)
            x = x - frequency * (count >> 1) - presence * (count > 1)
        logits[indices[i]] = x


class EditOperators:
    """Edits logits with the plain-torch reference. A subclass has a kernel."""

    def __init__(self, backend: object) -> None:
        """The references need nothing of the backend."""

    edit_logits = staticmethod(edit_logits_reference)
