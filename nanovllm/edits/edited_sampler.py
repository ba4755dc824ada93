"""Samples the steps in which a request asks for edits of its logits, on rank 0; the runner makes it when one does."""

import torch
from torch import Tensor

from nanovllm.backends import Backend
from nanovllm.edits.logit_edits import LogitEdits
from nanovllm.kernels.edit_logits import MaskAndPenalties
from nanovllm.kernels.sample import Sampled, SamplingValues
from nanovllm.runner.staging import to_device


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
            logits.view(-1)[to_device(edits.bias_index, self._device)] += to_device(edits.bias, self._device)
        indices, rows = to_device(edits.indices, self._device), to_device(edits.rows, self._device)
        masks = None if edits.masks is None else to_device(edits.masks, self._device)
        counts = penalties = None
        if edits.penalties is not None:
            counts, penalties = self._count(edits, logits.shape[1]), to_device(edits.penalties, self._device)
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
            of_row[to_device(prompt, self._device)] = 1
            of_row.index_add_(0, to_device(output, self._device), of_row.new_full((len(output),), 2))
        return self._counts
