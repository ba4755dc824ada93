"""Multiplies by a matrix of codes with scales, 8 or 4 bits a weight, in Triton. Activations keep their type.

The references are `TorchMatrix` and `TorchExperts` in features/quantized/torch_matrix.py.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.backends.gpu.fp8_codes import read_fp8
from nanovllm.backends.gpu.grouped_linear import locate_tile
from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.triton_shim import next_power_of_2, tl, triton
from nanovllm.features.families.qwen3_moe.ops import Routing
from nanovllm.features.quantized.codes import Codes
from nanovllm.utils.integers import ceil_div

TILES = ((16, 16, 32, 6), (64, 64, 64, 3), (128, 128, 64, 3))
"""Rows, columns and stages of a tile, each after the most rows of x for which it is taken. More rows take none of them.

Few rows wait for memory alone: six stages have five steps' codes under way, three have two.
"""


GROUPED_TILES = ((128, 16, 64, 3), (512, 32, 64, 3))
"""The same for experts, each after the most tokens for which it is taken. More tokens take (128, 64, 3)."""


MIN_PROGRAMS = 264
"""A product has at least so many programs if its sums are long enough: two for each multiprocessor of an H100."""


MIN_STEPS = 4
"""The fewest steps along K of a program's part of a sum."""


MAX_SCRATCH = 2**26
"""The most weights that are dequantised at a time: 128 MiB in 16 bits."""


MAX_BLOCK_K = 128


MIN_BLOCK_K = 32
"""With 16, the compiler of Triton 3.6 gives wrong products of four-bit codes: tests on an H100 found it."""


