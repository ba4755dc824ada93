// Samples tokens by the rule that is stated in sample.py.
#pragma once

#include <functional>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace {

constexpr int SAMPLE_CHUNK = 4096;

// Returns a number in (0, 1) from Philox4x32-10: the upper 23 bits of its first word, plus a half, over 2^23.
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

struct Request { float temperature; int32_t top_k; float top_p, min_p; uint64_t seed; uint32_t position; };

// Returns the lowest z that top-k and top-p keep, or -infinity if the request asks for neither. z_of(i) returns the z
// of 16 tokens from i on.
//
// For a small k the function looks only at candidates. It takes the maximum of each span of 64 tokens; the k-th largest
// of these maxima is a lower bound of the k-th largest z, because k tokens reach it. Tokens below it are dropped.
template <class Z> float lowest_kept(Z z_of, int64_t vocab, const Request& request) {
    const bool by_rank = request.top_k > 0 && request.top_k < vocab, by_mass = request.top_p < 1;
    if (!by_rank && !by_mass) return -INFINITY;
    constexpr int64_t SPAN = 64;
    static thread_local std::vector<float> z, spans, kept;
    spans.clear(), kept.clear(), z.resize((vocab + LANES - 1) / LANES * LANES);
    for (int64_t i = 0; i < vocab; i += LANES) store(&z[i], z_of(i));
    float bound = -INFINITY;
    if (by_rank && request.top_k <= vocab / SPAN) {
        for (int64_t i = 0; i + SPAN <= vocab; i += SPAN) {
            vf top = load<vf>(&z[i]);
            for (int64_t j = LANES; j < SPAN; j += LANES) top = maximum(top, load<vf>(&z[i + j]));
            spans.push_back(largest(top));
        }
        const auto kth = spans.begin() + request.top_k - 1;
        std::nth_element(spans.begin(), kth, spans.end(), std::greater<float>());
        bound = *kth;
    }
    for (int64_t i = 0; i < vocab; ++i)
        if (z[i] >= bound) kept.push_back(z[i]);
    float threshold = -INFINITY;
    if (by_rank) {
        const auto kth = kept.begin() + request.top_k - 1;
        std::nth_element(kept.begin(), kth, kept.end(), std::greater<float>());
        threshold = *kth;
        kept.erase(std::remove_if(kept.begin(), kept.end(), [=](float x) { return x < threshold; }), kept.end());
    }
    if (!by_mass) return threshold;
    std::sort(kept.begin(), kept.end(), std::greater<float>());
    const size_t count = kept.size();
    kept.resize((count + LANES - 1) / LANES * LANES, -INFINITY);
    std::vector<float> weights(kept.size());
    double total = 0, mass = 0;
    for (size_t i = 0; i < kept.size(); i += LANES) store(&weights[i], exp(load<vf>(&kept[i])));
    for (float w : weights) total += w;
    for (size_t i = 0; i < count; ++i)
        if ((mass += weights[i]) >= request.top_p * total) return kept[i];
    return kept[count - 1];
}

// Returns the sampled token, or -1 if the logits define no distribution: one is NaN or +infinity, or none is finite.
template <class T> int32_t sample_row(const typename T::element* logits, const Request& request, int64_t vocab) {
    const int64_t whole = vocab / LANES * LANES, padded = (vocab + LANES - 1) / LANES * LANES;
    alignas(64) float tail[LANES];  // the last tokens; -infinity beyond the vocabulary
    std::fill_n(tail, LANES, -INFINITY);
    for (int64_t i = whole; i < vocab; ++i) tail[i - whole] = T::to_float(logits[i]);
    const auto at = [&](int64_t i) { return i < whole ? T::widen(logits + i) : load<vf>(tail); };
    vf tops = splat(-INFINITY);
    vi below{-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    for (int64_t i = 0; i < padded; i += LANES) {
        const vf x = at(i);
        tops = maximum(tops, x);
        below &= x < INFINITY;
    }
    const float top = largest(tops);
    const bool is_below = std::all_of((int32_t*)&below, (int32_t*)(&below + 1), [](int32_t lane) { return lane; });
    if (!is_below || top == -INFINITY) return -1;
    if (request.temperature <= 0) {
        int64_t best = 0;
        while (largest(at(best)) != top) best += LANES;
        while (T::to_float(logits[best]) != top) ++best;
        return (int32_t)best;
    }
    const auto z_of = [&](int64_t i) { return (at(i) - top) / request.temperature; };
    const float threshold = lowest_kept(z_of, vocab, request);
    const auto weight = [&](int64_t i) {
        const vf z = z_of(i), w = exp(z);
        return select((z >= threshold) & (w >= request.min_p), w, vf{});
    };
    // A chunk has up to 4,096 tokens, so the sum from token to token is a double: in float its error would be 1e-5 of it.
    std::vector<float> sums;
    double total = 0;
    for (int64_t start = 0; start < vocab; start += SAMPLE_CHUNK) {
        vf partial{};
        for (int64_t i = start; i < std::min(vocab, start + SAMPLE_CHUNK); i += LANES) partial += weight(i);
        sums.push_back(sum(partial));
        total += sums.back();
    }
    const double target = uniform(request.seed, request.position) * total;
    double before = 0;
    size_t chunk = 0;
    while (chunk + 1 < sums.size() && before + sums[chunk] <= target) before += sums[chunk++];
    const int64_t start = (int64_t)chunk * SAMPLE_CHUNK;
    int64_t last = start;
    for (int64_t i = start; i < std::min(vocab, start + SAMPLE_CHUNK); i += LANES) {
        const vf w = weight(i);
        for (int j = 0; j < LANES; ++j) {
            before += w[j];
            if (w[j] > 0) last = i + j;
            if (before > target) return (int32_t)last;
        }
    }
    return (int32_t)last;  // only if rounding left the target at or above the total
}

// Samples one token per row of logits[rows][vocab]. checked[r] is the result of sample_row; tokens[r] is the same, but
// 0 instead of -1, so that it is always a valid token id.
template <class T>
void sample(const void* logits_, const float* temperature, const int32_t* top_k, const float* top_p, const float* min_p,
            const int64_t* seeds, const int32_t* positions, int32_t* tokens, int32_t* checked, int64_t rows,
            int64_t vocab) {
    const auto* logits = (const typename T::element*)logits_;
    share(rows, 1, [&](Span some) {
        for (int64_t r = some.begin; r < some.end; ++r) {
            const Request request = {temperature[r], top_k[r],           top_p[r],
                                     min_p[r],       (uint64_t)seeds[r], (uint32_t)positions[r]};
            checked[r] = sample_row<T>(logits + r * vocab, request, vocab);
            tokens[r] = std::max(checked[r], 0);
        }
    });
}

}  // namespace
