"""Logits as the sampler sees them: after temperature and filters. `logprobs_mode="processed_logprobs"` asks for them.

Every backend processes them in plain torch. Filters keep the most likely tokens down to some value, and each backend
rounds the sums that decide where that is. The sampled token was kept. So all tokens that are as likely count as kept,
and a sampled token never has the log-probability -infinity.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.backends import Backend
from nanovllm.ops.sample import SamplingValues, filter_reference, unpack_sampling

ROWS_AT_A_TIME = 64
"""How many rows are processed at a time, so that their copies in float32 stay small."""
FILTERED_AT_A_TIME = 16
"""How many rows are filtered at a time: the filters sort a row."""


def pair_processed_logits(
    logits: Tensor | None, indices: NDArray[np.intp], token_ids: Tensor, asked: NDArray[Any], backend: Backend
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (processed logits, token_ids) of ROWS_AT_A_TIME indices at a time; nothing on ranks other than 0.

    Args:
        logits: [n, vocab], which the tokens were sampled from, after edits; None on ranks other than 0.
        indices: the rows of the logits that are wanted.
        token_ids: int32 [n], the sampled tokens.
        asked: ROW_SAMPLING [n], the host's sampling values of each row.
    """
    if logits is None:
        return
    for start in range(0, len(indices), ROWS_AT_A_TIME):
        some = indices[start : start + ROWS_AT_A_TIME]
        rows = backend.to_device(some)
        ids = token_ids[rows]
        yield process_logits(logits[rows].float(), ids, asked[some], backend), ids


def process_logits(logits: Tensor, token_ids: Tensor, asked: NDArray[Any], backend: Backend) -> Tensor:
    """Divide logits [n, vocab] by the temperature, and put -infinity for tokens that the filters drop.

    Greedy rows, and rows that nothing changes, stay as they are. The host knows which rows these are, so nothing waits
    for the device.

    Args:
        logits: float32, written.
        token_ids: int32 [n], the sampled tokens.
        asked: ROW_SAMPLING [n].
    """
    values = unpack_sampling(torch.from_numpy(asked.view(np.int32).reshape(len(asked), -1)))
    is_drawn = values.temperature > 0
    is_filtered = values.has_filter(logits.shape[1]) & is_drawn
    changed = (is_filtered | (is_drawn & (values.temperature != 1))).nonzero().squeeze(1)
    if not len(changed):
        return logits
    rows = backend.to_device(changed.numpy())
    temperature = backend.to_device(values.temperature[changed].numpy())
    x = logits[rows]
    logits[rows] = (x - x.amax(1, keepdim=True)) / temperature.unsqueeze(1)
    filtered = is_filtered.nonzero().squeeze(1)
    for start in range(0, len(filtered), FILTERED_AT_A_TIME):
        some = filtered[start : start + FILTERED_AT_A_TIME]
        rows = backend.to_device(some.numpy())
        z = logits[rows]
        host = values.select(some)
        is_kept = filter_reference(z, SamplingValues(*(backend.to_device(x.numpy()) for x in host)), host)
        sampled = z.gather(1, token_ids[rows].long().clamp(min=0).unsqueeze(1))
        logits[rows] = torch.where(is_kept | (z >= sampled), z, -torch.inf)
    return logits
