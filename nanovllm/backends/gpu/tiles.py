"""Where a program's tile of a product lies, in Triton, and how it is stored. Few loads of these kernels have a mask."""

from nanovllm.backends.gpu.triton_shim import tl, triton


@triton.jit
def place_tile(num_rows, out_size, BAND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the numbers of the rows and columns of a program's tile. Those beyond the last ones are too large.

    Tiles go by bands of BAND tiles of rows, and within a band rows fastest. So what a band reads stays in L2.
    """
    band_size = BAND * tl.cdiv(out_size, BLOCK_N)
    first = tl.program_id(0) // band_size * BAND
    height = min(tl.cdiv(num_rows, BLOCK_M) - first, BAND)
    tile = tl.program_id(0) % band_size
    row = (first + tile % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile // height * BLOCK_N + tl.arange(0, BLOCK_N)
    return row, column


@triton.jit
def place_pairs(tokens_ptr, begin, end, out_size, GATHER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the numbers of the pairs of an expert's tile, of their rows of x, and of the tile's columns.

    In the place of pairs beyond the last one, rows are that of the last one once more.

    Args:
        begin, end: what `locate_tile` returns.
    """
    pair = begin + tl.arange(0, BLOCK_M)
    row = tl.minimum(pair, end - 1)
    if GATHER:
        row = tl.load(tokens_ptr + row)
    column = tl.program_id(0) % tl.cdiv(out_size, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    return pair, row, column


@triton.jit
def store_tile(y_ptr, y, row, end, column, out_size):
    """Store a tile in y's type: its rows before `end`, and the columns that exist."""
    y_at = y_ptr + row.to(tl.int64)[:, None] * out_size + column[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=(row < end)[:, None] & (column < out_size)[None, :])
