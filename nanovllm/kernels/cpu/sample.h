// Sampling, by the rule in sample.py, for rows without a filter.
#pragma once

#include <vector>

#include "vectors.h"

namespace {

constexpr int SAMPLE_CHUNK = 4096;

// A number in (0, 1) from Philox4x32-10: the first word's upper 23 bits, centred in their interval.
float uniform(uint64_t seed, uint32_t position) {
    uint32_t c[4] = {position, 0, 0, 0}, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < 10; ++i) {
        const uint64_t p0 = (uint64_t)c[0] * 0xD2511F53u, p1 = (uint64_t)c[2] * 0xCD9E8D57u;
        const uint32_t high0 = (uint32_t)(p0 >> 32), high1 = (uint32_t)(p1 >> 32);
        const uint32_t next[4] = {high1 ^ c[1] ^ k0, (uint32_t)p1, high0 ^ c[3] ^ k1, (uint32_t)p0};
        std::memcpy(c, next, sizeof c);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return ((float)(c[0] >> 9) + 0.5f) * 0x1p-23f;
}

template <class T>
int32_t sample_row(const typename T::element* logits, float temperature, uint64_t seed, uint32_t position,
                   int64_t vocab) {
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
    const int64_t start = (int64_t)chunk * SAMPLE_CHUNK;
    for (int64_t i = start; i < std::min(vocab, start + SAMPLE_CHUNK); i += LANES) {
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
void sample(const void* logits_, const float* temperature, const int64_t* seeds, const int32_t* positions,
            int32_t* tokens, int64_t rows, int64_t vocab) {
    const auto* logits = (const typename T::element*)logits_;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; ++r)
        tokens[r] = sample_row<T>(logits + r * vocab, temperature[r], (uint64_t)seeds[r], (uint32_t)positions[r],
                                  vocab);
}

}  // namespace
