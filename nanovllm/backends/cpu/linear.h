// Products with packed matrices. A packed weight is [out / PANEL][in units][PANEL].
#pragma once

#include <vector>

#include "amx.h"
#include "team.h"
#include "vectors.h"

namespace {

// Rows that are cut into pieces have LEAST_PIECE_ROWS in each, at least.
constexpr int MAX_TILE_ROWS = REGISTER_ROWS, FEW_TILE_ROWS = MAX_TILE_ROWS / 2;
constexpr int LEAST_PIECE_ROWS = (MAX_TILE_ROWS + 1) / 2;
static_assert(2 * FEW_TILE_ROWS <= MAX_TILE_ROWS, "few rows x twice the columns must fit the same registers");

// With AVX2's 16 registers the sums of MAX_TILE_ROWS x 32 columns leave too few of them to widen columns, and compilers
// keep sums in memory. There a tile that widens is narrow: it has 16 columns, and up to MOST_NARROW rows. narrow_rows
// says how many of a product's rows narrow tiles compute, so that the other pieces have MAX_TILE_ROWS each.
constexpr bool HAS_NARROW = REGISTER == 32;
constexpr int MOST_NARROW = 2 * MAX_TILE_ROWS - 1;
template <class T> constexpr bool IS_NARROW = HAS_NARROW && T::STEPS > 1;
template <class T> constexpr int MOST_WIDENED = IS_NARROW<T> ? MOST_NARROW : MAX_TILE_ROWS;
inline int64_t narrow_rows(int64_t rows) { return MAX_TILE_ROWS + rows % MAX_TILE_ROWS; }

// Where columns need no widening, compilers let every multiply-add load its column: 12 of them and 3 numbers of the left
// side are 15 loads. A processor with AVX2 makes two loads in the time of two multiply-adds, so it would wait for
// loads. There a tile holds a column in a register until all rows are multiplied by it: 7 loads.
template <class T> constexpr bool LOADS_ONCE = HAS_NARROW && T::STEPS == 1;
ALWAYS_INLINE void hold(rf& column) {
#ifdef __AVX__
    asm("" : "+x"(column));
#endif
}

// The left side of a product is stored in blocks of DEPTH steps of each row. If rows were a power of two apart, they
// would compete for the same few sets of the L1 cache, so each row gets 16 steps of padding.
constexpr int64_t DEPTH = 256, LEFT_ROW = DEPTH + 16;

// A product sums up so many steps before the next tile. With small registers a tile has few rows, so a panel's columns
// are read again for many pieces of rows: they and the left side must fit an L1 cache of 32 KiB together.
constexpr int64_t SUMMED = REGISTER < 64 ? DEPTH / 2 : DEPTH;

// The same for AMX: a panel's columns are read again for every 32 rows, and the L1 cache holds them beside these rows.
// A sum has the same bits in one piece as in several, because each piece but the last has whole AMX_UNITS. Where a
// group of inputs that share a scale has not, its bits depend on this number.
constexpr int64_t AMX_SUMMED = DEPTH / 2;
static_assert(AMX_SUMMED % AMX_UNITS == 0 && DEPTH % AMX_SUMMED == 0, "");

// Multiplications below which the other threads cost more than they save.
constexpr int64_t LEAST_SHARED = 1 << 17;

// Limits how many rows are multiplied by one panel before the next panel is read: their left side must stay in half of
// a small L2 cache. L2_LEFT counts the steps of all rows. Processors that have AMX have a larger L2 cache.
constexpr int64_t L2_LEFT = 1 << 17, AMX_L2_LEFT = 1 << 18, LEAST_ROWS = 64, MOST_ROWS = 256;

// Describes columns in memory. The distance from one summed unit to the next is `row` units, from 16 columns to the
// next 16 `vector` units, and from 32 columns to the next 32 `pair` units. While one summed unit is read, a tile
// prefetches from `ahead`, which moves on by `ahead_row` units each time: the hardware's own prefetching stops at every
// page.
struct Columns {
    const uint32_t* at;
    int64_t row, vector;
    const uint32_t* ahead;
    int64_t ahead_row = 0, pair = 0, ahead_pair = 0;
};

// Says which rows a tile computes. ALL: all rows of the product. If these are too many for one tile, they are cut into
// pieces: FIRST is the first piece, which keeps the widened columns for the others, and OTHER is any later piece. The
// pieces share the prefetching between them.
enum Piece { ALL, FIRST, OTHER };

// Computes c[ROWS][16 VECTORS] = (or, with `add`, +=) a[ROWS][k] x b[k][16 VECTORS], where k counts units. A FIRST
// piece writes the widened columns of b to `kept`. Every sum stays in a register and adds its products one after
// another in the order of k, whatever ROWS and VECTORS are. So an element of c has the same bits however many rows are
// computed together.
template <class T, int ROWS, int VECTORS, Piece PIECE>
inline void tile(const typename T::left* a, Columns b, int64_t k, float* c, int64_t ldc, bool add, float* kept) {
    constexpr int WIDTH = VECTORS * PARTS, SUMS = ROWS * WIDTH;
    rf acc[SUMS];
#pragma GCC unroll 24
    for (int j = 0; j < SUMS; ++j) acc[j] = add ? load<rf>(c + j / WIDTH * ldc + j % WIDTH * PART_LANES) : rf{};
    for (int64_t i = 0; i < k; ++i) {
        const uint32_t *at = b.at + i * b.row, *ahead = b.ahead + i * b.ahead_row;
        for (int v = 0; v < (PIECE == ALL ? VECTORS : 1); ++v)
            __builtin_prefetch(ahead + v % 2 * LANES + v / 2 * b.ahead_pair, 0, 2);  // into the L2 cache
#pragma GCC unroll 24
        for (int step = 0; step < T::STEPS; ++step) {
            rf right[WIDTH];
#pragma GCC unroll 24
            for (int v = 0; v < WIDTH; ++v) {
                const int lanes = v % PARTS * PART_LANES, vector = v / PARTS;
                right[v] = T::right(load<ri>(at + vector % 2 * b.vector + vector / 2 * b.pair + lanes), step);
                if (PIECE == FIRST) store(kept + (i * T::STEPS + step) * PANEL + v * PART_LANES, right[v]);
                if constexpr (LOADS_ONCE<T>) {
                    hold(right[v]);
#pragma GCC unroll 24
                    for (int j = v; j < SUMS; j += WIDTH)
                        acc[j] = T::fma(acc[j], a[j / WIDTH * LEFT_ROW + i * T::STEPS + step], right[v]);
                }
            }
            if constexpr (!LOADS_ONCE<T>)
#pragma GCC unroll 24
                for (int j = 0; j < SUMS; ++j)
                    acc[j] = T::fma(acc[j], a[j / WIDTH * LEFT_ROW + i * T::STEPS + step], right[j % WIDTH]);
        }
    }
#pragma GCC unroll 24
    for (int j = 0; j < SUMS; ++j) store(c + j / WIDTH * ldc + j % WIDTH * PART_LANES, acc[j]);
}

// Calls the `tile` for `rows` rows: for 1 vector of 16 columns at most MOST_WIDENED, for 2 MAX_TILE_ROWS, and for 4
// FEW_TILE_ROWS.
template <class T, Piece PIECE, int ROWS = MOST_WIDENED<T>>
inline void tile_of(int64_t rows, int vectors, const typename T::left* a, Columns b, int64_t k, float* c, int64_t ldc,
                    bool add, float* kept = nullptr) {
    if constexpr (ROWS >= (PIECE == ALL ? 1 : LEAST_PIECE_ROWS)) {
        if (rows != ROWS) return tile_of<T, PIECE, ROWS - 1>(rows, vectors, a, b, k, c, ldc, add, kept);
        if constexpr (ROWS <= FEW_TILE_ROWS && PIECE == ALL)
            if (vectors == 4) return tile<T, ROWS, 4, PIECE>(a, b, k, c, ldc, add, kept);
        if constexpr (ROWS <= MAX_TILE_ROWS)
            if (vectors == 2) return tile<T, ROWS, 2, PIECE>(a, b, k, c, ldc, add, kept);
        tile<T, ROWS, 1, PIECE>(a, b, k, c, ldc, add, kept);
    }
}

// Cuts `rows` into pieces of nearly equal size, at most `most` rows each, and calls body(first, count) for each piece.
template <class Body> inline void row_pieces(int64_t rows, int64_t most, Body body) {
    const int64_t pieces = (rows + most - 1) / most;
    for (int64_t i = 0; i < pieces; ++i) {
        const int64_t first = i * rows / pieces;
        body(first, (i + 1) * rows / pieces - first);
    }
}

// The memory that a product is written to in the end: `bytes` of each row, and `row` bytes from one row to the next. It
// is prefetched tile by tile, because prefetching all of it at once would delay every other read.
struct Target {
    const char* at = nullptr;
    int64_t row = 0, bytes = 0;
    void fetch(int64_t first, int64_t count) const {
        for (int64_t r = first; r < first + count; ++r)
            for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + r * row + b, 1);
    }
};

