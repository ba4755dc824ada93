// Products in whole numbers: int8 weights times activations that are rounded to int8 while a product runs.
//
// GROUP inputs in a row share a scale of the activations, and a row of the matrix, which is one output, has one scale.
// An element of a product is
//     weight scale x (sum over groups of: activation scale x (sum of activation code x weight code)) + bias.
// The inner sums are exact in int32, so their order does not matter. The groups are added in their order. Multiplying,
// adding and rounding are operations of their own: compile this file with -ffp-contract=off. So each element has the
// same bits on every processor, for one row as for many, and for any number of threads.
//
// A packed matrix is [out / PANEL][in / STEP][PANEL][STEP bytes], with zero codes beyond `out` and `in`.
#pragma once

#include <limits>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "amx.h"
#include "team.h"
#include "vectors.h"

namespace {

constexpr int STEP = 4;  // inputs that are multiplied together
constexpr int64_t GROUP = 128, GROUP_STEPS = GROUP / STEP, STEP_BYTES = PANEL * STEP;

// Dot multiplies STEP inputs of several columns by STEP inputs of one row, and adds the products of each column to an
// int32 lane. Nothing in it can overflow or saturate. BYTES is the size of its registers. A tile has at most ROWS rows
// and VECTORS registers of columns. `Right` is STEP inputs of the columns as `add` wants them. The left side of a step
// is UNITS numbers of 32 bits. The packed codes are SHIFT larger than the codes of the weights, and the code of input k
// of a step is in byte PLACES[k].
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
// Unsigned bytes times signed bytes: the weights are shifted by 128, which adds 128 x (sum of the row's codes).
struct Dot {
    using Element = int8_t;
    static constexpr bool IN_BYTES = true;
    static constexpr int SHIFT = 128, UNITS = 1, PLACES[STEP] = {0, 1, 2, 3};
#ifdef __AVX512VNNI__
    static constexpr int BYTES = 64, ROWS = 12, VECTORS = 2;
    typedef int32_t sums __attribute__((vector_size(BYTES)));
    static inline sums add(sums acc, sums right, const uint32_t* left) {
        return (sums)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)right, _mm512_set1_epi32((int)*left));
    }
#else
    static constexpr int BYTES = 32, ROWS = 6, VECTORS = 2;
    typedef int32_t sums __attribute__((vector_size(BYTES)));
    static inline sums add(sums acc, sums right, const uint32_t* left) {
        return (sums)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)right, _mm256_set1_epi32((int)*left));
    }
#endif
    using Right = sums;
    static inline Right prepare(sums weights) { return weights; }
};
#elif defined(__SSE2__)
// Pairs of 16-bit numbers. Bytes 0 and 2 of a step become one pair, bytes 1 and 3 the other.
struct Dot {
    using Element = int16_t;
    static constexpr bool IN_BYTES = false;
    static constexpr int SHIFT = 0, UNITS = 2, PLACES[STEP] = {0, 2, 1, 3};
#if defined(__AVX512BW__)
    static constexpr int BYTES = 64, ROWS = 12, VECTORS = 2;
    typedef int32_t sums __attribute__((vector_size(BYTES)));
    static inline sums multiply(sums a, uint32_t b) {
        return (sums)_mm512_madd_epi16((__m512i)a, _mm512_set1_epi32((int)b));
    }
#elif defined(__AVX2__)
    static constexpr int BYTES = 32, ROWS = 6, VECTORS = 2;
    typedef int32_t sums __attribute__((vector_size(BYTES)));
    static inline sums multiply(sums a, uint32_t b) {
        return (sums)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi32((int)b));
    }
#else
    static constexpr int BYTES = 16, ROWS = 6, VECTORS = 2;
    typedef int32_t sums __attribute__((vector_size(BYTES)));
    static inline sums multiply(sums a, uint32_t b) {
        return (sums)_mm_madd_epi16((__m128i)a, _mm_set1_epi32((int)b));
    }
