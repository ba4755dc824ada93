"""Joins the parts of a parameter, such as q, k and v, to as few matrices as their forms allow."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.features.quantized.codes import Codes, join_alike

Weights = Codes | Tensor
"""A part of a parameter: rows [..., n, in], as codes or, if a checkpoint does not quantise them, as numbers."""


def are_whole(parts: Collection[Weights], parameter: nn.Parameter) -> bool:
    """Return whether the parts fill a parameter, but for its padding, which has no part."""
    return _count_lacking(parts, parameter) * parameter.shape[-1] <= getattr(parameter, "padding", 0)


def _count_lacking(parts: Collection[Weights], parameter: nn.Parameter) -> int:
    """Return how many rows of a parameter the parts lack."""
    num_rows = sum(math.prod(_rows_of(part).shape[:-1]) for part in parts)
    return math.prod(parameter.shape[:-1]) - num_rows


def join_parts(parts: Sequence[Weights], parameter: nn.Parameter) -> list[Weights]:
    """Return the matrices [n, in], or [num_experts, n, in], that lie side by side in a parameter, in their own memory.

    Neighbours of the same form become one matrix. Rows of padding, which have no part, get zeros.

    Args:
        parts: all parts of it, in the order of their rows: either each has one expert, or each has all of them.

    Raises:
        ValueError: the same part has different forms in several experts. They may have different orders of columns.
    """
    num_lacking = _count_lacking(parts, parameter)
    if not are_whole(parts, parameter):
        raise RuntimeError(f"{num_lacking} rows of a quantised matrix have not been filled")
    num_experts = parameter.shape[0] if parameter.dim() > _rows_of(parts[0]).dim() else 1
    per_expert = len(parts) // num_experts
    of_experts = [parts[i::per_expert] for i in range(per_expert)]  # each part, in all experts
    for same in of_experts:
        if len({_describe(part) for part in same}) > 1:
            raise ValueError("its form differs from that of the same matrix in another expert")
    runs: list[list[Sequence[Weights]]] = []
    for same in of_experts:
        if runs and _are_alike(runs[-1][-1], same):
            runs[-1].append(same)
        else:
            runs.append([same])
    outer = parameter.shape[:-2]
    padding = [0] * (len(runs) - 1) + [num_lacking]
    return [_join(run, outer, rows) for run, rows in zip(runs, padding, strict=True)]


def _rows_of(part: Weights) -> Tensor:
    """Return the tensor of a part that has its shape, but for the length of a row."""
    return part.codes if isinstance(part, Codes) else part


def _describe(part: Weights) -> tuple[object, ...]:
    return part.describe_form() if isinstance(part, Codes) else (part.dtype,)


def _are_alike(part: Sequence[Weights], other: Sequence[Weights]) -> bool:
    """Return whether a part and its neighbour, both given of each expert, can be one matrix."""
    if _describe(part[0]) != _describe(other[0]):
        return False
    pairs = zip(part, other, strict=True)
    orders = [(a.order, b.order) for a, b in pairs if isinstance(a, Codes) and isinstance(b, Codes)]
    return all(torch.equal(a, b) for a, b in orders if a is not None and b is not None)


def _join(run: Sequence[Sequence[Weights]], outer: torch.Size, num_lacking: int) -> Weights:
    """Join parts of one form, each given of each expert. `outer` is [num_experts], or empty."""
    parts = list(chain.from_iterable(zip(*run, strict=True)))  # expert by expert

    def join(tensors: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(tuple(tensors), -2)
        if num_lacking:
            joined = F.pad(joined, (0, 0, 0, num_lacking))
        return joined.view(*outer, -1, joined.shape[-1])

    if not isinstance(parts[0], Codes):
        return join([_rows_of(part) for part in parts])
    joined = join_alike([part for part in parts if isinstance(part, Codes)], join)
    if joined.zeros is not None and bool((joined.zeros == (8 if joined.bits == 4 else 0)).all()):
        joined = replace(joined, zeros=None)
    orders = [part.order for part in run[0] if isinstance(part, Codes) and part.order is not None]
    if not orders or not outer:
        return joined
    return replace(joined, order=orders[0] if orders[0].dim() > 1 else torch.stack(orders))