#ifdef WITH_AMX
// Does the same as `tiles` for 1 or 2 vectors, by AMX. The columns are read once for AMX_BLOCK_ROWS rows. These blocks
// share the prefetching between them.
inline void amx_tiles(int64_t rows, int vectors, const uint32_t* a, Columns b, int64_t k, float* c, int64_t ldc,
                      bool add, Target target) {
    const int64_t blocks = (rows + AMX_BLOCK_ROWS - 1) / AMX_BLOCK_ROWS;
    b.ahead_row = (b.ahead_row + blocks - 1) / blocks;
    for (int64_t r = 0; r < rows; r += AMX_BLOCK_ROWS, b.ahead += k * b.ahead_row) {
        target.fetch(r, std::min(rows - r, AMX_BLOCK_ROWS));
        const uint32_t* first = a + r * LEFT_ROW;
        const auto left = [=](int64_t i) { return first + i; };
        const auto right = [=](int64_t i) { return b.at + i * b.row; };
        const auto prefetch = [=](int64_t i, int64_t end) {
            for (i *= b.ahead_row; i < end * b.ahead_row; i += LANES) __builtin_prefetch(b.ahead + i, 0, 2);
        };
        amx_block_of(rows - r, vectors, left, LEFT_ROW, right, b.row, b.vector, k, c + r * ldc, ldc, add, prefetch);
    }
}

