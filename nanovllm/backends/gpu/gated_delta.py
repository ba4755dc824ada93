"""The gated delta rule as Triton kernels.

The reference is `gated_delta_reference` in features/families/qwen3_5/ops.py, which states the rule and its paper.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.features.families.qwen3_5.ops import L2_EPS
from nanovllm.ops.step_inputs import StepInputs
from nanovllm.utils.integers import ceil_div

COLUMNS = 16
"""Columns of a state that a program owns."""


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)). (log(u) / (u - 1)) e is log(1 + e) even where u = 1 + e has lost most of e's digits."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 0.0, x, 0.0) + log


@triton.jit
def _read_gates(gate_ptr, exists, a_log_ptr, dt_bias_ptr, VALUE_HEADS: tl.constexpr):
    """Return beta, and the logarithm of the decay, of tokens that exist. gate_ptr is where b is."""
    b = tl.load(gate_ptr, mask=exists, other=0.0).to(tl.float32)
    a = tl.load(gate_ptr + VALUE_HEADS, mask=exists, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr))
    return 1.0 / (1.0 + tl.exp(-b)), -rate * _softplus(a + tl.load(dt_bias_ptr))


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
    # A program owns COLUMNS columns of the state of one sequence and one value head, if the sequence has one token.
    # KEYS is KEY_DIM, padded.
    # Padding is a sequence like any other; all of it has one row, which several programs may write.
    wait_for_predecessor(PDL)
    seq = tl.program_id(0) // VALUE_HEADS
    head = tl.program_id(0) % VALUE_HEADS
    key = tl.arange(0, KEYS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_key = key < KEY_DIM
    is_value = column < VALUE_DIM
    token = tl.load(cu_seqlens_ptr + seq).to(tl.int64)
    if tl.load(cu_seqlens_ptr + seq + 1) - token != 1:
        return
    num_kept = tl.where(tl.load(seq_lens_ptr + seq) > 1, KEY_DIM, 0)  # a new sequence has no state
    place = (tl.load(rows_ptr + seq).to(tl.int64) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state = recurrent_ptr + place + key[:, None] * VALUE_DIM + column[None, :]
    s = tl.load(state, mask=(key < num_kept)[:, None] & is_value[None, :], other=0.0)
    SIZE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    q_at = qkv_ptr + token * SIZE + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM + key
    q = tl.load(q_at, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(q_at + KEY_HEADS * KEY_DIM, mask=is_key, other=0.0).to(tl.float32)
    v_at = qkv_ptr + token * SIZE + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
    v = tl.load(v_at, mask=is_value, other=0.0).to(tl.float32)
    gate_ptr = gates_ptr + token * gates_stride + head
    beta, log_decay = _read_gates(gate_ptr, token >= 0, a_log_ptr + head, dt_bias_ptr + head, VALUE_HEADS)
    q *= tl.rsqrt(tl.sum(q * q, 0) + eps) * (KEY_DIM**-0.5)
    k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
    s *= tl.exp(log_decay)
    d = beta * (v - tl.sum(k[:, None] * s, 0))
    s += k[:, None] * d[None, :]
    out_at = out_ptr + (token * VALUE_HEADS + head) * VALUE_DIM + column
    tl.store(out_at, tl.sum(q[:, None] * s, 0).to(out_ptr.dtype.element_ty), mask=is_value)
    tl.store(state, s, mask=is_key[:, None] & is_value[None, :])


@triton.jit(do_not_specialize=["num_seqs"])
def _prepare_chunks_kernel(
    qkv_ptr,
    gates_ptr,
    a_log_ptr,
    dt_bias_ptr,
    cu_seqlens_ptr,
    solve_ptr,
    attend_ptr,
    gains_ptr,
    eps,
    gates_stride,
    num_seqs,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (at least the number of chunks, VALUE_HEADS).
    # A program owns one chunk of one sequence, and one value head: it computes what follows from no state. It finds its
    # sequence by counting chunks, 256 sequences at a time. Programs beyond the last chunk do nothing.
    wait_for_predecessor(PDL)
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    SEQS: tl.constexpr = 256
    seq = 0
    first_chunk = 0
    num_chunks = 0
    for start in range(0, num_seqs, SEQS):
        lane = start + tl.arange(0, SEQS)
        exists = lane < num_seqs
        begins = tl.load(cu_seqlens_ptr + lane, mask=exists, other=0)
        length = tl.load(cu_seqlens_ptr + lane + 1, mask=exists, other=0) - begins
        chunks = tl.where(exists & (length > 1), tl.cdiv(length, CHUNK), 0)
        last_chunk = num_chunks + tl.cumsum(chunks, 0)
        is_before = exists & (last_chunk <= chunk)
        seq += tl.sum(is_before.to(tl.int32), 0)
        first_chunk = tl.maximum(first_chunk, tl.max(tl.where(is_before, last_chunk, 0), 0))
        num_chunks += tl.sum(chunks, 0)
    if chunk >= num_chunks:
        return

    begin = tl.load(cu_seqlens_ptr + seq) + (chunk - first_chunk) * CHUNK
    end = tl.load(cu_seqlens_ptr + seq + 1)
    i = tl.arange(0, CHUNK)
    exists = begin + i < end
    token = begin.to(tl.int64)
    key = tl.arange(0, KEYS)
    SIZE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    qkv_ptr += token * SIZE + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    place = i[:, None] * SIZE + key[None, :]
    inside = exists[:, None] & (key < KEY_DIM)[None, :]
    q = tl.load(qkv_ptr + place, mask=inside, other=0.0)
    k = tl.load(qkv_ptr + KEY_HEADS * KEY_DIM + place, mask=inside, other=0.0)
    gate_ptr = gates_ptr + token * gates_stride + head + i * gates_stride
    beta, log_decay = _read_gates(gate_ptr, exists, a_log_ptr + head, dt_bias_ptr + head, VALUE_HEADS)
    # From here on a decay below exp(-100) is that: less is zero in float32, and sums of logarithms would lose digits.
    log_decay = tl.where(exists, tl.where(log_decay < -100.0, -100.0, log_decay), 0.0)
    log_sum = tl.cumsum(log_decay, 0)
    whole = tl.sum(log_decay, 0)
    q_scale = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + eps) * (KEY_DIM**-0.5)
    k_scale = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + eps)

    first = token * VALUE_HEADS + head
    row = first * CHUNK + i[:, None] * (VALUE_HEADS * CHUNK) + i[None, :]
    is_row = exists[:, None] & (i < CHUNK)[None, :]
    fade = tl.exp(tl.where(i[:, None] >= i[None, :], log_sum[:, None] - log_sum[None, :], 0.0))
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (q_scale[:, None] * k_scale[None, :])
    tl.store(attend_ptr + row, tl.where(i[:, None] >= i[None, :], scores * fade, 0.0), mask=is_row)

    # Row i of (1 + A)^-1 is row i of 1 less A's row i times the rows before it. A lies here with its columns as rows.
    fade = tl.exp(tl.where(i[:, None] < i[None, :], log_sum[None, :] - log_sum[:, None], 0.0))
    scores = tl.dot(k, tl.trans(k), input_precision="ieee") * (k_scale[:, None] * (k_scale * beta)[None, :])
    a = tl.where(i[:, None] < i[None, :], scores * fade, 0.0)
    solve = tl.zeros([CHUNK, CHUNK], tl.float32)
    for n in range(0, tl.minimum(end - begin, CHUNK)):
        a_row = tl.sum(tl.where(i[None, :] == n, a, 0.0), 1)
        solved = (i == n).to(tl.float32) - tl.sum(a_row[:, None] * solve, 0)
        solve = tl.where(i[:, None] == n, solved[None, :], solve)
    tl.store(solve_ptr + row, solve * beta[None, :], mask=is_row)
    gains = gains_ptr + (first + i * VALUE_HEADS) * 4
    tl.store(gains, tl.exp(log_sum) * k_scale, mask=exists)
    tl.store(gains + 1, tl.exp(log_sum) * q_scale, mask=exists)
    tl.store(gains + 2, tl.exp(whole - log_sum) * k_scale, mask=exists)
    tl.store(gains + 3, tl.exp(whole + tl.zeros([CHUNK], tl.float32)), mask=exists)


@triton.jit
def _run_chunks_kernel(
    qkv_ptr,
    recurrent_ptr,
    out_ptr,
    cu_seqlens_ptr,
    seq_lens_ptr,
    rows_ptr,
    solve_ptr,
    attend_ptr,
    gains_ptr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_seqs x VALUE_HEADS, VALUE_DIM / COLUMNS).
    # A program owns COLUMNS columns of the state of one sequence and one value head, if the sequence has several
    # tokens. It goes through them chunk by chunk, with what _prepare_chunks_kernel has computed. No input is padding.
    wait_for_predecessor(PDL)
    seq = tl.program_id(0) // VALUE_HEADS
    head = tl.program_id(0) % VALUE_HEADS
    begin = tl.load(cu_seqlens_ptr + seq)
    end = tl.load(cu_seqlens_ptr + seq + 1)
    if end - begin < 2:
        return
    key = tl.arange(0, KEYS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_key = key < KEY_DIM
    is_value = column < VALUE_DIM
    num_kept = tl.where(tl.load(seq_lens_ptr + seq) > end - begin, KEY_DIM, 0)  # a new sequence has no state
    place = (tl.load(rows_ptr + seq).to(tl.int64) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state = recurrent_ptr + place + key[:, None] * VALUE_DIM + column[None, :]
    s = tl.load(state, mask=(key < num_kept)[:, None] & is_value[None, :], other=0.0)
    i = tl.arange(0, CHUNK)
    SIZE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    PRECISION: tl.constexpr = "ieee" if EXACT else "tf32"
    key_place = i[:, None] * SIZE + key[None, :]
    value_place = i[:, None] * SIZE + column[None, :]
    row = i[:, None] * (VALUE_HEADS * CHUNK) + i[None, :]
    for start in range(0, end - begin, CHUNK):
        exists = start + i < end - begin
        inside = exists[:, None] & is_key[None, :]
        is_out = exists[:, None] & is_value[None, :]
        token = begin.to(tl.int64) + start
        q_ptr = qkv_ptr + token * SIZE + head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
        v_ptr = qkv_ptr + token * SIZE + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        first = token * VALUE_HEADS + head
        gains = gains_ptr + first * 4 + i * (VALUE_HEADS * 4)
        k_rows = tl.load(q_ptr + KEY_HEADS * KEY_DIM + key_place, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + value_place, mask=is_out, other=0.0).to(tl.float32)
        d = v - tl.load(gains, mask=exists, other=0.0)[:, None] * tl.dot(k_rows, s, input_precision=PRECISION)
        solve = tl.load(solve_ptr + first * CHUNK + row, mask=exists[:, None], other=0.0)
        d = tl.dot(solve, d, input_precision=PRECISION)
        q = tl.load(q_ptr + key_place, mask=inside, other=0.0).to(tl.float32)
        out = tl.load(gains + 1, mask=exists, other=0.0)[:, None] * tl.dot(q, s, input_precision=PRECISION)
        attend = tl.load(attend_ptr + first * CHUNK + row, mask=exists[:, None], other=0.0)
        out += tl.dot(attend, d, input_precision=PRECISION)
        out_at = out_ptr + first * VALUE_DIM + i[:, None] * (VALUE_HEADS * VALUE_DIM) + column[None, :]
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=is_out)
        d *= tl.load(gains + 2, mask=exists, other=0.0)[:, None]
        # Loaded again: to keep it and to turn it round would take registers, and spill.
        k_at = q_ptr + KEY_HEADS * KEY_DIM + key[:, None] + i[None, :] * SIZE
        k = tl.load(k_at, mask=is_key[:, None] & exists[None, :], other=0.0).to(tl.float32)
        s = s * tl.load(gains_ptr + first * 4 + 3) + tl.dot(k, d, input_precision=PRECISION)
    tl.store(state, s, mask=is_key[:, None] & is_value[None, :])


def head_config(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Return the constexprs that all kernels have."""
    sizes = {"KEY_HEADS": key_heads, "VALUE_HEADS": value_heads, "KEY_DIM": key_dim, "VALUE_DIM": value_dim}
    return {**sizes, "KEYS": max(16, next_power_of_2(key_dim))}  # tl.dot takes no fewer


