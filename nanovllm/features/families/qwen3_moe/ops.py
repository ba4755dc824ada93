"""The operators of mixtures of experts (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538), in plain torch.

Each token chooses its experts (softmax, then the k highest), the pairs are sorted by expert, multiplied by the experts'
matrices, and what a token's experts have computed is added up by the weights of the routing.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Routing(NamedTuple):
    """Experts of the tokens. A pair is a token with one of its k experts. Pairs are sorted by expert, then by token.

    Attributes:
        weights: float32 [num_tokens, k], rounded to the model's dtype. The most probable expert comes first; of equally
            probable experts, the lowest.
        places: int32 [num_tokens, k], the index of each pair in the sorted order.
        tokens: int32 [num_tokens * k], the token of each sorted pair.
        offsets: int32 [num_experts + 1]. Expert e has the sorted pairs from offsets[e] to offsets[e + 1]. The pairs of
            padding tokens come after those of all experts.
    """

    weights: Tensor
    places: Tensor
    tokens: Tensor
    offsets: Tensor


class SharedOutput(NamedTuple):
    """Holds the output of an expert that every token has, and its gate.

    Attributes:
        y: [num_tokens, size], what it has computed.
        gate: [num_tokens, 1]. The sigmoid of it is the expert's weight. Its rows may lie apart in memory.
    """

    y: Tensor
    gate: Tensor


def route_reference(logits: Tensor, k: int, normalize: bool, slots: Tensor) -> Routing:
    """Choose k experts for each token by the router's logits [num_tokens, num_experts].

    Args:
        logits: their rows may lie apart in memory.
        normalize: whether a token's weights are divided by their sum.
        slots: int64 [num_tokens], where K and V of a token are stored; -1 marks padding, which gets no expert.
    """
    num_experts = logits.shape[1]
    sorted_probabilities, experts = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = sorted_probabilities[:, :k]
    experts = experts[:, :k].where(slots.unsqueeze(1) >= 0, num_experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return sort_pairs(experts, weights.to(logits.dtype), num_experts)


def sort_pairs(experts: Tensor, weights: Tensor, num_experts: int) -> Routing:
    """Sort the pairs of experts [num_tokens, k] and their weights, without waiting for the device.

    An expert num_experts or above is none.
    """
    ordered, order = experts.flatten().sort(stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    first = torch.arange(num_experts + 1, dtype=ordered.dtype, device=ordered.device)
    offsets = torch.searchsorted(ordered, first, out_int32=True)
    tokens = (order // experts.shape[1]).to(torch.int32)
    return Routing(weights.float(), places.view(experts.shape), tokens, offsets)


def grouped_linear_reference(x: Tensor, weight: Tensor, routing: Routing, gather: bool) -> Tensor:
    """Multiply pairs by the matrices of their experts, weight [num_experts, out, in]; return y [pairs, out], sorted.

    The rows of padding's pairs, which have no expert, are undefined.

    Args:
        gather: True if x is [num_tokens, in], from which each pair takes its token's row. False if it is [pairs, in],
            in sorted order.
    """
    rows = x[routing.tokens.long()] if gather else x
    y = rows.new_zeros(len(rows), weight.shape[1])
    offsets = routing.offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(offsets)):
        if begin < end:
            y[begin:end] = F.linear(rows[begin:end], weight[expert])
    return y


def combine_reference(y: Tensor, routing: Routing, shared: SharedOutput | None = None) -> Tensor:
    """Return the weighted sums [num_tokens, size] of each token's rows of y [pairs, size], which is in sorted order.

    Sums are float32, in the order of each token's weights. So the other tokens of a step change no bit of them.

    Args:
        shared: comes last in the sums, if the model has a shared expert.
    """
    total = torch.zeros(len(routing.places), y.shape[1], dtype=torch.float32, device=y.device)
    for places, weights in zip(routing.places.long().unbind(1), routing.weights.unbind(1), strict=True):
        total += y[places].float() * weights.unsqueeze(1)
    if shared is not None:
        total += shared.y.float() * shared.gate.float().sigmoid()
    return total.to(y.dtype)


class ExpertOperators:
    """Computes each operator with its plain-torch reference. A subclass replaces those that it computes faster."""

    def __init__(self, backend: object) -> None:
        """The references need nothing of the backend."""

    route = staticmethod(route_reference)
    grouped_linear = staticmethod(grouped_linear_reference)
    combine = staticmethod(combine_reference)