#endif
    typedef int16_t words __attribute__((vector_size(BYTES)));
    struct Right { sums even, odd; };
    static inline Right prepare(sums weights) {
        return {(sums)(((words)weights << 8) >> 8), (sums)((words)weights >> 8)};
    }
    static inline sums add(sums acc, Right right, const uint32_t* left) {
        return acc + multiply(right.even, left[0]) + multiply(right.odd, left[1]);
    }
};
#else
// Signed bytes: by Arm's dot product, or one byte of each column at a time.
struct Dot {
    using Element = int8_t;
    static constexpr bool IN_BYTES = true;
    static constexpr int SHIFT = 0, UNITS = 1, PLACES[STEP] = {0, 1, 2, 3};
    static constexpr int BYTES = 16, ROWS = 6, VECTORS = 4;
    typedef int32_t sums __attribute__((vector_size(BYTES)));
    using Right = sums;
    static inline Right prepare(sums weights) { return weights; }
    static inline sums add(sums acc, sums right, const uint32_t* left) {
#ifdef __ARM_FEATURE_DOTPROD
        return (sums)vdotq_s32((int32x4_t)acc, (int8x16_t)right, vreinterpretq_s8_u32(vdupq_n_u32(*left)));
#else
        for (int k = 0; k < STEP; ++k) {
            const int place = is_little_endian() ? k : STEP - 1 - k;
            acc += (right << (24 - 8 * place) >> 24) * (int32_t)(int8_t)(*left >> 8 * place);
        }
        return acc;
#endif
    }
    static constexpr bool is_little_endian() { return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__; }
};
#endif

constexpr int SUMS = Dot::BYTES / 4, LEFT_ROW = GROUP_STEPS * Dot::UNITS;  // lanes of a register; units of a row's group
constexpr int FEW_ROWS = Dot::ROWS / 2, WIDTH = Dot::VECTORS * SUMS;       // a tile of few rows has twice the columns
using Sums = Dot::sums;
typedef float Totals __attribute__((vector_size(Dot::BYTES)));

// Limits how many rows are multiplied by one panel before the next panel is read: their codes must stay in half of a
// small L2 cache.
constexpr int64_t L2_LEFT = 1 << 19, LEAST_ROWS = 64, MOST_ROWS = 256;
constexpr int64_t LEAST_SHARED = 1 << 18;  // multiplications below which the other threads cost more than they save
constexpr int64_t AHEAD = 2;               // how many groups ahead of its reads a product prefetches

// Rounds to bfloat16 with the same bits everywhere: the processors' own instructions differ in denormal numbers.
template <class P> inline void narrow(typename P::element* p, vf v) {
    if constexpr (sizeof(*p) == 4) store(p, v);
    else store(p, narrow_to_bfloat16(v));
}

// Describes a packed matrix. `scales` has one for each output, padded to whole panels.
struct Matrix {
    const uint8_t* codes;
    const float* scales;
    int64_t in, out;
    int64_t panels() const { return (out + PANEL - 1) / PANEL; }
    int64_t steps() const { return (in + STEP - 1) / STEP; }
    int64_t groups() const { return (in + GROUP - 1) / GROUP; }
    int64_t panel_bytes() const { return steps() * STEP_BYTES; }
};

// Rounded rows: codes [groups][rows][LEFT_ROW], and of each group and row the scale and what the shift of the weights
// adds to a sum, with the sign turned. AMX reads up to 15 rows beyond the last one.
struct Rounded {
    uint32_t* codes;
    float* scales;
    int32_t* offsets;
    int64_t rows;

    // Returns the place of `count` rows behind `first` others of as many groups, in the memory of this one.
    Rounded part(int64_t groups, int64_t first, int64_t count) const {
        return {codes + groups * first * LEFT_ROW, scales + groups * first, offsets + groups * first, count};
    }
};

// Lends memory to rounded rows. It grows to the largest product.
class RoundedMemory {
  public:
    Rounded lend(int64_t groups, int64_t rows) {
        scales_.resize(std::max<size_t>(scales_.size(), groups * rows));
        offsets_.resize(std::max<size_t>(offsets_.size(), groups * rows));
        return {cache_lines(codes_, (groups * rows + AMX_ROWS) * LEFT_ROW), scales_.data(), offsets_.data(), rows};
    }

  private:
    std::vector<uint32_t> codes_;
    std::vector<float> scales_;
    std::vector<int32_t> offsets_;
};

