"""The gated delta rule as a Triton kernel. The rule and its reference are in models/qwen3_5/ops.py."""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.models.qwen3_5.ops import L2_EPS
from nanovllm.ops.step_inputs import StepInputs
from nanovllm.utils.integers import ceil_div


@triton.jit
def _load_token(
    q_ptr,
    v_ptr,
    b_ptr,
    key,
    column,
    exists,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
):
    """Load the inputs q, k, v, b and a of one token and one head as they are; zeros if it does not exist."""
    is_key = key < tl.where(exists, KEY_DIM, 0)
    is_value = column < tl.where(exists, VALUE_DIM, 0)
    q = tl.load(q_ptr + key, mask=is_key, other=0.0)
    k = tl.load(q_ptr + KEY_HEADS * KEY_DIM + key, mask=is_key, other=0.0)
    v = tl.load(v_ptr + column, mask=is_value, other=0.0)
    b = tl.load(b_ptr, mask=exists, other=0.0)
    a = tl.load(b_ptr + VALUE_HEADS, mask=exists, other=0.0)
    return q, k, v, b, a


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)). (log(u) / (u - 1)) e is log(1 + e) even where u = 1 + e has lost most of e's digits."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 0.0, x, 0.0) + log


@triton.jit
def _gated_delta_kernel(
    qkv_ptr,
    gates_ptr,
    a_log_ptr,
    dt_bias_ptr,
    recurrent_ptr,
    out_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    rows_ptr,
    eps,
    gates_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_seqs x VALUE_HEADS, VALUE_DIM / COLUMNS).
    # A program owns COLUMNS columns of the state of one sequence and one value head. It keeps them in registers while
    # it goes through the sequence's tokens, one after another. KEYS is KEY_DIM, padded.
    # Padding is a sequence like any other; all of it has one row, which several programs may write.
    wait_for_predecessor(PDL)
    seq = tl.program_id(0) // VALUE_HEADS
    head = tl.program_id(0) % VALUE_HEADS
    key = tl.arange(0, KEYS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_value = column < VALUE_DIM
    begin = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    num_kept = tl.where(tl.load(seq_lens_ptr + seq) > end - begin, KEY_DIM, 0)  # a new sequence has no state
    place = (tl.load(rows_ptr + seq).to(tl.int64) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state = recurrent_ptr + place + key[:, None] * VALUE_DIM + column[None, :]
    s = tl.load(state, mask=(key < num_kept)[:, None] & is_value[None, :], other=0.0)
    rate = tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(dt_bias_ptr + head)

    SIZE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    q_ptr = qkv_ptr + begin.to(tl.int64) * SIZE + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    v_ptr = qkv_ptr + begin.to(tl.int64) * SIZE + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    b_ptr = gates_ptr + begin.to(tl.int64) * gates_stride + head
    out = out_ptr + (begin.to(tl.int64) * VALUE_HEADS + head) * VALUE_DIM + column
    # The next token's inputs are loaded while this one is computed.
    q_in, k_in, v_in, b_in, a_in = _load_token(
        q_ptr, v_ptr, b_ptr, key, column, begin < end, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM
    )
    for token in range(begin, end):
        q = q_in.to(tl.float32)
        k = k_in.to(tl.float32)
        v = v_in.to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-b_in.to(tl.float32)))
        decay = tl.exp(-rate * _softplus(a_in.to(tl.float32) + bias))
        q_ptr += SIZE
        v_ptr += SIZE
        b_ptr += gates_stride
        q_in, k_in, v_in, b_in, a_in = _load_token(
            q_ptr, v_ptr, b_ptr, key, column, token + 1 < end, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM
        )
        q *= tl.rsqrt(tl.sum(q * q, 0) + eps) * (KEY_DIM**-0.5)
        k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
        s *= decay
        d = beta * (v - tl.sum(k[:, None] * s, 0))
        s += k[:, None] * d[None, :]
        tl.store(out, tl.sum(q[:, None] * s, 0).to(out_ptr.dtype.element_ty), mask=is_value)
        out += VALUE_HEADS * VALUE_DIM
    tl.store(state, s, mask=(key < KEY_DIM)[:, None] & is_value[None, :])


def gated_delta_config(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """One warp and 16 columns: sums over the keys stay in a warp, and 128 keys take 64 registers of a thread."""
    return {
        "KEY_HEADS": key_heads,
        "VALUE_HEADS": value_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEYS": next_power_of_2(key_dim),
        "COLUMNS": min(16, next_power_of_2(value_dim)),
        "num_warps": 1,
    }


def gated_delta(
    qkv: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, inputs: StepInputs
) -> Tensor:
    """gated_delta_reference in one kernel. qkv is contiguous."""
    value_heads, key_dim, value_dim = state.shape[1:]
    num_tokens = qkv.shape[0]
    key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    out = torch.empty(num_tokens, value_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    config = gated_delta_config(key_heads, value_heads, key_dim, value_dim)
    grid = (len(inputs.seq_lens) * value_heads, ceil_div(value_dim, config["COLUMNS"]))
    sequences = (inputs.cu_seqlens, inputs.seq_lens, inputs.rows)
    args = (qkv, gates, a_log, dt_bias, state, out, *sequences, L2_EPS, gates.stride(0))
    launch(_gated_delta_kernel, grid, args, config)
    return out
