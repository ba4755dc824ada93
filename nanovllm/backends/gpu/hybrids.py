"""The Triton kernels of hybrids: linear attention with a state per row, and a gate of attention."""

from nanovllm.backends.gpu.causal_conv import causal_conv
from nanovllm.backends.gpu.gate_and_mul import sigmoid_and_mul
from nanovllm.backends.gpu.gated_delta import gated_delta
from nanovllm.backends.gpu.gated_rms_norm import gated_rms_norm
from nanovllm.features.families.qwen3_5.ops import HybridOperators


class Operators(HybridOperators):
    """Launches our Triton kernels."""

    causal_conv = staticmethod(causal_conv)
    gated_delta = staticmethod(gated_delta)
    gated_rms_norm = staticmethod(gated_rms_norm)
    sigmoid_and_mul = staticmethod(sigmoid_and_mul)
