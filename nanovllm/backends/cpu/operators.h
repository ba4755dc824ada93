// The operators between the products: norms, the rotary embedding and the activation.
#pragma once

#include <type_traits>

#include "paged_cache.h"
#include "team.h"

namespace {

// Computes y = rms_norm(x) * weight for one row, as the reference does: a weight W of x's format scales what the norm
// has rounded, and a wider one scales before the rounding.
template <class T, class W>
void rms_norm_row(const typename T::element* x, const void* weight_, typename T::element* y, int64_t size, float eps) {
    const auto* weight = (const typename W::element*)weight_;
    vf squares{};
    for (int64_t i = 0; i < size; i += LANES) { vf v = T::widen(x + i); squares += v * v; }
    const float scale = 1.0f / std::sqrt(sum(squares) / (float)size + eps);
    for (int64_t i = 0; i < size; i += LANES) {
        const vf normed = T::widen(x + i) * scale;
        T::narrow(y + i, (std::is_same<T, W>::value ? round_to<T>(normed) : normed) * W::widen(weight + i));
    }
}

// Computes sum = x + residual and y = rms_norm(sum) * weight. If residual is null: only y = rms_norm(x) * weight.
// The references are in ops/rms_norm.py.
template <class T>
void add_rms_norm(const void* x_, const void* residual_, const void* weight, void* y, void* sum_, int64_t rows,
                  int64_t size, int64_t is_wide, float eps) {
    using E = typename T::element;
    const auto norm_row = is_wide ? rms_norm_row<T, Float> : rms_norm_row<T, T>;
    share(rows, quarter_unless_small(rows, rows * size), [&](Span some) {
        for (int64_t r = some.begin; r < some.end; ++r) {
            const E* x = (const E*)x_ + r * size;
            if (residual_) {
                const E* added = (const E*)residual_ + r * size;
                E* total = (E*)sum_ + r * size;
                for (int64_t i = 0; i < size; i += LANES) T::narrow(total + i, T::widen(x + i) + T::widen(added + i));
                x = total;
            }
            norm_row(x, weight, (E*)y + r * size, size, eps);
        }
    });
}

inline vf sigmoid(vf x) {
    const vf of_number = 1.0f / (1.0f + exp(-maximum(x, splat(-80.0f))));
    return by_register([](rf a, rf b) { return a == a ? b : a; }, x, of_number);  // NaN stays NaN
}

inline vf silu(vf x) { return x / (1.0f + exp(-maximum(x, splat(-80.0f)))); }

// Computes y[rows][size] = silu(gate) * up. A row of gate_up holds `size` gates, then `size` ups.
// The reference is `silu_and_mul_reference` in ops/silu_and_mul.py.
template <class T> void silu_and_mul(const void* gate_up, void* y_, int64_t rows, int64_t size) {
    using E = typename T::element;
    share(rows, quarter_unless_small(rows, rows * size), [&](Span some) {
        for (int64_t r = some.begin; r < some.end; ++r) {
            const E *gate = (const E*)gate_up + r * 2 * size, *up = gate + size;
            for (int64_t i = 0; i < size; i += LANES)
                T::narrow((E*)y_ + r * size + i, round_to<T>(silu(T::widen(gate + i))) * T::widen(up + i));
        }
    });
}

// Rotates a head in place. Element i forms a pair with element i + dim / 2.
template <class T> void rotate(typename T::element* x, const float* cos_sin, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const vf a = T::widen(x + i), b = T::widen(x + half + i);
        const vf c = load<vf>(cos_sin + i), s = load<vf>(cos_sin + half + i);
        T::narrow(x + i, a * c - b * s);
        T::narrow(x + half + i, b * c + a * s);
    }
}

// Writes one head to y: normed, and then rotated. W is void for the model families that do not norm their heads.
template <class T, class W>
void norm_rope(const typename T::element* x, const void* weight, const float* cos_sin, typename T::element* y,
               int64_t dim, float eps) {
    if constexpr (!std::is_void<W>::value) rms_norm_row<T, W>(x, weight, y, dim, eps);
    else std::memcpy(y, x, dim * sizeof *y);
    rotate<T>(y, cos_sin, dim);
}

// Norms and rotates q and k of every token, and stores k and v in the cache. Threads share the tokens. Two tokens
// that share a unit of V belong to one piece (`owned_from`), which stores the one at the even offset first: that
// clears the unit's other half, so that no old value is left in it.
template <class T, class W>
void norm_rope_store_as(const void* qkv_, const void* q_weight, const void* k_weight, const float* cos_sin,
                        const int32_t* positions, const int64_t* slots, void* q_, void* k_cache, void* v_cache,
                        float* k_scales, float* v_scales, int64_t tokens, int64_t heads, int64_t num_kv_heads,
                        int64_t dim, int64_t block_size, float eps) {
    using E = typename T::element;
    const int64_t stride = (heads + 2 * num_kv_heads) * dim, dim_units = dim / T::PER_UNIT;
    const auto owned_from = [=](int64_t t) {
        return t > 0 && t < tokens && slots[t] % 2 == 1 && slots[t] == slots[t - 1] + 1 ? t + 1 : t;
    };
    share(tokens, quarter_unless_small(tokens, tokens * stride), [&](Span some) {
        for (int64_t t = owned_from(some.begin); t < owned_from(some.end); ++t) {
            const E* from = (const E*)qkv_ + t * stride;
            const float* angles = cos_sin + positions[t] * dim;
            for (int64_t h = 0; h < heads; ++h, from += dim)
                norm_rope<T, W>(from, q_weight, angles, (E*)q_ + (t * heads + h) * dim, dim, eps);
            if (slots[t] < 0) continue;
            const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
            for (int64_t h = 0; h < num_kv_heads; ++h, from += dim) {
                const E* v = from + num_kv_heads * dim;
                alignas(64) E k[MAX_HEAD_DIM];
                norm_rope<T, W>(from, k_weight, angles, k, dim, eps);
                if (k_scales) {
                    const int64_t tile = cache_tile(block, h, num_kv_heads, block_size), at = tile * dim;
                    alignas(64) int8_t codes[MAX_HEAD_DIM];
                    k_scales[tile + offset] = quantise_head<T>(k, codes, dim);
                    store_key_codes(codes, (int8_t*)k_cache + at, offset, dim);
                    v_scales[tile + offset] = quantise_head<T>(v, (int8_t*)v_cache + at + offset * dim, dim);
                } else {
                    const int64_t at = cache_tile(block, h, num_kv_heads, dim_units * block_size);
                    store_key<T>(k, (uint32_t*)k_cache + at, offset, dim);
                    store_value<T>(v, (uint32_t*)v_cache + at, offset, dim);
                }
            }
        }
    });
}

// Calls norm_rope_store_as. q_weight is null in families that do not norm their heads; is_wide says whether both weights
// are float32 whatever T is.
// The reference is `norm_rope_store_reference` in ops/norm_rope_store.py.
template <class T, class... Arguments>
void norm_rope_store(const void* qkv, int64_t is_wide, const void* q_weight, Arguments... arguments) {
    const auto normed = is_wide ? norm_rope_store_as<T, Float> : norm_rope_store_as<T, T>;
    (q_weight ? normed : norm_rope_store_as<T, void>)(qkv, q_weight, arguments...);
}

}  // namespace