// Rounds one row's group of at most GROUP values, which are padded with zeros. The scale is max |x| / 127, and a code is
// x times (127 / max |x|), rounded to nearest, ties to even. Tiny values count as zeros. With a NaN or an infinity, the
// scale is NaN, and so is every product with this group.
inline void round_group(float* values, uint32_t* codes, float* scale, int32_t* offset) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
    constexpr float TINY = 0x1p-100f;
    int32_t bits[LANES], largest = 0, sum = 0;
    vi most{}, total{};
    for (int64_t i = 0; i < GROUP; i += LANES) {
        const vi magnitude = load<vi>(values + i) & 0x7fffffff;  // in the order of the floats, and NaN is the largest
        most = magnitude > most ? magnitude : most;
    }
    store(bits, most);
    for (const int32_t lane : bits) largest = std::max(largest, lane);
    float magnitude;
    std::memcpy(&magnitude, &largest, 4);
    const bool is_finite = largest < 0x7f800000, is_tiny = magnitude < TINY;
    const float inverse = is_finite && !is_tiny ? 127.0f / magnitude : 0.0f;
    if (!is_finite) std::fill(values, values + GROUP, 0.0f);
    typedef Dot::Element elements __attribute__((vector_size(LANES * sizeof(Dot::Element))));
    for (int64_t i = 0; i < GROUP; i += LANES) {
        const vi code = (vi)(load<vf>(values + i) * inverse + MAGIC) - 0x4b400000;
        total += code;
        store((Dot::Element*)codes + i, __builtin_convertvector(code, elements));
    }
    store(bits, total);
    for (const int32_t lane : bits) sum += lane;
    *scale = !is_finite ? std::numeric_limits<float>::quiet_NaN() : is_tiny ? 0.0f : magnitude / 127.0f;
    *offset = -Dot::SHIFT * sum;
}

// Rounds the rows of x[rows][in].
template <class P> void round_rows(const typename P::element* x, int64_t in, Span some, const Rounded& rounded) {
    alignas(64) float values[GROUP];
    for (int64_t r = some.begin; r < some.end; ++r)
        for (int64_t start = 0; start < in; start += GROUP) {
            const auto* from = x + r * in + start;
            const int64_t count = std::min(GROUP, in - start), whole = count / LANES * LANES;
            for (int64_t i = 0; i < whole; i += LANES) store(values + i, P::widen(from + i));
            for (int64_t i = whole; i < GROUP; ++i) values[i] = i < count ? P::to_float(from[i]) : 0.0f;
            const int64_t at = start / GROUP * rounded.rows + r;
            round_group(values, &rounded.codes[at * LEFT_ROW], &rounded.scales[at], &rounded.offsets[at]);
        }
}

// Where a tile prefetches while it reads a step: from `at`, which moves on by `row` bytes each time.
struct Ahead {
    const uint8_t* at;
    int64_t row;
};

// Adds the sums of one group, times the rows' scales, to totals[ROWS][ldt]. `b` is the columns' codes in the first of
// one or more panels, which are `panel` bytes apart. The first group writes the totals.
template <int ROWS, int VECTORS>
inline void tile(const uint32_t* left, const float* scales, const int32_t* offsets, const uint8_t* b, int64_t panel,
                 int64_t steps, float* totals, int64_t ldt, bool is_first, Ahead ahead) {
    constexpr int ALL = ROWS * VECTORS, BYTES = Dot::BYTES;
    Sums acc[ALL];
#pragma GCC unroll 24
    for (int j = 0; j < ALL; ++j) acc[j] = Sums{} + offsets[j / VECTORS];
    for (int64_t i = 0; i < steps; ++i) {
        for (int64_t p = 0; p * STEP_BYTES < VECTORS * BYTES; ++p) {
            __builtin_prefetch(ahead.at + p * panel + i * ahead.row, 0, 2);
            __builtin_prefetch(ahead.at + p * panel + i * ahead.row + ahead.row / 2, 0, 2);
        }
        Dot::Right right[VECTORS];
#pragma GCC unroll 24
        for (int v = 0; v < VECTORS; ++v) {
            const int64_t at = v * BYTES / STEP_BYTES * panel + v * BYTES % STEP_BYTES;
            right[v] = Dot::prepare(load<Sums>(b + i * STEP_BYTES + at));
        }
#pragma GCC unroll 24
        for (int j = 0; j < ALL; ++j)
            acc[j] = Dot::add(acc[j], right[j % VECTORS], left + j / VECTORS * LEFT_ROW + i * Dot::UNITS);
    }
#pragma GCC unroll 24
    for (int j = 0; j < ALL; ++j) {
        float* total = totals + j / VECTORS * ldt + j % VECTORS * SUMS;
        const Totals sum = __builtin_convertvector(acc[j], Totals) * scales[j / VECTORS];  // below 2^24: exact
        store(total, is_first ? sum : load<Totals>(total) + sum);
    }
}

