"""Multiplies inputs by a matrix, or by the matrices of experts, in one Triton kernel, whatever their weights are.

A product is where its tile lies (in a matrix, or in that of an expert), how a weight is read, what is summed (numbers,
or whole numbers of inputs that are rounded), into how many parts a sum is split, and what happens to the sum.

Inputs that keep their type meet codes that become numbers of that type, which is exact. A group's sum gets its scale,
and loses the group's minimum times the sum of its inputs.
Rounded inputs meet int8 codes: a sum is one of whole numbers, so a tile of any shape, and any number of parts, gives
the same bits. What follows is rounded operation by operation: for this the kernel is compiled with
enable_fp_fusion=False.

The references are `TorchMatrix` in features/quantized/torch_matrix.py, and `grouped_linear_reference` in
features/families/qwen3_moe/ops.py.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.backends.gpu.l2_cache import LINE_BYTES, prefetch_lines
from nanovllm.backends.gpu.launch import launch, wait_for_predecessor
from nanovllm.backends.gpu.round_inputs import find_rounded, round_inputs
from nanovllm.backends.gpu.tiles import MIN_STEPS, add_parts, choose_part_steps, locate_tile, place_tile, store_tile
from nanovllm.backends.gpu.triton_shim import next_power_of_2, num_multiprocessors, tl, triton
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from nanovllm.features.families.qwen3_moe.ops import Routing


class Tile(NamedTuple):
    """A program's share of a product, and how it is computed.

    Attributes:
        programs: of rounded inputs, sums are split until a multiprocessor has so many programs.
    """

    rows: int
    columns: int
    stages: int
    warps: int
    programs: int = 1


MANY = 2**31
"""More rows than any product has."""

Tiles = tuple[tuple[int, Tile], ...]
"""Tiles, each after the most rows of x for which it is taken: of tokens, if there are experts."""

CODES_TILES: Tiles = ((16, Tile(16, 32, 6, 4)), (64, Tile(64, 64, 3, 4)), (128, Tile(128, 64, 3, 8)))
"""Few rows wait for memory alone: six stages have five steps' codes under way, three have two."""

MOST_CODES_ROWS = CODES_TILES[-1][0]
"""For more rows the matrix is dequantised."""

CODES_EXPERT_TILES: Tiles = ((128, Tile(16, 64, 3, 4)), (512, Tile(32, 64, 3, 4)), (MANY, Tile(128, 64, 3, 8)))

ROUNDED_TILES: Tiles = ((16, Tile(16, 64, 5, 4, 3)), (64, Tile(64, 128, 4, 4, 2)), (MANY, Tile(128, 128, 3, 8, 1)))
"""Those of rounded inputs, and of experts below. Nobody has timed them: they are arithmetic, for an H100."""

ROUNDED_EXPERT_TILES: Tiles = ((128, Tile(16, 64, 4, 4)), (512, Tile(64, 64, 4, 4)), (MANY, Tile(128, 128, 3, 8)))

PLAIN_EXPERT_TILES: Tiles = (
    (32, Tile(16, 64, 3, 4)),
    (128, Tile(16, 128, 3, 4)),
    (512, Tile(32, 256, 3, 4)),
    (MANY, Tile(128, 256, 3, 8)),
)
"""Those of experts with weights of the inputs' type."""

MIN_PROGRAMS = 264
"""A product by codes has so many programs if its sums are long enough: two for each multiprocessor of an H100."""

BLOCK_K = 128
"""The most inputs of a step along K."""

PLAIN_BLOCK_K = 64
"""The inputs of a step by weights of 16 bits or more."""

MIN_BLOCK_K = 32
"""With 16, the compiler of Triton 3.6 gives wrong products of four-bit codes: tests on an H100 found it. So two groups
of 16 share a step."""

MIN_GROUP = 16
"""The fewest inputs of a group."""

BAND = 16
"""Tiles of rows that meet the same columns before the next columns come, so that what they read stays in L2."""


def pack_numbers(numbers: Iterable[int]) -> int:
    """Pack 16 numbers of 8 bits into one, the first in the lowest bits: a constant that a kernel takes them from."""
    return sum((number & 255) << 8 * i for i, number in enumerate(numbers))


FROM_ZERO: Any = tl.constexpr(pack_numbers(range(16)))
"""The table of codes that are the numbers themselves."""


