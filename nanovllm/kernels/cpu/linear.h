// Products with packed matrices. A packed weight is [out / PANEL][in units][PANEL].
#pragma once

#include "vectors.h"

namespace {

constexpr int PANEL = 32, MAX_TILE_ROWS = REGISTER_ROWS, FEW_TILE_ROWS = MAX_TILE_ROWS / 2, AHEAD = 64 * PANEL;
static_assert(2 * FEW_TILE_ROWS <= MAX_TILE_ROWS, "few rows take twice the columns in the same room");
constexpr int64_t FEW_ROWS = 96, GROUP_UNITS = 1 << 17;  // units of a weight: half a MiB, half of a small L2 cache

// Columns in memory: `row` units from one summed unit to the next, `vector` units from 16 columns to the next 16, and
// `pair` units from 32 to the next. While they are read, as much is fetched from `ahead`, which has strides of its own:
// hardware prefetching stops at every page.
struct Columns {
    const uint32_t* at;
    int64_t row, vector;
    const uint32_t* ahead;
    int64_t pair = 0, ahead_row = 0, ahead_pair = 0;
};

// c[ROWS][16 VECTORS] = (or +=) a[ROWS][k] x b[k][16 VECTORS]; k and lda count units. Every sum stays in a register and
// takes its products one after another in the order of k, whatever ROWS and VECTORS are: an element of c has the same
// bits however many rows it is computed with. STREAM: fetch ahead.
template <class T, int ROWS, int VECTORS, bool STREAM>
inline void tile(const uint32_t* a, int64_t lda, Columns b, int64_t k, float* c, int64_t ldc, bool add) {
    rf acc[ROWS][VECTORS * PARTS];
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 24
        for (int v = 0; v < VECTORS * PARTS; ++v) acc[r][v] = add ? load<rf>(c + r * ldc + v * PART_LANES) : rf{};
    for (int64_t i = 0; i < k; ++i) {
        ri bv[VECTORS * PARTS];
#pragma GCC unroll 24
        for (int v = 0; v < VECTORS; ++v) {
            const uint32_t* from = b.at + i * b.row + v % 2 * b.vector + v / 2 * b.pair;
#pragma GCC unroll 24
            for (int p = 0; p < PARTS; ++p) bv[v * PARTS + p] = load<ri>(from + p * PART_LANES);
            if (STREAM) __builtin_prefetch(b.ahead + i * b.ahead_row + v % 2 * LANES + v / 2 * b.ahead_pair);
        }
#pragma GCC unroll 24
        for (int r = 0; r < ROWS; ++r) {
            const uint32_t unit = a[r * lda + i];
#pragma GCC unroll 24
            for (int v = 0; v < VECTORS * PARTS; ++v) acc[r][v] = T::fma(acc[r][v], unit, bv[v]);
        }
    }
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 24
        for (int v = 0; v < VECTORS * PARTS; ++v) store(c + r * ldc + v * PART_LANES, acc[r][v]);
}

template <class T, bool STREAM, int ROWS = MAX_TILE_ROWS>
inline void tile_of(int rows, const uint32_t* a, int64_t lda, Columns b, int64_t k, float* c, int64_t ldc, int vectors,
                    bool add) {
    if constexpr (ROWS > 0) {
        if (rows != ROWS) return tile_of<T, STREAM, ROWS - 1>(rows, a, lda, b, k, c, ldc, vectors, add);
        if constexpr (ROWS <= FEW_TILE_ROWS)
            if (vectors == 4) return tile<T, ROWS, 4, STREAM>(a, lda, b, k, c, ldc, add);
        if (vectors == 2) tile<T, ROWS, 2, STREAM>(a, lda, b, k, c, ldc, add);
        else tile<T, ROWS, 1, STREAM>(a, lda, b, k, c, ldc, add);
    }
}

// Calls body(first, count) for pieces of `rows` that are nearly equal and at most MAX_TILE_ROWS.
template <class Body> inline void row_pieces(int64_t rows, Body body) {
    const int64_t pieces = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    for (int64_t i = 0; i < pieces; ++i) {
        const int64_t first = i * rows / pieces;
        body(first, (int)((i + 1) * rows / pieces - first));
    }
}

// c[rows][columns] = (or +=) a x b for columns that are a multiple of 16.
template <class T>
inline void product(int64_t rows, const uint32_t* a, int64_t lda, Columns b, int64_t k, float* c, int64_t ldc,
                    int64_t columns, bool add) {
    const int most = rows <= FEW_TILE_ROWS ? 4 : 2;  // few rows: more columns at a time hide the multiply-add's latency
    for (int64_t n = 0, vectors; n < columns; n += vectors * LANES) {
        vectors = columns - n >= most * LANES ? most : columns - n > LANES ? 2 : 1;
        const Columns part = {b.at + n / LANES * b.vector, b.row,           b.vector, b.ahead + n * k,
                              2 * b.vector,                vectors * LANES, 2 * LANES};
        row_pieces(rows, [&](int64_t first, int count) {
            const auto product = first ? tile_of<T, false> : tile_of<T, true>;
            product(count, a + first * lda, lda, part, k, c + first * ldc + n, ldc, vectors, add);
        });
    }
}

// y[count][PANEL num_panels] = x[count][k units] times that many panels + bias (null: none); of the last panel `columns`
// may leave some out. is_first: these rows bring the panels into the cache.
template <class T>
inline void multiply(const uint32_t* x, int count, int64_t k, const uint32_t* panel, int64_t num_panels, bool is_first,
                     const typename T::element* bias, typename T::element* y, int64_t ldy, int64_t columns) {
    const int64_t width = num_panels * PANEL;
    for (int r = 0; r < count; ++r) __builtin_prefetch(y + r * ldy, 1);  // it is written a microsecond from now
    alignas(64) float sums[MAX_TILE_ROWS * PANEL];
    const auto product = is_first ? tile_of<T, true> : tile_of<T, false>;
    const Columns weights = {panel, PANEL, LANES, panel + AHEAD, k * PANEL, PANEL, k * PANEL};
    product(count, x, k, weights, k, sums, width, 2 * (int)num_panels, false);
    for (int r = 0; r < count; ++r) {
        float* of_row = sums + r * width;
        if (bias)
            for (int v = 0; v < columns; ++v) of_row[v] += T::to_float(bias[v]);
        typename T::element line[2 * PANEL];
        for (int v = 0; v < width; v += LANES) T::narrow(line + v, load<vf>(of_row + v));
        if (columns == PANEL) std::memcpy(y + r * ldy, line, sizeof(line) / 2);
        else std::memcpy(y + r * ldy, line, columns * sizeof(*line));
    }
}

// How many panels go together with so many rows: few rows take two, which hides the multiply-add's latency.
inline int64_t panels_at_a_time(int64_t rows) { return rows <= FEW_TILE_ROWS ? 2 : 1; }

// y[rows][out] = x[rows][in] W^T + bias. A thread owns panels of W. All rows pass by one or two of them, or if they are
// many by a group that stays in the L2 cache, so W is read from memory once.
template <class T>
void linear(const void* x_, const uint32_t* packed, const void* bias_, void* y_, int64_t rows, int64_t in,
            int64_t out) {
    using E = typename T::element;
    const auto* x = (const uint32_t*)x_;
    const auto* bias = (const E*)bias_;
    const int64_t k = in / T::PER_UNIT, panels = (out + PANEL - 1) / PANEL, together = panels_at_a_time(rows);
    const int64_t group = rows <= FEW_ROWS ? together : std::max<int64_t>(GROUP_UNITS / (k * PANEL), 1);
#pragma omp parallel
    {
        const Share mine = share_of(panels);
        for (int64_t start = mine.begin; start < mine.end; start += group)
            row_pieces(rows, [&](int64_t first, int count) {
                const int64_t end = std::min(start + group, mine.end);
                for (int64_t p = start; p < end; p += together) {
                    const int64_t n = std::min(together, end - p), column = p * PANEL;
                    multiply<T>(x + first * k, count, k, packed + column * k, n, !first, bias ? bias + column : nullptr,
                                (E*)y_ + first * out + column, out, std::min(n * PANEL, out - column));
                }
            });
    }
}

}  // namespace

extern "C" {

// weight [out][units] -> packed [out / PANEL][units][PANEL]; columns beyond `out` are zero.
void pack(const uint32_t* weight, uint32_t* packed, int64_t out, int64_t units) {
    const int64_t panels = (out + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; ++p)
        for (int64_t i = 0; i < units; ++i)
            for (int64_t c = 0; c < PANEL; ++c)
                packed[(p * units + i) * PANEL + c] = p * PANEL + c < out ? weight[(p * PANEL + c) * units + i] : 0;
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
