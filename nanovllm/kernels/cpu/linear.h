// Products with packed matrices. A packed weight is [out / PANEL][in units][PANEL].
#pragma once

#include <vector>

#include "vectors.h"

namespace {

constexpr int PANEL = 32, MAX_TILE_ROWS = REGISTER_ROWS, FEW_TILE_ROWS = MAX_TILE_ROWS / 2;
static_assert(2 * FEW_TILE_ROWS <= MAX_TILE_ROWS, "few rows take twice the columns in the same room");

// The left side of a product lies in blocks, DEPTH steps of each row. Rows a power of two apart would meet in the same
// few places of the L1 cache: so they are a little further apart.
constexpr int64_t DEPTH = 256, LEFT_ROW = DEPTH + 16;

// How many rows meet a panel before the next one is read: their left side stays in half of a small L2 cache.
constexpr int64_t L2_LEFT = 1 << 17, LEAST_ROWS = 64, MOST_ROWS = 256;

// Columns in memory: `row` units from one summed unit to the next, `vector` units from 16 columns to the next 16, and
// `pair` units from 32 to the next. While they are read, `ahead_row` units for each of theirs are fetched from `ahead`:
// hardware prefetching stops at every page.
struct Columns {
    const uint32_t* at;
    int64_t row, vector;
    const uint32_t* ahead;
    int64_t ahead_row = 0, pair = 0, ahead_pair = 0;
};

// Which rows a tile has: all; or of several pieces the first, which keeps what it widens, or another. Pieces share the
// fetching ahead.
enum Piece { ALL, FIRST, OTHER };

// c[ROWS][16 VECTORS] = (or +=) a[ROWS][k] x b[k][16 VECTORS]; k counts units; `kept` becomes b, widened. Every sum
// stays in a register and takes its products one after another in the order of k, whatever ROWS and VECTORS are: an
// element of c has the same bits however many rows it is computed with.
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
            }
#pragma GCC unroll 24
            for (int j = 0; j < SUMS; ++j)
                acc[j] = T::fma(acc[j], a[j / WIDTH * LEFT_ROW + i * T::STEPS + step], right[j % WIDTH]);
        }
    }
#pragma GCC unroll 24
    for (int j = 0; j < SUMS; ++j) store(c + j / WIDTH * ldc + j % WIDTH * PART_LANES, acc[j]);
}

template <class T, Piece PIECE, int ROWS = MAX_TILE_ROWS>
inline void tile_of(int64_t rows, int vectors, const typename T::left* a, Columns b, int64_t k, float* c, int64_t ldc,
                    bool add, float* kept = nullptr) {
    if constexpr (ROWS > 0) {
        if (rows != ROWS) return tile_of<T, PIECE, ROWS - 1>(rows, vectors, a, b, k, c, ldc, add, kept);
        if constexpr (ROWS <= FEW_TILE_ROWS && PIECE == ALL)
            if (vectors == 4) return tile<T, ROWS, 4, PIECE>(a, b, k, c, ldc, add, kept);
        if (vectors == 2) tile<T, ROWS, 2, PIECE>(a, b, k, c, ldc, add, kept);
        else tile<T, ROWS, 1, PIECE>(a, b, k, c, ldc, add, kept);
    }
}

// Calls body(first, count) for pieces of `rows` that are nearly equal and at most `most`.
template <class Body> inline void row_pieces(int64_t rows, int64_t most, Body body) {
    const int64_t pieces = (rows + most - 1) / most;
    for (int64_t i = 0; i < pieces; ++i) {
        const int64_t first = i * rows / pieces;
        body(first, (i + 1) * rows / pieces - first);
    }
}

// Where a product is written in the end: `bytes` of each row, and `row` from one row to the next. It is fetched tile by
// tile: a burst of it would stop the reading of all else.
struct Target {
    const char* at = nullptr;
    int64_t row = 0, bytes = 0;
    void fetch(int64_t first, int64_t count) const {
        for (int64_t r = first; r < first + count; ++r)
            for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(at + r * row + b, 1);
    }
};

// c[rows][16 vectors] = (or +=) a x b, for at most DEPTH steps.
template <class T>
inline void tiles(int64_t rows, int vectors, const typename T::left* a, Columns b, int64_t k, float* c, int64_t ldc,
                  bool add, Target target = {}) {
    if (rows <= MAX_TILE_ROWS) {
        target.fetch(0, rows);
        return tile_of<T, ALL>(rows, vectors, a, b, k, c, ldc, add);
    }
    alignas(64) float kept[T::STEPS > 1 ? DEPTH * PANEL : 1];
    const int64_t pieces = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    b.ahead_row = (b.ahead_row + pieces - 1) / pieces;
    row_pieces(rows, MAX_TILE_ROWS, [&](int64_t first, int64_t count) {
        target.fetch(first, count);
        const auto* from = a + first * LEFT_ROW;
        const Columns widened = {(const uint32_t*)kept, PANEL, LANES, b.ahead, (b.ahead_row + 1) / 2};
        if constexpr (T::STEPS == 1) tile_of<T, OTHER>(count, vectors, from, b, k, c + first * ldc, ldc, add);
        else if (first == 0) tile_of<T, FIRST>(count, vectors, from, b, k, c, ldc, add, kept);
        else tile_of<Float, OTHER>(count, vectors, from, widened, 2 * k, c + first * ldc, ldc, add);
        b.ahead += k * b.ahead_row;
    });
}

