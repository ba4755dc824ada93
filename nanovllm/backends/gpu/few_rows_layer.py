"""A decoder layer that multiplies few rows by the kernel of few_rows.py, in place of cuBLAS.

An H200 has timed it (docs/tried.md). The layers of Qwen3-0.6B are faster, and those of Qwen3-8B
are slower. So the layers of small matrices take it, on the architecture that was timed, and all other layers do not.

The activation and the sums with the residual belong to the products. A layer then has eight launches where it has nine:
the activation's is gone. A norm still takes one, and reads a sum in place of two summands.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.backends import LayerCache
from nanovllm.backends.gpu.few_rows import MAX_ROWS, FewRowsMatrix
from nanovllm.models.decoder import MLP, Attention, Layer
from nanovllm.models.layers.linear import MatrixModule
from nanovllm.ops.attention import KVCache
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.ops.step_inputs import StepInputs

TIMED_ARCHITECTURE = 9
"""The major number of the compute capability of the GPU that has timed the kernel: Hopper."""

MOST_BYTES = 24 << 20
"""The largest matrix of a layer that takes the kernel. Of the layers that were timed, the largest matrix of the faster
one has 12 MiB, and that of the slower one has 192 MiB, and none of its matrices has less than 32."""


class FewRowsProduct:
    """The product of a module with its matrix. It takes the place of the module's `multiply`.

    Attributes:
        row_limits: up to so many rows the kernel computes the product. More rows are torch's. At start-up both are
            launched once.
    """

    row_limits = (MAX_ROWS,)

    def __init__(self, module: MatrixModule) -> None:
        self._matrix = FewRowsMatrix(module.weight)  # not the module, so that it is freed without a garbage collection

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight = self._matrix.weight
        return F.linear(x, weight, bias) if len(x) > MAX_ROWS else self._matrix.multiply(x, bias)


class FewRowsLayer(Layer):
    """A plain layer whose products do what follows them. It returns a sum and None in place of two summands.

    Steps of more than MAX_ROWS tokens are as they are without it.

    Attributes:
        o_matrix, gate_up_matrix, down_matrix: those whose products do what follows them.
        is_last: whether no layer of this rank follows. Then it returns two summands, as another layer does.
    """

    self_attn: Attention
    mlp: MLP
    o_matrix: FewRowsMatrix
    gate_up_matrix: FewRowsMatrix
    down_matrix: FewRowsMatrix
    is_last: bool

    def forward(
        self, x: Tensor, residual: Tensor | None, cos_sin: Tensor, cache: LayerCache, inputs: StepInputs
    ) -> tuple[Tensor, Tensor | None]:
        if len(x) > MAX_ROWS:
            return super().forward(x, residual, cos_sin, cache, inputs)
        if residual is None:
            residual = x
            x = self.backend.rms_norm(x, self.input_layernorm, self.eps)
        else:
            x, residual = self.backend.add_rms_norm(x, residual, self.input_layernorm, self.eps)
        assert isinstance(cache, KVCache)
        attention = self.self_attn
        norms = NormRope(attention.q_norm, attention.k_norm, attention.eps, cos_sin)
        q = self.backend.norm_rope_store(attention.qkv_proj(x), norms, inputs.positions, cache, inputs.slots)
        attended = self.backend.attend(q, cache, inputs, attention.scale, attention.variant).flatten(1)
        total = self.o_matrix.multiply(attended, attention.o_proj.bias, residual)
        x = self.backend.rms_norm(total, self.post_attention_layernorm, self.eps)
        gated = self.gate_up_matrix.multiply_gated(x)
        if self.is_last:
            return self.down_matrix.multiply(gated), total
        return self.down_matrix.multiply(gated, None, total), None


def choose_few_rows_bytes(device: torch.device) -> int:
    """Return how many bytes the largest matrix of a layer may have that takes the kernel; 0 if no layer does."""
    was_timed = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == TIMED_ARCHITECTURE
    return MOST_BYTES if was_timed else 0


def use_few_rows(modules: Iterable[nn.Module], most_bytes: int) -> None:
    """Make the plain layers of a loaded model `FewRowsLayer`s, if the kernel takes all their matrices.

    New weights must be written where the old ones are. Layers that several ranks share stay as they are, because what
    follows their products needs the sum over the ranks.

    Args:
        most_bytes: of a layer's largest matrix.
    """
    layers = [module for module in modules if type(module) is Layer]
    for layer in layers:
        attention = layer.self_attn
        mlp = layer.mlp
        if type(attention) is not Attention or type(mlp) is not MLP or attention.o_proj.parallel.size > 1:
            continue
        matrices = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        if not all(_takes(matrix, most_bytes) for matrix in matrices):
            continue
        layer.__class__ = FewRowsLayer
        assert isinstance(layer, FewRowsLayer)
        attention.qkv_proj.multiply = FewRowsProduct(attention.qkv_proj)  # type: ignore[method-assign]
        layer.o_matrix = FewRowsMatrix(attention.o_proj.weight)
        layer.gate_up_matrix = FewRowsMatrix(mlp.gate_up_proj.weight)
        layer.down_matrix = FewRowsMatrix(mlp.down_proj.weight)
        layer.is_last = layer is layers[-1]


def _takes(module: MatrixModule, most_bytes: int) -> bool:
    weight = module.weight
    return module.packed is None and weight.nbytes <= most_bytes and FewRowsMatrix.is_supported(weight)
