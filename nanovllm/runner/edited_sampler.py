"""Samples the steps in which a request asks for edits of its logits, on rank 0; the runner makes it when one does."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.backends import Backend
from nanovllm.engine.logit_edits import LogitEdits
from nanovllm.kernels.edit_logits import MaskAndPenalties
from nanovllm.kernels.sample import Sampled, SamplingValues


class EditedSampler:
    """Edits logits, samples, and counts what rows with penalties have sampled, without waiting for the device.

    The counts of all rows, 4 bytes for each token of the vocabulary, are made when the first row with penalties comes.
    """

    def __init__(self, backend: Backend, num_rows: int, device: torch.device) -> None:
        self._backend, self._num_rows, self._device = backend, num_rows, device
        self._counts: Tensor | None = None

    def sample(self, logits: Tensor, values: SamplingValues, edits: LogitEdits) -> Sampled:
        """As `Backend.sample`, from the edited logits: in float32, in which a row without edits samples the same."""
        logits = logits.float().contiguous()
        if len(edits.bias):
            logits.view(-1)[self._send(edits.bias_index)] += self._send(edits.bias)
        indices, rows = self._send(edits.indices), self._send(edits.rows)
        masks = None if edits.masks is None else self._send(edits.masks)
        counts = penalties = None
        if edits.penalties is not None:
            counts, penalties = self._count(edits, logits.shape[1]), self._send(edits.penalties)
        if masks is not None or counts is not None:
            self._backend.edit_logits(logits, MaskAndPenalties(indices, masks, rows, counts, penalties))
        sampled = self._backend.sample(logits, values)
        if counts is not None:
            counts[rows, sampled.token_ids[indices]] += 2  # of rows without penalties, too: nobody reads theirs
        return sampled

    def _count(self, edits: LogitEdits, vocab_size: int) -> Tensor:
        """The counts, [num_rows, vocab], as MaskAndPenalties has them, those of rows that moved in made anew."""
        if self._counts is None:
            self._counts = torch.zeros(self._num_rows, vocab_size, dtype=torch.int32, device=self._device)
        for row, prompt, output in edits.started:
            of_row = self._counts[row].zero_()
            of_row[self._send(prompt)] = 1
            of_row.index_add_(0, self._send(output), of_row.new_full((len(output),), 2))
        return self._counts

    def _send(self, values: NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor
