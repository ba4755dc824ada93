"""The log-probability and the rank of one token of each row, as a Triton kernel.

The reference is `token_logprobs_reference` in ops/token_logprobs.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.ops.token_logprobs import TokenLogprobs


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
