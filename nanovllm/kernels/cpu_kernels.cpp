// The CPU path's kernels: products with packed matrices, attention over the paged cache, and the operators between.
//
// Plain C++ with the vector extensions of GCC and Clang, called through ctypes: without torch's headers it compiles in
// seconds. `cpu_library.py` builds it with -march=native; AVX-512 BF16 is used where the machine has it, and the
// same code runs, more slowly, where it has not.
//
// Everything is built of one step: 16 float32 sums += (a unit of A, broadcast) x (16 units of B). A *unit* is 32 bits
// along the summed dimension: two bfloat16 or one float32. So B is stored as rows of units, [summed units][columns],
// which is what `pack` makes of a weight and what `norm_rope_store` writes into the cache:
//   a packed weight  [out / PANEL][in units][PANEL]
//   a block of K     [num_kv_heads][block_size / LANES][head_dim units][LANES]
//   a block of V     [num_kv_heads][block_size units][head_dim]

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;

namespace {

constexpr int LANES = 16, PANEL = 32, MAX_TILE_ROWS = 12;
constexpr int MAX_HEAD_DIM = 256, QUERY_ROWS = 48, KEY_TILE = 64, AHEAD = 64 * PANEL, SAMPLE_CHUNK = 4096;
constexpr int64_t FEW_ROWS = 96, GROUP_UNITS = 1 << 17;  // units of a weight: half a MiB, half of a small L2 cache
constexpr int64_t SMALL = 1 << 14;  // elements below which waking the other threads costs more than it saves

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

template <class V> inline V load(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V> inline void store(void* p, V v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return vf{} + x; }
inline vf select(vi mask, vf a, vf b) { return mask ? a : b; }
inline vf maximum(vf a, vf b) { return select(a > b, a, b); }

// One number of 16, by halves. The halves are taken whole, and of a copy: compilers make slow code of single elements, and
// of vectors that have an address.
template <class Combine> inline float reduce(vf v, Combine combine) {
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    alignas(64) float e[LANES];
    store(e, v);
    store(e, combine(load<v8>(e), load<v8>(e + 8)));
    const v4 four = combine(load<v4>(e), load<v4>(e + 4));
    return combine(combine(four[0], four[2]), combine(four[1], four[3]));
}
inline float sum(vf v) { return reduce(v, [](auto a, auto b) { return a + b; }); }
inline float largest(vf v) { return reduce(v, [](auto a, auto b) { return a > b ? a : b; }); }

// exp for x <= 88, to about 2 units in the last place: 2^n times a polynomial in the rest (Cody and Waite 1980).
inline vf exp(vf x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    vf n = (x * 1.44269504f + magic) - magic;
    vf r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vf p = ((((1.9875691e-4f * r + 1.3981999e-3f) * r + 8.3334519e-3f) * r + 4.1665796e-2f) * r + 1.6666665e-1f) * r + 0.5f;
    vf y = p * r * r + r + 1.0f;
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return select(x < -87.0f, vf{}, y * (vf)exponent);
}

struct Float {
    using element = float;
    static constexpr int PER_UNIT = 1;
    static inline vf fma(vf acc, uint32_t a, vi b) { float f; std::memcpy(&f, &a, 4); return acc + f * (vf)b; }
    static inline vf widen(const element* p) { return load<vf>(p); }
    static inline void narrow(element* p, vf v) { store(p, v); }
    static inline float to_float(element x) { return x; }
};

struct BFloat16 {
    using element = uint16_t;
    static constexpr int PER_UNIT = 2;
    static inline vf fma(vf acc, uint32_t a, vi b) {
#ifdef __AVX512BF16__
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)b, (__m512bh)_mm512_set1_epi32((int)a));
#else
        vi av = vi{} + (int32_t)a;
        return acc + (vf)(av << 16) * (vf)(b << 16) + (vf)(av & ~0xffff) * (vf)(b & ~0xffff);
#endif
    }
    static inline vf widen(const element* p) {
#ifdef __AVX512BF16__
        return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16);
#else
        return (vf)(__builtin_convertvector(load<vh>(p), vi) << 16);
#endif
    }
    static inline void narrow(element* p, vf v) {  // to nearest, ties to even
#ifdef __AVX512BF16__
        store(p, _mm512_cvtneps_pbh((__m512)v));
#else
        vi u = (vi)v, rounded = u + 0x7fff + ((u >> 16) & 1);
        vi is_nan = v != v;
        store(p, __builtin_convertvector(((is_nan & 0x7fc00000) | (~is_nan & rounded)) >> 16, vh));
#endif
    }
    static inline float to_float(element x) {
        uint32_t u = (uint32_t)x << 16;
        float f;
        std::memcpy(&f, &u, 4);
        return f;
    }
};

