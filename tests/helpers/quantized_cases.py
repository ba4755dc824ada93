"""Random quantised matrices for the kernels' tests, on the CPU and on a GPU alike."""

import torch

from helpers.kernel_cases import DEVICE
from nanovllm.features.quantized.codes import Codes, Scales

FORMATS = [(8, 0, False), (8, 128, True), (8, 64, False), (4, 0, False), (4, 32, True), (4, 128, True), (4, 32, False)]
FORMATS += [(4, 16, True), (8, 16, False)]  # two groups are in a step
"""Bits, group size (0: a row is one group), whether there are zeros."""


def make_codes(
    shape: tuple[int, ...], bits: int, group_size: int, has_zeros: bool, seed: int = 0, is_sorted: bool = False
) -> Codes:
    """Random codes of the whole range, with scales that make weights of about one of them."""
    *leading, in_size = shape
    generator = torch.Generator().manual_seed(seed)
    low, high = (-127, 128) if bits == 8 else (0, 16)
    codes = torch.randint(low, high, shape, generator=generator)
    groups = -(-in_size // (group_size or in_size))
    scales = (torch.rand(*leading, groups, generator=generator) + 0.5) / high
    zeros = torch.randint(low, high + 1, (*leading, groups), generator=generator) if has_zeros else None
    packed = codes.to(torch.int8) if bits == 8 else codes[..., ::2].byte() | codes[..., 1::2].byte() << 4
    order = torch.randperm(in_size, generator=generator).to(DEVICE) if is_sorted else None
    zeros = None if zeros is None else zeros.to(DEVICE, torch.int16)
    return Codes(bits, packed.to(DEVICE), Scales(scales.to(DEVICE)), zeros, group_size or in_size, order)
