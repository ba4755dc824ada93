"""Inputs of the kernels that mask and penalise logits, and a check of the C++ one."""

import math

import torch
from torch import Tensor

from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.edit_logits import Operators as CpuEditOperators
from nanovllm.features.edits.edit_logits import MaskAndPenalties, edit_logits_reference


def edit_case(vocab_size: int, seed: int = 0) -> tuple[Tensor, MaskAndPenalties]:
    """Seven rows of logits, some of them broken, and the masks and penalties of five of them."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    logits = 5 * torch.randn(7, vocab_size, generator=generator)
    logits[2, 3] = math.nan
    logits[2, 5] = math.inf
    logits[4, 0] = -math.inf
    words = torch.randint(-(2**31), 2**31, (5, -(-vocab_size // 32)), generator=generator, dtype=torch.int32)
    words[0] = -1
    words[3] = 0
    counts = integers(6, 9, vocab_size) * (integers(3, 9, vocab_size) == 0)
    penalties = torch.tensor([[1.5, 0.25, 0.5], [1, 0, 0], [0.5, -0.5, 2], [1, 0, -1], [2, 1, 0]])
    rows = torch.tensor([8, 0, 3, 5, 1], dtype=torch.int32)
    indices = torch.tensor([0, 2, 3, 4, 6], dtype=torch.int32)
    return logits, MaskAndPenalties(indices, words, rows, counts, penalties)


def check_edited_logits(backend: CpuBackend) -> None:
    """Masked and penalised logits equal those of plain torch, bit for bit."""
    torch.manual_seed(6)
    logits = torch.randn(5, 75)
    edits = MaskAndPenalties(
        indices=torch.tensor([0, 3, 4], dtype=torch.int32),
        masks=torch.randint(-(2**31), 2**31 - 1, (3, 3)).int(),
        rows=torch.tensor([2, 0, 1], dtype=torch.int32),
        counts=torch.randint(0, 6, (3, 75)).int(),
        penalties=torch.tensor([[1.3, 0.5, 0.25]] * 3),
    )
    got = logits.clone()
    CpuEditOperators(backend).edit_logits(got, edits)
    edit_logits_reference(logits, edits)
    assert torch.equal(got, logits)
