// Causal attention over the paged cache.
#pragma once

#include <limits>
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
static_assert(MAX_HEAD_DIM <= DEPTH && KEY_TILE <= DEPTH, "a product here is one block deep");

// The naive form, for one query q at position p, and the keys k[i] and values v[i] of its sequence:
//
//     score[i]  = scale * dot(q, k[i])                   for 0 <= i <= p
//     weight[i] = exp(score[i] - max(score))
//     out       = sum(weight[i] * v[i]) / sum(weight[i])
//
// A layer may have a variant of it:
//
//     window:   only the keys p - window < i <= p count
//     softcap:  score[i] = softcap * tanh(score[i] / softcap)
//     sinks:    the head's sink is one more score, without a value; it adds exp(sink - max) to sum(weight)
//
// attend_rows does this for up to QUERY_ROWS queries at once, in five steps with a function each. Long sequences have
// more keys than fit a cache, so it goes through them in tiles of KEY_TILE. For each query it keeps the maximum and the
// two sums over the keys so far (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867). If a tile has a larger
// score, the sums are multiplied by exp(old maximum - new maximum), as if the new one had been known from the start.
//
// Every tile starts at a multiple of KEY_TILE and has KEY_TILE keys, in one block of the cache or in several. So the
// order of the sums depends only on the position of the query. Tiles before every query's window are skipped. A query
// that sees no key of a tile adds zeros, so its bits do not depend on the queries beside it.

// A layer's keys and values: elements of T, or codes with scales. Without codes both scales are null.
struct Cache { const void *keys, *values; const float *key_scales, *value_scales; };

// Says where the keys and values of one KV head of one sequence are. A run is a part of a tile that lies in one block.
template <class T, bool CODES> struct CachedHead {
    using Product = std::conditional_t<CODES, FormatOfCodes<T>, T>;  // the format in which they are multiplied
    const Cache& cache;
    const int32_t* blocks;
    int64_t head, num_kv_heads, dim, block_size;

    int64_t dim_units() const { return dim / Product::PER_UNIT; }
    int64_t run() const { return std::min<int64_t>(block_size, KEY_TILE); }
    // Returns where the head's part of the block of `key` begins, if each of these parts has `size` elements.
    int64_t part_at(int64_t key, int64_t size) const {
        return cache_tile(blocks[key / block_size], head, num_kv_heads, size);
    }
    // Returns the start of the group of 16 keys that holds `key`.
    const uint32_t* keys_at(int64_t key) const {
        const int64_t offset = key % block_size / LANES * LANES * dim_units();
        return (const uint32_t*)cache.keys + part_at(key, dim_units() * block_size) + offset;
    }
    const uint32_t* values_at(int64_t key) const {
        const int64_t offset = key % block_size / Product::PER_UNIT * dim;
        return (const uint32_t*)cache.values + part_at(key, dim_units() * block_size) + offset;
    }
    // Returns the number of the first token of a run of codes, counted over the tokens of all blocks and heads.
    int64_t token_at(int64_t key) const { return part_at(key, block_size) + key % block_size; }
    const int8_t* key_codes_at(int64_t token) const { return (const int8_t*)cache.keys + token * dim; }
    const int8_t* value_codes_at(int64_t token) const { return (const int8_t*)cache.values + token * dim; }
};

// Says which variant of attention a layer has. Zeros and null stand for plain attention. sinks [query heads].
struct Variant { int64_t window; float softcap; const float* sinks; };

// Says which queries are computed together: `group` heads of each of `tokens` tokens. The first one is at `position`.
struct QueryRows {
    int64_t tokens, group, position;
    int64_t count() const { return tokens * group; }
    // A row sees the keys from `first_visible` to `end_visible`.
    int64_t end_visible(int64_t row) const { return position + row / group + 1; }
    int64_t first_visible(int64_t row, int64_t window) const {
        return window ? std::max<int64_t>(end_visible(row) - window, 0) : 0;
    }
};

// A tile of keys. `padded` is their number as a multiple of LANES.
struct Tile { int64_t start, keys, padded; };

