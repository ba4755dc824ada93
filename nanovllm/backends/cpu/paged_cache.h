// Where the cache holds K and V of a token. A block of K or V has num_kv_heads tiles of block_size x head_dim elements:
//   a tile of K  [block_size / LANES][head_dim units][LANES]
//   a tile of V  [block_size units][head_dim]
// With keys and values in one byte, a tile has block_size x head_dim codes, and a scale for each of its tokens:
//   a tile of K  [block_size / LANES][head_dim][LANES]
//   a tile of V  [block_size][head_dim]
#pragma once

#include <type_traits>

#include "vectors.h"

namespace {

// Returns the offset of the tile of `head` in `block`, in units. It is the same for K and V: their tiles have one size.
inline int64_t cache_tile(int64_t block, int64_t head, int64_t num_kv_heads, int64_t tile_units) {
    return (block * num_kv_heads + head) * tile_units;
}

// Stores k [dim] as a column of its tile.
template <class T> inline void store_key(const typename T::element* k, uint32_t* tile, int64_t offset, int64_t dim) {
    const int64_t units = dim / T::PER_UNIT;
    uint32_t* column = tile + offset / LANES * LANES * units + offset % LANES;
    for (int64_t i = 0; i < units; ++i) column[i * LANES] = load<uint32_t>(k + i * T::PER_UNIT);
}

// Stores v [dim] as a row of its tile. In bfloat16 two tokens share a row, each with one half of every unit. The token
// at the even offset is stored first and clears the other half, so that a sum never reads what the block held before.
template <class T> inline void store_value(const typename T::element* v, uint32_t* tile, int64_t offset, int64_t dim) {
    uint32_t* row = tile + offset / T::PER_UNIT * dim;
    if (T::PER_UNIT == 1) std::memcpy(row, v, dim * sizeof *v);
    else if (offset % 2 == 0)
        for (int64_t d = 0; d < dim; ++d) row[d] = (uint32_t)v[d];
    else
        for (int64_t d = 0; d < dim; ++d) row[d] = (row[d] & 0xffff) | (uint32_t)v[d] << 16;
}

// The format in which codes are multiplied: float32 where products widen bfloat16 anyway.
template <class T> using FormatOfCodes = std::conditional_t<T::STEPS == 1, T, Float>;

typedef int8_t codes_of_vector __attribute__((vector_size(LANES)));

// Writes the units of 16 columns, whose elements are the codes at `codes`, and, if a unit has two, at `second`. bfloat16
// holds every code exactly.
template <class T> ALWAYS_INLINE void widen_codes(const int8_t* codes, const int8_t* second, uint32_t* units) {
    typedef uint32_t ru __attribute__((vector_size(REGISTER)));
    const auto numbers = [](const int8_t* at) { return (ru)__builtin_convertvector(widen_bytes(at), rf); };
    for (int i = 0; i < LANES; i += PART_LANES) {
        const ru first = numbers(codes + i);
        store(units + i, T::PER_UNIT == 1 ? first : numbers(second + i) | first >> 16);  // the lower halves are zero
    }
}

// Widens `keys` codes of K, a multiple of LANES, to units as a tile of K has them. Meanwhile it prefetches as many
// codes from `ahead`: so many requests at once would delay every other read.
template <class T>
inline void widen_keys(const int8_t* codes, uint32_t* units, int64_t keys, int64_t dim, const int8_t* ahead) {
    constexpr int64_t STEP = T::PER_UNIT * LANES;
    for (int64_t i = 0; i < keys * dim; i += STEP, units += LANES) {
        __builtin_prefetch(ahead + i, 0, 2);  // into the L2 cache
        widen_codes<T>(codes + i, codes + i + LANES, units);
    }
}

// Does the same with the codes of V of `count` units of tokens.
template <class T>
inline void widen_values(const int8_t* codes, uint32_t* units, int64_t count, int64_t dim, const int8_t* ahead) {
    for (int64_t u = 0; u < count; ++u, codes += T::PER_UNIT * dim, ahead += T::PER_UNIT * dim, units += dim)
        for (int64_t d = 0; d < dim; d += LANES) {
            __builtin_prefetch(ahead + d * T::PER_UNIT, 0, 2);
            widen_codes<T>(codes + d, codes + dim + d, units + d);
        }
}

// Quantises x [dim] to codes, and returns their scale: largest magnitude / 127. The scale of zeros is 0. If an element
// is not finite, the scale is NaN. The reference is `quantize_heads` in ops/kv_codes.py.
template <class T> inline float quantise_head(const typename T::element* x, int8_t* codes, int64_t dim) {
    vf top{}, zeros{};
    for (int64_t d = 0; d < dim; d += LANES) {
        const vf v = T::widen(x + d);
        top = maximum(maximum(v, -v), top);
        zeros += v * 0.0f;  // NaN for what is not finite
    }
    const float scale = largest(top) / 127.0f + sum(zeros);
    const float magic = 12582912.0f;  // adding it rounds to an integer, ties to even
    for (int64_t d = 0; d < dim; d += LANES) {
        vf code{};
        if (scale > 0) code = (T::widen(x + d) / scale + magic) - magic;
        code = -maximum(-maximum(code, splat(-127.0f)), splat(-127.0f));
        store(codes + d, __builtin_convertvector(__builtin_convertvector(code, vi), codes_of_vector));
    }
    return scale;
}

// Stores the codes of a key as a column of its tile.
inline void store_key_codes(const int8_t* codes, int8_t* tile, int64_t offset, int64_t dim) {
    int8_t* column = tile + offset / LANES * LANES * dim + offset % LANES;
    for (int64_t i = 0; i < dim; ++i) column[i * LANES] = codes[i];
}

}  // namespace
