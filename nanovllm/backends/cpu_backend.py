"""Our C++ kernels for the CPU, compiled on first use, and weights packed once for them."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from nanovllm.backends.base import Backend
from nanovllm.backends.pack import pack_matrices
from nanovllm.backends.scratch import Scratch
from nanovllm.kernels.attention import AttentionMetadata, KVCache
from nanovllm.kernels.cpu_library import PANEL, CpuLibrary, cpu_library
from nanovllm.kernels.edit_logits import MaskAndPenalties
from nanovllm.kernels.norm_rope_store import NormRope
from nanovllm.kernels.route import Routing
from nanovllm.kernels.sample import Sampled, SamplingValues
from nanovllm.layers.experts import Experts

LANES = 16
"""float32 numbers in a vector, as in kernels/cpu/."""


class CpuBackend(Backend):
    """The kernels of kernels/cpu/. Widths that they do not know fall back to the references, call by call.

    The cache has the usual shape and strides, but the order inside a (block, head) tile is the kernels' own.
    """

    name = "cpu"
    dtypes = (torch.bfloat16, torch.float32)
    head_dims = tuple(range(2 * LANES, 256 + 1, 2 * LANES))
    groups = range(1, 48 + 1)

    def __init__(self) -> None:
        self._library, self._scratch = cpu_library(), Scratch()

    @classmethod
    def why_cannot(cls, device: torch.device) -> str | None:
        """Compiles the kernels, unless they lie in the user's cache."""
        if device.type != "cpu":
            return f"it needs the CPU, not {device.type}"
        try:
            cpu_library()
        except RuntimeError as error:
            return str(error)
        return None

    def allocate_cache(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> KVCache:
        num_blocks, block_size, num_kv_heads, head_dim = shape
        stored = (num_blocks, num_kv_heads, block_size, head_dim)
        return KVCache(*(self._library.zeros(stored, dtype).transpose(1, 2) for _ in KVCache._fields))

    def before_writing(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            self._library.advise_huge_pages(weight)

    def pack_weights(self, modules: Iterable[nn.Module], check: Callable[[], None]) -> None:
        modules = list(modules)
        pack_matrices(modules, lambda weight: NativeMatrix(self._library, weight, self._scratch, in_place=True), check)
        for module in modules:
            if isinstance(module, Experts):
                for weight in (module.gate_up, module.down):
                    for matrix in weight if _packs_in_place(weight) else ():
                        check()
                        self._library.pack(matrix, in_place=True)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.shape[1] % LANES:
            return super().rms_norm(x, weight, eps)
        y = self._scratch.empty(*x.shape, dtype=x.dtype)
        self._library.call("add_rms_norm", x.dtype, x, None, weight, y, None, *x.shape, eps)
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.shape[1] % LANES:
            return super().add_rms_norm(x, residual, weight, eps)
        y, total = (self._scratch.empty(*x.shape, dtype=x.dtype) for _ in range(2))
        self._library.call("add_rms_norm", x.dtype, x, residual, weight, y, total, *x.shape, eps)
        return y, total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        if size % LANES:
            return super().silu_and_mul(gate_up)
        y = self._scratch.empty(rows, size, dtype=gate_up.dtype)
        self._library.call("silu_and_mul", y.dtype, gate_up, y, rows, size)
        return y

    def route(self, logits: Tensor, k: int, normalize: bool, slots: Tensor) -> Routing:
        tokens, experts = logits.shape
        pairs, offsets = torch.empty(2, tokens * k, dtype=torch.int32), torch.empty(experts + 1, dtype=torch.int32)
        routing = Routing(torch.empty(tokens, k, dtype=torch.float32), pairs[0].view(tokens, k), pairs[1], offsets)
        self._library.call("route", logits.dtype, logits.contiguous(), slots, *routing, tokens, experts, k, normalize)
        return routing

    def grouped_linear(self, x: Tensor, weight: Tensor, routing: Routing, gather: bool) -> Tensor:
        if not _packs_in_place(weight):
            return super().grouped_linear(x, weight, routing, gather)
        rows = x[routing.tokens] if gather else x
        y = self._scratch.empty(len(rows), weight.shape[1], dtype=x.dtype)
        num_experts, out_size, in_size = weight.shape
        self._library.call("grouped_linear", x.dtype, rows, weight, routing.offsets, y, num_experts, in_size, out_size)
        return y

    def combine(self, y: Tensor, routing: Routing) -> Tensor:
        (tokens, k), size = routing.places.shape, y.shape[1]
        if size % LANES:
            return super().combine(y, routing)
        out = y.new_empty(tokens, size)
        weights, places = routing.weights.contiguous(), routing.places.contiguous()
        self._library.call("combine", y.dtype, y, weights, places, out, tokens, k, size)
        return out

    def norm_rope_store(self, qkv: Tensor, norms: NormRope, positions: Tensor, cache: KVCache, slots: Tensor) -> Tensor:
        block_size, num_kv_heads, dim = cache.keys.shape[1:]
        tokens, num_heads = qkv.shape[0], qkv.shape[1] // dim - 2 * num_kv_heads
        q = self._scratch.empty(tokens, num_heads, dim, dtype=qkv.dtype)
        inputs = (qkv, norms.q_weight, norms.k_weight, norms.cos_sin, positions.to(torch.int32), slots)
        sizes = (tokens, num_heads, num_kv_heads, dim, block_size, norms.eps)
        self._library.call("norm_rope_store", q.dtype, *inputs, q, *cache, *sizes)
        return q

    def attend(self, q: Tensor, cache: KVCache, metadata: AttentionMetadata, scale: float) -> Tensor:
        block_size, num_kv_heads, dim = cache.keys.shape[1:]
        q, tables = q.contiguous(), metadata.block_tables.contiguous()
        out = self._scratch.empty(*q.shape, dtype=q.dtype)
        inputs = (q, *cache, tables, metadata.cu_seqlens_q, metadata.seq_lens)
        sizes = (*tables.shape, num_kv_heads, q.shape[1] // num_kv_heads, dim, block_size, scale)
        self._library.call("attend", q.dtype, *inputs, out, *sizes)
        return out

    def sample(self, logits: Tensor, values: SamplingValues) -> Sampled:
        logits = logits.contiguous()
        sampled = Sampled(*(torch.empty(len(logits), dtype=torch.int32) for _ in Sampled._fields))
        values = values._replace(positions=values.positions.to(torch.int32))
        self._library.call("sample", logits.dtype, logits, *values, *sampled, *logits.shape)
        return sampled

    def edit_logits(self, logits: Tensor, edits: MaskAndPenalties) -> None:
        self._library.call("edit_logits", logits.dtype, logits, *edits, len(edits.indices), logits.shape[1])


def _packs_in_place(weight: Tensor) -> bool:
    """Whether the experts' matrices weight [num_experts, out, in] are as large packed as they are."""
    return weight.shape[1] % PANEL == 0 and weight.shape[2] % 2 == 0


class NativeMatrix:
    """Packed for the `linear` kernel, which also reads single rows: a tied embedding needs no second copy."""

    def __init__(self, library: CpuLibrary, weight: Tensor, scratch: Scratch, in_place: bool = False) -> None:
        self._library, self._scratch, (self._out, self._in) = library, scratch, weight.shape
        self._packed = library.pack(weight.contiguous(), in_place)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = self._scratch.empty(x.shape[0], self._out, dtype=x.dtype)
        self._library.call("linear", x.dtype, x.contiguous(), self._packed, bias, y, x.shape[0], self._in, self._out)
        return y

    def rows(self, indices: Tensor) -> Tensor:
        return self._library.packed_rows(self._packed, indices.to(torch.int32), self._in)