// Holds what the steps hand on to each other. A store delays the load of an address that is a multiple of 4 KiB away.
// So a small array lies between two large ones.
template <class T, class Product> struct Attention {
    alignas(64) typename T::left queries[QUERY_ROWS * LEFT_ROW];
    float maxima[QUERY_ROWS];  // of the scores so far
    alignas(64) typename T::left weights[QUERY_ROWS * LEFT_ROW];
    float before[QUERY_ROWS];  // the maxima before this tile
    alignas(64) float scores[QUERY_ROWS * KEY_TILE];
    float totals[QUERY_ROWS];  // sums of the weights so far
    alignas(64) float sums[QUERY_ROWS * MAX_HEAD_DIM];  // sums of weight * value so far
    alignas(64) float key_scales[KEY_TILE], value_scales[KEY_TILE];
    alignas(64) uint32_t gathered[KEY_TILE / Product::PER_UNIT * MAX_HEAD_DIM];  // units of a run or a tile
};

template <class P> constexpr int64_t units_of(int64_t keys) { return (keys + P::PER_UNIT - 1) / P::PER_UNIT; }

// Step 1: scores = queries x keys, for all rows and one tile. Codes are widened once for all rows. Their scales are
// copied for the next steps.
template <class T, bool CODES, class P>
ALWAYS_INLINE void score_tile(const CachedHead<T, CODES>& head, int64_t rows, Tile tile, Attention<T, P>& at) {
    const int64_t dim_units = head.dim_units(), run = head.run();
    for (int64_t first = 0; first < tile.keys; first += run) {
        const int64_t key = tile.start + first, count = std::min(tile.padded - first, run);
        Columns columns = {head.keys_at(key), LANES, LANES * dim_units, head.values_at(key)};
        if (CODES) {
            const int64_t token = head.token_at(key), used = std::min(tile.keys - first, run);
            widen_keys<P>(head.key_codes_at(token), at.gathered, count, head.dim, head.value_codes_at(token));
            std::copy_n(head.cache.key_scales + token, used, at.key_scales + first);
            std::copy_n(head.cache.value_scales + token, used, at.value_scales + first);
            columns = {at.gathered, LANES, LANES * dim_units, at.gathered};
        }
        product<P>(rows, at.queries, columns, dim_units, at.scores + first, KEY_TILE, count, false);
    }
    if (CODES) {  // the scale of a slot without a token may be NaN
        std::fill(at.key_scales + tile.keys, at.key_scales + tile.padded, 0.0f);
        std::fill(at.value_scales + tile.keys, at.value_scales + tile.padded, 0.0f);
    }
}

// Computes softcap * tanh(s / softcap). tanh(x) is 1 - 2 / (exp(2 x) + 1), and 1 where exp would overflow. Where x is
// small, that would be a difference of numbers near 1, so the first terms of the series are taken: x - x^3 / 3 + 2 x^5 /
// 15. They multiply s itself, which loses nothing if softcap is huge. NaN stays.
ALWAYS_INLINE rf cap_scores(rf s, float softcap) {
    const rf x = s * (1.0f / softcap), square = x * x;
    const rf small = s * (1.0f - square * (1.0f / 3 - square * (2.0f / 15)));
    const rf twice = -maximum(rf{} - 88.0f, x * -2.0f);
    return select_less(square, 0.01f, small, softcap * (1.0f - 2.0f / (exp(twice) + 1.0f)));
}

// Step 2: scales the scores, makes those of keys that the query does not see -infinity, and finds the maximum of each
// row. It is not one loop with step 3, so that the processor computes the maxima of several rows side by side.
// If VARIES, the scores have a cap, or some of the keys lie before a query's window.
template <class T, bool CODES, bool VARIES, class P>
ALWAYS_INLINE void find_maxima(QueryRows queries, Tile tile, float scale, Variant variant, Attention<T, P>& at) {
    const int64_t rows = queries.count();
    rf lane;
    for (int i = 0; i < PART_LANES; ++i) lane[i] = (float)i;
    if (CODES)
        for (int64_t v = 0; v < tile.padded; v += LANES)
            store(at.key_scales + v, load<vf>(at.key_scales + v) * scale);
    std::copy_n(at.maxima, rows, at.before);
    for (int64_t r = 0; r < rows; ++r) {
        float* score = at.scores + r * KEY_TILE;
        const float end = (float)std::min<int64_t>(queries.end_visible(r) - tile.start, tile.padded);
        const float first = (float)(queries.first_visible(r, variant.window) - tile.start);
        rf top = rf{} - INFINITY;
        for (int64_t v = 0; v < tile.padded; v += PART_LANES) {
            rf scaled = load<rf>(score + v) * (CODES ? load<rf>(at.key_scales + v) : rf{} + scale);
            if (VARIES) {
                if (variant.softcap > 0) scaled = cap_scores(scaled, variant.softcap);
                scaled = select_less(lane + (float)v, first, rf{} - INFINITY, scaled);
            }
            const rf s = select_less(lane + (float)v, end, scaled, rf{} - INFINITY);
            store(score + v, s);
            top = maximum(top, s);
        }
        alignas(64) float tops[LANES];
        for (int i = 0; i < LANES; i += PART_LANES) store(tops + i, top);
        at.maxima[r] = std::max(at.maxima[r], largest(load<vf>(tops)));
    }
}

