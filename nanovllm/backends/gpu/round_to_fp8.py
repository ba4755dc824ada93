"""Rounds activations to fp8 (e4m3), in Triton, for products of fp8 by fp8 on tensor cores of sm_89 and later.

No option of users leads here: scripts/gpu_products.py times it. The reference is `round_inputs_to_fp8` in
features/quantized/dynamic.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.round_groups import Rounded
from nanovllm.backends.gpu.rounded_linear import ROUNDED_AT_A_TIME
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.features.quantized.dynamic import GROUP, TINY
from nanovllm.utils.integers import ceil_div


@triton.jit
def _round_mantissas(x):
    """Round x, float32 of at most 448, to the numbers of fp8, ties to even, in float32.

    The conversion that follows is then exact. Triton's interpreter does not round in it as a GPU does.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    STEPS: tl.constexpr = 1.5 * 2**14  # float32 of this size has steps of 2^-9, as the subnormals of fp8
    return tl.where(tl.abs(x) < 2**-6, (x + STEPS) - STEPS, normal)


@triton.jit(do_not_specialize=["num_rows", "num_groups"])
def _round_to_fp8_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    in_size,
    num_rows,
    num_groups,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid and padding as in _round_inputs_kernel. NaN becomes infinity before the maximum, which ignores it.
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row * in_size + column, mask=column < in_size, other=0.0).to(tl.float32)
    infinity = float("inf")
    most = tl.max(tl.where(tl.abs(x) < infinity, tl.abs(x), infinity), 1)
    has_values = (most < infinity) & (most >= LEAST)
    largest = tl.full([GROUPS], 448.0, tl.float32)
    inverse = tl.where(has_values, tl.div_rn(largest, tl.where(has_values, most, 1.0)), 0.0)
    scale = tl.where(has_values, tl.div_rn(most, largest), tl.where(most < infinity, 0.0, float("nan")))
    numbers = _round_mantissas(tl.where(has_values[:, None], x, 0.0) * inverse[:, None])
    codes = numbers.to(codes_ptr.dtype.element_ty)
    is_group = group < num_groups
    tl.store(codes_ptr + row * (num_groups * GROUP) + column, codes, mask=is_group[:, None])
    tl.store(scales_ptr + group * num_rows + row, scale, mask=is_group)


def round_to_fp8_config() -> dict[str, float]:
    """Return the constants to compile with."""
    return {"GROUP": GROUP, "LEAST": TINY, "GROUPS": ROUNDED_AT_A_TIME, "num_warps": 4, "enable_fp_fusion": False}


def round_to_fp8(x: Tensor) -> Rounded:
    """Do what `round_inputs_to_fp8` does for x [n, in], which is contiguous. The codes are float8."""
    num_rows, in_size = x.shape
    num_groups = ceil_div(in_size, GROUP)
    codes = torch.empty(num_rows, num_groups * GROUP, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_groups, num_rows, dtype=torch.float32, device=x.device)
    grid = (num_rows, ceil_div(num_groups, ROUNDED_AT_A_TIME))
    launch(_round_to_fp8_kernel, grid, (x, codes, scales, in_size, num_rows, num_groups), round_to_fp8_config())
    return Rounded(codes, scales)
