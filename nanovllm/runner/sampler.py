"""Which tokens a step samples, and how: on rank 0, from the logits of all ranks."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends import Backend
from nanovllm.engine.hooks import StepEdits
from nanovllm.engine.plan import StepPlan
from nanovllm.kernels.sample import SamplingValues
from nanovllm.kernels.step_inputs import StepInputs
from nanovllm.layers.parallel import Parallel
from nanovllm.runner.device import DeviceTables, to_device


def choose_samples(plan: StepPlan, rows: Tensor, inputs: StepInputs) -> tuple[Tensor, Tensor, SamplingValues]:
    """Choose the tokens after which a step samples: the last of each sequence, and those before it that drafts follow.

    Always sample once per sequence, to keep shapes simple. Samples nobody asked for (num_sampled is 0) are dropped:
    those of a prompt's chunk, and of a prompt that is only scored. `Sampler.sample` also writes them to the row's
    last_token, where nobody reads them: the plan that computes the row's next token carries its id. So it is after
    drafts, where the device does not know which of several samples is the last one kept.

    Args:
        rows: int32 [num_seqs].

    Returns:
        Of each of n samples, sequence after sequence: its row int32 [n], the index of its token among the step's
        tokens [n], and how it is sampled.
    """
    last = inputs.cu_seqlens[1:] - 1
    num_samples = 1 + plan.num_drafts
    if num_samples.sum() == plan.num_seqs:
        return rows, last, inputs.sampling
    sequences = np.repeat(np.arange(plan.num_seqs), num_samples)
    num_later = np.repeat(num_samples.cumsum(), num_samples) - 1 - np.arange(len(sequences))  # of the same sequence
    chosen, back = to_device(np.stack((sequences, num_later)), rows.device).unbind(0)
    values = inputs.sampling.select(chosen)
    values = values._replace(positions=values.positions - back.int())
    return rows[chosen], last[chosen] - back, values


class Sampler:
    """Samples tokens, and leaves each for its row's next decode."""

    def __init__(self, backend: Backend, tables: DeviceTables, parallel: Parallel) -> None:
        self._backend = backend
        self._tables = tables
        self._parallel = parallel

    def sample(
        self, logits: Tensor | None, rows: Tensor, values: SamplingValues, edits: StepEdits | None = None
    ) -> Tensor:
        """Sample one token for each of n rows. Rank 0 samples and broadcasts the tokens to the other ranks.

        Args:
            logits: [n, vocab], and they stay as they are, for log-probabilities; None on ranks other than 0.
            rows: int32 [n].

        Returns:
            int32 [n], -1 for a row whose logits are no distribution; without meaning on ranks other than 0.
        """
        if logits is None:
            token_ids = checked = torch.empty_like(rows)
        elif edits is None:
            token_ids, checked = self._backend.sample(logits, values)
        else:
            token_ids, checked = edits.sample(self._backend, logits, values)
        self._tables.row_tables.last_token[rows] = self._parallel.broadcast(token_ids)
        return checked
