"""Adds up what a token's experts have computed, as a Triton kernel.

The reference is `combine_reference` in features/families/qwen3_moe/ops.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.features.families.qwen3_moe.ops import Routing, SharedOutput
from nanovllm.utils.integers import ceil_div


@triton.jit
def _combine_experts_kernel(
    y_ptr,
    weights_ptr,
    places_ptr,
    out_ptr,
    offsets_ptr,
    shared_ptr,
    gate_ptr,
    size,
    num_experts,
    gate_stride,
    K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_tokens, size / BLOCK).
    # A program owns BLOCK elements of one token. A shared expert, if there is one, comes last in their sums.
    # Padding may be anywhere among the tokens: no expert has computed its pairs, so they add nothing.
    wait_for_predecessor(PDL)
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    num_computed = tl.load(offsets_ptr + num_experts)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(K):
        place = tl.load(places_ptr + token * K + slot).to(tl.int64)
        weight = tl.load(weights_ptr + token * K + slot)
        limit = tl.where(place < num_computed, size, 0)
        part = tl.load(y_ptr + place * size + element, mask=element < limit, other=0.0)
        total += part.to(tl.float32) * weight
    if HAS_SHARED:
        gate = tl.load(gate_ptr + token * gate_stride).to(tl.float32)
        part = tl.load(shared_ptr + token * size + element, mask=inside, other=0.0)
        total += part.to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + token * size + element, total.to(out_ptr.dtype.element_ty), mask=inside)


def combine_config(k: int, has_shared: bool) -> dict[str, int]:
    return {"K": k, "HAS_SHARED": has_shared, "BLOCK": 1024, "num_warps": 4}


def combine(y: Tensor, routing: Routing, shared: SharedOutput | None = None) -> Tensor:
    """combine_reference in one kernel."""
    num_tokens, k = routing.places.shape
    size = y.shape[1]
    out = torch.empty(num_tokens, size, dtype=y.dtype, device=y.device)
    config = combine_config(k, shared is not None)
    grid = (num_tokens, ceil_div(size, config["BLOCK"]))
    gated = shared or SharedOutput(y, y)  # without a shared expert these are not read
    pointers = (y, routing.weights, routing.places, out, routing.offsets, *gated)
    sizes = (size, len(routing.offsets) - 1, gated.gate.stride(0))
    launch(_combine_experts_kernel, grid, (*pointers, *sizes), config)
    return out
