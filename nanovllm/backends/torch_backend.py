"""Plain torch: needs nothing else, runs everywhere, and is what every other backend is compared with."""

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.backends.base import Backend
from nanovllm.backends.pack import pack_matrices
from nanovllm.kernels.attention import KVCache


class TorchBackend(Backend):
    """The references, and on a CPU with native bfloat16 oneDNN's packed products.

    Heads lie before tokens in the cache, which on a CPU is three times faster to read.
    """

    name = "torch"

    def allocate_cache(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVCache:
        if device.type != "cpu":
            return super().allocate_cache(shape, dtype, device)
        num_blocks, block_size, num_kv_heads, head_dim = shape

        def zeros() -> Tensor:
            # torch.zeros writes every page, which for gigabytes takes seconds; numpy's come zeroed, when first touched.
            memory = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
            return memory.view(dtype).view(num_blocks, num_kv_heads, block_size, head_dim).transpose(1, 2)

        return KVCache(zeros(), zeros())

    def pack_weights(self, modules: Iterable[nn.Module], check: Callable[[], None]) -> None:
        modules = list(modules)
        if OneDnnMatrix.works(next(parameter for module in modules for parameter in module.parameters())):
            pack_matrices(modules, OneDnnMatrix, check)


class OneDnnMatrix:
    """Packed by oneDNN, through the operators that torch's own compiler uses; they are not public: see `works`."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")  # type: ignore[no-any-return]

    def rows(self, indices: Tensor) -> None:
        return None

    @staticmethod
    def works(like: Tensor) -> bool:
        """Whether torch and the machine have the operators for weights like this one, and they compute x W^T."""
        is_bf16 = like.dtype == torch.bfloat16 and like.device.type == "cpu"
        if not is_bf16 or not torch.cpu.get_capabilities().get("avx512_bf16"):
            return False
        try:
            weight, x = torch.eye(32, dtype=like.dtype), torch.ones(2, 32, dtype=like.dtype)
            return bool((OneDnnMatrix(weight).multiply(x, None) == x).all())
        except (AttributeError, RuntimeError, TypeError):
            return False
