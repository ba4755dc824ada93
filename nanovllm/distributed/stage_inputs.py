"""The memory at fixed addresses from which the CUDA graphs of a pipeline's stage read what other stages send."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanovllm.ops.sample import SamplingValues
from nanovllm.runner.step_handle import Front
from nanovllm.utils.integers import ceil_div

ALIGNMENT = 4
"""Arrays begin at a multiple of 4 elements (16 bytes). Triton compiles a kernel again for other addresses."""


class StageInputs:
    """The inputs of a stage's graphs, beside the staging buffer. Each step's are copied here before its graph runs.

    The first stage samples. Its back runs after the fronts of later steps, which write the front's outputs anew. So
    `keep` copies what the back of a step needs, and `fill` writes that here when the back runs.

    Attributes:
        hidden: [num_seqs, hidden], of the stage before; in the first stage those of the last one.
    """

    def __init__(self, num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device, row: int) -> None:
        """
        Args:
            num_seqs: of the largest graph.
            row: the one of padding, which the graphs write to while they are captured.
        """
        self.hidden = torch.zeros(num_seqs, hidden_size, dtype=dtype, device=device)
        width = ceil_div(num_seqs, ALIGNMENT) * ALIGNMENT
        self._sampling = torch.zeros(6, width, dtype=torch.int32, device=device)
        self._sampling[0].fill_(row)
        self._seeds = torch.zeros(width, dtype=torch.int64, device=device)

    def bind(
        self, is_first: bool, decode: Callable[..., Any], sample: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """Return the two halves of a decode step, `ModelRunner.decode` and `sample_decoded`, reading from here."""
        if not is_first:
            return lambda head: decode(head, self.hidden[: head.shape[1]]), None
        return decode, lambda hidden, rows, values: sample(self.hidden[: len(rows)], *self._read(len(rows)))

    def keep(self, front: Front, num_tokens: int) -> Front:
        """Return a graph's outputs, copied: those of the first num_tokens, and how each row of the step is sampled."""
        stacked = _stack(front)
        rows, values = _split(stacked, front.values.seeds.clone())
        return front._replace(hidden=front.hidden[:num_tokens].clone(), rows=rows, values=values)

    def fill(self, front: Front, hidden: Tensor) -> Front:
        """Write here what `keep` has kept, and the hidden states that came for it; returns the front of what is here.

        Args:
            hidden: [n, hidden], without the step's padding.
        """
        size = len(front.rows)
        self.hidden[: len(hidden)].copy_(hidden)
        self._sampling[:, :size].copy_(_stack(front))
        self._seeds[:size].copy_(front.values.seeds)
        rows, values = self._read(size)
        return front._replace(hidden=self.hidden[:size], rows=rows, values=values)

    def _read(self, size: int) -> tuple[Tensor, SamplingValues]:
        return _split(self._sampling[:, :size], self._seeds[:size])


def _stack(front: Front) -> Tensor:
    """Return rows and sampling values but for seeds as int32 [6, n], which is one copy instead of six."""
    values = front.values
    floats = (values.temperature, values.top_p, values.min_p)
    bits = (value.view(torch.int32) for value in floats)
    return torch.stack([front.rows, values.top_k, values.positions, *bits])


def _split(stacked: Tensor, seeds: Tensor) -> tuple[Tensor, SamplingValues]:
    """Return the rows and sampling values that were stacked, as views."""
    rows, top_k, positions, *bits = stacked.unbind(0)
    temperature, top_p, min_p = (value.view(torch.float32) for value in bits)
    return rows, SamplingValues(temperature, top_k, top_p, min_p, seeds, positions)
