"""Samples the tokens of a step. Rank 0 samples, from the logits of all ranks."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends import Backend
from nanovllm.engine.plan import StepPlan
from nanovllm.models.layers.parallel import Parallel
from nanovllm.ops.sample import Sampled
from nanovllm.ops.step_inputs import StepInputs
from nanovllm.runner.device_rows import DeviceRows


def choose_samples(plan: StepPlan, inputs: StepInputs, backend: Backend) -> tuple[Tensor, Tensor | None, Tensor]:
    """Choose the tokens after which the step samples: the last one of each sequence, and those followed by a draft.

    A step samples for every sequence, also for those whose num_sampled is 0: their prompt is not complete yet, or is
    only scored. `StepHandle` drops these samples. So the number of samples follows from the numbers of sequences and
    drafts alone, and a recorded step can sample, too. (If no sequence of a step wants a sample, it does not sample.)

    `Sampler.sample` writes every sample to the row's last_token. After an unwanted sample, or after several samples of
    one row, last_token is not valid. Nothing reads it then: the row's next plan has the token id itself.

    Returns:
        For n samples, sequence after sequence:
        their rows, int32 [n];
        the index of the token whose logits each sample uses, [n], or None if sample i uses token i;
        and for each sampled token its index in its sequence, int32 [n].
    """
    rows = inputs.rows
    if plan.num_tokens == plan.num_seqs:  # all sequences decode
        return rows, None, inputs.seq_lens
    last = inputs.cu_seqlens[1:] - 1
    if plan.num_sampled.max() <= 1:  # without drafts
        return rows, last, inputs.seq_lens
    num_samples = 1 + plan.num_drafts
    # With drafts: find the sequence of each sample, and how many later samples that sequence has. Example: num_samples
    # [1, 3] gives sequences [0, 1, 1, 1] and num_later [0, 2, 1, 0]. A sample with k later samples of its sequence uses
    # the logits of the token k places before the sequence's last token. Its position is k lower than the position of
    # the sequence's last sample.
    sequences = np.repeat(np.arange(plan.num_seqs), num_samples)
    num_later = np.repeat(num_samples.cumsum(), num_samples) - 1 - np.arange(len(sequences))
    chosen, back = backend.to_device(np.stack((sequences, num_later))).unbind(0)
    return rows[chosen], last[chosen] - back, inputs.seq_lens[chosen] - back.int()


class StepEdits(Protocol):
    """The edits of one step's logits. `Sampler` calls their `sample` in place of `Backend.sample`, on rank 0 alone."""

    def sample(
        self, backend: Backend, logits: Tensor, table: Tensor, rows: Tensor, positions: Tensor
    ) -> tuple[Sampled, Tensor]:
        """Sample as `Backend.sample` does, from an edited copy of `logits` [n, vocab]. Return this copy, too."""


class Sampler:
    """Samples tokens, and writes each to its row's last_token, where the row's next decode reads it."""

    def __init__(self, backend: Backend, device_rows: DeviceRows, parallel: Parallel) -> None:
        self._backend = backend
        self._device_rows = device_rows
        self._parallel = parallel

    def sample(
        self,
        logits: Tensor | None,
        rows: Tensor,
        positions: Tensor,
        edits: StepEdits | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Sample one token for each of n rows. Rank 0 samples and broadcasts the tokens to the other ranks.

        Args:
            logits: [n, vocab]. They are not changed, because log-probabilities are computed from them later. None on
                ranks other than 0.
            rows: int32 [n].
            positions: int32 [n], for each sampled token its index in its sequence.

        Returns:
            int32 [n], FAILED for a row whose logits are not a valid distribution. On ranks other than 0 the values mean
            nothing. And the logits that the tokens were sampled from: those given, or a copy with the edits.
        """
        table = self._device_rows.sampling
        if logits is None:
            empty = torch.empty_like(rows)
            sampled = Sampled(empty, checked=empty)
        elif edits is None:
            sampled = self._backend.sample(logits, table, rows, positions)
        else:
            sampled, logits = edits.sample(self._backend, logits, table, rows, positions)
        token_ids = self._parallel.broadcast(sampled.token_ids)
        self._backend.store_samples(token_ids, rows, self._device_rows.last_token)
        return sampled.checked, logits
