"""Makes an engine multiply few rows by its own kernel, `backends/gpu/few_rows.py`, in place of cuBLAS.

No option of users does this, because no GPU has timed the kernel. Benchmarks and tests do it. It needs the Triton
backend, weights of 16 bits, and one rank. Steps of more than MAX_ROWS tokens are as they are without it.

In a plain layer the activation and the sums with the residual belong to the products. It then has eight launches where
it has nine: the activation's is gone. A norm still takes one, and reads a sum in place of two summands.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor, nn

from nanovllm.backends import LayerCache
from nanovllm.backends.gpu.few_rows import MAX_ROWS, FewRowsMatrix
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.models.decoder import MLP, Attention, Layer
from nanovllm.models.layers.embedding import LMHead
from nanovllm.models.layers.linear import ColumnParallelLinear, MatrixModule, RowParallelLinear
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.ops.step_inputs import StepInputs


class OwnProduct:
    """The product of a module with its matrix. It takes the place of the module's `multiply`."""

    def __init__(self, module: MatrixModule) -> None:
        self.matrix = FewRowsMatrix(module.weight)
        self._usual = module.multiply

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._usual(x, bias) if len(x) > MAX_ROWS else self.matrix.multiply(x, bias)


class OwnLayer(Layer):
    """A layer whose products do what follows them. It returns a sum and None in place of two summands.

    Attributes:
        is_last: whether no layer follows. The decoder's last norm takes two summands.
    """

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
        attention = self.self_attn
        norms = NormRope(attention.q_norm, attention.k_norm, attention.eps, cos_sin)
        q = self.backend.norm_rope_store(attention.qkv_proj(x), norms, inputs.positions, cache, inputs.slots)
        attended = self.backend.attend(q, cache, inputs, attention.scale, attention.variant).flatten(1)
        o_proj = attention.o_proj
        total = o_proj.multiply.matrix.multiply(attended, o_proj.bias, residual)
        x = self.backend.rms_norm(total, self.post_attention_layernorm, self.eps)
        gated = self.mlp.gate_up_proj.multiply.matrix.multiply_gated(x)
        down = self.mlp.down_proj.multiply.matrix
        return (down.multiply(gated), total) if self.is_last else (down.multiply(gated, None, total), None)


def use_own_products(modules: Iterable[nn.Module]) -> None:
    """Give the modules of a loaded model the kernel: plain layers with what follows products, others without.

    Raises:
        ValueError: several ranks share the layers, so what follows a product needs the sum over the ranks.
    """
    modules = list(modules)
    layers = []
    for module in modules:
        if isinstance(module, RowParallelLinear) and module.parallel.size > 1:
            raise ValueError(f"own products need one rank, and tensor_parallel_size is {module.parallel.size}")
        multiplies = isinstance(module, ColumnParallelLinear | RowParallelLinear | LMHead) and module.packed is None
        if multiplies and FewRowsMatrix.is_supported(module.weight):
            module.multiply = OwnProduct(module)
        if type(module) is Layer and type(module.self_attn) is Attention and type(module.mlp) is MLP:
            layers.append(module)
    for layer in layers:
        matrices = [matrix for matrix in layer.modules() if isinstance(matrix, MatrixModule)]
        if all(isinstance(matrix.multiply, OwnProduct) for matrix in matrices):
            layer.__class__ = OwnLayer
            layer.is_last = layer is layers[-1]


@contextmanager
def own_products() -> Iterator[None]:
    """Within, an engine on the Triton backend that is made in this process uses the kernel, and goes on using it."""
    with mock.patch.object(TritonKernels, "pack_weights", lambda backend, modules: use_own_products(modules)):
        yield
