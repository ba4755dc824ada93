"""The C++ kernels of hybrids: linear attention with a state per row, and a gate of attention."""

from torch import Tensor

from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.library import LANES, MAX_HEAD_DIM, read_constant
from nanovllm.features.families.qwen3_5.ops import HybridOperators
from nanovllm.ops.step_inputs import StepInputs

MAX_CONV_WIDTH = read_constant("MAX_CONV_WIDTH", "gated_delta.h")
"""The most inputs in a sum of `causal_conv`."""


class Operators(HybridOperators):
    """Calls kernels of the CPU backend's library. A width that a kernel does not know goes to its reference."""

    def __init__(self, backend: CpuBackend) -> None:
        self._library = backend.library
        self._scratch = backend.scratch

    def causal_conv(self, x: Tensor, weight: Tensor, state: Tensor, inputs: StepInputs) -> Tensor:
        width, channels = weight.shape
        if channels % LANES or width > MAX_CONV_WIDTH:
            return super().causal_conv(x, weight, state, inputs)
        y = self._scratch.empty(*x.shape, dtype=x.dtype)
        sequences = (inputs.cu_seqlens, inputs.seq_lens, inputs.rows)
        sizes = (len(inputs.seq_lens), channels, width, x.stride(0))
        self._library.call("causal_conv", x.dtype, x, weight, state, y, *sequences, *sizes)
        return y

    def gated_delta(
        self, qkv: Tensor, gates: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, inputs: StepInputs
    ) -> Tensor:
        value_heads, key_dim, value_dim = state.shape[1:]
        if key_dim % LANES or value_dim % LANES or key_dim > MAX_HEAD_DIM:
            return super().gated_delta(qkv, gates, a_log, dt_bias, state, inputs)
        key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
        out = self._scratch.empty(qkv.shape[0], value_heads, value_dim, dtype=qkv.dtype)
        sequences = (inputs.cu_seqlens, inputs.seq_lens, inputs.rows)
        sizes = (len(inputs.seq_lens), key_heads, value_heads, key_dim, value_dim, gates.stride(0))
        self._library.call("gated_delta", qkv.dtype, qkv, gates, a_log, dt_bias, state, *sequences, out, *sizes)
        return out

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        tokens, heads, dim = x.shape
        if dim % LANES:
            return super().gated_rms_norm(x, gate, weight, eps)
        y = self._scratch.empty(tokens, heads * dim, dtype=x.dtype)
        self._library.call("gated_rms_norm", x.dtype, x, gate, weight, y, *x.shape, gate.stride(0), eps)
        return y

    def sigmoid_and_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.shape[1] % LANES:
            return super().sigmoid_and_mul(x, gate)
        y = self._scratch.empty(*x.shape, dtype=x.dtype)
        self._library.call("sigmoid_and_mul", x.dtype, x, gate, y, *x.shape, gate.stride(0))
        return y