template <class T> inline vf round_to(vf v) {  // what is left of v once it has been stored as a T
    typename T::element e[LANES];
    T::narrow(e, v);
    return T::widen(e);
}

// ---- the product of a few rows

// Columns in memory: `row` units from one summed unit to the next, `vector` units from 16 columns to the next 16. While
// they are read, as much is fetched from `ahead`: hardware prefetching stops at every page.
struct Columns {
    const uint32_t* at;
    int64_t row, vector;
    const uint32_t* ahead;
};

// c[ROWS][16 VECTORS] = (or +=) a[ROWS][k] x b[k][16 VECTORS]; k and lda count units. Every sum stays in a register; where
// there are few, SPLIT interleaved sums hide the latency of the multiply-add. STREAM: fetch ahead.
template <class T, int ROWS, int VECTORS, bool STREAM>
inline void tile(const uint32_t* a, int64_t lda, Columns b, int64_t k, float* c, int64_t ldc, bool add) {
    constexpr int SPLIT = ROWS * VECTORS <= 4 ? 4 : ROWS * VECTORS <= 8 ? 2 : 1;
    vf acc[SPLIT][ROWS][VECTORS];
#pragma GCC unroll 24
    for (int s = 0; s < SPLIT; ++s)
#pragma GCC unroll 24
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 24
            for (int v = 0; v < VECTORS; ++v) acc[s][r][v] = add && !s ? load<vf>(c + r * ldc + v * LANES) : vf{};
    const auto step = [&](int64_t i, int s) {
        vi bv[VECTORS];
#pragma GCC unroll 24
        for (int v = 0; v < VECTORS; ++v) {
            bv[v] = load<vi>(b.at + i * b.row + v * b.vector);
            if (STREAM) __builtin_prefetch(b.ahead + (i * VECTORS + v) * LANES);
        }
#pragma GCC unroll 24
        for (int r = 0; r < ROWS; ++r) {
            const uint32_t unit = a[r * lda + i];
#pragma GCC unroll 24
            for (int v = 0; v < VECTORS; ++v) acc[s][r][v] = T::fma(acc[s][r][v], unit, bv[v]);
        }
    };
    int64_t i = 0;
    for (; i + SPLIT <= k; i += SPLIT) {
#pragma GCC unroll 24
        for (int s = 0; s < SPLIT; ++s) step(i + s, s);
    }
    for (; i < k; ++i) step(i, 0);
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 24
        for (int v = 0; v < VECTORS; ++v) {
            vf total = acc[0][r][v];
#pragma GCC unroll 24
            for (int s = 1; s < SPLIT; ++s) total += acc[s][r][v];
            store(c + r * ldc + v * LANES, total);
        }
}

template <class T, bool STREAM, int ROWS = MAX_TILE_ROWS>
inline void tile_of(int rows, const uint32_t* a, int64_t lda, Columns b, int64_t k, float* c, int64_t ldc, int vectors, bool add) {
    if constexpr (ROWS > 0) {
        if (rows != ROWS) return tile_of<T, STREAM, ROWS - 1>(rows, a, lda, b, k, c, ldc, vectors, add);
        if (vectors == 2) tile<T, ROWS, 2, STREAM>(a, lda, b, k, c, ldc, add);
        else tile<T, ROWS, 1, STREAM>(a, lda, b, k, c, ldc, add);
    }
}

