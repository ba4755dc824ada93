"""Edits logits by masks and penalties, as a Triton kernel.

The reference is `edit_logits_reference` in features/edits/edit_logits.py, which states the rule.
"""

from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.features.edits.edit_logits import EditOperators, MaskAndPenalties

BLOCK = 4096


@triton.jit
def _edit_kernel(
    logits_ptr,
    indices_ptr,
    masks_ptr,
    rows_ptr,
    counts_ptr,
    penalties_ptr,
    vocab_size,
    num_words,
    HAS_MASKS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (m, blocks of the vocabulary).
    # A program owns BLOCK tokens of one edited row.
    # There is no padding: only rows that sample are edited.
    wait_for_predecessor(PDL)
    i = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < vocab_size
    x_ptr = logits_ptr + tl.load(indices_ptr + i).to(tl.int64) * vocab_size + token
    x = tl.load(x_ptr, mask=exists, other=0.0)
    if HAS_MASKS:
        word = tl.load(masks_ptr + i * num_words + token // 32, mask=exists, other=0)
        forbidden = (((word >> (token % 32)) & 1) == 0) & (x < float("inf"))
        x = tl.where(forbidden, float("-inf"), x)
    if HAS_COUNTS:
        row = tl.load(rows_ptr + i).to(tl.int64)
        count = tl.load(counts_ptr + row * vocab_size + token, mask=exists, other=0)
        repetition = tl.load(penalties_ptr + 3 * i)
        x = tl.where(count > 0, tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition), x)
        x = x - tl.load(penalties_ptr + 3 * i + 1) * (count >> 1).to(tl.float32)
        x = x - tl.load(penalties_ptr + 3 * i + 2) * (count > 1).to(tl.float32)
    tl.store(x_ptr, x, mask=exists)


def edit_config(has_masks: bool, has_counts: bool) -> dict[str, int]:
    return {"HAS_MASKS": has_masks, "HAS_COUNTS": has_counts, "BLOCK": BLOCK, "num_warps": 8}


def edit_logits(logits: Tensor, edits: MaskAndPenalties) -> None:
    """Do what `edit_logits_reference` does, in one kernel. The logits are contiguous."""
    indices, masks, rows, counts, penalties = edits
    vocab_size = logits.shape[1]
    # If masks or counts are missing, another tensor takes their place as argument. The kernel does not read it.
    pointers = [indices if x is None else x for x in (masks, rows, counts)]
    sizes = (logits if penalties is None else penalties, vocab_size, -(-vocab_size // 32))
    grid = (len(indices), -(-vocab_size // BLOCK))
    config = edit_config(masks is not None, counts is not None)
    launch(_edit_kernel, grid, (logits, indices, *pointers, *sizes), config)


class Operators(EditOperators):
    """Launches our Triton kernel."""

    edit_logits = staticmethod(edit_logits)