// Calls the `tile` for `rows` <= Dot::ROWS rows, and the usual number of columns or, for few rows, twice as many.
template <int ROWS = Dot::ROWS, class... Arguments>
inline void tile_of(int64_t rows, bool is_wide, Arguments... arguments) {
    if constexpr (ROWS > 0) {
        if (rows != ROWS) return tile_of<ROWS - 1>(rows, is_wide, arguments...);
        if constexpr (ROWS <= FEW_ROWS)
            if (is_wide) return tile<ROWS, 2 * Dot::VECTORS>(arguments...);
        tile<ROWS, Dot::VECTORS>(arguments...);
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

// Computes totals[rows][panels * PANEL] of `panels` panels from `panel` on. A group of a panel is read once for all
// rows, and the tiles that read it share the prefetching of a later one between them.
inline void sum_groups(const Rounded& x, const Matrix& m, int64_t panel, int64_t panels, float* totals) {
    const int64_t columns = panels * PANEL, groups = m.groups(), bytes = m.panel_bytes(), rows = x.rows;
    const bool is_wide = rows <= FEW_ROWS && columns >= 2 * WIDTH;
    const int64_t width = is_wide ? 2 * WIDTH : WIDTH, tiles = (rows + Dot::ROWS - 1) / Dot::ROWS;
    const int64_t calls = tiles * std::max<int64_t>(PANEL / width, 1);  // of tiles that read the same panel
    const uint8_t* codes = m.codes + panel * bytes;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t first = g * GROUP_STEPS, steps = std::min(GROUP_STEPS, m.steps() - first);
        // Beyond the end of these panels come the first groups of the next ones.
        const int64_t later = (g + AHEAD) * GROUP_STEPS * STEP_BYTES;
        const uint8_t* ahead = codes + (g + AHEAD < groups ? later : later + (panels - 1) * bytes);
        const int64_t ahead_row = (STEP_BYTES + calls - 1) / calls;
        row_pieces(rows, Dot::ROWS, [&](int64_t r, int64_t count) {
            const int64_t at = g * rows + r;
            for (int64_t c = 0; c < columns; c += width) {
                const uint8_t* b = codes + c / PANEL * bytes + first * STEP_BYTES + c % PANEL * STEP;
                const Ahead fetched = {ahead + c / PANEL * bytes, ahead_row};
                tile_of(count, is_wide, &x.codes[at * LEFT_ROW], &x.scales[at], &x.offsets[at], b, bytes, steps,
                        totals + r * columns + c, columns, g == 0, fetched);
                if (c % PANEL + width < PANEL) ahead += steps * ahead_row;
            }
            ahead += steps * ahead_row;
        });
    }
}

#ifdef WITH_AMX
static_assert(Dot::SHIFT == 128 && LEFT_ROW * 4 == GROUP && GROUP_STEPS % AMX_UNITS == 0, "what AMX multiplies");

// Adds the sums of one group, of `rows` rows of a panel, which are in `sums`, to totals as `tile` does.
inline void add_amx_sums(const int32_t* sums, int64_t rows, const float* scales, const int32_t* offsets, bool is_first,
                         float* totals) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t v = 0; v < PANEL; v += LANES) {
            float* total = totals + r * PANEL + v;
            const vf sum = __builtin_convertvector(load<vi>(sums + r * PANEL + v) + offsets[r], vf) * scales[r];
            store(total, is_first ? sum : load<vf>(total) + sum);
        }
}

