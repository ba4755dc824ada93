"""Edits of the logits that a request asks for: masks and penalties, after biases and before temperature and filters.

The order is vLLM's. Everything that forbids tokens (a grammar, allowed ids, bad words, min_tokens) is one mask, made on
the host; as a bias leaves a forbidden token forbidden, it does not matter that it is added before the mask. Then

    repetition   tokens of prompt and output: a positive logit is divided by it, another multiplied
                 (Keskar et al. 2019, "CTRL", with the sign's case of transformers)
    frequency    times how often the token is in the output, subtracted
    presence     subtracted for tokens of the output

A NaN or +inf is left as it is, also where it is forbidden: the sampler then says that the row is broken.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.launch import launch, wait_for_predecessor
from nanovllm.kernels.triton_shim import tl, triton

BLOCK = 4096


class MaskAndPenalties(NamedTuple):
    """What is done to m of the rows of logits. Either half may be missing.

    indices int32 [m], which rows of the logits; masks int32 [m, ceil(vocab / 32)], bit t % 32 of word t // 32 is set if
    token t may come; rows int32 [m], their rows of counts; counts int32 [num_rows, vocab], twice how often a token is
    in the output, plus 1 if it is in the prompt; penalties float32 [m, 3], repetition, frequency, presence.
    """

    indices: Tensor
    masks: Tensor | None
    rows: Tensor
    counts: Tensor | None
    penalties: Tensor | None


def edit_logits_reference(logits: Tensor, edits: MaskAndPenalties) -> None:
    """Edit logits float32 [n, vocab] in place."""
    indices, masks, rows, counts, penalties = edits
    for i in torch.arange(len(indices)).split(16):  # bounds what is held at a time
        x = logits[indices[i]]
        if masks is not None:
            bits = masks[i].unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=masks.device)
            is_allowed = (bits & 1).flatten(1)[:, : x.shape[1]].bool()
            x = torch.where(is_allowed | ~(x < math.inf), x, -math.inf)
        if counts is not None and penalties is not None:
            count, (repetition, frequency, presence) = counts[rows[i]], penalties[i].unsqueeze(2).unbind(1)
            x = torch.where(count > 0, torch.where(x > 0, x / repetition, x * repetition), x)
            x = x - frequency * (count >> 1) - presence * (count > 1)
        logits[indices[i]] = x


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
    """`edit_logits_reference` in one kernel; logits contiguous."""
    indices, masks, rows, counts, penalties = edits
    vocab_size = logits.shape[1]
    # Where a half is missing, its kernel does not look at what stands in for it.
    pointers = [indices if x is None else x for x in (masks, rows, counts)]
    sizes = (logits if penalties is None else penalties, vocab_size, -(-vocab_size // 32))
    grid = (len(indices), -(-vocab_size // BLOCK))
    config = edit_config(masks is not None, counts is not None)
    launch(_edit_kernel, grid, (logits, indices, *pointers, *sizes), config)
