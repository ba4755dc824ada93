"""The memory at fixed addresses from which the CUDA graphs of a pipeline's stage read what other stages send."""

import torch
from torch import Tensor

from nanovllm.ops.sample import SamplingValues
from nanovllm.runner.head_inputs import HeadInputs
from nanovllm.utils.integers import ceil_div

ALIGNMENT = 4
"""Arrays begin at a multiple of 4 elements (16 bytes). Triton compiles a kernel again for other addresses."""


class StageInputs:
    """The inputs of a stage's graphs, beside the staging buffer. Each step's are copied here before its graph runs.

    The first stage samples. The second part of a step runs after the first parts of later steps, which write the
    outputs anew. So `keep` copies what the second part needs, and `fill` writes that here when it runs.

    Attributes:
        hidden: [num_seqs, hidden], of the stage before; in the first stage those of the last one.
    """

    def __init__(self, num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device, row: int) -> None:
        """
        Args:
            num_seqs: of the largest graph.
            row: the row of padding, which the graphs write to while they are captured.
        """
        self.hidden = torch.zeros(num_seqs, hidden_size, dtype=dtype, device=device)
        width = ceil_div(num_seqs, ALIGNMENT) * ALIGNMENT
        self._sampling = torch.zeros(6, width, dtype=torch.int32, device=device)
        self._sampling[0].fill_(row)
        self._seeds = torch.zeros(width, dtype=torch.int64, device=device)

    def keep(self, head: HeadInputs, num_tokens: int) -> HeadInputs:
        """Return a graph's outputs, copied: those of the first num_tokens, and how each row of the step is sampled."""
        stacked = _stack(head)
        rows, values = _split(stacked, head.values.seeds.clone())
        return head._replace(hidden=head.hidden[:num_tokens].clone(), rows=rows, values=values)

    def fill(self, head: HeadInputs, hidden: Tensor) -> HeadInputs:
        """Write here what `keep` has kept, and the hidden states that came for it; return what is here then.

        Args:
            hidden: [n, hidden], without the step's padding.
        """
        size = len(head.rows)
        self.hidden[: len(hidden)].copy_(hidden)
        self._sampling[:, :size].copy_(_stack(head))
        self._seeds[:size].copy_(head.values.seeds)
        rows, values = self.read(size)
        return head._replace(hidden=self.hidden[:size], rows=rows, values=values)

    def read(self, size: int) -> tuple[Tensor, SamplingValues]:
        """Return the rows of the first `size` samples, and how each is sampled: views of the memory here."""
        return _split(self._sampling[:, :size], self._seeds[:size])


def _stack(head: HeadInputs) -> Tensor:
    """Return rows and sampling values but for seeds as int32 [6, n], which is one copy instead of six."""
    values = head.values
    floats = (values.temperature, values.top_p, values.min_p)
    bits = (value.view(torch.int32) for value in floats)
    return torch.stack([head.rows, values.top_k, values.positions, *bits])


def _split(stacked: Tensor, seeds: Tensor) -> tuple[Tensor, SamplingValues]:
    """Return the rows and sampling values that were stacked, as views."""
    rows, top_k, positions, *bits = stacked.unbind(0)
    temperature, top_p, min_p = (value.view(torch.float32) for value in bits)
    return rows, SamplingValues(temperature, top_k, top_p, min_p, seeds, positions)
