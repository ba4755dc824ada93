"""A short causal convolution of each channel, then silu, as a Triton kernel.

The reference is `causal_conv_reference` in features/families/qwen3_5/ops.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.paged_prefill import find_sequence
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.ops.step_inputs import StepInputs
from nanovllm.utils.integers import ceil_div


@triton.jit(do_not_specialize=["num_seqs"])
def _causal_conv_kernel(
    x_ptr,
    weight_ptr,
    conv_ptr,
    out_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    rows_ptr,
    num_seqs,
    x_stride,
    size,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_tokens / TOKENS + num_seqs, channels / BLOCK).
    # A program owns TOKENS tokens of one sequence and BLOCK channels. The first one of a sequence is the only one that
    # reads the row's state, so it also replaces the state, by copies of x. KEPT is WIDTH - 1, padded.
    # Tiles beyond a sequence's tokens do nothing. Padding has a row of its own, which several programs may write.
    wait_for_predecessor(PDL)
    seq, first_token = find_sequence(cu_seqlens_ptr, num_seqs, tl.program_id(0), TOKENS, 128)
    begin = tl.load(cu_seqlens_ptr + seq)
    count = tl.load(cu_seqlens_ptr + seq + 1) - begin
    if first_token >= count:
        return
    oldest = tl.where(tl.load(seq_lens_ptr + seq) > count, 1 - WIDTH, 0)  # the first token whose input is known
    dtype = out_ptr.dtype.element_ty
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = channel < size
    x = x_ptr + begin.to(tl.int64) * x_stride + channel
    state = conv_ptr + tl.load(rows_ptr + seq).to(tl.int64) * ((WIDTH - 1) * size) + channel
    token = (first_token + tl.arange(0, TOKENS))[:, None]
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for j in tl.static_range(WIDTH):
        at = token + (j - (WIDTH - 1))  # below 0: a token of an earlier step
        is_here = (at >= 0) & (token < count)
        value = tl.load(x + at.to(tl.int64) * x_stride, mask=inside & is_here, other=0.0).to(tl.float32)
        is_before = (at < 0) & (at >= oldest)
        kept = tl.load(state + (at + (WIDTH - 1)) * size, mask=inside & is_before, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + j * size + channel, mask=inside, other=0.0).to(tl.float32)
        total += (value + kept) * weight
    total = total.to(dtype).to(tl.float32)
    out = out_ptr + (begin + token).to(tl.int64) * size + channel
    tl.store(out, (total / (1.0 + tl.exp(-total))).to(dtype), mask=inside & (token < count))
    if first_token == 0:
        place = tl.arange(0, KEPT)[:, None]
        last = count - (WIDTH - 1) + place
        is_kept = inside & (place < WIDTH - 1)
        new = tl.load(x + last.to(tl.int64) * x_stride, mask=is_kept & (last >= 0), other=0.0)
        old = tl.load(state + (last + (WIDTH - 1)) * size, mask=is_kept & (last < 0) & (last >= oldest), other=0.0)
        tl.debug_barrier()  # what other threads have yet to read is not overwritten
        tl.store(state + place * size, tl.where(last >= 0, new, old), mask=is_kept)


def causal_conv_config(width: int) -> dict[str, int]:
    """Eight tokens of 256 channels: a thread has eight channels (16 bytes of bf16) of two tokens."""
    return {"WIDTH": width, "KEPT": next_power_of_2(max(width - 1, 1)), "TOKENS": 8, "BLOCK": 256, "num_warps": 4}


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, inputs: StepInputs) -> Tensor:
    """causal_conv_reference in one kernel."""
    num_tokens, channels = x.shape
    num_seqs = len(inputs.seq_lens)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = causal_conv_config(len(weight))
    grid = (num_tokens // config["TOKENS"] + num_seqs, ceil_div(channels, config["BLOCK"]))
    sequences = (inputs.cu_seqlens, inputs.seq_lens, inputs.rows)
    args = (x, weight, state, out, *sequences, num_seqs, x.stride(0), channels)
    launch(_causal_conv_kernel, grid, args, config)
    return out