@triton.jit
def read_codes(at, step, exists, BITS: tl.constexpr, HAS_TAIL: tl.constexpr):
    """Return the codes of some columns of W^T at one step along K, [columns, inputs].

    Args:
        at: pointers to what the columns have for step 0: bytes of codes, or numbers.
        exists: which of these are within their row, [1, width]. It is read if the row HAS_TAIL.
    """
    WIDTH: tl.constexpr = at.shape[1]
    codes = tl.load(at + step * WIDTH, mask=exists, other=0) if HAS_TAIL else tl.load(at + step * WIDTH)
    if BITS == 4:
        codes = tl.interleave(codes & 15, codes >> 4).to(tl.int32)
    return codes


@triton.jit
def read_numbers(codes, zero, BITS: tl.constexpr, NUMBERS: tl.constexpr, HAS_ZEROS: tl.constexpr, TYPE: tl.constexpr):
    """Return what codes [columns, inputs] mean, as numbers of TYPE: exactly.

    Args:
        zero: the zeros of the columns, int32. They are read if it HAS_ZEROS.
        NUMBERS: see `pack_numbers`.
    """
    if NUMBERS is not None:
        if NUMBERS != FROM_ZERO:
            # Each of four words has the numbers of four codes.
            is_odd = (codes & 4) != 0
            low = tl.where(is_odd, NUMBERS >> 32 & 0xFFFFFFFF, NUMBERS & 0xFFFFFFFF)
            high = tl.where(is_odd, NUMBERS >> 96 & 0xFFFFFFFF, NUMBERS >> 64 & 0xFFFFFFFF)
            word = tl.where((codes & 8) != 0, high, low)
            codes = (word >> (codes & 3) * 8).to(tl.int8)
    elif HAS_ZEROS:
        codes = codes.to(tl.int32) - zero[:, None]
    elif BITS == 4:
        codes -= 8
    return codes.to(TYPE)