// This thread's part of `count` things, inside a parallel region.
struct Share { int64_t begin, end; };
inline Share share_of(int64_t count) {
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    return {me * count / threads, (me + 1) * count / threads};
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
inline void product(int64_t rows, const uint32_t* a, int64_t lda, Columns b, int64_t k, float* c, int64_t ldc, int64_t columns, bool add) {
    for (int64_t n = 0; n < columns; n += 2 * LANES) {
        const int vectors = columns - n > LANES ? 2 : 1;
        const Columns part = {b.at + n / LANES * b.vector, b.row, b.vector, b.ahead + n * k};
        row_pieces(rows, [&](int64_t first, int count) {
            const auto product = first ? tile_of<T, false> : tile_of<T, true>;
            product(count, a + first * lda, lda, part, k, c + first * ldc + n, ldc, vectors, add);
        });
    }
}

// y[rows][out] = x[rows][in] W^T + bias. A thread owns panels of W. All rows pass by one of them, or if they are many by a
// group that stays in the L2 cache, so W is read from memory once.
template <class T>
void linear(const void* x_, const uint32_t* packed, const void* bias_, void* y_, int64_t rows, int64_t in, int64_t out) {
    using E = typename T::element;
    const auto *x = (const uint32_t*)x_;
    const auto *bias = (const E*)bias_;
    auto* y = (E*)y_;
    const int64_t k = in / T::PER_UNIT, panels = (out + PANEL - 1) / PANEL;
    const int64_t group = rows <= FEW_ROWS ? 1 : std::max<int64_t>(GROUP_UNITS / (k * PANEL), 1);
    const auto multiply = [=](int64_t first, int count, int64_t p) {
        const uint32_t* panel = packed + p * k * PANEL;
        const int64_t columns = std::min<int64_t>(PANEL, out - p * PANEL);
        E* to = y + first * out + p * PANEL;
        for (int r = 0; r < count; ++r) __builtin_prefetch(to + r * out, 1);  // it is written a microsecond from now
        alignas(64) float sums[MAX_TILE_ROWS * PANEL];
        const auto product = first ? tile_of<T, false> : tile_of<T, true>;  // the first piece brings W into the cache
        product(count, x + first * k, k, {panel, PANEL, LANES, panel + AHEAD}, k, sums, PANEL, 2, false);
        for (int r = 0; r < count; ++r) {
            float* of_row = sums + r * PANEL;
            if (bias)
                for (int v = 0; v < columns; ++v) of_row[v] += T::to_float(bias[p * PANEL + v]);
            E line[PANEL];
            for (int v = 0; v < PANEL; v += LANES) T::narrow(line + v, load<vf>(of_row + v));
            if (columns == PANEL) std::memcpy(to + r * out, line, sizeof line);
            else std::memcpy(to + r * out, line, columns * sizeof(E));
        }
    };
#pragma omp parallel
    {
        const Share mine = share_of(panels);
        for (int64_t start = mine.begin; start < mine.end; start += group)
            row_pieces(rows, [&](int64_t first, int count) {
                for (int64_t p = start; p < std::min(start + group, mine.end); ++p) multiply(first, count, p);
            });
    }
}

// ---- attention

// Position of head `head` of block `block`, in units; the same for K and V, whose tiles are of equal size.
inline int64_t cache_tile(int64_t block, int64_t head, int64_t num_kv_heads, int64_t tile_units) {
    return (block * num_kv_heads + head) * tile_units;
}

// One KV head, `tokens` query tokens of one sequence, the first of them at `position`: softmax(scale q K^T) V, key tile by
// key tile with running maxima and sums (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867).
template <class T>
void attend_rows(const typename T::element* q, const uint32_t* k_cache, const uint32_t* v_cache, const int32_t* blocks,
                 typename T::element* out, int64_t tokens, int64_t position, int64_t head, int64_t num_kv_heads, int64_t group,
                 int64_t dim, int64_t block_size, float scale) {
    using E = typename T::element;
    const int64_t stride = num_kv_heads * group * dim, rows = tokens * group;
    const int64_t dim_units = dim / T::PER_UNIT, tile_units = dim_units * block_size;
    const int64_t tile_size = std::min<int64_t>(block_size, KEY_TILE), num_keys = position + tokens;
    alignas(64) E queries[QUERY_ROWS * MAX_HEAD_DIM];
    alignas(64) float scores[QUERY_ROWS * KEY_TILE], sums[QUERY_ROWS * MAX_HEAD_DIM];
    alignas(64) E weights[QUERY_ROWS * KEY_TILE];
    float maxima[QUERY_ROWS], totals[QUERY_ROWS];
    for (int64_t t = 0; t < tokens; ++t)
        std::memcpy(queries + t * group * dim, q + t * stride + head * group * dim, group * dim * sizeof(E));
    std::fill_n(maxima, rows, -INFINITY);
    std::fill_n(totals, rows, 0.0f);
    std::fill_n(sums, rows * dim, 0.0f);
    vi lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;

    for (int64_t start = 0; start < num_keys; start += tile_size) {
        const int64_t at = cache_tile(blocks[start / block_size], head, num_kv_heads, tile_units), offset = start % block_size;
        const int64_t keys = std::min(num_keys - start, tile_size), padded = (keys + LANES - 1) / LANES * LANES;
        const uint32_t *k_at = k_cache + at + offset * dim_units, *v_at = v_cache + at + offset / T::PER_UNIT * dim;
        const int64_t next = std::min(start + tile_size, num_keys - 1), next_offset = next % block_size / LANES * LANES;
        const int64_t next_at = cache_tile(blocks[next / block_size], head, num_kv_heads, tile_units);
        const Columns k_tile = {k_at, LANES, LANES * dim_units, v_at};
        product<T>(rows, (const uint32_t*)queries, dim_units, k_tile, dim_units, scores, KEY_TILE, padded, false);
        for (int64_t r = 0; r < rows; ++r) {
            float* score = scores + r * KEY_TILE;
            const int32_t visible = (int32_t)std::min<int64_t>(position + r / group + 1 - start, padded);
            vf top = splat(-INFINITY);
            for (int64_t v = 0; v < padded; v += LANES) {
                vf s = select(lane + (int32_t)v < visible, load<vf>(score + v) * scale, splat(-INFINITY));
                store(score + v, s);
                top = maximum(top, s);
            }
            const float before = maxima[r], now = std::max(before, largest(top));
            vf total{};
            for (int64_t v = 0; v < padded; v += LANES) {
                vf w = exp(load<vf>(score + v) - now);  // key 0 is visible to every query: `now` is finite
                total += w;
                T::narrow(weights + r * KEY_TILE + v, w);
            }
            if (now > before) {
                const float rescale = std::exp(before - now);
                totals[r] *= rescale;
                for (int64_t d = 0; d < dim; d += LANES) store(sums + r * dim + d, load<vf>(sums + r * dim + d) * rescale);
                maxima[r] = now;
            }
            totals[r] += sum(total);
        }
        const Columns v_tile = {v_at, dim, LANES, k_cache + next_at + next_offset * dim_units};
        const int64_t key_units = (keys + T::PER_UNIT - 1) / T::PER_UNIT;
        product<T>(rows, (const uint32_t*)weights, KEY_TILE / T::PER_UNIT, v_tile, key_units, sums, dim, dim, true);
    }
    for (int64_t r = 0; r < rows; ++r) {
        E* to = out + r / group * stride + (head * group + r % group) * dim;
        const float weight = totals[r] > 0 ? 1.0f / totals[r] : 0.0f;  // 0: a sequence of no tokens, which is padding
        for (int64_t d = 0; d < dim; d += LANES) T::narrow(to + d, load<vf>(sums + r * dim + d) * weight);
    }
}

template <class T>
void attend(const void* q, const uint32_t* k_cache, const uint32_t* v_cache, const int32_t* block_tables, const int32_t* cu_seqlens,
            const int32_t* seq_lens, void* out, int64_t num_seqs, int64_t max_blocks, int64_t num_kv_heads, int64_t group,
            int64_t dim, int64_t block_size, float scale) {
    using E = typename T::element;
    struct Piece { int32_t seq, first, tokens; };
    const int32_t most = std::max<int32_t>(QUERY_ROWS / group, 1);
    std::vector<Piece> pieces;
    for (int32_t s = 0; s < num_seqs; ++s)
        for (int32_t length = cu_seqlens[s + 1] - cu_seqlens[s], first = 0; first < length; first += most)
            pieces.push_back({s, first, std::min(most, length - first)});
    const int64_t work = (int64_t)pieces.size() * num_kv_heads;
#pragma omp parallel for schedule(dynamic, 4)
    for (int64_t i = 0; i < work; ++i) {
        const Piece piece = pieces[i / num_kv_heads];
        const int64_t token = cu_seqlens[piece.seq] + piece.first;
        const int64_t position = seq_lens[piece.seq] - cu_seqlens[piece.seq + 1] + token;
        const int64_t at = token * num_kv_heads * group * dim;
        attend_rows<T>((const E*)q + at, k_cache, v_cache, block_tables + piece.seq * max_blocks, (E*)out + at, piece.tokens,
                       position, i % num_kv_heads, num_kv_heads, group, dim, block_size, scale);
    }
}

// ---- the operators between

template <class T>
void rms_norm_row(const typename T::element* x, const typename T::element* weight, typename T::element* y, int64_t size, float eps) {
    vf squares{};
    for (int64_t i = 0; i < size; i += LANES) { vf v = T::widen(x + i); squares += v * v; }
    const float scale = 1.0f / std::sqrt(sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += LANES)
        T::narrow(y + i, round_to<T>(T::widen(x + i) * scale) * T::widen(weight + i));
}

// y = rms_norm(x + residual) * weight, sum = x + residual; without a residual, y = rms_norm(x) * weight.
template <class T>
void add_rms_norm(const void* x_, const void* residual_, const void* weight, void* y, void* sum_, int64_t rows, int64_t size, float eps) {
    using E = typename T::element;
#pragma omp parallel for schedule(static) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; ++r) {
        const E* x = (const E*)x_ + r * size;
        if (residual_) {
            const E* residual = (const E*)residual_ + r * size;
            E* total = (E*)sum_ + r * size;
            for (int64_t i = 0; i < size; i += LANES) T::narrow(total + i, T::widen(x + i) + T::widen(residual + i));
            x = total;
        }
        rms_norm_row<T>(x, (const E*)weight, (E*)y + r * size, size, eps);
    }
}

