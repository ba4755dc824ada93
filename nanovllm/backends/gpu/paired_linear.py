"""Multiplies by weights of 8 or 4 bits whose codes are taken in pairs or in fours, in Triton. Inputs keep their type.

quantized_linear.py converts code by code. Here, as in decode_codes.py, an instruction works on two codes. An element of
16 bits has code i of 128 with code i + 64, or with three codes that are 32 apart. So the inputs of its low bytes, say,
are contiguous.

With few rows x is the left side of the product. With more rows the weights are: y^T = W x^T. Tensor cores may take the
left side from registers, where codes become numbers. The right side must come from shared memory on sm_90.

The references are `TorchMatrix` and `TorchExperts` in features/quantized/torch_matrix.py.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.backends.gpu.decode_codes import unpack_codes
from nanovllm.backends.gpu.grouped_linear import locate_tile
from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.quantized_linear import add_parts, list_tensors, split_steps
from nanovllm.backends.gpu.tiles import place_pairs, place_tile, store_tile
from nanovllm.backends.gpu.triton_shim import INTERPRETED, next_power_of_2, tl, triton
from nanovllm.features.families.qwen3_moe.ops import Routing
from nanovllm.features.quantized.codes import Codes, pack_int4, unpack_int4
from nanovllm.utils.integers import ceil_div

FEW_ROWS = 16
"""The most rows of a tile whose product has x as its left side."""

MOST_REGISTERS = 96
"""The most registers of a thread in such a tile: five programs share those of a multiprocessor. If the compiler is not
told, it takes 40 for some forms, and spills."""

TILES = ((16, 16, 32, 6, 4), (64, 64, 128, 3, 8), (192, 128, 128, 3, 8))
"""Rows, columns, stages and warps of a tile, each after the most rows of x for which it is taken. More rows take the
last one, too, if the matrix has no copy of 16 bits."""

GROUPED_TILES = ((128, 16, 64, 4, 4), (512, 32, 128, 3, 8), (1024, 128, 128, 3, 8))
"""The same for experts, each after the most tokens for which it is taken. More tokens take the last one, too."""

BAND = 16
"""Tiles of rows that meet the same columns before the next columns come, so that what they read stays in L2."""

BLOCK_K = 128
"""Codes of a step along K."""

_IS_COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def _unpack_fours(fours, minus):
    """Return the four codes of each of `fours`, from the lowest bits to the highest, less their zero, in bfloat16.

    In the assembly $4 is a register with two fours, and $5 has their -128 - zero. 0x4300 is 128 in bfloat16, and with
    the bits of a code it is 128 + code. `lop3` with 0xEA is (a & b) | c.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 next, bits, one;
        mov.b32 one, 0x3F803F80;
        lop3.b32 bits, $4, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $0, bits, one, $5;
        shr.b32 next, $4, 4;
        lop3.b32 bits, next, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $1, bits, one, $5;
        shr.b32 next, $4, 8;
        lop3.b32 bits, next, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $2, bits, one, $5;
        shr.b32 next, $4, 12;
        lop3.b32 bits, next, 0x000F000F, 0x43004300, 0xEA;
        fma.rn.bf16x2 $3, bits, one, $5;
        }""",
        "=r,=r,=r,=r,r,r",
        [fours, minus],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def unpack_fours(fours, zero, TYPE: tl.constexpr):
    """Return the four codes of each of `fours`, int16, less their zero, as numbers of TYPE. This is exact.

    Args:
        zero: int32, of the same shape.
    """
    if _IS_COMPILED and tl.bfloat16 == TYPE:
        first, second, third, fourth = _unpack_fours(fours, (-128 - zero).to(tl.bfloat16))
    else:
        first = ((fours & 15) - zero).to(TYPE)
        second = ((fours >> 4 & 15) - zero).to(TYPE)
        third = ((fours >> 8 & 15) - zero).to(TYPE)
        fourth = ((fours >> 12 & 15) - zero).to(TYPE)
    return first, second, third, fourth


@triton.jit
def _add_product(acc, x_at, start, in_size, is_row, weight, SWAPS: tl.constexpr, HAS_TAIL: tl.constexpr):
    """Return acc plus the product of weights [columns, n] with n inputs of each row of x, from number `start` on.

    Args:
        is_row: which rows exist. In a tile of few rows no others are loaded, or many programs would ask for one row.
    """
    k = start + tl.arange(0, weight.shape[1])
    if HAS_TAIL:
        x = tl.load(x_at + start, mask=is_row[:, None] & (k < in_size)[None, :], other=0.0)
    elif SWAPS:
        x = tl.load(x_at + start)
    else:
        x = tl.load(x_at + start, mask=is_row[:, None], other=0.0)
    return tl.dot(weight, tl.trans(x), acc) if SWAPS else tl.dot(x, tl.trans(weight), acc)


@triton.jit
def _multiply_pairs(
    x_rows,
    matrix,
    steps,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    SWAPS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return rows of x times columns of W^T, float32 [rows, columns], summed over some steps along K.

    Args:
        x_rows: a pointer to x, the length of a row, the rows' numbers, and which of them exist. Others are numbers of
            rows that do.
        matrix: pointers to the pairs, the scales and the zeros, the pairs of a row, how many columns W^T has, and the
            columns' numbers, which all exist.
        steps: the number of the first step, and the number after the last one.
    """
    x_ptr, in_size, row, is_row = x_rows
    pairs_ptr, scales_ptr, zeros_ptr, row_size, out_size, column = matrix
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_K * BITS // 16
    k = tl.arange(0, WIDTH)
    x_at = x_ptr + row.to(tl.int64)[:, None] * in_size + k[None, :]
    pairs_at = pairs_ptr + column.to(tl.int64)[:, None] * row_size + k[None, :]
    BLOCK_N: tl.constexpr = column.shape[0]
    acc = tl.zeros([BLOCK_N, row.shape[0]] if SWAPS else [row.shape[0], BLOCK_N], tl.float32)
    for step in range(steps[0], steps[1]):
        start = step * BLOCK_K
        pairs = tl.load(pairs_at + step * WIDTH)
        place = start // GROUP * out_size + column if GROUP else column
        total = tl.zeros_like(acc) if GROUP else acc
        if BITS == 8:
            low, high = unpack_codes(pairs, TYPE, False)
            total = _add_product(total, x_at, start, in_size, is_row, low, SWAPS, HAS_TAIL)
            total = _add_product(total, x_at, start + WIDTH, in_size, is_row, high, SWAPS, HAS_TAIL)
        else:
            zero = tl.load(zeros_ptr + place) if HAS_ZEROS else tl.full([BLOCK_N], 8, tl.int32)
            first, second, third, fourth = unpack_fours(pairs, tl.broadcast_to(zero[:, None], pairs.shape), TYPE)
            total = _add_product(total, x_at, start, in_size, is_row, first, SWAPS, HAS_TAIL)
            total = _add_product(total, x_at, start + WIDTH, in_size, is_row, second, SWAPS, HAS_TAIL)
            total = _add_product(total, x_at, start + 2 * WIDTH, in_size, is_row, third, SWAPS, HAS_TAIL)
            total = _add_product(total, x_at, start + 3 * WIDTH, in_size, is_row, fourth, SWAPS, HAS_TAIL)
        if GROUP:
            scale = tl.load(scales_ptr + place)
            acc += total * (scale[:, None] if SWAPS else scale[None, :])
        else:
            acc = total
    acc = tl.trans(acc) if SWAPS else acc
    return acc if GROUP else acc * tl.load(scales_ptr + column)[None, :]