@triton.jit
def read_scale(values_ptr, factors_ptr, group, column, mask, out_size, SHARED: tl.constexpr):
    """Return the scale, or the minimum, that each column has in a group: see `LaidScales`.

    Args:
        group: the number of the group.
        mask: which columns have one. The others get zero.
        SHARED: how many neighbouring groups share a value.
    """
    scale = tl.load(values_ptr + (group // SHARED * out_size + column), mask=mask, other=0.0).to(tl.float32)
    if factors_ptr is not None:
        scale *= tl.load(factors_ptr + (group * out_size + column), mask=mask, other=0).to(tl.float32)
    return scale


@triton.jit(do_not_specialize=["num_rows", "part_steps", "num_groups", "num_experts"])
def _product_kernel(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    factors_ptr,
    minima_ptr,
    minima_factors_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    partial_ptr,
    arrivals_ptr,
    tokens_ptr,
    offsets_ptr,
    in_size,
    row_size,
    out_size,
    num_rows,
    part_steps,
    num_groups,
    num_experts,
    BITS: tl.constexpr,
    NUMBERS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHARED: tl.constexpr,
    MINIMA_SHARED: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    EXPERTS: tl.constexpr,
    BAND: tl.constexpr,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    # Grid (tiles, parts). A program owns part_steps steps along K of a tile: BLOCK_M rows and BLOCK_N columns of the
    # product. The last program of a tile to arrive adds the parts in their order, and leaves arrivals as it found them:
    # zero. With EXPERTS the rows are pairs, those of padding are in no expert, and programs beyond the last expert's
    # tiles do nothing. Beyond the last column a program computes that one once more, and stores nothing of it.
    # With AHEAD a program asks for the weights of so many steps, and then waits: see few_rows.py.
    if not EXPERTS:
        row, column = place_tile(num_rows, out_size, BAND, BLOCK_M, BLOCK_N, SILU)
        end = num_rows
    if AHEAD and PDL:
        LINE: tl.constexpr = LINE_BYTES * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
        begin = tl.program_id(1) * part_steps * BLOCK_K
        line = tl.arange(0, max(AHEAD * BLOCK_K // LINE, 1)) * LINE
        asked = tl.minimum(begin + line, min(begin + part_steps * BLOCK_K, in_size) - 1)
        prefetch_lines(weight_ptr + tl.minimum(column, out_size - 1).to(tl.int64)[:, None] * row_size + asked[None, :])
    wait_for_predecessor(PDL)
    if EXPERTS:
        num_columns = tl.cdiv(out_size, BLOCK_N)
        expert, begin, end = locate_tile(offsets_ptr, tl.program_id(0) // num_columns, num_experts, EXPERTS, BLOCK_M)
        if expert >= num_experts:
            return
        row = begin + tl.arange(0, BLOCK_M)
        column = tl.program_id(0) % num_columns * BLOCK_N + tl.arange(0, BLOCK_N)
        first = expert.to(tl.int64) * out_size
        weight_ptr += first * row_size
        if scales_ptr is not None:
            scales_ptr += first * (num_groups // SHARED)
        if factors_ptr is not None:
            factors_ptr += first * num_groups
        if minima_ptr is not None:
            minima_ptr += first * (num_groups // MINIMA_SHARED)
        if minima_factors_ptr is not None:
            minima_factors_ptr += first * num_groups
        if zeros_ptr is not None:
            zeros_ptr += first * num_groups
    # Of few rows no others are loaded, or many programs would ask for one row. Of many the last one is read once more.
    is_row = row < end
    source = tl.minimum(row, end - 1)
    if tokens_ptr is not None:
        source = tl.load(tokens_ptr + source)
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_K * BITS // 8 if BITS < 16 else BLOCK_K
    k = tl.arange(0, BLOCK_K)
    unit = tl.arange(0, WIDTH)
    x_at = x_ptr + source.to(tl.int64)[:, None] * in_size + k[None, :]
    nearest = tl.minimum(column, out_size - 1)
    is_column = column < out_size
    weight_at = weight_ptr + nearest.to(tl.int64)[:, None] * row_size + unit[None, :]
    part = tl.program_id(1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32 if x_scales_ptr is not None else tl.float32)
    for step in range(part * part_steps, min((part + 1) * part_steps, tl.cdiv(in_size, BLOCK_K))):
        if HAS_TAIL:
            x = tl.load(x_at + step * BLOCK_K, mask=is_row[:, None] & (step * BLOCK_K + k < in_size)[None, :], other=0)
        elif BLOCK_M <= 16 or AHEAD:
            x = tl.load(x_at + step * BLOCK_K, mask=is_row[:, None], other=0)
        else:
            x = tl.load(x_at + step * BLOCK_K)
        exists = (step * WIDTH + unit < row_size)[None, :]
        codes = read_codes(weight_at, step, exists, BITS, HAS_TAIL)
        for i in tl.static_range(GROUPS):
            group = step * BLOCK_K // GROUP + i if GROUP else 0
            is_there = is_column
            if GROUPS > 1 and HAS_TAIL:  # groups beyond the last one meet inputs of zero
                is_there = column < tl.where(group * GROUP < in_size, out_size, 0)
            zero = column  # any numbers: nobody reads them if there are no zeros
            if zeros_ptr is not None:
                zero = tl.load(zeros_ptr + (group * out_size + column), mask=is_there, other=0)
            weight = tl.trans(read_numbers(codes, zero, BITS, NUMBERS, zeros_ptr is not None, TYPE))
            own = tl.where((k // GROUP == i)[None, :], x, 0.0) if GROUPS > 1 else x
            if x_scales_ptr is not None:
                acc = tl.dot(own, weight, acc, out_dtype=tl.int32)
            elif GROUP:
                scale = read_scale(scales_ptr, factors_ptr, group, column, is_there, out_size, SHARED)
                acc += tl.dot(own, weight, input_precision="ieee") * scale[None, :]
                if minima_ptr is not None:
                    least = read_scale(minima_ptr, minima_factors_ptr, group, column, is_there, out_size, MINIMA_SHARED)
                    acc -= tl.sum(own.to(tl.float32), 1)[:, None] * least[None, :]
            else:
                acc = tl.dot(own, weight, acc, input_precision="ieee")
    is_last = True
    if not EXPERTS:
        num_parts = PARTS if PARTS else tl.num_programs(1)
        mask = is_row[:, None] if AHEAD else None
        acc, is_last = add_parts(acc, partial_ptr, arrivals_ptr, tl.program_id(0), part, num_parts, mask)
    if is_last:
        y = acc.to(tl.float32)
        if x_scales_ptr is not None:
            y *= tl.load(x_scales_ptr + source)[:, None]
        if scales_ptr is not None and not GROUP:
            y *= read_scale(scales_ptr, factors_ptr, 0, column, is_column, out_size, SHARED)[None, :]
        if bias_ptr is not None:
            y += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        size = out_size
        place = column
        if SILU:
            size = out_size // 2
            place = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            gate, up = tl.split(tl.reshape(y.to(TYPE).to(tl.float32), (BLOCK_M, BLOCK_N // 2, 2)))
            y = (gate / (1.0 + tl.exp(-gate))).to(TYPE).to(tl.float32) * up
        store_tile(y_ptr, y, row, end, place, size, residual_ptr)


class LaidScales(NamedTuple):
    """A number for each group and column, as in `Scales`. Neighbours in memory belong to neighbouring columns.

    Attributes:
        values: float32 or float16 [..., n, out].
        factors: int8 [..., groups, out]; None if the values are the numbers.
        shared: how many neighbouring groups share a value.
    """

    values: Tensor | None = None
    factors: Tensor | None = None
    shared: int = 1


class Laid(NamedTuple):
    """The weights of a matrix [out, in], or of experts [num_experts, out, in], as the kernel reads them.

    Attributes:
        weight: codes as those of `Codes`, or numbers of the inputs' type. Contiguous, as all tensors here.
        bits: those of a stored weight: 4 or 8 of codes, 16 of all numbers.
        group_size: how many inputs share a scale; `in` for one scale a row.
        scales: without values for numbers.
        zeros: int32 [..., groups, out]; None as in `Codes`.
        rounds: whether inputs are rounded to int8, with a scale for each row of x.
        arrivals: what `make_arrivals` returns; None for experts.
        minima: without values if there are none.
        numbers: what codes of 4 bits mean: see `pack_numbers`. None: what is left when the zero is subtracted.
    """

    weight: Tensor
    bits: int
    group_size: int
    scales: LaidScales = LaidScales()
    zeros: Tensor | None = None
    rounds: bool = False
    arrivals: Tensor | None = None
    minima: LaidScales = LaidScales()
    numbers: int | None = None

    @property
    def in_size(self) -> int:
        """The length of a row."""
        return self.weight.shape[-1] * (8 // self.bits if self.bits < 16 else 1)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The matrix's tensors, in the order of a kernel's arguments."""
        return (self.weight, *self.scales[:2], *self.minima[:2], self.zeros)

    @property
    def tiles(self) -> Tiles:
        """The tiles of its products."""
        is_matrix = self.weight.dim() == 2
        if self.rounds:
            return ROUNDED_TILES if is_matrix else ROUNDED_EXPERT_TILES
        if self.bits < 16:
            return CODES_TILES if is_matrix else CODES_EXPERT_TILES
        return PLAIN_EXPERT_TILES


def choose_step(bits: int, in_size: int, group_size: int) -> int:
    """Return the inputs of a step along K. They follow from a matrix alone, so the order of a sum does, too.

    Raises:
        ValueError: groups have a size that the kernel cannot cut into steps.
    """
    step = BLOCK_K if bits < 16 else PLAIN_BLOCK_K
    if group_size >= in_size:
        return step
    while group_size % step and step > MIN_BLOCK_K:
        step //= 2
    if group_size % step and group_size != MIN_GROUP:
        raise ValueError(
            f"the Triton kernel needs groups of {MIN_GROUP} weights, or of a multiple of {MIN_BLOCK_K}, and these have "
            f'{group_size}: use attention_backend="torch"'
        )
    return step


def read_config(laid: Laid) -> dict[str, int | None]:
    """Return the constants that say how a kernel reads a matrix."""
    step = choose_step(laid.bits, laid.in_size, laid.group_size)
    is_grouped = laid.group_size < laid.in_size or laid.minima.values is not None
    return {
        "BITS": laid.bits,
        "NUMBERS": laid.numbers,
        "GROUP": laid.group_size if is_grouped else 0,
        "GROUPS": ceil_div(step, laid.group_size) if is_grouped else 1,
        "SHARED": laid.scales.shared,
        "MINIMA_SHARED": laid.minima.shared,
        "BLOCK_K": step,
    }


def limit_rows(tiles: Tiles) -> tuple[int, ...]:
    """Return the numbers of rows after which another variant of the kernel is taken. At start-up each is compiled."""
    return tuple(most for most, _ in tiles if most < MANY)


def choose_tile(laid: Laid, num_rows: int, itemsize: int) -> Tile:
    """Return the tile for so many rows of x, or tokens, whose numbers have `itemsize` bytes.

    float32 is multiplied without tensor cores, from registers: larger tiles, or fewer warps, spill kilobytes.
    """
    tile = next(tile for most, tile in laid.tiles if num_rows <= most)
    if itemsize < 4 or laid.rounds:
        return tile
    if laid.bits < 16:
        return Tile(16, 32, 3, 8)
    return Tile(min(tile.rows, 64), min(tile.columns, 64), 3, 4)


def product_config(laid: Laid, tile: Tile) -> dict[str, int | None]:
    """Return the constants to compile with."""
    step = choose_step(laid.bits, laid.in_size, laid.group_size)
    return {
        **read_config(laid),
        "HAS_TAIL": laid.in_size % step > 0,
        "EXPERTS": next_power_of_2(len(laid.weight)) if laid.weight.dim() > 2 else 0,
        "BAND": BAND,
        "PARTS": 0,
        "AHEAD": 0,
        "SILU": False,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": not laid.rounds,
    }


def count_places(tile: Tile, device: torch.device) -> int:
    """Return how many programs of a product of rounded inputs a device has places for."""
    return num_multiprocessors(device) * tile.programs


def split_steps(laid: Laid, tile: Tile, num_tiles: int) -> tuple[int, int]:
    """Return into how many parts the sums of a matrix are split, and the steps along K of a part.

    If they are of numbers, both follow from the matrix alone, so the order of a sum does, too. Sums of whole numbers
    are split until all programs together have about as many places as the device has.
    """
    num_steps = ceil_div(laid.in_size, choose_step(laid.bits, laid.in_size, laid.group_size))
    if laid.rounds:
        most = min(count_places(tile, laid.weight.device) // max(num_tiles, 1), num_steps // MIN_STEPS)
        part_steps = ceil_div(num_steps, max(1, most))
    else:
        # The last of many ranks may have no rows of a vocabulary.
        num_columns = ceil_div(laid.weight.shape[0], CODES_TILES[0][1].columns)
        part_steps = choose_part_steps(num_steps, num_columns, MIN_PROGRAMS)
    return ceil_div(num_steps, part_steps), part_steps


def make_arrivals(laid: Laid) -> Tensor:
    """Return what counts the parts of each tile that are done. A matrix needs one of its own: int32, all zero."""
    device = laid.weight.device
    if laid.rounds:
        most_tiles = max(count_places(tile, device) for _, tile in laid.tiles)  # with more, no sum is split
    else:
        most_tiles = ceil_div(MOST_CODES_ROWS, 16) * ceil_div(laid.weight.shape[0], 32)  # of the smallest tiles
    return torch.zeros(most_tiles, dtype=torch.int32, device=device)


def product(
    x: Tensor, laid: Laid, bias: Tensor | None = None, routing: "Routing | None" = None, gather: bool = False
) -> Tensor:
    """x [n, in] -> x W^T + bias [n, out], in x's dtype; or do what `grouped_linear_reference` does, with routing.

    The grid of a product of experts needs no length from the device.

    Args:
        x: its columns are in the order of the codes'. For rounded products it may carry its rounded form.
        bias: of a matrix.
    """
    out_size, row_size = laid.weight.shape[-2:]
    num_experts = 0 if routing is None else len(laid.weight)
    num_rows = len(x) if routing is None else routing.weights.numel()
    tile = choose_tile(laid, num_rows if routing is None else len(routing.weights), x.element_size())
    num_tiles = ceil_div(num_rows, tile.rows)
    if routing is not None:
        num_tiles = min(num_rows, num_tiles + num_experts)
    num_tiles *= ceil_div(out_size, tile.columns)
    config = product_config(laid, tile)
    parts = 1
    part_steps = ceil_div(laid.in_size, choose_step(laid.bits, laid.in_size, laid.group_size))
    if laid.arrivals is not None:
        parts, part_steps = split_steps(laid, tile, num_tiles)
    y = torch.empty(num_rows, out_size, dtype=x.dtype, device=x.device)
    input_scales: Tensor | None = None
    if laid.rounds:
        inputs, input_scales = find_rounded(x) or round_inputs(x)
    else:
        inputs = x.contiguous()
    num_sums = num_tiles * parts * tile.rows * tile.columns if parts > 1 else 0
    sums = torch.empty(num_sums, dtype=torch.int32 if laid.rounds else torch.float32, device=x.device)
    arrivals = sums if laid.arrivals is None else laid.arrivals  # nobody reads them of experts
    tokens = None if routing is None or not gather else routing.tokens
    offsets = None if routing is None else routing.offsets
    pointers = (inputs, input_scales, *laid.tensors, bias, None, y, sums, arrivals, tokens, offsets)
    num_groups = ceil_div(laid.in_size, laid.group_size)
    sizes = (laid.in_size, row_size, out_size, num_rows, part_steps, num_groups, num_experts)
    launch(_product_kernel, (num_tiles, parts), (*pointers, *sizes), config)
    return y