// c[rows][columns] = (or +=) a x b for columns that are a multiple of 16, and at most DEPTH steps.
template <class T>
inline void product(int64_t rows, const typename T::left* a, Columns b, int64_t k, float* c, int64_t ldc,
                    int64_t columns, bool add) {
    const int most = rows <= FEW_TILE_ROWS ? 4 : 2;  // few rows: more columns at a time hide the multiply-add's latency
    for (int64_t n = 0, vectors; n < columns; n += vectors * LANES) {
        vectors = columns - n >= most * LANES ? most : columns - n > LANES ? 2 : 1;
        const Columns part = {b.at + n / LANES * b.vector, b.row,        b.vector, b.ahead + n * k, vectors * LANES,
                              2 * b.vector,                2 * LANES};
        tiles<T>(rows, (int)vectors, a, part, k, c + n, ldc, add);
    }
}

// Puts x[rows][in] into blocks of DEPTH steps: [blocks][rows][LEFT_ROW]. It is read from end to end: it may be large.
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

// y[rows][PANEL num_panels] = x, in blocks, times that many panels of k units + bias (null: none); of the last panel
// `columns` may leave some out.
template <class T>
inline void multiply(const typename T::left* x, int64_t rows, int64_t k, const uint32_t* panel, int64_t num_panels,
                     const typename T::element* bias, typename T::element* y, int64_t ldy, int64_t columns) {
    const int64_t width = num_panels * PANEL;
    const Target target = {(const char*)y, ldy * (int64_t)sizeof(*y), columns * (int64_t)sizeof(*y)};
    alignas(64) float sums[MOST_ROWS * PANEL];
    for (int64_t i = 0, units; i < k; i += units, x += rows * LEFT_ROW) {
        units = std::min(DEPTH / T::STEPS, k - i);
        const uint32_t* part = panel + i * PANEL;  // beside which the next one is fetched, or the next panels' first
        const uint32_t* ahead = i + units < k ? part + units * PANEL : panel + num_panels * k * PANEL;
        tiles<T>(rows, 2 * (int)num_panels, x, {part, PANEL, LANES, ahead, PANEL, k * PANEL, k * PANEL}, units, sums,
                 width, i > 0, i > 0 ? Target{} : target);
    }
    for (int64_t r = 0; r < rows; ++r) {
        float* of_row = sums + r * width;
        if (bias)
            for (int64_t v = 0; v < columns; ++v) of_row[v] += T::to_float(bias[v]);
        typename T::element line[2 * PANEL];
        for (int64_t v = 0; v < width; v += LANES) T::narrow(line + v, load<vf>(of_row + v));
        if (columns == PANEL) std::memcpy(y + r * ldy, line, sizeof(line) / 2);
        else std::memcpy(y + r * ldy, line, columns * sizeof(*line));
    }
}

// Of y[rows][out] = x[rows][in] W^T + bias, the columns of the panels from `begin` to `end`, by one thread. As many
// rows as stay in the L2 cache pass by a panel, or if they are few by two, which hides the multiply-add's latency.
template <class T>
void multiply_panels(const typename T::element* x, const uint32_t* packed, const typename T::element* bias,
                     typename T::element* y, int64_t rows, int64_t in, int64_t out, int64_t begin, int64_t end) {
    static thread_local std::vector<typename T::left> left;
    const int64_t k = in / T::PER_UNIT, blocks = (k * T::STEPS + DEPTH - 1) / DEPTH;
    const int64_t together = rows <= FEW_TILE_ROWS ? 2 : 1;
    row_pieces(rows, std::clamp(L2_LEFT / (blocks * DEPTH), LEAST_ROWS, MOST_ROWS), [&](int64_t first, int64_t count) {
        left.resize(std::max<size_t>(left.size(), blocks * count * LEFT_ROW));
        put_left<T>(x + first * in, count, in, left.data());
        for (int64_t p = begin; p < end; p += together) {
            const int64_t n = std::min(together, end - p), column = p * PANEL;
            multiply<T>(left.data(), count, k, packed + column * k, n, bias ? bias + column : nullptr,
                        y + first * out + column, out, std::min(n * PANEL, out - column));
        }
    });
}

// y[rows][out] = x[rows][in] W^T + bias. A thread owns panels of W.
template <class T>
void linear(const void* x, const uint32_t* packed, const void* bias, void* y, int64_t rows, int64_t in, int64_t out) {
    using E = typename T::element;
#pragma omp parallel
    {
        const Share mine = share_of((out + PANEL - 1) / PANEL);
        multiply_panels<T>((const E*)x, packed, (const E*)bias, (E*)y, rows, in, out, mine.begin, mine.end);
    }
}

}  // namespace

extern "C" {

// weight [out][units] -> packed [out / PANEL][units][PANEL]; columns beyond `out` are zero. Both may be the same memory:
// a panel's rows are first copied, in tiles of a cache line's width, since their own distance is that of few cache sets.
void pack(const uint32_t* weight, uint32_t* packed, int64_t out, int64_t units) {
    constexpr int64_t WIDTH = 16;
    const int64_t panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel
    {
        std::vector<uint32_t> tiles((units + WIDTH - 1) / WIDTH * WIDTH * PANEL);
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; ++p) {
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
    }
}

// Rows of the matrix that was packed, for an embedding that shares its weight with the LM head.
void packed_rows(const uint32_t* packed, const int32_t* indices, uint32_t* rows, int64_t count, int64_t units) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < count; ++r) {
        const uint32_t* column = packed + indices[r] / PANEL * units * PANEL + indices[r] % PANEL;
        for (int64_t i = 0; i < units; ++i) rows[r * units + i] = column[i * PANEL];
    }
}

}
