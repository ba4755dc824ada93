"""The memory at fixed addresses from which the CUDA graphs of a pipeline's stage read what other stages send."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanovllm.engine.plan import SAMPLING_COLUMNS
from nanovllm.runner.step_handle import Front


class StageInputs:
    """The inputs of a stage's graphs, beside the staging buffer. Each step's are copied here before its graph runs.

    The first stage samples. Its back runs after the fronts of later steps, which write the front's outputs anew. So
    `keep` copies what the back of a step needs, and `fill` writes that here when the back runs.

    Attributes:
        hidden: [num_seqs, hidden], what the stage before has sent; in the first stage, what the last one has sent.
    """

    def __init__(self, num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device, row: int) -> None:
        """
        Args:
            num_seqs: the number of sequences of the largest graph.
            row: the row of padding, which the graphs write to while they are captured.
        """
        self.hidden = torch.zeros(num_seqs, hidden_size, dtype=dtype, device=device)
        self._rows = torch.full((num_seqs,), row, dtype=torch.int32, device=device)
        self._positions = torch.zeros(num_seqs, dtype=torch.int32, device=device)
        self._sampling = torch.zeros(num_seqs, len(SAMPLING_COLUMNS), dtype=torch.int32, device=device)

    def bind(
        self, is_first: bool, decode: Callable[..., Any], sample: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """Return the two halves of a decode step, `ModelRunner.decode` and `sample_decoded`, reading from here."""
        if not is_first:
            return lambda head: decode(head, self.hidden[: head.shape[1]]), None
        return decode, lambda hidden, rows, positions: sample(*self._read(len(rows)))

    def keep(self, front: Front, num_tokens: int) -> Front:
        """Return a graph's outputs, copied: the hidden states of the first num_tokens, rows and positions."""
        hidden = front.hidden[:num_tokens].clone()
        return front._replace(hidden=hidden, rows=front.rows.clone(), positions=front.positions.clone())

    def fill(self, front: Front, hidden: Tensor) -> Front:
        """Write here what the first half has kept, and the hidden states that came for it; returns the front of what is
        here.

        Args:
            hidden: [n, hidden], without the step's padding.
        """
        assert front.sampling is not None, "the first half has kept no sampling values"
        size = len(front.rows)
        self.hidden[: len(hidden)].copy_(hidden)
        self._rows[:size].copy_(front.rows)
        self._positions[:size].copy_(front.positions)
        self._sampling[:size].copy_(front.sampling)
        hidden, rows, positions, sampling = self._read(size)
        return front._replace(hidden=hidden, rows=rows, positions=positions, sampling=sampling)

    def _read(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the arguments of `ModelRunner.sample_decoded`."""
        return self.hidden[:size], self._rows[:size], self._positions[:size], self._sampling[:size]
