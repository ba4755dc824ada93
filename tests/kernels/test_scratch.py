"""Memory that operators' results are written into, again and again."""

import mmap

import pytest
import torch

from nanovllm.backends.cpu.scratch import SMALLEST_LOAN, Scratch, borrow_from

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


def test_a_scratch_that_keeps_all_frees_nothing_even_what_is_never_given_back() -> None:
    """An exception that a signal raises while memory is given back would lose it."""
    kept = Scratch(keeps_all=True)
    with borrow_from(kept):
        lent = [Scratch().empty(rows, 5, dtype=torch.float32) for rows in (1, 100, 10_000, 1_000_000)]
    Scratch().empty(1, 5, dtype=torch.float32)  # borrows nothing: below, no piece is its own
    places = [one.data_ptr() for one in lent]
    del lent
    kept._free.clear()
    assert [torch.frombuffer(memory, dtype=torch.int8).data_ptr() for memory in kept._kept] == places