// Returns a function that finds the units from i on in the blocks that put_left makes of `rows` rows.
inline auto left_units(const uint32_t* x, int64_t rows) {
    return [=](int64_t i) { return x + i / DEPTH * rows * LEFT_ROW + i % DEPTH; };
}

// Computes sums[rows][PANEL] = x times a panel of k units, for at most AMX_BLOCK_ROWS rows. The sums stay in registers.
inline void amx_panel(int64_t rows, const uint32_t* x, const uint32_t* panel, int64_t k, float* sums) {
    constexpr int64_t AHEAD_UNITS = 128;
    const auto right = [=](int64_t i) { return panel + i * PANEL; };
    const auto prefetch = [=](int64_t i, int64_t end) {
        for (i *= PANEL; i < end * PANEL; i += LANES) __builtin_prefetch(panel + AHEAD_UNITS * PANEL + i, 0, 2);
    };
    amx_block_of(rows, 2, left_units(x, rows), LEFT_ROW, right, PANEL, LANES, k, sums, PANEL, false, prefetch);
}
#endif

// Computes c[rows][16 vectors] = (or, with `add`, +=) a x b, for any number of rows and at most DEPTH steps. With AMX,
// `vectors` is 1 or 2, and a and c have memory for a multiple of 16 rows, if there are more than 16.
template <class T>
inline void tiles(int64_t rows, int vectors, const typename T::left* a, Columns b, int64_t k, float* c, int64_t ldc,
                  bool add, Target target = {}) {
#ifdef WITH_AMX
    if constexpr (T::PER_UNIT == 2)
        if (uses_amx<T>()) return amx_tiles(rows, vectors, a, b, k, c, ldc, add, target);
#endif
    if (rows <= MOST_WIDENED<T>) {
        target.fetch(0, rows);
        if (!IS_NARROW<T> || rows < MAX_TILE_ROWS) return tile_of<T, ALL>(rows, vectors, a, b, k, c, ldc, add);
        for (int v = 0; v < vectors; ++v, b.at += b.vector, b.ahead += LANES)
            tile_of<T, ALL>(rows, 1, a, b, k, c + v * LANES, ldc, add);
        return;
    }
    alignas(64) float kept[T::STEPS > 1 ? DEPTH * PANEL : 1];
    const int64_t narrow = IS_NARROW<T> ? narrow_rows(rows) : 0;
    const int64_t pieces = (rows - narrow + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS + (IS_NARROW<T> ? vectors : 0);
    b.ahead_row = (b.ahead_row + pieces - 1) / pieces;
    if constexpr (IS_NARROW<T>) {
        target.fetch(0, narrow);
        for (int v = 0; v < vectors; ++v, b.ahead += k * b.ahead_row) {
            const Columns half = {b.at + v * b.vector, b.row, b.vector, b.ahead, b.ahead_row};
            tile_of<T, FIRST>(narrow, 1, a, half, k, c + v * LANES, ldc, add, kept + v * LANES);
        }
    }
    row_pieces(rows - narrow, MAX_TILE_ROWS, [&](int64_t first, int64_t count) {
        first += narrow;
        target.fetch(first, count);
        const auto* from = a + first * LEFT_ROW;
        const Columns widened = {(const uint32_t*)kept, PANEL, LANES, b.ahead, (b.ahead_row + 1) / 2};
        if constexpr (T::STEPS == 1) tile_of<T, OTHER>(count, vectors, from, b, k, c + first * ldc, ldc, add);
        else if (first == 0) tile_of<T, FIRST>(count, vectors, from, b, k, c, ldc, add, kept);
        else tile_of<Float, OTHER>(count, vectors, from, widened, 2 * k, c + first * ldc, ldc, add);
        b.ahead += k * b.ahead_row;
    });
}

// Computes c[rows][columns] = (or, with `add`, +=) a x b, for at most DEPTH steps. `columns` is a multiple of 16.
template <class T>
inline void product(int64_t rows, const typename T::left* a, Columns b, int64_t k, float* c, int64_t ldc,
                    int64_t columns, bool add) {
    // More columns for few rows hide the latency of FMA.
    const int most = rows <= FEW_TILE_ROWS && !uses_amx<T>() ? 4 : 2;
    for (int64_t n = 0, vectors; n < columns; n += vectors * LANES) {
        vectors = columns - n >= most * LANES ? most : columns - n > LANES ? 2 : 1;
        const Columns part = {b.at + n / LANES * b.vector, b.row,        b.vector, b.ahead + n * k, vectors * LANES,
                              2 * b.vector,                2 * LANES};
        tiles<T>(rows, (int)vectors, a, part, k, c + n, ldc, add);
    }
}

// Copies x[rows][in] into blocks of DEPTH steps, [blocks][rows][LEFT_ROW]. It reads x from end to end, as x may be
// large.
template <class T>
inline void put_left(const typename T::element* x, int64_t rows, int64_t in, typename T::left* left) {
    constexpr int64_t PER_LEFT = T::PER_UNIT / T::STEPS, DEEP = DEPTH * PER_LEFT;
    typename T::element rest[LANES] = {};
    for (int64_t r = 0; r < rows; ++r, x += in)
        for (int64_t start = 0; start < in; start += DEEP) {
            typename T::left* row = left + (start / DEEP * rows + r) * LEFT_ROW;
            for (int64_t i = start; i < std::min(start + DEEP, in); i += LANES) {
                const bool is_whole = i + LANES <= in;
                if (!is_whole) std::copy(x + i, x + in, rest);
                T::put_left(row + (i - start) / PER_LEFT, is_whole ? x + i : rest);
            }
        }
}

// Rounds `columns` sums, at most those of two panels, and writes them to y; past the caches if `is_past`.
template <class T>
inline void write_row(const float* sums, typename T::element* y, int64_t columns, bool is_past) {
#ifdef WITH_AMX
    if (is_past) {
        const __m512bh line = _mm512_cvtne2ps_pbh(load<__m512>(sums + LANES), load<__m512>(sums));
        return _mm512_stream_si512((__m512i*)y, (__m512i)line);
    }
#endif
    typename T::element line[2 * PANEL];
    for (int64_t v = 0; v < columns; v += LANES) T::narrow(line + v, load<vf>(sums + v));
    if (columns == PANEL) std::memcpy(y, line, sizeof(line) / 2);
    else std::memcpy(y, line, columns * sizeof(*line));
}

// Computes y[rows][columns] = x times num_panels panels of k units, + bias unless that is null. x is in the blocks that
// put_left makes. `columns` is at most PANEL num_panels; smaller where the matrix ends within the last panel.
template <class T>
inline void multiply(const typename T::left* x, int64_t rows, int64_t k, const uint32_t* panel, int64_t num_panels,
                     const typename T::element* bias, typename T::element* y, int64_t ldy, int64_t columns) {
    const int64_t width = num_panels * PANEL;
    const bool is_past = goes_past_caches(y, ldy, columns, rows);
    const int64_t fetched = is_past ? 0 : columns * (int64_t)sizeof(*y);
    const Target target = {(const char*)y, ldy * (int64_t)sizeof(*y), fetched};
    alignas(64) float sums[MOST_ROWS * PANEL];
    constexpr int64_t DEEP = DEPTH / T::STEPS;  // units of a block
    int64_t i = 0;
#ifdef WITH_AMX
    if constexpr (T::PER_UNIT == 2)
        if (uses_amx<T>() && rows <= AMX_BLOCK_ROWS) {
            target.fetch(0, rows);
            amx_panel(rows, x, panel, k, sums);
            i = k;
        }
#endif
    for (int64_t units; i < k; i += units) {
        units = std::min((uses_amx<T>() ? AMX_SUMMED : SUMMED) / T::STEPS, k - i);
        const auto* left = x + i / DEEP * rows * LEFT_ROW + i % DEEP * T::STEPS;
        const uint32_t* part = panel + i * PANEL;
        // The next part is prefetched meanwhile; during the last part of these panels, the first of the next ones.
        const uint32_t* ahead = i + units < k ? part + units * PANEL : panel + num_panels * k * PANEL;
        tiles<T>(rows, 2 * (int)num_panels, left, {part, PANEL, LANES, ahead, PANEL, k * PANEL, k * PANEL}, units, sums,
                 width, i > 0, i > 0 ? Target{} : target);
    }
    for (int64_t r = 0; r < rows; ++r) {
        float* of_row = sums + r * width;
        if (bias)
            for (int64_t v = 0; v < columns; ++v) of_row[v] += T::to_float(bias[v]);
        write_row<T>(of_row, y + r * ldy, columns, is_past);
    }
}

// Returns how many rows are multiplied by one panel after another: their left side, of `steps` a row, stays in the L2
// cache.
template <class T> inline int64_t rows_together(int64_t steps) {
    const int64_t blocks = (steps + DEPTH - 1) / DEPTH, most = uses_amx<T>() ? AMX_L2_LEFT : L2_LEFT;
    return std::clamp(most / (blocks * DEPTH), LEAST_ROWS, MOST_ROWS);
}

// One thread computes the columns of some panels of y[rows][out] = x[rows][in] W^T + bias. It takes as many rows at a
// time as stay in the L2 cache, and multiplies them by one panel after another. Few rows are multiplied by two panels
// at a time, which hides the latency of the multiply-add; AMX does not need that. The left side of the thread's first
// piece serves its later ones: only a first piece may have more rows than are taken at once.
template <class T>
void multiply_panels(const typename T::element* x, const uint32_t* packed, const typename T::element* bias,
                     typename T::element* y, int64_t rows, int64_t in, int64_t out, Span panels) {
    static thread_local std::vector<typename T::left> left;
    const int64_t k = in / T::PER_UNIT, blocks = (k * T::STEPS + DEPTH - 1) / DEPTH;
    const int64_t together = rows <= FEW_TILE_ROWS && !uses_amx<T>() ? 2 : 1;
    const AmxRegisters registers(rows, uses_amx<T>());
    row_pieces(rows, rows_together<T>(k * T::STEPS), [&](int64_t first, int64_t count) {
        auto* rows_left = cache_lines(left, (blocks * count + AMX_ROWS) * LEFT_ROW);
        if (panels.is_first) put_left<T>(x + first * in, count, in, rows_left);
        for (int64_t p = panels.begin; p < panels.end; p += together) {
            const int64_t n = std::min(together, panels.end - p), column = p * PANEL;
            multiply<T>(rows_left, count, k, packed + column * k, n, bias ? bias + column : nullptr,
                        y + first * out + column, out, std::min(n * PANEL, out - column));
        }
    });
}

// Computes y[rows][out] = x[rows][in] W^T + bias. Each thread owns some panels of W. The threads take the same rows at
// the same time: so each converts the left side of these rows once, and not again for each of its pieces.
// The reference is torch.nn.functional.linear.
template <class T>
void linear(const void* x, const uint32_t* packed, const void* bias, void* y, int64_t rows, int64_t in, int64_t out) {
    using E = typename T::element;
    const int64_t panels = (out + PANEL - 1) / PANEL;
    row_pieces(rows, rows_together<T>(in / T::PER_UNIT * T::STEPS), [&](int64_t first, int64_t count) {
        const int64_t piece = count * in * out > LEAST_SHARED ? (quarter(panels) + 1) / 2 * 2 : panels;
        share(panels, piece, [&](Span some) {
            multiply_panels<T>((const E*)x + first * in, packed, (const E*)bias, (E*)y + first * out, count, in, out,
                               some);
        });
    });
}

}  // namespace