TOKEN_CONFIG = {"COLUMNS": COLUMNS, "num_warps": 1}
"""Of one token: one warp and 16 columns, so sums over the keys stay in a warp, and 128 keys take 64 registers."""


def chunk_config(dtype: torch.dtype) -> dict[str, int]:
    """Return the constexprs of chunks: of 64 tokens, or 16 in float32, which is multiplied without tensor cores."""
    return {"CHUNK": 16 if dtype == torch.float32 else 64, "num_warps": 8, "num_stages": 1}


def run_config(dtype: torch.dtype) -> dict[str, int]:
    """Return the constexprs of the kernel that carries states on.

    16 bits are multiplied by them as TF32, in which q and k are exact, and all else has 11 bits.
    """
    is_exact = dtype == torch.float32
    return chunk_config(dtype) | {"COLUMNS": COLUMNS, "EXACT": is_exact, "num_warps": 8 if is_exact else 4}


def gated_delta(
    qkv: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, inputs: StepInputs
) -> Tensor:
    """Do what gated_delta_reference does. qkv is contiguous.

    A sequence with one token in the step has a kernel of its own. The others go chunk by chunk (section 3.3 there).
    Let A[i, j] be beta_i fade(j, i) k_i k_j for tokens j < i of a chunk, where fade(j, i) is the product of the decays
    after j up to i. Then all d of the chunk are (1 + A)^-1 beta (v - fade k S). So only S goes from chunk to chunk, and
    one kernel prepares all chunks at a time.
    """
    value_heads, key_dim, value_dim = state.shape[1:]
    num_tokens = qkv.shape[0]
    num_seqs = len(inputs.seq_lens)
    key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    out = torch.empty(num_tokens, value_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    config = head_config(key_heads, value_heads, key_dim, value_dim)
    grid = (num_seqs * value_heads, ceil_div(value_dim, COLUMNS))
    sequences = (inputs.cu_seqlens, inputs.seq_lens, inputs.rows)
    parameters = (qkv, gates, a_log, dt_bias)
    numbers = (L2_EPS, gates.stride(0))
    launch(_gated_delta_kernel, grid, (*parameters, state, out, *sequences, *numbers), config | TOKEN_CONFIG)
    if num_tokens == num_seqs:
        return out
    prepare = chunk_config(qkv.dtype)
    chunk = prepare["CHUNK"]
    solve = torch.empty(num_tokens, value_heads, chunk, dtype=torch.float32, device=qkv.device)
    attend = torch.empty_like(solve)
    gains = torch.empty(num_tokens, value_heads, 4, dtype=torch.float32, device=qkv.device)
    chunks = (solve, attend, gains)
    most_chunks = num_tokens // chunk + num_seqs
    args = (*parameters, inputs.cu_seqlens, *chunks, *numbers, num_seqs)
    launch(_prepare_chunks_kernel, (most_chunks, value_heads), args, config | prepare)
    launch(_run_chunks_kernel, grid, (qkv, state, out, *sequences, *chunks), config | run_config(qkv.dtype))
    return out
