"""Where a program's tile of a product lies, in Triton, how its sum is cut into parts, and how it is stored."""

from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.utils.integers import ceil_div

MIN_STEPS = 4
"""The fewest steps along K of a program's part of a sum, if it is split. The last part may have fewer."""


def choose_part_steps(num_steps: int, num_tiles: int, min_programs: int) -> int:
    """Return the steps along K of a part of a sum, so that tiles and parts make about `min_programs` programs."""
    most_parts = ceil_div(min_programs, max(num_tiles, 1))
    return max(ceil_div(num_steps, most_parts), min(MIN_STEPS, num_steps))


@triton.jit
def place_tile(
    num_rows, out_size, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SILU: tl.constexpr
):
    """Return the numbers of the rows and columns of a program's tile. Those beyond the last ones are too large.

    Tiles go by bands of BAND tiles of rows, and within a band rows fastest. So what a band reads stays in L2. If BAND
    is 0, one tile has all rows; with SILU, neighbours are a column of the gate and the same one of what it multiplies,
    which begins in the middle.
    """
    if not BAND:
        element = tl.arange(0, BLOCK_N)
        column = tl.program_id(0) * BLOCK_N + element
        if SILU:
            column = tl.program_id(0) * (BLOCK_N // 2) + element // 2 + element % 2 * (out_size // 2)
        return tl.arange(0, BLOCK_M), column
    band_size = BAND * tl.cdiv(out_size, BLOCK_N)
    first = tl.program_id(0) // band_size * BAND
    height = min(tl.cdiv(num_rows, BLOCK_M) - first, BAND)
    tile = tl.program_id(0) % band_size
    row = (first + tile % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile // height * BLOCK_N + tl.arange(0, BLOCK_N)
    return row, column


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


@triton.jit
def add_parts(acc, partial_ptr, arrivals_ptr, tile, part, num_parts, mask=None):
    """Return a tile's sum, and whether this program has it: the tile's last to arrive adds all parts in their order.

    It leaves arrivals as it found them: zero.

    Args:
        acc: this program's part, [rows, columns].
        tile, part: their numbers.
        num_parts: how many parts there are. A constant makes the kernel shorter.
        mask: which elements of the sum are wanted; None for all. The others become anything.
    """
    is_last = num_parts == 1
    if num_parts > 1:
        BLOCK_M: tl.constexpr = acc.shape[0]
        BLOCK_N: tl.constexpr = acc.shape[1]
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        element = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partial_at = partial_ptr + tile.to(tl.int64) * num_parts * SIZE + element
        tl.store(partial_at + part * SIZE, acc, mask=mask)
        tl.debug_barrier()  # whoever sees this program's arrival sees what all its threads have stored
        is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == num_parts - 1
        if is_last:
            tl.store(arrivals_ptr + tile, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], acc.dtype)
            for i in range(num_parts):
                # From L2: others have written it.
                acc += tl.load(partial_at + i * SIZE, mask=mask, cache_modifier=".cg")
    return acc, is_last


@triton.jit
def store_tile(y_ptr, y, row, end, column, out_size, residual_ptr=None):
    """Store a tile in y's type: its rows before `end`, and the columns that exist. Rounded, it gets the residual."""
    TYPE: tl.constexpr = y_ptr.dtype.element_ty
    at = row.to(tl.int64)[:, None] * out_size + column[None, :]
    exists = (row < end)[:, None] & (column < out_size)[None, :]
    if residual_ptr is not None:
        y = y.to(TYPE).to(tl.float32) + tl.load(residual_ptr + at, mask=exists, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(TYPE), mask=exists)
