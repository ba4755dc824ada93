"""Plain torch on a CPU. It needs nothing else; every other backend is compared with it."""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.backends.base import Backend
from nanovllm.models.layers.embedding import LMHead, VocabParallelEmbedding
from nanovllm.models.layers.linear import MatrixModule, PackedMatrix
from nanovllm.utils.machine import torch_in_one_thread


class TorchBackend(Backend):
    """The references on a CPU. If it multiplies bfloat16, matrices are multiplied by oneDNN's packed product."""

    _in_one_thread = False

    def choose_threads(self, num_parameters: int) -> None:
        # A model of so few parameters gains little by threads, and loses much by them on a busy machine.
        self._in_one_thread = num_parameters <= 10_000_000 and "OMP_NUM_THREADS" not in os.environ

    def with_threads(self) -> AbstractContextManager[object]:
        return torch_in_one_thread() if self._in_one_thread else nullcontext()

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        # torch.zeros writes every page, which takes seconds for gigabytes. Pages of numpy's zeros are made when they
        # are first touched.
        memory = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        return memory.view(dtype).view(*shape)

    def pack_weights(self, modules: Iterable[nn.Module]) -> None:
        matrices = [module for module in modules if isinstance(module, MatrixModule)]
        if matrices and OneDnnMatrix.is_supported(matrices[0].weight):
            pack_matrices(matrices, OneDnnMatrix)


class OneDnnMatrix:
    """A matrix [out, in], packed by oneDNN.

    The operators are those that torch's own compiler uses. They are not public, so `is_supported` tries them first.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")  # type: ignore[no-any-return]

    def rows(self, indices: Tensor) -> None:
        return None

    @staticmethod
    def is_supported(like: Tensor) -> bool:
        """Return whether torch and the machine have these operators for weights like `like`, and compute x W^T."""
        if like.dtype != torch.bfloat16 or not torch.cpu.get_capabilities().get("avx512_bf16"):
            return False
        try:
            weight = torch.eye(32, dtype=like.dtype)
            x = torch.ones(2, 32, dtype=like.dtype)
            return bool((OneDnnMatrix(weight).multiply(x, None) == x).all())
        except (AttributeError, RuntimeError, TypeError):
            return False


def pack_matrices(modules: Iterable[nn.Module], pack: Callable[[Tensor], PackedMatrix]) -> None:
    """Pack every matrix that is multiplied, one after another, and free the weights that nothing reads any more.

    Args:
        pack: makes the packed form of a weight [out, in].
    """
    matrices = [module for module in modules if isinstance(module, MatrixModule)]
    embeddings = [m for m in matrices if isinstance(m, VocabParallelEmbedding) and not isinstance(m, LMHead)]
    for module in matrices:
        if module in embeddings or module.packed is not None:
            continue
        if module.weight.shape[1] % 2:  # packed forms hold pairs of input features
            continue
        weight = module.weight
        packed = pack(weight.data)
        module.packed = packed
        # An embedding may share its weight with the LM head; it needs the packed form alone if that gives rows.
        readers = [embedding for embedding in embeddings if embedding.weight is weight]
        if not readers or packed.rows(torch.zeros(1, dtype=torch.int32)) is not None:
            for owner in (module, *readers):
                owner.packed = packed
                owner.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