@triton.jit
def _load_codes(
    matrix, step, columns, BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return code - zero of some columns of W^T at one step along K, int32 [columns, BLOCK_K]; uint8 if they are fp8.

    Args:
        matrix: pointers to codes and zeros, the bytes of a row of codes, and the number of the rows.
        columns: the columns' numbers, and which of them exist.
    """
    codes_ptr, zeros_ptr, packed_size, out_size = matrix
    column, is_column = columns
    byte = step * (BLOCK_K * BITS // 8) + tl.arange(0, BLOCK_K * BITS // 8)
    inside = is_column[:, None] & (byte < packed_size)[None, :]
    codes = tl.load(codes_ptr + column.to(tl.int64)[:, None] * packed_size + byte[None, :], mask=inside, other=0)
    if BITS == 4:
        codes = tl.interleave(codes & 15, codes >> 4)
    if BITS == 4 or codes.dtype == tl.int8:
        codes = codes.to(tl.int32)
    if HAS_ZEROS:
        group = step * BLOCK_K // GROUP if GROUP else 0
        codes -= tl.load(zeros_ptr + group * out_size + column, mask=is_column, other=0)[:, None]
    elif BITS == 4:
        codes -= 8
    return codes


@triton.jit
def _read_codes(codes, TYPE: tl.constexpr):
    """Return what `_load_codes` has returned as numbers of TYPE, which is exact."""
    return read_fp8(codes, TYPE) if codes.dtype == tl.uint8 else codes.to(TYPE)


@triton.jit
def _multiply_tile(
    x_rows,
    matrix,
    columns,
    steps,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return rows of x times columns of W^T, float32 [rows, columns], summed over some steps along K.

    Codes become x's type, which is exact. A group's sum gets its scale, and sums go along K by BLOCK_K, so every
    element has one order of summing.

    Args:
        x_rows: a pointer to x, the length of a row, the rows' numbers, and which of them exist.
        matrix: a pointer to the scales, and what `_load_codes` takes.
        columns: as `_load_codes` takes them.
        steps: the number of the first step, and the number after the last one.
    """
    x_ptr, in_size, row, is_row = x_rows
    scales_ptr, packed = matrix
    out_size = packed[3]
    column, is_column = columns
    k = tl.arange(0, BLOCK_K)
    x_at = x_ptr + row.to(tl.int64)[:, None] * in_size + k[None, :]
    acc = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for step in range(steps[0], steps[1]):
        start = step * BLOCK_K
        x = tl.load(x_at + start, mask=is_row[:, None] & (start + k < in_size)[None, :], other=0.0)
        codes = _load_codes(packed, step, columns, BITS, GROUP, HAS_ZEROS, BLOCK_K)
        weight = tl.trans(_read_codes(codes, x.dtype))
        if GROUP:
            scale = tl.load(scales_ptr + start // GROUP * out_size + column, mask=is_column, other=0.0)
            acc += tl.dot(x, weight, input_precision="ieee") * scale[None, :]
        else:
            acc = tl.dot(x, weight, acc, input_precision="ieee")
    if not GROUP:
        acc *= tl.load(scales_ptr + column, mask=is_column, other=0.0)[None, :]
    return acc


@triton.jit
def add_parts(acc, partial_ptr, arrivals_ptr, tile, part):
    """Return a tile's sum, and whether this program has it: the tile's last to arrive adds all parts in their order.

    It leaves arrivals as it found them: zero.

    Args:
        acc: this program's part, [rows, columns].
        tile, part: their numbers. The second dimension of the grid has the parts.
    """
    num_parts = tl.num_programs(1)
    is_last = num_parts == 1
    if num_parts > 1:
        BLOCK_M: tl.constexpr = acc.shape[0]
        BLOCK_N: tl.constexpr = acc.shape[1]
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        element = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partial_at = partial_ptr + tile.to(tl.int64) * num_parts * SIZE + element
        tl.store(partial_at + part * SIZE, acc)
        tl.debug_barrier()  # whoever sees this program's arrival sees what all its threads have stored
        is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == num_parts - 1
        if is_last:
            tl.store(arrivals_ptr + tile, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], acc.dtype)
            for i in range(num_parts):
                acc += tl.load(partial_at + i * SIZE, cache_modifier=".cg")  # from L2: others have written it
    return acc, is_last


@triton.jit(do_not_specialize=["num_rows", "part_steps"])
def _quantized_linear_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    arrivals_ptr,
    in_size,
    packed_size,
    out_size,
    num_rows,
    part_steps,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows / BLOCK_M x out_size / BLOCK_N, parts), rows fastest: programs that read the same weights run
    # together. A program owns part_steps steps along K of BLOCK_M rows and BLOCK_N columns of the product, a tile. The
    # last program of a tile to arrive adds the parts in their order, and leaves arrivals as it found them: zero.
    # No input is padding.
    wait_for_predecessor(PDL)
    tile = tl.program_id(0)
    part = tl.program_id(1)
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    row = tile % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile // row_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    is_column = column < out_size
    x_rows = (x_ptr, in_size, row, is_row)
    matrix = (scales_ptr, (codes_ptr, zeros_ptr, packed_size, out_size))
    first = part * part_steps
    steps = (first, min(first + part_steps, tl.cdiv(in_size, BLOCK_K)))
    acc = _multiply_tile(x_rows, matrix, (column, is_column), steps, BITS, GROUP, HAS_ZEROS, BLOCK_K)
    acc, is_last = add_parts(acc, partial_ptr, arrivals_ptr, tile, part)
    if is_last:
        if HAS_BIAS:
            acc += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        y_at = y_ptr + row.to(tl.int64)[:, None] * out_size + column[None, :]
        tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["first", "num_rows"])
def _dequantize_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    weight_ptr,
    in_size,
    packed_size,
    out_size,
    first,
    num_rows,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (num_rows / BLOCK_N, in_size / BLOCK_K).
    # A program owns BLOCK_N rows and BLOCK_K columns of the result, whose row 0 is the matrix's row `first`.
    # No input is padding.
    wait_for_predecessor(PDL)
    step = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    packed = (codes_ptr, zeros_ptr, packed_size, out_size)
    codes = _load_codes(packed, step, (first + row, is_row), BITS, GROUP, HAS_ZEROS, BLOCK_K)
    group = step * BLOCK_K // GROUP if GROUP else 0
    scale = tl.load(scales_ptr + group * out_size + first + row, mask=is_row, other=0.0)
    k = step * BLOCK_K + tl.arange(0, BLOCK_K)
    weight = (_read_codes(codes, tl.float32) * scale[:, None]).to(weight_ptr.dtype.element_ty)
    weight_at = weight_ptr + row.to(tl.int64)[:, None] * in_size + k[None, :]
    tl.store(weight_at, weight, mask=is_row[:, None] & (k < in_size)[None, :])


