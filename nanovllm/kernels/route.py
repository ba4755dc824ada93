"""Which experts each token goes to: softmax, the k highest, and a counting sort by expert (Shazeer et al. 2017,
https://arxiv.org/abs/1701.06538)."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.launch import after_predecessor, launch
from nanovllm.kernels.triton_shim import next_power_of_2, tl, triton

MOST_PAIRS = 4096
"""Beyond so many pairs one program would sort for too long: torch sorts them, into the same order."""


class Routing(NamedTuple):
    """A pair is a token with one of its k experts. Pairs are sorted by expert, those of one expert by token.

    Attributes:
        weights: float32 [num_tokens, k], rounded to the model's dtype; the most probable expert first, and of several
            alike the one with the lowest number.
        places: int32 [num_tokens, k], where each pair lies among the sorted ones.
        tokens: int32 [num_tokens * k], the token of each sorted pair.
        offsets: int32 [num_experts + 1]: expert e has the sorted pairs from offsets[e] to offsets[e + 1]. The pairs of
            padding tokens come after all these.
    """

    weights: Tensor
    places: Tensor
    tokens: Tensor
    offsets: Tensor


def route_reference(logits: Tensor, k: int, normalize: bool, slots: Tensor) -> Routing:
    """Route by logits [num_tokens, num_experts].

    Args:
        normalize: whether a token's weights are divided by their sum.
        slots: int64 [num_tokens]; -1 is padding, which goes to no expert.
    """
    num_experts = logits.shape[1]
    sorted_probabilities, experts = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, experts = sorted_probabilities[:, :k], experts[:, :k]
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return sort_pairs(
        weights.to(logits.dtype).float(), experts.where(slots.unsqueeze(1) >= 0, num_experts), num_experts
    )


def sort_pairs(weights: Tensor, experts: Tensor, num_experts: int) -> Routing:
    """The routing of tokens to experts [num_tokens, k]; nothing here waits for the device."""
    ordered, order = experts.flatten().sort(stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    first = torch.arange(num_experts + 1, dtype=ordered.dtype, device=ordered.device)
    offsets = torch.searchsorted(ordered, first, out_int32=True)
    tokens = (order // experts.shape[1]).to(torch.int32)
    return Routing(weights, places.view(experts.shape), tokens, offsets)


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits_ptr,
    slots_ptr,
    weights_ptr,
    places_ptr,
    tokens_ptr,
    offsets_ptr,
    experts_ptr,
    logits_stride,
    num_tokens,
    num_experts,
    NORMALIZE: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (1,).
    # The program owns all tokens, TOKENS at a time: first it chooses experts and counts, then it places the pairs.
    # Tokens with slot -1 are padding: their pairs lie after all others, in no expert's range.
    after_predecessor(PDL)
    expert = tl.arange(0, EXPERTS)[None, :]
    row = tl.arange(0, TOKENS)
    counts = tl.zeros([EXPERTS], tl.int32)
    num_padding = 0
    for start in range(0, num_tokens, TOKENS):
        token = start + row
        exists = token < num_tokens
        is_real = exists & (tl.load(slots_ptr + token, mask=exists, other=-1) >= 0)
        inside = exists[:, None] & (expert < num_experts)
        at = logits_ptr + token.to(tl.int64)[:, None] * logits_stride + expert
        logits = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
        logits = tl.where(exists[:, None], logits, 0.0)
        highest = tl.max(logits, 1)
        exponentials = tl.exp(logits - highest[:, None])
        total = tl.sum(exponentials, 1)
        left = exponentials / total[:, None]
        # One NaN makes the whole row NaN. On a GPU the same expert would then win k times, and `tokens` would keep what
        # lay in memory. As zeros, the row ties: the lowest k experts are chosen.
        left = tl.where(left >= 0.0, left, 0.0)
        chosen_sum = tl.zeros([TOKENS], tl.float32)
        chosen = tl.zeros([TOKENS, EXPERTS], tl.int32)
        for slot in tl.static_range(K):
            best, index = tl.max(left, 1, return_indices=True, return_indices_tie_break_left=True)
            is_best = expert == index[:, None]
            left = tl.where(is_best, -1.0, left)
            chosen += is_best.to(tl.int32)
            chosen_sum += best
            tl.store(experts_ptr + token * K + slot, index.to(tl.int32), mask=exists)
        chosen = tl.where(is_real[:, None], chosen, 0)
        before = tl.cumsum(chosen, 0) - chosen + counts[None, :]
        padding = (exists & ~is_real).to(tl.int32)
        padding_before = tl.cumsum(padding, 0) - padding + num_padding
        left = exponentials / total[:, None]
        left = tl.where(left >= 0.0, left, 0.0)
        for slot in tl.static_range(K):
            best, index = tl.max(left, 1, return_indices=True, return_indices_tie_break_left=True)
            is_best = expert == index[:, None]
            left = tl.where(is_best, -1.0, left)
            weight = best / chosen_sum if NORMALIZE else best
            weight = tl.where(total > 0.0, weight, float("nan"))  # so that the sampler sees a broken row
            rank = tl.sum(tl.where(is_best, before, 0), 1)
            rank = tl.where(is_real, rank, padding_before * K + slot)
            tl.store(places_ptr + token * K + slot, rank, mask=exists)
            weight = weight.to(logits_ptr.dtype.element_ty).to(tl.float32)
            tl.store(weights_ptr + token * K + slot, weight, mask=exists)
        counts += tl.sum(chosen, 0)
        num_padding += tl.sum(padding, 0)
    ends = tl.cumsum(counts, 0)
    begins = ends - counts
    lane = tl.arange(0, EXPERTS)
    tl.store(offsets_ptr + lane, begins, mask=lane < num_experts)
    tl.store(offsets_ptr + num_experts, tl.sum(counts, 0))
    tl.debug_barrier()  # what other threads of this program have stored is read now
    for start in range(0, num_tokens, TOKENS):
        token = start + row
        exists = token < num_tokens
        is_real = exists & (tl.load(slots_ptr + token, mask=exists, other=-1) >= 0)
        for slot in tl.static_range(K):
            index = tl.load(experts_ptr + token * K + slot, mask=exists, other=0)
            index = tl.where(is_real, index, num_experts)
            place = tl.load(places_ptr + token * K + slot, mask=exists, other=0)
            place += tl.load(offsets_ptr + index, mask=exists, other=0)
            tl.store(places_ptr + token * K + slot, place, mask=exists)
            tl.store(tokens_ptr + place, token, mask=exists)


def route_config(num_experts: int, k: int, normalize: bool) -> dict[str, int]:
    """16 tokens at a time: with 128 experts, that is 16 numbers a thread."""
    return {"NORMALIZE": normalize, "K": k, "EXPERTS": next_power_of_2(num_experts), "TOKENS": 16, "num_warps": 4}


def route(logits: Tensor, k: int, normalize: bool, slots: Tensor) -> Routing:
    """route_reference in one kernel, or, of many tokens, in a few."""
    num_tokens, num_experts = logits.shape
    if not 0 < num_tokens * k <= MOST_PAIRS:
        return route_reference(logits, k, normalize, slots)
    pairs = torch.empty(3, num_tokens, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, k, dtype=torch.float32, device=logits.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=logits.device)
    places, tokens, experts = pairs.unbind()
    config = route_config(num_experts, k, normalize)
    sizes = (logits.stride(0), num_tokens, num_experts)
    launch(_route_kernel, (1,), (logits, slots, weights, places, tokens, offsets, experts, *sizes), config)
    return Routing(weights, places, tokens.flatten(), offsets)