// Step 3: turns scores into weights, rounds these for the product of step 4, and adds them to the totals. If a row has
// a new maximum, its sums and its total so far are scaled down to that. The weights of codes are multiplied by the
// scales of their values, but not in the totals.
template <class T, bool CODES, class P>
ALWAYS_INLINE void weigh_tile(int64_t rows, int64_t dim, Tile tile, Attention<T, P>& at) {
    constexpr int64_t PER_LEFT = P::PER_UNIT / P::STEPS;
    for (int64_t r = 0; r < rows; ++r) {
        const float* score = at.scores + r * KEY_TILE;
        const float top = at.maxima[r], before = at.before[r];
        rf total[PARTS] = {};
        for (int64_t v = 0; v < tile.padded; v += LANES)
            for (int64_t p = 0, lane = v; p < PARTS; ++p, lane += PART_LANES) {
                rf w = exp(load<rf>(score + lane) - top);  // top is finite: see attend_rows
                total[p] += w;
                if (CODES) w *= load<rf>(at.value_scales + lane);
                T::put_register(at.weights + r * LEFT_ROW + lane / PER_LEFT, w);
            }
        if (top > before) {
            const float rescale = std::exp(before - top);
            at.totals[r] *= rescale;
            float* of_row = at.sums + r * dim;
            for (int64_t d = 0; d < dim; d += LANES) store(of_row + d, load<vf>(of_row + d) * rescale);
        }
        at.totals[r] += sum(load<vf>(total));
    }
}

// Step 4: sums += weights x values, for all rows and one tile. Values are multiplied where they lie, run by run; but if
// `is_gathered`, a tile of them is put together first, and widened if it has codes. Meanwhile the next tile is
// prefetched: its keys, or its codes and scales.
template <class T, bool CODES, class P>
ALWAYS_INLINE void add_values(const CachedHead<T, CODES>& head, QueryRows queries, Tile tile, bool is_gathered,
                              Attention<T, P>& at) {
    constexpr int64_t PER_LEFT = P::PER_UNIT / P::STEPS;
    const int64_t rows = queries.count(), dim = head.dim, run = head.run();
    const int64_t last_key = queries.position + queries.tokens - 1;
    const auto next_of = [=](int64_t first) { return std::min(tile.start + KEY_TILE + first, last_key); };
    const auto multiply = [&](int64_t first, int64_t count, const uint32_t* values) {
        const Columns columns = {values, dim, LANES, CODES ? values : head.keys_at(next_of(first))};
        product<P>(rows, at.weights + first / PER_LEFT, columns, units_of<P>(count), at.sums, dim, dim, true);
    };
    for (int64_t first = 0; first < tile.keys; first += run) {
        const int64_t key = tile.start + first, count = std::min(tile.keys - first, run);
        uint32_t* place = at.gathered + units_of<P>(first) * dim;
        if (CODES) {
            const int64_t next = head.token_at(next_of(first)), token = head.token_at(key);
            for (int64_t k = 0; k < run; k += LANES) {
                __builtin_prefetch(head.cache.key_scales + next + k, 0, 2);
                __builtin_prefetch(head.cache.value_scales + next + k, 0, 2);
            }
            widen_values<P>(head.value_codes_at(token), place, units_of<P>(count), dim, head.key_codes_at(next));
        } else if (is_gathered) std::copy_n(head.values_at(key), units_of<P>(count) * dim, place);
        else multiply(first, count, head.values_at(key));
    }
    if (is_gathered) multiply(0, tile.keys, at.gathered);
}

// Step 5: out = sums / totals. `out` points to the first token's output; the next token's is `stride` elements later.
template <class T, class P>
ALWAYS_INLINE void write_rows(QueryRows queries, int64_t dim, int64_t stride, const Attention<T, P>& at,
                              typename T::element* out) {
    for (int64_t r = 0; r < queries.count(); ++r) {
        typename T::element* to = out + r / queries.group * stride + r % queries.group * dim;
        // Padding is a sequence without keys: 0.
        const float weight = at.totals[r] > 0 ? 1.0f / at.totals[r] : 0.0f;
        for (int64_t d = 0; d < dim; d += LANES) T::narrow(to + d, load<vf>(at.sums + r * dim + d) * weight);
    }
}