template <class T> void silu_and_mul(const void* gate_up, void* y_, int64_t rows, int64_t size) {
    using E = typename T::element;
#pragma omp parallel for schedule(static) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; ++r) {
        const E *gate = (const E*)gate_up + r * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; i += LANES) {
            const vf g = T::widen(gate + i);
            const vf e = exp(-maximum(g, splat(-80.0f)));
            T::narrow((E*)y_ + r * size + i, round_to<T>(g / (1.0f + e)) * T::widen(up + i));
        }
    }
}

// Rotate a normed head in place; element i is paired with i + dim / 2.
template <class T> void rotate(typename T::element* x, const float* cos_sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const vf a = T::widen(x + i), b = T::widen(x + half + i), c = load<vf>(cos_sin + i), s = load<vf>(cos_sin + half + i);
        T::narrow(x + i, a * c - b * s);
        T::narrow(x + half + i, b * c + a * s);
    }
}

// A thread owns tokens; two that share a unit of V have one owner. The token at the even offset comes first and clears
// the other half: what a block held before never meets a new sum.
template <class T>
void norm_rope_store(const void* qkv_, const void* q_weight, const void* k_weight, const float* cos_sin, const int32_t* positions,
                     const int64_t* slots, void* q_, uint32_t* k_cache, uint32_t* v_cache, int64_t tokens, int64_t heads,
                     int64_t num_kv_heads, int64_t dim, int64_t block_size, float eps) {
    using E = typename T::element;
    const int64_t stride = (heads + 2 * num_kv_heads) * dim, dim_units = dim / T::PER_UNIT;
    const auto store_key = [=](const E* k, int64_t at, int64_t offset) {
        uint32_t* column = k_cache + at + offset / LANES * LANES * dim_units + offset % LANES;
        for (int64_t i = 0; i < dim_units; ++i) column[i * LANES] = load<uint32_t>(k + i * T::PER_UNIT);
    };
    const auto store_value = [=](const E* v, int64_t at, int64_t offset) {
        uint32_t* units = v_cache + at + offset / T::PER_UNIT * dim;
        if (T::PER_UNIT == 1) std::memcpy(units, v, dim * sizeof(E));
        else if (offset % 2 == 0)
            for (int64_t d = 0; d < dim; ++d) units[d] = (uint32_t)v[d];
        else
            for (int64_t d = 0; d < dim; ++d) units[d] = (units[d] & 0xffff) | (uint32_t)v[d] << 16;
    };
    const auto owned_from = [=](int64_t t) {
        return t > 0 && t < tokens && slots[t] % 2 == 1 && slots[t] == slots[t - 1] + 1 ? t + 1 : t;
    };
#pragma omp parallel if (tokens * stride > SMALL)
    {
        const Share mine = share_of(tokens);
        for (int64_t t = owned_from(mine.begin); t < owned_from(mine.end); ++t) {
            const E* from = (const E*)qkv_ + t * stride;
            const float* angles = cos_sin + positions[t] * dim;
            for (int64_t h = 0; h < heads; ++h, from += dim) {
                E* q = (E*)q_ + (t * heads + h) * dim;
                rms_norm_row<T>(from, (const E*)q_weight, q, dim, eps);
                rotate<T>(q, angles, dim);
            }
            if (slots[t] < 0) continue;
            const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
            for (int64_t h = 0; h < num_kv_heads; ++h, from += dim) {
                const int64_t at = cache_tile(block, h, num_kv_heads, dim_units * block_size);
                alignas(64) E k[MAX_HEAD_DIM];
                rms_norm_row<T>(from, (const E*)k_weight, k, dim, eps);
                rotate<T>(k, angles, dim);
                store_key(k, at, offset);
                store_value(from + num_kv_heads * dim, at, offset);
            }
        }
    }
}

