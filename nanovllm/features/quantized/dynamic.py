"""Products in whole numbers: int8 weights times activations that are rounded to int8 while a product runs.

This is the plain-torch form. The C++ kernels of backends/cpu/dynamic.h compute the same bits, and are compared with it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.utils.integers import ceil_div

GROUP = 128
"""Inputs in a row of the activations that share a scale, as in backends/cpu/dynamic.h."""

EXACT = 1024
"""Products of codes that float32 adds exactly, in any order: the sum of as many is below 2^24."""

MOST_INPUTS = (2**31 - 1) // (127 * 128)
"""Products of codes that int32 adds exactly. A checkpoint's codes may be -128."""

TINY = 2.0**-100
"""A group counts as zeros if no magnitude in it is larger: the reciprocal of a smaller one may be infinite."""


def round_inputs(x: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Round activations x [n, in] to whole numbers, in float32.

    For each row and group of inputs: scale = max |x| / 127, and code = round(x * (127 / max |x|)), ties to even.
    Every operation is rounded by itself. A group with a NaN or an infinity gets the scale NaN.

    Args:
        group: how many inputs have a scale; `in` for one scale a row.

    Returns:
        Codes from -127 to 127, float32 [n, groups, group], padded with zeros; and scales, float32 [n, groups].
    """
    n, size = x.shape
    padded = F.pad(x.to(torch.float32), (0, -size % group)).view(n, ceil_div(size, group), group)
    most = padded.abs().amax(2)
    largest = torch.full_like(most, 127)  # with a number instead, torch may multiply by a reciprocal
    inverse = torch.where(most >= TINY, largest / most, 0)
    codes = (padded * inverse.unsqueeze(2)).round_()
    scales = torch.where(most >= TINY, most / largest, 0).masked_fill_(~most.isfinite(), torch.nan)
    return codes.masked_fill_(~most.isfinite().unsqueeze(2), 0), scales


def multiply_rounded(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rounded activations x [n, in] by a matrix: x W^T + bias, [n, out].

    The sum of a group is below 2^24, so float32 holds it and all its partial sums exactly, whatever their order.

    Args:
        codes: int8 [out, in].
        scales: float32 [out].
    """
    inputs, input_scales = round_inputs(x)
    total = x.new_zeros(len(x), len(codes), dtype=torch.float32)
    for group in range(inputs.shape[1]):
        weights = codes[:, group * GROUP : (group + 1) * GROUP].to(torch.float32)
        sums = inputs[:, group, : weights.shape[1]] @ weights.T
        total += sums.mul_(input_scales[:, group, None])
    total *= scales
    return (total if bias is None else total.add_(bias)).to(x.dtype)


def multiply_rounded_tokens(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Do what `multiply_rounded` does, with one scale for all inputs of a row.

    So the sum of a row is exact in whole numbers, whatever its order. It becomes float32, and is multiplied by the
    scale of the inputs and then by that of the weights.
    """
    size = x.shape[1]
    inputs, input_scales = round_inputs(x, size)
    sums = x.new_zeros(len(x), len(codes), dtype=torch.float64)  # it holds them exactly
    for start in range(0, size, EXACT):
        sums += inputs[:, 0, start : start + EXACT] @ codes[:, start : start + EXACT].to(torch.float32).T
    total = sums.to(torch.float32).mul_(input_scales).mul_(scales)
    return (total if bias is None else total.add_(bias)).to(x.dtype)
