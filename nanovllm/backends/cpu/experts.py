"""The C++ kernels of mixtures of experts."""

import torch
from torch import Tensor

from nanovllm.backends.cpu.backend import CpuBackend, gather_rows, packs_in_place
from nanovllm.backends.cpu.library import LANES
from nanovllm.features.families.qwen3_moe.ops import ExpertOperators, Routing, SharedOutput


class Operators(ExpertOperators):
    """Calls kernels of the CPU backend's library. A width that a kernel does not know goes to its reference."""

    def __init__(self, backend: CpuBackend) -> None:
        self._library = backend.library
        self._scratch = backend.scratch

    def route(self, logits: Tensor, k: int, normalize: bool, slots: Tensor) -> Routing:
        tokens, experts = logits.shape
        pairs = self._scratch.empty(2, tokens * k, dtype=torch.int32)
        routing = Routing(
            weights=self._scratch.empty(tokens, k, dtype=torch.float32),
            places=pairs[0].view(tokens, k),
            tokens=pairs[1],
            offsets=self._scratch.empty(experts + 1, dtype=torch.int32),
        )
        sizes = (tokens, experts, k, normalize, logits.stride(0))
        self._library.call("route", logits.dtype, logits, slots, *routing, *sizes)
        return routing

    def grouped_linear(self, x: Tensor, weight: Tensor, routing: Routing, gather: bool) -> Tensor:
        if not packs_in_place(weight):
            return super().grouped_linear(x, weight, routing, gather)
        rows = gather_rows(self._library, x, routing.tokens, self._scratch) if gather else x
        y = self._scratch.empty(len(rows), weight.shape[1], dtype=x.dtype)
        num_experts, out_size, in_size = weight.shape
        self._library.call("grouped_linear", x.dtype, rows, weight, routing.offsets, y, num_experts, in_size, out_size)
        return y

    def combine(self, y: Tensor, routing: Routing, shared: SharedOutput | None = None) -> Tensor:
        tokens, k = routing.places.shape
        size = y.shape[1]
        if size % LANES:
            return super().combine(y, routing, shared)
        out = self._scratch.empty(tokens, size, dtype=y.dtype)
        weights = routing.weights.contiguous()
        places = routing.places.contiguous()
        gated = (None, None) if shared is None else shared
        sizes = (tokens, k, size, 0 if shared is None else shared.gate.stride(0))
        self._library.call("combine", y.dtype, y, weights, places, *gated, out, *sizes)
        return out