// Multiplies a group of x's rows from r on, at most AMX_BLOCK_ROWS, by a panel's codes, and stores the sums.
template <bool TALL>
inline void amx_group(const Rounded& x, const Matrix& m, const uint8_t* codes, int64_t g, int64_t r, int32_t* sums) {
    constexpr int64_t BYTES = STEP_BYTES, LEFT_BYTES = LEFT_ROW * 4;
    const int64_t first = g * GROUP_STEPS, last = std::min(first + GROUP_STEPS, m.steps());
    const uint32_t* left = x.codes + (g * x.rows + r) * LEFT_ROW;
    alignas(64) uint8_t rest[AMX_UNITS * BYTES];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = first; i < last; i += AMX_UNITS, left += AMX_UNITS) {
        const uint8_t* right = codes + i * BYTES;
        if (last - i < AMX_UNITS) {  // the other units may be anything: they are multiplied by codes of 0
            std::memcpy(rest, right, (last - i) * BYTES);
            right = rest;
        }
        access_memory();
        _tile_loadd(6, right, BYTES);
        _tile_loadd(4, left, LEFT_BYTES);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, right + BYTES / 2, BYTES);
        _tile_dpbsud(1, 4, 7);
        if (TALL) _tile_loadd(5, left + AMX_ROWS * LEFT_ROW, LEFT_BYTES);
        if (TALL) _tile_dpbsud(2, 5, 6);
        if (TALL) _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums, BYTES);
    _tile_stored(1, sums + LANES, BYTES);
    if (TALL) _tile_stored(2, sums + AMX_ROWS * PANEL, BYTES);
    if (TALL) _tile_stored(3, sums + AMX_ROWS * PANEL + LANES, BYTES);
    access_memory();
}