// Computes softmax(scale q K^T) V, or a variant of it, for one KV head, and for some tokens of one sequence. q and out
// [tokens][heads][dim] begin with the first of these tokens.
template <class T, bool CODES>
void attend_rows(const typename T::element* q, const CachedHead<T, CODES>& head, QueryRows queries, float scale,
                 Variant variant, typename T::element* out) {
    using P = typename CachedHead<T, CODES>::Product;
    const int64_t rows = queries.count(), group = queries.group, dim = head.dim;
    const int64_t num_keys = queries.position + queries.tokens;
    const int64_t stride = head.num_kv_heads * group * dim, first_head = head.head * group * dim;
    const AmxRegisters registers(rows, uses_amx<T>());
    // The sums of AMX depend on where its pieces of 32 values begin, so values of shorter blocks are put together.
    const bool is_gathered = CODES || (uses_amx<T>() && head.run() < AMX_UNITS * P::PER_UNIT);
    Attention<T, P> at;
    for (int64_t t = 0; t < queries.tokens; ++t)
        put_left<T>(q + t * stride + first_head, group, dim, at.queries + t * group * LEFT_ROW);
    // Every query sees key 0 in the first tile, unless there is a window. Then its maximum is finite from the start.
    std::fill_n(at.maxima, rows, variant.window ? std::numeric_limits<float>::lowest() : -INFINITY);
    std::fill_n(at.totals, rows, 0.0f);
    std::fill_n(at.sums, rows * dim, 0.0f);
    if (variant.sinks) {
        for (int64_t r = 0; r < rows; ++r)  // a sink may be -infinity
            at.maxima[r] = std::max(variant.sinks[head.head * group + r % group], at.maxima[r]);
        std::fill_n(at.totals, rows, 1.0f);
    }
    const int64_t first_key = queries.first_visible(0, variant.window);
    const int64_t last_first_key = queries.first_visible(rows - 1, variant.window);
    for (int64_t start = first_key / KEY_TILE * KEY_TILE; start < num_keys; start += KEY_TILE) {
        const int64_t keys = std::min<int64_t>(num_keys - start, KEY_TILE);
        const Tile tile = {start, keys, (keys + LANES - 1) / LANES * LANES};
        score_tile<T, CODES>(head, rows, tile, at);
        if (variant.softcap > 0 || start < last_first_key)
            find_maxima<T, CODES, true>(queries, tile, scale, variant, at);
        else find_maxima<T, CODES, false>(queries, tile, scale, variant, at);
        weigh_tile<T, CODES>(rows, dim, tile, at);
        add_values<T, CODES>(head, queries, tile, is_gathered, at);
    }
    write_rows<T>(queries, dim, stride, at, out + first_head);
}

// Attends all query tokens to the cached keys of their sequences, out [tokens][heads][dim] like q. Threads share pieces
// of at most QUERY_ROWS rows, where a row is one query head of one token; a piece is computed once for each KV head.
// The reference is `attend_reference` in ops/attention.py.
template <class T>
void attend(const void* q, const void* keys, const void* values, const float* key_scales, const float* value_scales,
            const int32_t* block_tables, const int32_t* cu_seqlens, const int32_t* seq_lens, void* out,
            int64_t num_seqs, int64_t max_blocks, int64_t num_kv_heads, int64_t group, int64_t dim, int64_t block_size,
            float scale, int64_t window, float softcap, const float* sinks) {
    using E = typename T::element;
    const Variant variant = {window, softcap, sinks};
    const Cache cache = {keys, values, key_scales, value_scales};
    struct Queries { int64_t seq, first_piece; };  // first_piece: the index in `pieces` of its sequence's first piece
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
            const int32_t* blocks = block_tables + queries.seq * max_blocks;
            const QueryRows rows = {tokens, group, position};
            if (key_scales) {
                const CachedHead<T, true> codes = {cache, blocks, head, num_kv_heads, dim, block_size};
                attend_rows((const E*)q + at, codes, rows, scale, variant, (E*)out + at);
            } else {
                const CachedHead<T, false> elements = {cache, blocks, head, num_kv_heads, dim, block_size};
                attend_rows((const E*)q + at, elements, rows, scale, variant, (E*)out + at);
            }
        }
    });
}

}  // namespace