// ---- sampling, by the rule in sample.py, for rows without a filter

// A number in (0, 1) from Philox4x32-10: the first word's upper 23 bits, centred in their interval.
float uniform(uint64_t seed, uint32_t position) {
    uint32_t c[4] = {position, 0, 0, 0}, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < 10; ++i) {
        const uint64_t p0 = (uint64_t)c[0] * 0xD2511F53u, p1 = (uint64_t)c[2] * 0xCD9E8D57u;
        const uint32_t next[4] = {(uint32_t)(p1 >> 32) ^ c[1] ^ k0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c[3] ^ k1, (uint32_t)p0};
        std::memcpy(c, next, sizeof c);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return ((float)(c[0] >> 9) + 0.5f) * 0x1p-23f;
}

template <class T> int32_t sample_row(const typename T::element* logits, float temperature, uint64_t seed, uint32_t position, int64_t vocab) {
    float top = -INFINITY;
    int64_t best = 0;
    vf tops = splat(-INFINITY);
    const int64_t whole = vocab / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) tops = maximum(tops, T::widen(logits + i));
    top = largest(tops);
    for (int64_t i = whole; i < vocab; ++i) top = std::max(top, T::to_float(logits[i]));
    while (best + 1 < vocab && T::to_float(logits[best]) != top) ++best;
    if (temperature <= 0) return (int32_t)best;
    const auto weight = [&](int64_t i) {  // of 16 tokens; those beyond the vocabulary weigh nothing
        if (i + LANES <= vocab) return exp((T::widen(logits + i) - top) / temperature);
        vf z = splat(-INFINITY);
        for (int64_t j = i; j < vocab; ++j) z[j - i] = (T::to_float(logits[j]) - top) / temperature;
        return exp(z);
    };
    std::vector<float> sums;
    float total = 0;
    for (int64_t start = 0; start < vocab; start += SAMPLE_CHUNK) {
        vf partial{};
        for (int64_t i = start; i < std::min(vocab, start + SAMPLE_CHUNK); i += LANES) partial += weight(i);
        sums.push_back(sum(partial));
        total += sums.back();
    }
    const float target = uniform(seed, position) * total;
    float before = 0;
    size_t chunk = 0;
    int64_t last = best;
    while (chunk + 1 < sums.size() && before + sums[chunk] <= target) before += sums[chunk++];
    for (int64_t i = (int64_t)chunk * SAMPLE_CHUNK; i < std::min(vocab, (int64_t)(chunk + 1) * SAMPLE_CHUNK); i += LANES) {
        const vf w = weight(i);
        for (int j = 0; j < LANES; ++j) {
            before += w[j];
            if (w[j] > 0) last = i + j;
            if (before > target) return (int32_t)last;
        }
    }
    return (int32_t)last;  // rounding left the target at or above the total
}

