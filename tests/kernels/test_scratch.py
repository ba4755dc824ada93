"""Memory that operators' results are written into, again and again."""

import mmap

import pytest
import torch

from nanovllm.kernels.scratch import SMALLEST_LOAN, Scratch

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="memory is lent on Linux")

ROWS = SMALLEST_LOAN // 4096
"""Of 1024 float32 each, they are just large enough to be lent."""


def test_memory_is_lent_again_only_when_the_last_view_of_it_is_gone() -> None:
    scratch = Scratch()
    first = scratch.empty(2 * ROWS, 1024, dtype=torch.float32)
    view = first[1:].fill_(7)
    place = first.data_ptr()
    del first
    second = scratch.empty(2 * ROWS, 1024, dtype=torch.float32).fill_(1)
    assert second.data_ptr() != place and (view == 7).all()
    del view
    assert scratch.empty(ROWS, 1024, dtype=torch.float32).data_ptr() == place


def test_a_larger_tensor_takes_the_place_of_memory_that_is_too_small() -> None:
    scratch = Scratch()
    for rows in (ROWS, 2 * ROWS, 4 * ROWS):
        scratch.empty(rows, 1024, dtype=torch.float32).zero_()
        assert [len(memory) for memory in scratch._free] == [4096 * rows]
