"""Samples the tokens of a step. Rank 0 does it, from the logits of all ranks."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends import Backend
from nanovllm.engine.interfaces import StepEdits
from nanovllm.engine.plan import StepPlan
from nanovllm.layers.parallel import Parallel
from nanovllm.ops.step_inputs import StepInputs
from nanovllm.runner.device_rows import DeviceRows


def choose_samples(plan: StepPlan, inputs: StepInputs, backend: Backend) -> tuple[Tensor, Tensor | None, Tensor]:
    """Choose the tokens after which the step samples: the last one of each sequence, and those followed by a draft.

    A step samples for every sequence, or for none: that keeps shapes simple. Some samples are not wanted (num_sampled
    is 0): after a chunk that does not end a prompt, and after a prompt that is only scored. `StepHandle` in
    step_handle.py drops them. `Sampler.sample` writes them to the row's last_token, too. That does no harm, because the
    row's next plan has the real token id, not -1.

    After a step with drafts the row's next plan has the real id, too. Several samples were written then, and the device
    does not know which of them is valid.

    Returns:
        For n samples, sequence after sequence: their rows int32 [n]; the index, among the step's tokens, of the token
        whose logits each uses [n], or None if that is every token, in order; and the index, in its sequence, of the
        token that it samples, int32 [n].
    """
    rows = inputs.rows
    if plan.num_tokens == plan.num_seqs:  # all sequences decode
        return rows, None, inputs.seq_lens
    last = inputs.cu_seqlens[1:] - 1
    if plan.num_sampled.max() <= 1:  # without drafts
        return rows, last, inputs.seq_lens
    num_samples = 1 + plan.num_drafts
    # With drafts: for each sample its sequence, and how many samples of the same sequence follow it. A sample with k
    # followers comes k tokens before the sequence's last token, and its position is k lower.
    sequences = np.repeat(np.arange(plan.num_seqs), num_samples)
    num_later = np.repeat(num_samples.cumsum(), num_samples) - 1 - np.arange(len(sequences))
    chosen, back = backend.to_device(np.stack((sequences, num_later))).unbind(0)
    return rows[chosen], last[chosen] - back, inputs.seq_lens[chosen] - back.int()


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
        kept: Tensor | None = None,
    ) -> Tensor:
        """Sample one token for each of n rows. Rank 0 samples and broadcasts the tokens to the other ranks.

        Args:
            logits: [n, vocab]. They are not changed, because log-probabilities are computed from them later. None on
                ranks other than 0.
            rows: int32 [n].
            positions: int32 [n], the index in its sequence of each token.
            kept: int32 [n, width], the packed sampling values of each token, if the rows may have new owners by now;
                None if the device's table still has them.

        Returns:
            int32 [n], -1 for a row whose logits are not a valid distribution. On ranks other than 0 the values mean
            nothing.
        """
        if logits is None:
            token_ids = checked = torch.empty_like(rows)
        else:
            sample = self._backend.sample if edits is None else partial(edits.sample, self._backend)
            if kept is None:
                token_ids, checked = sample(logits, self._device_rows.sampling, rows, positions)
            else:
                every_row = torch.arange(len(kept), dtype=torch.int32, device=kept.device)
                token_ids, checked = sample(logits, kept, every_row, positions)
        self._backend.store_samples(self._parallel.broadcast(token_ids), rows, self._device_rows.last_token)
        return checked