@triton.jit(do_not_specialize=["num_rows", "part_steps"])
def _paired_linear_kernel(
    x_ptr,
    pairs_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    arrivals_ptr,
    in_size,
    row_size,
    out_size,
    num_rows,
    part_steps,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    SWAPS: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows / BLOCK_M x out_size / BLOCK_N, parts), by bands as place_tile says. Parts are as in
    # _quantized_linear_kernel. In the place of columns beyond the last one a program computes others once more, and so
    # it does with rows if it has many; of few it computes zeros. It stores nothing of them. No input is padding.
    wait_for_predecessor(PDL)
    part = tl.program_id(1)
    row, column = place_tile(num_rows, out_size, BAND, BLOCK_M, BLOCK_N)
    first = part * part_steps
    steps = (first, min(first + part_steps, tl.cdiv(in_size, BLOCK_K)))
    matrix = (pairs_ptr, scales_ptr, zeros_ptr, row_size, out_size, column % out_size)
    x_rows = (x_ptr, in_size, row % num_rows, row < num_rows)
    acc = _multiply_pairs(x_rows, matrix, steps, BITS, GROUP, HAS_ZEROS, SWAPS, HAS_TAIL, BLOCK_K)
    acc, is_last = add_parts(acc, partial_ptr, arrivals_ptr, tl.program_id(0), part)
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + column, mask=column < out_size, other=0.0).to(tl.float32)[None, :]
        store_tile(y_ptr, acc, row, num_rows, column, out_size)


