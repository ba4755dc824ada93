// Where the cache holds K and V of a token. A block of K or V has num_kv_heads tiles of block_size x head_dim elements:
//   a tile of K  [block_size / LANES][head_dim units][LANES]
//   a tile of V  [block_size units][head_dim]
#pragma once

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

}  // namespace
