"""The Triton kernels of hybrids: linear attention with a state per row, and a gate of attention."""

from typing import TYPE_CHECKING

from torch import Tensor

from nanovllm.backends.gpu.causal_conv import causal_conv
from nanovllm.backends.gpu.gate_and_mul import sigmoid_and_mul
from nanovllm.backends.gpu.gated_delta import gated_delta
from nanovllm.backends.gpu.gated_rms_norm import gated_rms_norm
from nanovllm.features.families.qwen3_5.ops import HybridOperators

if TYPE_CHECKING:
    from nanovllm.backends.gpu.triton_backend import TritonKernels


class Operators(HybridOperators):
    """Launches our Triton kernels. The gate rounds what it writes as the backend's norms do."""

    causal_conv = staticmethod(causal_conv)
    gated_delta = staticmethod(gated_delta)
    gated_rms_norm = staticmethod(gated_rms_norm)

    def __init__(self, backend: "TritonKernels") -> None:
        self._backend = backend

    def sigmoid_and_mul(self, x: Tensor, gate: Tensor) -> Tensor:
        return sigmoid_and_mul(x, gate, self._backend.rounds_inputs)
