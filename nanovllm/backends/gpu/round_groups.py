"""Rounds a row of activations to int8: for the kernel that does only this, and for those that write the row.

The reference is `round_inputs` in features/quantized/dynamic.py. A kernel that calls `store_rounded` has its bits if it
is compiled with enable_fp_fusion=False.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.utils.integers import ceil_div

MAGIC = tl.constexpr(12582912.0)
"""1.5 x 2^23. Adding it rounds a small number to a whole one, ties to even, in the lowest bits of the sum."""

MAGIC_BITS = tl.constexpr(0x4B400000)


class Rounding(NamedTuple):
    """How inputs of a product are rounded.

    Attributes:
        group, least: GROUP and TINY of features/quantized/dynamic.py. Rows of codes are padded to a multiple of GROUP.
        by_token: whether a row has one scale, and not one for each group.
    """

    group: int
    least: float
    by_token: bool = False


class Rounded(NamedTuple):
    """Rounded activations.

    Attributes:
        codes: int8 [n, groups * group], with zeros beyond the last input.
        scales: float32 [groups, n], or [1, n] by token.
    """

    codes: Tensor
    scales: Tensor


@triton.jit
def store_rounded(x, places, row, first, GROUP: tl.constexpr, LEAST: tl.constexpr, BY_TOKEN: tl.constexpr):
    """Round some columns of one row, and store their codes and scales.

    Args:
        x: float32 [columns], a multiple of GROUP of them, with zeros beyond the last input. BY_TOKEN it is the row.
        places: pointers to codes and scales, and how many rows and groups there are.
        row: its number, int64.
        first: the number of x's first group; 0 BY_TOKEN.
    """
    codes_ptr, scales_ptr, num_rows, num_groups = places
    # Elements that share a scale, and how many scales they have here.
    SHARE: tl.constexpr = x.shape[0] if BY_TOKEN else GROUP
    GROUPS: tl.constexpr = x.shape[0] // SHARE
    x = tl.reshape(x, [GROUPS, SHARE])
    # The bits of magnitudes are in the order of the floats, and those of NaN are the largest.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    most = bits.to(tl.float32, bitcast=True)
    is_finite = bits < 0x7F800000
    has_values = is_finite & (most >= LEAST)
    steps = tl.full([GROUPS], 127.0, tl.float32)
    inverse = tl.where(has_values, tl.div_rn(steps, tl.where(has_values, most, 1.0)), 0.0)
    scale = tl.where(has_values, tl.div_rn(most, steps), tl.where(is_finite, 0.0, float("nan")))
    shifted = tl.where(is_finite[:, None], x, 0.0) * inverse[:, None] + MAGIC
    codes = (shifted.to(tl.int32, bitcast=True) - MAGIC_BITS).to(tl.int8)
    group = first + tl.arange(0, GROUPS)
    column = group[:, None] * SHARE + tl.arange(0, SHARE)[None, :]
    is_code = column < num_groups * GROUP if BY_TOKEN else (group < num_groups)[:, None]
    tl.store(codes_ptr + row * (num_groups * GROUP) + column, codes, mask=is_code)
    tl.store(scales_ptr + group * num_rows + row, scale, mask=group < num_groups)


def make_rounded(num_rows: int, size: int, rounding: Rounding, device: torch.device) -> Rounded:
    """Return room for the codes and scales of activations [num_rows, size]."""
    num_groups = ceil_div(size, rounding.group)
    codes = torch.empty(num_rows, num_groups * rounding.group, dtype=torch.int8, device=device)
    num_scales = 1 if rounding.by_token else num_groups
    return Rounded(codes, torch.empty(num_scales, num_rows, dtype=torch.float32, device=device))


def rounding_config(rounding: Rounding | None) -> dict[str, float]:
    """Return the constants of a kernel that rounds what it writes; a GROUP of 0 rounds nothing."""
    if rounding is None:
        return {"GROUP": 0, "LEAST": 0.0, "BY_TOKEN": False}
    constants = {"GROUP": rounding.group, "LEAST": rounding.least, "BY_TOKEN": rounding.by_token}
    return constants | {"enable_fp_fusion": False}


def give_rounded(x: Tensor, rounding: Rounding | None) -> tuple[Tensor, Tensor, int, int]:
    """Give x [n, size], which a kernel is about to write, its rounded form too. Return the `places` of that form.

    x carries it as an attribute, and `find_rounded` returns it to whoever multiplies x. So nobody may write to x later:
    in inference mode torch counts no versions of a tensor, so no product could notice. tests/runner/test_launches.py
    looks for such a write.
    If nothing is rounded, x takes the place of codes and scales as argument. The kernel does not write there.
    """
    if rounding is None:
        return x, x, 0, 0
    num_rows, size = x.shape
    rounded = make_rounded(num_rows, size, rounding, x.device)
    x.rounded = rounded  # type: ignore[attr-defined]
    return *rounded, num_rows, rounded.codes.shape[1] // rounding.group


def find_rounded(x: Tensor) -> Rounded | None:
    """Return the rounded form that x carries; None if it carries none, as a view of it, say."""
    return getattr(x, "rounded", None)