extern "C" {

// Packs weight [out][units] into packed [out / PANEL, rounded up][units][PANEL]; columns beyond `out` are zero. Both
// may be the same memory, because the rows of a panel are copied before they are written. The copy has tiles as wide as
// a cache line: the rows themselves are often a power of two apart and would compete for the same few cache sets.
void pack(int64_t threads, const uint32_t* weight, uint32_t* packed, int64_t out, int64_t units) {
    num_threads = threads;
    constexpr int64_t WIDTH = 16;
    const int64_t panels = (out + PANEL - 1) / PANEL;
    share(panels, quarter(panels), [&](Span some) {
        std::vector<uint32_t> tiles((units + WIDTH - 1) / WIDTH * WIDTH * PANEL);
        for (int64_t p = some.begin; p < some.end; ++p) {
            for (int64_t c = 0; c < PANEL; ++c)
                for (int64_t i = 0; i < units; i += WIDTH) {
                    const int64_t n = p * PANEL + c < out ? std::min(WIDTH, units - i) : 0;
                    uint32_t* tile_row = tiles.data() + i * PANEL + c * WIDTH;
                    if (n == WIDTH) std::memcpy(tile_row, weight + (p * PANEL + c) * units + i, WIDTH * 4);
                    else std::fill(std::copy_n(weight + (p * PANEL + c) * units + i, n, tile_row), tile_row + WIDTH, 0);
                }
            for (int64_t i = 0; i < units; ++i)
                for (int64_t c = 0; c < PANEL; ++c)
                    packed[(p * units + i) * PANEL + c] = tiles[i / WIDTH * WIDTH * PANEL + c * WIDTH + i % WIDTH];
        }
    });
}

// Copies the rows of `from` at `indices`, of so many bytes each. The reference is torch.index_select.
void gather_rows(int64_t threads, const char* from, const int32_t* indices, char* rows, int64_t count, int64_t bytes) {
    num_threads = threads;
    share(count, quarter_unless_small(count, count * bytes / 4), [&](Span some) {
        for (int64_t r = some.begin; r < some.end; ++r) std::memcpy(rows + r * bytes, from + indices[r] * bytes, bytes);
    });
}

// Copies rows of the matrix as it was before packing. An embedding that shares its weight with the LM head needs them.
// The reference is torch.nn.functional.embedding.
void packed_rows(int64_t threads, const uint32_t* packed, const int32_t* indices, uint32_t* rows, int64_t count,
                 int64_t units) {
    num_threads = threads;
    share(count, quarter_unless_small(count, count * units), [&](Span some) {
        for (int64_t r = some.begin; r < some.end; ++r) {
            const uint32_t* column = packed + indices[r] / PANEL * units * PANEL + indices[r] % PANEL;
            for (int64_t i = 0; i < units; ++i) rows[r * units + i] = column[i * PANEL];
        }
    });
}

}
