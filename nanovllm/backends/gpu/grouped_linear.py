"""Multiplies every token by the matrices of its experts, all experts in one launch of a Triton kernel.

The reference is `grouped_linear_reference` in features/families/qwen3_moe/ops.py.
"""

import torch
from torch import Tensor

from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.features.families.qwen3_moe.ops import Routing
from nanovllm.utils.integers import ceil_div

TILES = ((32, 16, 64), (128, 16, 128), (512, 32, 256))
"""Rows and columns of a tile, each after the most tokens for which it is taken. More tokens take (128, 256)."""


@triton.jit
def locate_tile(offsets_ptr, tile, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the expert of a tile, its first pair and the end of the expert's pairs.

    Beyond the last expert's tiles the expert is num_experts or more.
    """
    lane = tl.arange(0, EXPERTS)
    begins = tl.load(offsets_ptr + lane, mask=lane < num_experts, other=0)
    ends = tl.load(offsets_ptr + lane + 1, mask=lane < num_experts, other=0)
    tiles = tl.cdiv(ends - begins, BLOCK_M)
    last_tile = tl.cumsum(tiles, 0)
    expert = tl.sum((last_tile <= tile).to(tl.int32), 0)
    is_mine = lane == expert
    first_tile = tl.sum(tl.where(is_mine, last_tile - tiles, 0), 0)
    begin = tl.sum(tl.where(is_mine, begins, 0), 0) + (tile - first_tile) * BLOCK_M
    end = tl.sum(tl.where(is_mine, ends, 0), 0)
    return expert, begin, end


@triton.jit(do_not_specialize=["num_experts"])
def _grouped_linear_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    tokens_ptr,
    offsets_ptr,
    in_size,
    out_size,
    num_experts,
    GATHER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (at least the number of tiles x out_size / BLOCK_N,), columns fastest: programs that read one x run together.
    # A program owns BLOCK_M pairs of one expert and BLOCK_N columns; it finds its expert by counting tiles.
    # Tiles beyond the last expert's do nothing; pairs of padding are in no expert's range.
    wait_for_predecessor(PDL)
    num_columns = tl.cdiv(out_size, BLOCK_N)
    expert, begin, end = locate_tile(offsets_ptr, tl.program_id(0) // num_columns, num_experts, EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return

    pair = begin + tl.arange(0, BLOCK_M)
    is_pair = pair < end
    row = tl.load(tokens_ptr + pair, mask=is_pair, other=0) if GATHER else pair
    column = tl.program_id(0) % num_columns * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < out_size
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row.to(tl.int64)[:, None] * in_size + k[None, :]
    matrix_ptr = weight_ptr + expert.to(tl.int64) * out_size * in_size
    weight_at = matrix_ptr + column[None, :].to(tl.int64) * in_size + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_size, BLOCK_K):
        inside = start + k < in_size
        x = tl.load(x_at + start, mask=is_pair[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=inside[:, None] & is_column[None, :], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    y_at = y_ptr + pair.to(tl.int64)[:, None] * out_size + column[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


def grouped_linear_config(num_tokens: int, num_experts: int, gather: bool, itemsize: int) -> dict[str, int]:
    """Return tiles by the number of tokens. K always goes by 64, so that sums are always taken in one order."""
    rows, columns = next(((m, n) for most, m, n in TILES if num_tokens <= most), (128, 256))
    if itemsize == 4:
        rows = min(rows, 64)
        columns = min(columns, 64)
    return {
        "GATHER": gather,
        "EXPERTS": next_power_of_2(num_experts),
        "BLOCK_M": rows,
        "BLOCK_N": columns,
        "BLOCK_K": 64,
        "num_warps": 8 if rows * columns > 8192 else 4,
        "num_stages": 3,
    }


def grouped_linear(x: Tensor, weight: Tensor, routing: Routing, gather: bool) -> Tensor:
    """grouped_linear_reference in one kernel. Its grid needs no length from the device."""
    num_experts, out_size, in_size = weight.shape
    num_tokens, k = routing.weights.shape
    pairs = num_tokens * k
    y = torch.empty(pairs, out_size, dtype=x.dtype, device=x.device)
    config = grouped_linear_config(num_tokens, num_experts, gather, x.element_size())
    most_tiles = min(pairs, ceil_div(pairs, config["BLOCK_M"]) + num_experts)
    grid = (most_tiles * ceil_div(out_size, config["BLOCK_N"]),)
    sizes = (in_size, out_size, num_experts)
    launch(_grouped_linear_kernel, grid, (x, weight, y, routing.tokens, routing.offsets, *sizes), config)
    return y
