"""The log-probability and the rank of one given token of each row, for prompts that are scored and for `logprobs`."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.launch import launch, wait_for_predecessor
from nanovllm.kernels.triton_shim import tl, triton

ROWS_AT_A_TIME = 64
"""How many rows the reference copies to float32 at a time: with a vocabulary of 151,936, one copy takes 40 MB."""


class TokenLogprobs(NamedTuple):
    """Of n rows of logits.

    Attributes:
        values: float32 [n], the log-probability of each row's token.
        log_sums: float32 [n], the logarithm of the sum of a row's exponentials. Any token's logit less this is its
            log-probability.
        num_above: int32 [n], how many logits of the row are higher than that of the row's token.
    """

    values: Tensor
    log_sums: Tensor
    num_above: Tensor


def token_logprobs_reference(logits: Tensor, token_ids: Tensor) -> TokenLogprobs:
    """Return the log-probabilities of token_ids int32 [n] by logits [n, vocab]. Id -1, for padding, counts as 0.

    A row's values do not depend on the other rows. A single row is computed as two: by itself, several threads would
    share its sum, which changes the order of additions.
    """
    values: list[Tensor] = []
    log_sums: list[Tensor] = []
    num_above: list[Tensor] = []
    for part, ids in zip(logits.split(ROWS_AT_A_TIME), token_ids.split(ROWS_AT_A_TIME), strict=True):
        x = part.float()
        several = x if len(x) > 1 else x.expand(2, -1)
        log_sum = several.logsumexp(1, keepdim=True)[: len(x)]
        own = x.gather(1, ids.long().clamp(min=0).unsqueeze(1))
        values.append((own - log_sum).squeeze(1))
        log_sums.append(log_sum.squeeze(1))
        # Row by row: with a dim, torch converts each boolean before it adds, which takes four times as long on a CPU.
        num_above.append(torch.stack([row.count_nonzero() for row in x > own]).int())
    return TokenLogprobs(torch.cat(values), torch.cat(log_sums), torch.cat(num_above))


# The targets of a prompt are a part of the step's staging buffer, which begins at any address.
@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr"])
def _token_logprobs_kernel(
    logits_ptr,
    token_ids_ptr,
    values_ptr,
    log_sums_ptr,
    num_above_ptr,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows,).
    # A program owns one row. It reads the logits once, BLOCK at a time, with a running maximum and sum. It also counts
    # the logits above the token's own, so it reads the block of that logit first. (The logit alone would be a load of
    # two bytes.) Rows of padding have token -1, which counts as 0.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    own_id = tl.maximum(tl.load(token_ids_ptr + row), 0)
    near = own_id // BLOCK * BLOCK + lane
    x = tl.load(logits_ptr + row * row_stride + near, mask=near < vocab_size, other=float("-inf")).to(tl.float32)
    own = tl.max(tl.where(near == own_id, x, float("-inf")), 0)
    highest = tl.full([], float("-inf"), tl.float32)
    origin = tl.zeros([], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + lane
        x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        above += (x > own).to(tl.int32)
        new_highest = tl.maximum(highest, tl.max(x, 0))
        # Sums are relative to the maximum where that is finite: -inf - -inf would be NaN.
        is_finite = (new_highest > float("-inf")) & (new_highest < float("inf"))
        new_origin = tl.where(is_finite, new_highest, origin)
        shrink = tl.where(highest > float("-inf"), tl.exp(origin - new_origin), 0.0)  # before that, all sums are 0
        total = total * shrink + tl.exp(x - new_origin)
        highest = new_highest
        origin = new_origin
    log_sum = origin + tl.log(tl.sum(total, 0))
    tl.store(log_sums_ptr + row, log_sum)
    tl.store(values_ptr + row, own - log_sum)
    tl.store(num_above_ptr + row, tl.sum(above, 0))


def token_logprobs_config() -> dict[str, int]:
    """16 logits a thread at a time."""
    return {"BLOCK": 4096, "num_warps": 8}


def token_logprobs(logits: Tensor, token_ids: Tensor) -> TokenLogprobs:
    """token_logprobs_reference in one kernel, which reads the logits once, in their own dtype."""
    n, vocab_size = logits.shape
    dtypes = (torch.float32, torch.float32, torch.int32)
    made = TokenLogprobs(*(torch.empty(n, dtype=dtype, device=logits.device) for dtype in dtypes))
    args = (logits, token_ids, *made, logits.stride(0), vocab_size)
    launch(_token_logprobs_kernel, (n,), args, token_logprobs_config())
    return made
