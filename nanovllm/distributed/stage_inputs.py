"""The memory at fixed addresses from which the CUDA graphs of a pipeline's stage read what other stages send."""

import torch
from torch import Tensor

from nanovllm.engine.plan import SAMPLING_COLUMNS
from nanovllm.runner.head_inputs import HeadInputs


class StageInputs:
    """The inputs of a stage's graphs, beside the staging buffer. Each step's are copied here before its graph runs.

    The first stage samples. The second part of a step runs after the first parts of later steps, which write the
    outputs anew. So `keep` copies what the second part needs, and `fill` writes that here when it runs.

    Attributes:
        hidden: [num_seqs, hidden], what the stage before has sent; in the first stage, what the last one has sent.
    """

    def __init__(self, num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            num_seqs: the most sequences of a step. It is also the row of padding, to which the graphs write while they
                are captured.
        """
        self.hidden = torch.zeros(num_seqs, hidden_size, dtype=dtype, device=device)
        self._rows = torch.full((num_seqs,), num_seqs, dtype=torch.int32, device=device)
        self._positions = torch.zeros(num_seqs, dtype=torch.int32, device=device)
        self._sampling = torch.zeros(num_seqs, len(SAMPLING_COLUMNS), dtype=torch.int32, device=device)

    def keep(self, head: HeadInputs, num_tokens: int) -> HeadInputs:
        """Return a graph's outputs, copied: the hidden states of the first num_tokens, rows and positions."""
        hidden = head.hidden[:num_tokens].clone()
        return head._replace(hidden=hidden, rows=head.rows.clone(), positions=head.positions.clone())

    def fill(self, head: HeadInputs, hidden: Tensor) -> HeadInputs:
        """Write here what the first part has kept, and the hidden states that came for it; return what is here then.

        Args:
            hidden: [n, hidden], without the step's padding.
        """
        assert head.sampling is not None, "the first part has kept no sampling values"
        size = len(head.rows)
        self.hidden[: len(hidden)].copy_(hidden)
        self._rows[:size].copy_(head.rows)
        self._positions[:size].copy_(head.positions)
        self._sampling[:size].copy_(head.sampling)
        hidden, rows, positions, sampling = self.read(size)
        return head._replace(hidden=hidden, rows=rows, positions=positions, sampling=sampling)

    def read(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the arguments of `ModelRunner.sample` for the first `size` samples: views of the memory here."""
        return self.hidden[:size], self._rows[:size], self._positions[:size], self._sampling[:size]