@triton.jit(do_not_specialize=["num_groups", "num_experts"])
def _grouped_quantized_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    y_ptr,
    tokens_ptr,
    offsets_ptr,
    in_size,
    packed_size,
    out_size,
    num_groups,
    num_experts,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    GATHER: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid, tiles and padding as in _grouped_linear_kernel.
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
    first = expert.to(tl.int64) * out_size
    packed = (codes_ptr + first * packed_size, zeros_ptr + first * num_groups, packed_size, out_size)
    matrix = (scales_ptr + first * num_groups, packed)
    x_rows = (x_ptr, in_size, row, is_pair)
    steps = (0, tl.cdiv(in_size, BLOCK_K))
    acc = _multiply_tile(x_rows, matrix, (column, is_column), steps, BITS, GROUP, HAS_ZEROS, BLOCK_K)
    y_at = y_ptr + pair.to(tl.int64)[:, None] * out_size + column[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


def format_config(bits: int, in_size: int, group_size: int, has_zeros: bool) -> dict[str, int]:
    """Return the constexprs that follow from a matrix alone. So the order of a sum does, too.

    Raises:
        ValueError: groups have a size that the kernel cannot cut into its steps along K.
    """
    block = MAX_BLOCK_K
    is_grouped = group_size < in_size
    while is_grouped and group_size % block:
        block //= 2
    if block < MIN_BLOCK_K:
        raise ValueError(
            f"the Triton kernel needs groups of a multiple of {MIN_BLOCK_K} weights, and these have {group_size}: "
            'use attention_backend="torch"'
        )
    return {"BITS": bits, "GROUP": group_size if is_grouped else 0, "HAS_ZEROS": has_zeros, "BLOCK_K": block}


def split_steps(in_size: int, out_size: int, block_k: int) -> tuple[int, int]:
    """Return into how many parts the sums of a matrix are split, and the steps along K of a part.

    They follow from the matrix alone, so the order of a sum does, too.
    """
    num_steps = ceil_div(in_size, block_k)
    num_tiles = max(1, ceil_div(out_size, TILES[0][2]))  # the last of many ranks may have no rows of a vocabulary
    part_steps = max(ceil_div(num_steps, ceil_div(MIN_PROGRAMS, num_tiles)), min(MIN_STEPS, num_steps))
    return ceil_div(num_steps, part_steps), part_steps


def tile_config(num_rows: int, tiles: tuple[tuple[int, int, int, int], ...], itemsize: int) -> dict[str, int]:
    """Return the tile for a number of rows, and how it is computed.

    float32 is multiplied without tensor cores, from registers: larger tiles, or fewer warps, spill kilobytes.
    """
    if itemsize == 4:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 8, "num_stages": 3}
    rows, columns, stages = next((tile for most, *tile in tiles if num_rows <= most), (128, 64, 3))
    return {"BLOCK_M": rows, "BLOCK_N": columns, "num_warps": 8 if rows == 128 else 4, "num_stages": stages}


def make_arrivals(weight: Codes) -> Tensor:
    """Return what counts the parts of each tile that are done. A matrix needs one of its own: int32, all zero."""
    most_tiles = TILES[-1][0] // TILES[0][1] * ceil_div(weight.out_features, TILES[0][2])
    return torch.zeros(most_tiles, dtype=torch.int32, device=weight.codes.device)


def list_tensors(weight: Codes) -> tuple[Tensor, Tensor, Tensor]:
    """Return a matrix as the kernels take it. If it has no zeros, the scales take their place, where no kernel reads.

    Args:
        weight: what `transpose_scales` returns.
    """
    scales = weight.scales.mT
    return weight.codes, scales, scales if weight.zeros is None else weight.zeros.mT