@triton.jit(do_not_specialize=["num_groups", "num_experts"])
def _grouped_paired_kernel(
    x_ptr,
    pairs_ptr,
    scales_ptr,
    zeros_ptr,
    y_ptr,
    tokens_ptr,
    offsets_ptr,
    in_size,
    row_size,
    out_size,
    num_groups,
    num_experts,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    GATHER: tl.constexpr,
    EXPERTS: tl.constexpr,
    SWAPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid, tiles and padding as in _grouped_linear_kernel. Beyond the last pair and column it does what
    # _paired_linear_kernel does. An expert has num_groups scales for each column.
    wait_for_predecessor(PDL)
    num_columns = tl.cdiv(out_size, BLOCK_N)
    expert, begin, end = locate_tile(offsets_ptr, tl.program_id(0) // num_columns, num_experts, EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    pair, row, column = place_pairs(tokens_ptr, begin, end, out_size, GATHER, BLOCK_M, BLOCK_N)
    first = expert.to(tl.int64) * out_size
    values = (pairs_ptr + first * row_size, scales_ptr + first * num_groups, zeros_ptr + first * num_groups)
    matrix = (values[0], values[1], values[2], row_size, out_size, column % out_size)
    steps = (0, tl.cdiv(in_size, BLOCK_K))
    x_rows = (x_ptr, in_size, row, pair < end)
    y = _multiply_pairs(x_rows, matrix, steps, BITS, GROUP, HAS_ZEROS, SWAPS, HAS_TAIL, BLOCK_K)
    store_tile(y_ptr, y, pair, end, column, out_size)


def tile_config(num_rows: int, tiles: tuple[tuple[int, int, int, int, int], ...]) -> dict[str, int]:
    """Return the tile for a number of rows, and how it is computed."""
    rows, columns, stages, warps = next((tile for most, *tile in tiles if num_rows <= most), tiles[-1][1:])
    shape = {"BLOCK_M": rows, "BLOCK_N": columns, "BLOCK_K": BLOCK_K}
    if rows <= FEW_ROWS:
        shape["maxnreg"] = MOST_REGISTERS
    return shape | {"SWAPS": rows > FEW_ROWS, "num_warps": warps, "num_stages": stages}


def format_config(weight: Codes, in_size: int) -> dict[str, int]:
    """Return the constants that follow from a matrix alone.

    Args:
        weight: what `pair_codes` returns.
        in_size: the length of a row without padding.
    """
    group_size = weight.group_size if weight.group_size < in_size else 0
    form = {"BITS": weight.bits, "GROUP": group_size, "HAS_ZEROS": weight.zeros is not None}
    return form | {"HAS_TAIL": in_size % BLOCK_K > 0}


def is_supported(codes: Codes, dtype: torch.dtype) -> bool:
    """Return whether the kernels take a matrix or experts, and activations of dtype."""
    has_pairs = codes.bits == 4 or (codes.codes.dtype == torch.int8 and codes.zeros is None)
    has_steps = codes.group_size >= codes.in_features or codes.group_size % BLOCK_K == 0
    return has_pairs and has_steps and dtype.itemsize == 2


def pair_codes(codes: Codes) -> Codes:
    """Return the same weights as the kernels read them: with zeros at the ends of rows to whole steps, and in pairs.

    `order` says to which input each code belongs.

    Args:
        codes: of a matrix or of experts that `is_supported`.
    """
    in_size = codes.in_features
    lacking = -in_size % BLOCK_K
    input_ = torch.arange(in_size + lacking, device=codes.codes.device)
    place = input_.view(-1, 16 // codes.bits, BLOCK_K * codes.bits // 16).mT.flatten()
    values = codes.codes if codes.bits == 8 else unpack_int4(codes.codes)
    values = F.pad(values, (0, lacking)).index_select(-1, place)
    order = place if codes.order is None else torch.cat((codes.order, input_[in_size:]))[place]
    return replace(
        codes,
        codes=values if codes.bits == 8 else pack_int4(values),
        group_size=in_size + lacking if codes.group_size >= in_size else codes.group_size,
        order=order.expand(*codes.codes.shape[:-2], -1),
    )


def paired_linear(x: Tensor, weight: Codes, bias: Tensor | None, arrivals: Tensor) -> Tensor:
    """x [n, in] -> x W^T + bias [n, out], summed in float32, in x's dtype.

    Sums of more rows than the limit of the last tile are not split into parts. There are programs enough.

    Args:
        x: contiguous, of 16 bits, with its columns in the order of the codes' before they were in pairs.
        weight: what `pair_codes` returns, with scales and zeros as `lay_values` lays them. Its rows may be longer
            than those of x.
        arrivals: what `make_arrivals` returns.
    """
    num_rows, in_size = x.shape
    out_size = weight.out_features
    pairs, *values = list_tensors(weight)
    pairs = pairs.view(torch.int16)
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    config = format_config(weight, in_size) | {"HAS_BIAS": bias is not None, "BAND": BAND}
    config |= tile_config(num_rows, TILES)
    num_tiles = ceil_div(num_rows, config["BLOCK_M"]) * ceil_div(out_size, config["BLOCK_N"])
    num_parts, part_steps = split_steps(in_size, out_size, BLOCK_K)
    if num_rows > TILES[-1][0]:
        num_parts = 1
        part_steps = ceil_div(in_size, BLOCK_K)
    assert num_parts == 1 or num_tiles <= len(arrivals), f"{num_tiles} tiles, and {len(arrivals)} counters"
    num_partial = num_parts * num_tiles * config["BLOCK_M"] * config["BLOCK_N"] if num_parts > 1 else 0
    sums = torch.empty(num_partial, dtype=torch.float32, device=x.device)
    # If there is no bias, x takes its place as argument. The kernel does not read it there.
    pointers = (x, pairs, *values, x if bias is None else bias, y, sums, arrivals)
    sizes = (in_size, pairs.shape[1], out_size, num_rows, part_steps)
    launch(_paired_linear_kernel, (num_tiles, num_parts), (*pointers, *sizes), config)
    return y


def grouped_paired(x: Tensor, weight: Codes, routing: Routing, gather: bool) -> Tensor:
    """Do what `grouped_linear_reference` does, in one kernel. Its grid needs no length from the device.

    Args:
        x: contiguous, of 16 bits.
        weight: as `paired_linear` takes it, of several experts.
    """
    num_experts, out_size, _ = weight.codes.shape
    in_size = x.shape[1]
    num_tokens, k = routing.weights.shape
    num_pairs = num_tokens * k
    pairs, *values = list_tensors(weight)
    pairs = pairs.view(torch.int16)
    y = torch.empty(num_pairs, out_size, dtype=x.dtype, device=x.device)
    config = format_config(weight, in_size) | {"GATHER": gather, "EXPERTS": next_power_of_2(num_experts)}
    config |= tile_config(num_tokens, GROUPED_TILES)
    most_tiles = min(num_pairs, ceil_div(num_pairs, config["BLOCK_M"]) + num_experts)
    grid = (most_tiles * ceil_div(out_size, config["BLOCK_N"]),)
    pointers = (x, pairs, *values, y, routing.tokens, routing.offsets)
    sizes = (in_size, pairs.shape[2], out_size, weight.scales.shape[2], num_experts)
    launch(_grouped_paired_kernel, grid, (*pointers, *sizes), config)
    return y