template <class T>
void sample(const void* logits, const float* temperature, const int64_t* seeds, const int32_t* positions, int32_t* tokens, int64_t rows, int64_t vocab) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r)
        tokens[r] = sample_row<T>((const typename T::element*)logits + r * vocab, temperature[r], (uint64_t)seeds[r], (uint32_t)positions[r], vocab);
}

}  // namespace

// ---- what ctypes calls: each operator for both formats, and the two that only move units

extern "C" {

#define EXPORT(name, parameters, arguments)                          \
    void name##_bfloat16 parameters { name<BFloat16> arguments; }    \
    void name##_float32 parameters { name<Float> arguments; }

EXPORT(linear, (const void* x, const uint32_t* packed, const void* bias, void* y, int64_t rows, int64_t in, int64_t out),
       (x, packed, bias, y, rows, in, out))
EXPORT(attend,
       (const void* q, const uint32_t* k, const uint32_t* v, const int32_t* tables, const int32_t* cu_seqlens, const int32_t* lens,
        void* out, int64_t seqs, int64_t max_blocks, int64_t kv_heads, int64_t group, int64_t dim, int64_t block_size, float scale),
       (q, k, v, tables, cu_seqlens, lens, out, seqs, max_blocks, kv_heads, group, dim, block_size, scale))
EXPORT(add_rms_norm, (const void* x, const void* residual, const void* weight, void* y, void* sum, int64_t rows, int64_t size, float eps),
       (x, residual, weight, y, sum, rows, size, eps))
EXPORT(silu_and_mul, (const void* gate_up, void* y, int64_t rows, int64_t size), (gate_up, y, rows, size))
EXPORT(norm_rope_store,
       (const void* qkv, const void* qw, const void* kw, const float* cos_sin, const int32_t* positions, const int64_t* slots, void* q,
        uint32_t* k, uint32_t* v, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, int64_t block_size, float eps),
       (qkv, qw, kw, cos_sin, positions, slots, q, k, v, tokens, heads, kv_heads, dim, block_size, eps))
EXPORT(sample,
       (const void* logits, const float* temperature, const int64_t* seeds, const int32_t* positions, int32_t* tokens, int64_t rows, int64_t vocab),
       (logits, temperature, seeds, positions, tokens, rows, vocab))

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

// Ask for huge pages: a weight is streamed once a step, and 4 KiB pages cost a table walk every 4 KiB.
void advise_huge_pages(void* start, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = 4096, first = ((uintptr_t)start + page - 1) & ~(page - 1), end = ((uintptr_t)start + bytes) & ~(page - 1);
    if (end > first) madvise((void*)first, end - first, MADV_HUGEPAGE);
#endif
}

const int32_t vectors_are_native =
#ifdef __AVX512BF16__
    1;
#else
    0;
#endif
}
