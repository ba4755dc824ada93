// Causal attention over the paged cache.
#pragma once

#include <vector>

#include "linear.h"
#include "paged_cache.h"

namespace {

// AMX is faster with more rows and keys at a time.
#ifdef WITH_AMX
constexpr int QUERY_ROWS = 64, KEY_TILE = 128;
#else
constexpr int QUERY_ROWS = 96, KEY_TILE = 64;
#endif
// A layer's keys and values: elements of T, or codes with scales. Without codes both scales are null.
struct Cache { const void *keys, *values; const float *key_scales, *value_scales; };
static_assert(MAX_HEAD_DIM <= DEPTH && KEY_TILE <= DEPTH, "a product here is one block deep");

// Computes softmax(scale q K^T) V for one KV head and for `tokens` query tokens of one sequence, whose first token is
// at `position`. It goes through the keys tile by tile and keeps running maxima and sums (Milakov and Gimelshein 2018,
// https://arxiv.org/abs/1805.02867). Every tile starts at a multiple of KEY_TILE and has KEY_TILE keys, in one block or
// in several. So the order of the sums depends only on the position of the query.
// If the cache holds CODES, a tile of them is widened once for all rows. Scores are multiplied by the scales of keys,
// and weights by those of values.
template <class T, bool CODES>
void attend_rows(const typename T::element* q, const Cache& cache, const int32_t* blocks, typename T::element* out,
                 int64_t tokens, int64_t position, int64_t head, int64_t num_kv_heads, int64_t group, int64_t dim,
                 int64_t block_size, float scale) {
    using E = typename T::element;
    using P = std::conditional_t<CODES, FormatOfCodes<T>, T>;  // the format of the products
    constexpr int64_t PER_LEFT = P::PER_UNIT / P::STEPS;
    const int64_t stride = num_kv_heads * group * dim, rows = tokens * group, num_keys = position + tokens;
    const int64_t dim_units = dim / P::PER_UNIT, tile_units = dim_units * block_size;
    const int64_t run = std::min<int64_t>(block_size, KEY_TILE);  // how many keys of a tile lie in one block
    alignas(64) typename T::left queries[QUERY_ROWS * LEFT_ROW], weights[QUERY_ROWS * LEFT_ROW];
    alignas(64) float scores[QUERY_ROWS * KEY_TILE], sums[QUERY_ROWS * MAX_HEAD_DIM];
    float maxima[QUERY_ROWS], before[QUERY_ROWS], totals[QUERY_ROWS];
    const AmxRegisters registers(rows, uses_amx<T>());
    // The sums of AMX depend on where its pieces of 32 values begin, so values of shorter blocks are put together.
    const bool is_gathered = CODES || (uses_amx<T>() && run < AMX_UNITS * P::PER_UNIT);
    alignas(64) float key_scales[KEY_TILE], value_scales[KEY_TILE];
    alignas(64) uint32_t gathered[KEY_TILE / P::PER_UNIT * MAX_HEAD_DIM];
    const auto units_of = [](int64_t keys) { return (keys + P::PER_UNIT - 1) / P::PER_UNIT; };
    for (int64_t t = 0; t < tokens; ++t)
        put_left<T>(q + t * stride + head * group * dim, group, dim, queries + t * group * LEFT_ROW);
    std::fill_n(maxima, rows, -INFINITY);
    std::fill_n(totals, rows, 0.0f);
    std::fill_n(sums, rows * dim, 0.0f);
    rf lane;
    for (int i = 0; i < PART_LANES; ++i) lane[i] = (float)i;
    const auto keys_at = [=](int64_t key) {  // returns the start of the group of 16 keys that holds `key`
        const int64_t at = cache_tile(blocks[key / block_size], head, num_kv_heads, tile_units);
        return (const uint32_t*)cache.keys + at + key % block_size / LANES * LANES * dim_units;
    };
    const auto values_at = [=](int64_t key) {
        const int64_t at = cache_tile(blocks[key / block_size], head, num_kv_heads, tile_units);
        return (const uint32_t*)cache.values + at + key % block_size / P::PER_UNIT * dim;
    };
    // Returns the number of the first token of a run of keys, counted over the tiles of all blocks and heads.
    const auto token_at = [=](int64_t key) {
        return cache_tile(blocks[key / block_size], head, num_kv_heads, block_size) + key % block_size;
    };

    for (int64_t start = 0; start < num_keys; start += KEY_TILE) {
        const int64_t keys = std::min<int64_t>(num_keys - start, KEY_TILE), padded = (keys + LANES - 1) / LANES * LANES;
        for (int64_t first = 0; first < keys; first += run) {
            const int64_t count = std::min(padded - first, run);
            Columns k_run = {keys_at(start + first), LANES, LANES * dim_units, values_at(start + first)};
            if (CODES) {
                const int64_t at = token_at(start + first), used = std::min(keys - first, run);
                const int8_t* codes = (const int8_t*)cache.keys + at * dim;
                widen_keys<P>(codes, gathered, count, dim, (const int8_t*)cache.values + at * dim);
                std::copy_n(cache.key_scales + at, used, key_scales + first);
                std::copy_n(cache.value_scales + at, used, value_scales + first);
                k_run = {gathered, LANES, LANES * dim_units, gathered};
            }
            product<P>(rows, queries, k_run, dim_units, scores + first, KEY_TILE, count, false);
        }
        if (CODES) {  // the scale of a slot without a token may be NaN
            std::fill(key_scales + keys, key_scales + padded, 0.0f);
            std::fill(value_scales + keys, value_scales + padded, 0.0f);
            for (int64_t v = 0; v < padded; v += LANES) store(key_scales + v, load<vf>(key_scales + v) * scale);
        }
        // Two loops: the processor computes the maxima of several rows side by side.
        std::copy_n(maxima, rows, before);
        for (int64_t r = 0; r < rows; ++r) {
            float* score = scores + r * KEY_TILE;
            const float visible = (float)std::min<int64_t>(position + r / group + 1 - start, padded);
            rf top = rf{} - INFINITY;
            for (int64_t v = 0; v < padded; v += PART_LANES) {
                const rf scaled = load<rf>(score + v) * (CODES ? load<rf>(key_scales + v) : rf{} + scale);
                const rf s = select_less(lane + (float)v, visible, scaled, rf{} - INFINITY);
                store(score + v, s);
                top = maximum(top, s);
            }
            alignas(64) float tops[LANES];
            for (int i = 0; i < LANES; i += PART_LANES) store(tops + i, top);
            maxima[r] = std::max(maxima[r], largest(load<vf>(tops)));
        }
        for (int64_t r = 0; r < rows; ++r) {
            const float* score = scores + r * KEY_TILE;
            rf total[PARTS] = {};
            for (int64_t v = 0; v < padded; v += LANES)
                for (int64_t p = 0, at = v; p < PARTS; ++p, at += PART_LANES) {
                    rf w = exp(load<rf>(score + at) - maxima[r]);  // it is finite, because every query sees key 0
                    total[p] += w;
                    if (CODES) w *= load<rf>(value_scales + at);
                    T::put_register(weights + r * LEFT_ROW + at / PER_LEFT, w);
                }
            if (maxima[r] > before[r]) {
                const float rescale = std::exp(before[r] - maxima[r]);
                totals[r] *= rescale;
                float* of_row = sums + r * dim;
                for (int64_t d = 0; d < dim; d += LANES) store(of_row + d, load<vf>(of_row + d) * rescale);
            }
            totals[r] += sum(load<vf>(total));
        }
        const auto add_values = [&](int64_t first, int64_t count, const uint32_t* values) {
            const int64_t next = std::min(start + KEY_TILE + first, num_keys - 1);
            const Columns columns = {values, dim, LANES, CODES ? values : keys_at(next)};
            product<P>(rows, weights + first / PER_LEFT, columns, units_of(count), sums, dim, dim, true);
        };
        for (int64_t first = 0; first < keys; first += run) {
            const int64_t count = std::min(keys - first, run);
            const uint32_t* values = values_at(start + first);
            uint32_t* place = gathered + units_of(first) * dim;
            if (CODES) {
                const int64_t next = token_at(std::min(start + KEY_TILE + first, num_keys - 1));
                const int8_t* codes = (const int8_t*)cache.values + token_at(start + first) * dim;
                for (int64_t k = 0; k < run; k += LANES) {
                    __builtin_prefetch(cache.key_scales + next + k, 0, 2);
                    __builtin_prefetch(cache.value_scales + next + k, 0, 2);
                }
                widen_values<P>(codes, place, units_of(count), dim, (const int8_t*)cache.keys + next * dim);
            } else if (is_gathered) std::copy_n(values, units_of(count) * dim, place);
            else add_values(first, count, values);
        }
        if (is_gathered) add_values(0, keys, gathered);
    }
    for (int64_t r = 0; r < rows; ++r) {
        E* to = out + r / group * stride + (head * group + r % group) * dim;
        const float weight = totals[r] > 0 ? 1.0f / totals[r] : 0.0f;  // padding is a sequence without keys: 0
        for (int64_t d = 0; d < dim; d += LANES) T::narrow(to + d, load<vf>(sums + r * dim + d) * weight);
    }
}

// Attends all query tokens to the cached keys of their sequences, out [tokens][heads][dim] like q. Threads share pieces
// of at most QUERY_ROWS rows, where a row is one query head of one token; a piece is computed once for each KV head.
// The reference is `attend_reference` in ops/attention.py.
template <class T>
void attend(const void* q, const void* keys, const void* values, const float* key_scales, const float* value_scales,
            const int32_t* block_tables, const int32_t* cu_seqlens, const int32_t* seq_lens, void* out,
            int64_t num_seqs, int64_t max_blocks, int64_t num_kv_heads, int64_t group, int64_t dim, int64_t block_size,
            float scale) {
    using E = typename T::element;
    const Cache cache = {keys, values, key_scales, value_scales};
    const auto attend_piece = key_scales ? attend_rows<T, true> : attend_rows<T, false>;
    struct Queries { int64_t seq, first_piece; };  // the number of its sequence's first one
    const int64_t most = std::max<int64_t>(QUERY_ROWS / group, 1);
    std::vector<Queries> pieces;
    for (int64_t s = 0; s < num_seqs; ++s) {
        const int64_t first_piece = pieces.size(), length = cu_seqlens[s + 1] - cu_seqlens[s];
        pieces.insert(pieces.end(), (length + most - 1) / most, {s, first_piece});
    }
    // All pieces of a sequence read one head after another, so its keys and values stay in the L2 cache.
    share(pieces.size() * num_kv_heads, 4, [&](Span some) {
        for (int64_t i = some.begin; i < some.end; ++i) {
            const Queries queries = pieces[i / num_kv_heads];
            const int64_t begin = cu_seqlens[queries.seq], length = cu_seqlens[queries.seq + 1] - begin;
            const int64_t count = (length + most - 1) / most, number = i - queries.first_piece * num_kv_heads;
            const int64_t head = number / count, first = number % count * most, tokens = std::min(most, length - first);
            const int64_t token = begin + first, position = seq_lens[queries.seq] - length + first;
            const int64_t at = token * num_kv_heads * group * dim;
            attend_piece((const E*)q + at, cache, block_tables + queries.seq * max_blocks, (E*)out + at, tokens,
                         position, head, num_kv_heads, group, dim, block_size, scale);
        }
    });
}

}  // namespace
