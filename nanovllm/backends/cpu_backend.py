"""The CPU path: plain torch, with our compiled kernels where they can be had, and weights packed once."""

import os
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from nanovllm.backends.base import AttentionMetadata, KVCache
from nanovllm.backends.torch_backend import TorchBackend
from nanovllm.kernels.cpu_library import CpuLibrary, cpu_library
from nanovllm.layers.embedding import LMHead, VocabParallelEmbedding
from nanovllm.layers.matrix import MatrixModule, PackedMatrix

SWITCH = "NANOVLLM_CPU_KERNELS"
"""Environment variable: "0" never compiles, "1" always does; otherwise models above WORTHWHILE parameters do."""

WORTHWHILE = 100_000_000
LANES, MAX_GROUP, MAX_HEAD_DIM = 16, 48, 256  # as in kernels/cpu/


def make_cpu_backend(
    dtype: torch.dtype, head_dim: int, group: int, block_size: int, num_parameters: int
) -> TorchBackend:
    """Compiled kernels for a model that is worth the seconds and has a shape that they know; else plain torch."""
    asked = os.environ.get(SWITCH, "auto")
    if asked == "0" or (asked != "1" and num_parameters < WORTHWHILE):
        return TorchBackend()
    fits = head_dim % (2 * LANES) == 0 and head_dim <= MAX_HEAD_DIM and group <= MAX_GROUP and block_size >= LANES
    if fits and dtype in (torch.bfloat16, torch.float32) and (library := cpu_library()) is not None:
        return CpuBackend(library)
    return OneDnnBackend() if OneDnnMatrix.works(dtype) else TorchBackend()


class CpuBackend(TorchBackend):
    """The kernels of kernels/cpu/. Widths that they do not know fall back to the references, call by call.

    The cache has plain torch's shape and strides, but the order inside a (block, head) tile is the kernels' own.
    """

    def __init__(self, library: CpuLibrary) -> None:
        self._library = library

    def allocate_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Touches every page, a second for 4 GiB: else each block's first tokens wait for the system to clear it."""
        cache = super().allocate_cache(num_blocks, block_size, num_kv_heads, head_dim, dtype, device)
        for side in cache:
            side.zero_()
        return cache

    def pack_weights(self, modules: Iterable[nn.Module], check: Callable[[], None]) -> None:
        pack_matrices(modules, lambda weight: NativeMatrix(self._library, weight), check)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.shape[1] % LANES:
            return super().rms_norm(x, weight, eps)
        y = torch.empty_like(x)
        self._library.call("add_rms_norm", x.dtype, x, None, weight, y, None, *x.shape, eps)
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.shape[1] % LANES:
            return super().add_rms_norm(x, residual, weight, eps)
        y, total = torch.empty_like(x), torch.empty_like(x)
        self._library.call("add_rms_norm", x.dtype, x, residual, weight, y, total, *x.shape, eps)
        return y, total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if size % LANES:
            return super().silu_and_mul(gate_up)
        y = gate_up.new_empty(rows, size)
        self._library.call("silu_and_mul", y.dtype, gate_up, y, rows, size)
        return y

    def norm_rope_store(
        self,
        qkv: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        cos_sin: Tensor,
        positions: Tensor,
        cache: KVCache,
        slot_mapping: Tensor,
    ) -> Tensor:
        keys, values = cache
        block_size, num_kv_heads, dim = keys.shape[1:]
        tokens, num_heads = qkv.shape[0], qkv.shape[1] // dim - 2 * num_kv_heads
        q = qkv.new_empty(tokens, num_heads, dim)
        sizes = (tokens, num_heads, num_kv_heads, dim, block_size, eps)
        inputs = (qkv, q_weight, k_weight, cos_sin, positions.to(torch.int32), slot_mapping)
        self._library.call("norm_rope_store", q.dtype, *inputs, q, keys, values, *sizes)
        return q

    def attend(self, q: Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        keys, values = cache
        block_size, num_kv_heads, dim = keys.shape[1:]
        q, tables = q.contiguous(), metadata.block_tables.contiguous()
        out = torch.empty_like(q)
        inputs = (q, keys, values, tables, metadata.cu_seqlens_q, metadata.seq_lens)
        sizes = (*tables.shape, num_kv_heads, q.shape[1] // num_kv_heads, dim, block_size, scale)
        self._library.call("attend", q.dtype, *inputs, out, *sizes)
        return out

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> Tensor:
        logits = logits.contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int32)
        inputs = (logits, temperature, seeds, positions.to(torch.int32), tokens)
        self._library.call("sample", logits.dtype, *inputs, *logits.shape)
        is_filtered = ((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1) | (min_p > 0)
        if is_filtered.any():
            rows = is_filtered.nonzero().squeeze(1)
            each = (temperature, top_k, top_p, min_p, seeds, positions)
            tokens[rows] = super().sample(logits[rows], *(values[rows] for values in each))
        return tokens


class NativeMatrix:
    """Packed for the `linear` kernel, which also reads single rows: a tied embedding needs no second copy."""

    def __init__(self, library: CpuLibrary, weight: Tensor) -> None:
        self._library, (self._out, self._in) = library, weight.shape
        self._packed = library.pack(weight.contiguous())

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(x.shape[0], self._out)
        self._library.call("linear", x.dtype, x.contiguous(), self._packed, bias, y, x.shape[0], self._in, self._out)
        return y

    def rows(self, indices: Tensor) -> Tensor:
        return self._library.packed_rows(self._packed, indices.to(torch.int32), self._in)


class OneDnnBackend(TorchBackend):
    """Plain torch, with the weights packed for oneDNN: what there is without a compiler."""

    def pack_weights(self, modules: Iterable[nn.Module], check: Callable[[], None]) -> None:
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
    def works(dtype: torch.dtype) -> bool:
        """Whether this torch and this machine have the operators, and they compute x W^T."""
        if dtype != torch.bfloat16 or not torch.cpu.get_capabilities().get("avx512_bf16"):
            return False
        try:
            weight, x = torch.eye(32, dtype=dtype), torch.ones(2, 32, dtype=dtype)
            return bool((OneDnnMatrix(weight).multiply(x, None) == x).all())
        except (AttributeError, RuntimeError, TypeError):
            return False


def pack_matrices(
    modules: Iterable[nn.Module], pack: Callable[[Tensor], PackedMatrix], check: Callable[[], None]
) -> None:
    """Pack every matrix that is multiplied, one after another, and let go of what nothing reads any more."""
    matrices = [module for module in modules if isinstance(module, MatrixModule)]
    embeddings = [m for m in matrices if isinstance(m, VocabParallelEmbedding) and not isinstance(m, LMHead)]
    for module in matrices:
        if module in embeddings or module.weight.shape[1] % 2:  # packed forms hold pairs of input features
            continue
        check()
        weight = module.weight
        module.packed = packed = pack(weight.data)
        readers = [embedding for embedding in embeddings if embedding.weight is weight]
        if not readers or packed.rows(torch.zeros(1, dtype=torch.int32)) is not None:
            for owner in (module, *readers):
                owner.packed, owner.weight = packed, nn.Parameter(weight.new_empty(0), requires_grad=False)
