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
from nanovllm.ops.sample import SamplingValues, keep_likely

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
    vocab_size = logits.shape[1]
    has_rank = (asked["top_k"] > 0) & (asked["top_k"] < vocab_size)
    is_filtered = (has_rank | (asked["top_p"] < 1) | (asked["min_p"] > 0)) & (asked["temperature"] > 0)
    changed = np.flatnonzero(is_filtered | ((asked["temperature"] > 0) & (asked["temperature"] != 1)))
    if not len(changed):
        return logits
    rows = backend.to_device(changed)
    temperature = backend.to_device(asked["temperature"][changed].astype(np.float32))
    x = logits[rows]
    logits[rows] = (x - x.amax(1, keepdim=True)) / temperature.unsqueeze(1)
    filtered = np.flatnonzero(is_filtered)
    for start in range(0, len(filtered), FILTERED_AT_A_TIME):
        some = filtered[start : start + FILTERED_AT_A_TIME]
        rows = backend.to_device(some)
        z = logits[rows]
        sampled = z.gather(1, token_ids[rows].long().clamp(min=0).unsqueeze(1))
        is_kept = _keep(z, asked[some], backend) | (z >= sampled)
        logits[rows] = torch.where(is_kept, z, -torch.inf)
    return logits


def _keep(z: Tensor, asked: NDArray[Any], backend: Backend) -> Tensor:
    """Return bool [n, vocab]: which tokens the filters keep. Each row is filtered by its values in `asked`."""

    def column(name: str) -> Tensor:
        return backend.to_device(np.ascontiguousarray(asked[name]))

    values = SamplingValues(
        temperature=column("temperature"),
        top_k=column("top_k"),
        top_p=column("top_p"),
        min_p=column("min_p"),
        seeds=torch.empty(0),  # no filter reads them
    )
    top_k = np.where((asked["top_k"] > 0) & (asked["top_k"] < z.shape[1]), asked["top_k"], z.shape[1])
    return keep_likely(z, values, int(top_k.max()), bool((asked["top_p"] < 1).any()))
