"""Chooses the experts of each token and sorts the pairs by expert, in two Triton kernels.

The reference is `route_reference` in features/families/qwen3_moe/ops.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.features.families.qwen3_moe.ops import Routing, route_reference
from nanovllm.utils.integers import ceil_div

MOST_PAIRS = 4096
"""Our kernels sort up to so many pairs: each program reads all of them. More are sorted by torch, in the same order."""


@triton.jit(do_not_specialize=["num_tokens"])
def _choose_experts_kernel(
    logits_ptr,
    slots_ptr,
    weights_ptr,
    experts_ptr,
    logits_stride,
    num_tokens,
    num_experts,
    NORMALIZE: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_tokens / TOKENS,).
    # A program owns TOKENS tokens: it chooses the K experts of each and their weights.
    # Tokens with slot -1 are padding: their expert is num_experts, which does not exist.
    wait_for_predecessor(PDL)
    expert = tl.arange(0, EXPERTS)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    is_real = tl.load(slots_ptr + token, mask=exists, other=-1) >= 0
    inside = exists[:, None] & (expert < num_experts)
    at = logits_ptr + token.to(tl.int64)[:, None] * logits_stride + expert
    logits = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    highest = tl.max(logits, 1)
    exponentials = tl.exp(logits - highest[:, None])
    probabilities = exponentials / tl.sum(exponentials, 1)[:, None]

    # Bits of floats from 0 on, read as integers, are in the order of the floats. A maximum of integers is one
    # instruction for a warp. It also orders NaN, which makes a whole row NaN: the row ties, and the lowest K experts
    # are chosen. A comparison of floats could choose one expert K times, and some pairs would have no place.
    CHOSEN: tl.constexpr = -(2**31)
    keys = probabilities.to(tl.int32, bitcast=True)
    keys = tl.where(expert < num_experts, keys, CHOSEN)
    chosen_experts = tl.zeros([TOKENS, SLOTS], tl.int32)
    weights = tl.zeros([TOKENS, SLOTS], tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    for i in tl.static_range(K):
        best = tl.max(keys, 1)
        index = tl.min(tl.where(keys == best[:, None], expert, EXPERTS), 1)
        keys = tl.where(expert == index[:, None], CHOSEN, keys)
        weight = best.to(tl.float32, bitcast=True)
        total += weight
        weights = tl.where(slot == i, weight[:, None], weights)
        chosen_experts = tl.where(slot == i, index[:, None], chosen_experts)
    if NORMALIZE:
        weights = weights / total[:, None]
    weights = weights.to(logits_ptr.dtype.element_ty).to(tl.float32)
    chosen_experts = tl.where(is_real[:, None], chosen_experts, num_experts)
    pair = token[:, None] * K + slot
    is_pair = exists[:, None] & (slot < K)
    tl.store(weights_ptr + pair, weights, mask=is_pair)
    tl.store(experts_ptr + pair, chosen_experts, mask=is_pair)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs_kernel(
    experts_ptr,
    places_ptr,
    tokens_ptr,
    offsets_ptr,
    num_pairs,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_experts + 1,).
    # A program owns one expert: it counts the pairs of lower experts, and places its own pairs after them in order.
    # The last program owns the padding's pairs, which lie after all others, in no expert's range.
    wait_for_predecessor(PDL)
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + lane
        of_pair = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=2**30)
        lower += (of_pair < expert).to(tl.int32)
    place = tl.sum(lower, 0)
    tl.store(offsets_ptr + expert, place)
    for start in range(0, num_pairs, BLOCK):
        pair = start + lane
        is_own = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=2**30) == expert
        count = is_own.to(tl.int32)
        own_place = place + tl.cumsum(count, 0) - count
        tl.store(places_ptr + pair, own_place, mask=is_own)
        tl.store(tokens_ptr + own_place, pair // K, mask=is_own)
        place += tl.sum(count, 0)


def choose_experts_config(num_experts: int, k: int, normalize: bool) -> dict[str, int]:
    """A token a warp, so that no warp waits for another. With 128 experts a thread has 4 of them."""
    return {
        "NORMALIZE": normalize,
        "K": k,
        "SLOTS": next_power_of_2(k),
        "EXPERTS": next_power_of_2(num_experts),
        "TOKENS": 4,
        "num_warps": 4,
    }


def sort_pairs_config(k: int) -> dict[str, int]:
    """Eight pairs a thread at a time: 128 tokens with 8 experts each."""
    return {"K": k, "BLOCK": 1024, "num_warps": 4}


def route(logits: Tensor, k: int, normalize: bool, slots: Tensor) -> Routing:
    """route_reference in two kernels; of more than MOST_PAIRS pairs, the reference itself, in torch's kernels."""
    num_tokens, num_experts = logits.shape
    num_pairs = num_tokens * k
    if not 0 < num_pairs <= MOST_PAIRS:
        return route_reference(logits, k, normalize, slots)
    # A tensor each: parts of one would begin at any address, and Triton would compile a variant for each alignment.
    places, tokens, experts = (torch.empty(num_tokens, k, dtype=torch.int32, device=logits.device) for _ in range(3))
    weights = torch.empty(num_tokens, k, dtype=torch.float32, device=logits.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=logits.device)
    config = choose_experts_config(num_experts, k, normalize)
    sizes = (logits.stride(0), num_tokens, num_experts)
    grid = (ceil_div(num_tokens, config["TOKENS"]),)
    launch(_choose_experts_kernel, grid, (logits, slots, weights, experts, *sizes), config)
    pointers = (experts, places, tokens, offsets)
    launch(_sort_pairs_kernel, (num_experts + 1,), (*pointers, num_pairs), sort_pairs_config(k))
    return Routing(weights, places, tokens.flatten(), offsets)