// Does the same as sum_groups for one panel, by AMX. The sums of a block are added while the next block is multiplied.
inline void amx_sum_groups(const Rounded& x, const Matrix& m, int64_t panel, float* totals) {
    const uint8_t* codes = m.codes + panel * m.panel_bytes();
    const int64_t blocks = (x.rows + AMX_BLOCK_ROWS - 1) / AMX_BLOCK_ROWS;
    const int64_t ahead_bytes = (GROUP_STEPS * STEP_BYTES / blocks + 63) / 64 * 64;  // the blocks share the prefetching
    alignas(64) int32_t sums[2][AMX_BLOCK_ROWS * PANEL];
    const auto add = [&](int64_t block) {
        const int64_t g = block / blocks, r = block % blocks * AMX_BLOCK_ROWS, at = g * x.rows + r;
        add_amx_sums(sums[block % 2], std::min(x.rows - r, AMX_BLOCK_ROWS), &x.scales[at], &x.offsets[at], g == 0,
                     totals + r * PANEL);
    };
    for (int64_t block = 0; block < m.groups() * blocks; ++block) {
        const int64_t g = block / blocks, r = block % blocks * AMX_BLOCK_ROWS;
        const uint8_t* ahead = codes + (g + AHEAD) * GROUP_STEPS * STEP_BYTES + block % blocks * ahead_bytes;
        for (int64_t i = 0; i < ahead_bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        if (x.rows - r > AMX_ROWS) amx_group<true>(x, m, codes, g, r, sums[block % 2]);
        else amx_group<false>(x, m, codes, g, r, sums[block % 2]);
        if (block > 0) add(block - 1);
    }
    if (m.groups() > 0) add(m.groups() * blocks - 1);
}
#endif

// Computes y[rows][out] = x W^T + bias in the columns of some panels. `bias` may be null.
template <class P>
void multiply_panels(const Rounded& x, const Matrix& m, const typename P::element* bias, typename P::element* y,
                     Span some) {
    alignas(64) float totals[MOST_ROWS * PANEL];
    const int64_t together = x.rows <= FEW_ROWS && !IS_AMX_ALLOWED ? 2 : 1;
    const AmxRegisters registers(x.rows, IS_AMX_ALLOWED);
    for (int64_t p = some.begin, n; p < some.end; p += n) {
        n = std::min(together, some.end - p);
#ifdef WITH_AMX
        if (IS_AMX_ALLOWED) amx_sum_groups(x, m, p, totals);
        else
#endif
            sum_groups(x, m, p, n, totals);
        const int64_t width = n * PANEL, column = p * PANEL, columns = std::min(width, m.out - column);
        const bool is_past = goes_past_caches(y + column, m.out, columns, x.rows);
        float biases[2 * PANEL] = {};
        if (bias) std::transform(bias + column, bias + column + columns, biases, P::to_float);
        for (int64_t r = 0; r < x.rows; ++r) {
            alignas(64) typename P::element line[2 * PANEL];
            for (int64_t v = 0; v < width; v += LANES) {
                const vf product = load<vf>(totals + r * width + v) * load<vf>(m.scales + column + v);
                narrow<P>(line + v, bias ? product + load<vf>(biases + v) : product);
            }
            auto* to = y + r * m.out + column;
#ifdef WITH_AMX
            if (is_past) _mm512_stream_si512((__m512i*)to, load<__m512i>(line));
            else
#endif
                std::memcpy(to, line, columns * sizeof(*line));
        }
    }
}

// Returns how many rows are multiplied by one panel before the next panel is read.
inline int64_t rows_at_a_time(const Matrix& m) {
    return std::clamp(L2_LEFT / std::max<int64_t>(m.in, 1), LEAST_ROWS, MOST_ROWS);
}

inline RoundedMemory& rounded_memory() {
    static thread_local RoundedMemory memory;
    return memory;
}

// Computes y[rows][out] = x[rows][in] W^T + bias. The threads round the rows together, and then each owns some panels.
template <class P> void linear_dynamic(const void* x_, const Matrix& m, const void* bias, void* y_, int64_t rows) {
    using E = typename P::element;
    const int64_t panels = m.panels();
    row_pieces(rows, rows_at_a_time(m), [&](int64_t first, int64_t count) {
        const E* x = (const E*)x_ + first * m.in;
        const Rounded left = rounded_memory().lend(m.groups(), count);
        share(count, quarter_unless_small(count, count * m.in), [&](Span some) { round_rows<P>(x, m.in, some, left); });
        const int64_t piece = count * m.in * m.out > LEAST_SHARED ? (quarter(panels) + 1) / 2 * 2 : panels;
        share(panels, piece, [&](Span some) {
            multiply_panels<P>(left, m, (const E*)bias, (E*)y_ + first * m.out, some);
        });
    });
}

// Computes y[r][out] = x[r][in] W_e^T for every expert e and its rows r from offsets[e] to offsets[e + 1]. `m` describes
// the first expert's matrix, and the others follow it. Threads share the rows and then the panels of as many experts as
// have few rows together. An expert with many rows comes alone.
template <class P>
void grouped_dynamic(const void* x_, const Matrix& m, const int32_t* offsets, void* y_, int64_t experts) {
    using E = typename P::element;
    const int64_t panels = m.panels(), groups = m.groups(), most = rows_at_a_time(m);
    const auto x = [&](int64_t expert) { return (const E*)x_ + offsets[expert] * m.in; };
    const auto y = [&](int64_t expert) { return (E*)y_ + offsets[expert] * m.out; };
    const auto matrix = [&](int64_t expert) -> Matrix {
        return {m.codes + expert * panels * m.panel_bytes(), m.scales + expert * panels * PANEL, m.in, m.out};
    };
    std::vector<int64_t> touched;
    for (int64_t begin = 0, end; begin < experts; begin = end) {
        touched.clear();
        for (end = begin; end < experts && (end == begin || offsets[end + 1] - offsets[begin] <= most); ++end)
            if (offsets[end] < offsets[end + 1]) touched.push_back(end);
        const int64_t rows = offsets[end] - offsets[begin], items = (int64_t)touched.size() * panels;
        if (touched.size() == 1) {
            linear_dynamic<P>(x(touched[0]), matrix(touched[0]), nullptr, y(touched[0]), rows);
            continue;
        }
        const Rounded all = rounded_memory().lend(groups, rows);
        const auto left = [&](int64_t expert) {
            return all.part(groups, offsets[expert] - offsets[begin], offsets[expert + 1] - offsets[expert]);
        };
        const int64_t count = (int64_t)touched.size();
        share(count, quarter_unless_small(count, rows * m.in), [&](Span some) {
            for (int64_t i = some.begin; i < some.end; ++i)
                round_rows<P>(x(touched[i]), m.in, {0, left(touched[i]).rows, true}, left(touched[i]));
        });
        share(items, quarter(items), [&](Span some) {
            for (int64_t i = some.begin, n; i < some.end; i += n) {
                const int64_t expert = touched[i / panels], p = i % panels;
                n = std::min(panels - p, some.end - i);
                multiply_panels<P>(left(expert), matrix(expert), (const E*)nullptr, y(expert), {p, p + n, true});
            }
        });
    }
}

}  // namespace