def quantized_linear(x: Tensor, weight: Codes, bias: Tensor | None, arrivals: Tensor) -> Tensor:
    """x [n, in] -> x W^T + bias [n, out], summed in float32, in x's dtype.

    Args:
        x: contiguous, with its columns in the order of the codes'.
        weight: what `transpose_scales` returns.
        arrivals: what `make_arrivals` returns.
    """
    num_rows = x.shape[0]
    out_size = weight.codes.shape[0]
    if num_rows > TILES[-1][0]:
        return _multiply_dequantized(x, weight, bias)
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    config = format_config(weight.bits, weight.in_features, weight.group_size, weight.zeros is not None)
    config |= {"HAS_BIAS": bias is not None} | tile_config(num_rows, TILES, x.element_size())
    num_tiles = ceil_div(num_rows, config["BLOCK_M"]) * ceil_div(out_size, config["BLOCK_N"])
    num_parts, part_steps = split_steps(weight.in_features, out_size, config["BLOCK_K"])
    num_partial = num_parts * num_tiles * config["BLOCK_M"] * config["BLOCK_N"] if num_parts > 1 else 0
    sums = torch.empty(num_partial, dtype=torch.float32, device=x.device)
    # If there is no bias, x takes its place as argument. The kernel does not read it there.
    pointers = (x, *list_tensors(weight), x if bias is None else bias, y, sums, arrivals)
    sizes = (weight.in_features, weight.codes.shape[1], out_size, num_rows, part_steps)
    launch(_quantized_linear_kernel, (num_tiles, num_parts), (*pointers, *sizes), config)
    return y


def _multiply_dequantized(x: Tensor, weight: Codes, bias: Tensor | None) -> Tensor:
    """Do what `quantized_linear` does for many rows: dequantise rows of the matrix, and take torch's product."""
    out_size, packed_size = weight.codes.shape
    in_size = x.shape[1]
    height = max(1, MAX_SCRATCH // in_size)
    config = format_config(weight.bits, in_size, weight.group_size, weight.zeros is not None)
    config |= {"BLOCK_N": 32, "num_warps": 4}
    parts = []
    for first in range(0, max(out_size, 1), height):
        num_rows = min(height, out_size - first)
        scratch = torch.empty(num_rows, in_size, dtype=x.dtype, device=x.device)
        grid = (ceil_div(num_rows, config["BLOCK_N"]), ceil_div(in_size, config["BLOCK_K"]))
        sizes = (in_size, packed_size, out_size, first, num_rows)
        launch(_dequantize_kernel, grid, (*list_tensors(weight), scratch, *sizes), config)
        parts.append(F.linear(x, scratch, None if bias is None else bias[first : first + height]))
        del scratch  # its memory is free for the next rows
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def grouped_quantized(x: Tensor, weight: Codes, routing: Routing, gather: bool) -> Tensor:
    """Do what `grouped_linear_reference` does, in one kernel. Its grid needs no length from the device.

    Args:
        weight: what `transpose_scales` returns.
    """
    num_experts, out_size, packed_size = weight.codes.shape
    num_tokens, k = routing.weights.shape
    pairs = num_tokens * k
    y = torch.empty(pairs, out_size, dtype=x.dtype, device=x.device)
    config = format_config(weight.bits, weight.in_features, weight.group_size, weight.zeros is not None)
    config |= {"GATHER": gather, "EXPERTS": next_power_of_2(num_experts)}
    config |= tile_config(num_tokens, GROUPED_TILES, x.element_size())
    most_tiles = min(pairs, ceil_div(pairs, config["BLOCK_M"]) + num_experts)
    grid = (most_tiles * ceil_div(out_size, config["BLOCK_N"]),)
    pointers = (x, *list_tensors(weight), y, routing.tokens, routing.offsets)
    sizes = (weight.in_features, packed_size, out_size, weight.scales.shape[2], num_experts)
    launch(_grouped_quantized_kernel, grid, (*pointers, *sizes), config)
    return y
