// Samples tokens by the rule that is stated in ops/sample.py, and computes log-probabilities of given tokens.
#pragma once

#include <functional>
#include <iterator>
#include <vector>

#include "team.h"
#include "vectors.h"

namespace {

constexpr int SAMPLE_CHUNK = 4096;

// Returns a number in (0, 1) from Philox4x32-10: the upper 23 bits of its first word, plus a half, over 2^23.
// k0 and k1 are the halves of the request's seed.
float uniform(uint32_t k0, uint32_t k1, uint32_t position) {
    uint32_t c[4] = {position, 0, 0, 0};
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

// A row of numbers that is read 16 at a time.
template <class T> struct PaddedRow {
    const typename T::element* numbers;
    int64_t size;
    alignas(64) float tail[LANES];  // the last numbers; -infinity beyond them
    PaddedRow(const typename T::element* from, int64_t count) : numbers(from), size(count) {
        std::fill_n(tail, LANES, -INFINITY);
        std::transform(from + whole(), from + count, tail, T::to_float);
    }
    int64_t whole() const { return size / LANES * LANES; }
    vf at(int64_t i) const { return i < whole() ? T::widen(numbers + i) : load<vf>(tail); }

    // Returns the highest number; NaN if one is NaN.
    float top() const {
        vf tops = splat(-INFINITY);
        vi nans{};
        for (int64_t i = 0; i < size; i += LANES) {
            const vf x = at(i);
            tops = maximum(tops, x);
            nans |= is_nan(x);
        }
        const bool has_nan = std::any_of((int32_t*)&nans, (int32_t*)(&nans + 1), [](int32_t lane) { return lane; });
        return has_nan ? NAN : largest(tops);
    }
};

// Sums exp(x) in double: over a vocabulary the error of float would be too large.
struct ExpSum {
    double lanes[LANES] = {};
    void add(vf x) {
        alignas(64) float weights[LANES];
        store(weights, exp(x));
        for (int j = 0; j < LANES; ++j) lanes[j] += weights[j];
    }
    double total() const {
        double sum = 0;
        for (double lane : lanes) sum += lane;
        return sum;
    }
};

// The sampling values of a row, packed as ROW_SAMPLING in plan.py says. A test compares the fields.
struct RowSampling {
    int32_t row;
    float temperature;
    int32_t top_k;
    float top_p;
    float min_p;
    uint32_t seed_low;
    uint32_t seed_high;
    int32_t num_logprobs;
    int32_t num_prompt_logprobs;
    int32_t is_edited;
};

constexpr int64_t STRETCH = 64;  // tokens in a row of which the filters know the largest z
constexpr int64_t FEW = 256;     // top-p looks at so many candidates first, or at a few more

// The z of all tokens of a row, and the largest z of each stretch.
struct Stretches {
    std::vector<float> z, maxima, sorted;

    template <class Z> void fill(Z z_of, int64_t vocab) {
        const int64_t padded = (vocab + STRETCH - 1) / STRETCH * STRETCH;
        z.resize(padded), maxima.clear();
        std::fill(z.begin() + vocab / LANES * LANES, z.end(), -INFINITY);
        for (int64_t i = 0; i < vocab; i += LANES) store(&z[i], z_of(i));
        for (int64_t i = 0; i < padded; i += STRETCH) {
            vf top = load<vf>(&z[i]);
            for (int64_t j = LANES; j < STRETCH; j += LANES) top = maximum(top, load<vf>(&z[i + j]));
            maxima.push_back(largest(top));
        }
    }

    // Fills `candidates` with the k largest z, and a few more. The k-th largest of the maxima is a lower bound of the
    // k-th largest z, because k tokens reach it. Tokens below it are left out, whole stretches at a time. If there are
    // fewer than k stretches, all tokens are candidates.
    void collect(int64_t k, int64_t vocab, std::vector<float>& candidates) {
        float bound = -INFINITY;
        if (k <= (int64_t)maxima.size()) {
            sorted = maxima;
            std::nth_element(sorted.begin(), sorted.begin() + k - 1, sorted.end(), std::greater<float>());
            bound = sorted[k - 1];
        }
        candidates.clear();
        for (int64_t i = 0; i < vocab; i += STRETCH)
            if (maxima[i / STRETCH] >= bound)
                std::copy_if(&z[i], &z[i] + std::min(STRETCH, vocab - i), std::back_inserter(candidates),
                             [=](float x) { return x >= bound; });
    }
};

// Sums exp(z) of n numbers.
inline double sum_exp(const float* z, int64_t n) {
    ExpSum sum;
    const PaddedRow<Float> row(z, n);
    for (int64_t i = 0; i < n; i += LANES) sum.add(row.at(i));
    return sum.total();
}

// Returns the largest of the numbers z for which exp of all numbers from it up sums to `goal` or more; the lowest if
// there is none. It changes the order of z, which may not be empty. This is quickselect with weights: it keeps the part
// in which the answer lies, and the goal that is left there.
inline float find_mass(std::vector<float>& z, double goal) {
    for (auto first = z.begin(), last = z.end();;) {
        const float pivot = first[(last - first) / 2];
        const auto equal = std::partition(first, last, [=](float x) { return x > pivot; });
        const double above = sum_exp(&*first, equal - first);
        if (above >= goal && equal > first) {  // a top-p that is 0 in float makes a goal of 0
            last = equal;
            continue;
        }
        const auto below = std::partition(equal, last, [=](float x) { return x == pivot; });
        const double found = above + (double)(below - equal) * exp(splat(pivot))[0];
        if (found >= goal || below == last) return pivot;
        goal -= found;
        first = below;
    }
}

// Returns the lowest z that top-k and top-p keep, or -infinity if the request asks for neither. z_of(i) returns the z
// of 16 tokens from i on. Where few tokens decide, only these are put in order.
template <class Z> float lowest_kept(Z z_of, int64_t vocab, const RowSampling& request) {
    const bool by_rank = request.top_k > 0 && request.top_k < vocab, by_mass = request.top_p < 1;
    if (!by_rank && !by_mass) return -INFINITY;
    static thread_local Stretches stretches;
    static thread_local std::vector<float> candidates;
    stretches.fill(z_of, vocab);
    stretches.collect(by_rank ? request.top_k : std::min(FEW, vocab), vocab, candidates);
    if (by_rank) {
        const auto kth = candidates.begin() + request.top_k - 1;
        std::nth_element(candidates.begin(), kth, candidates.end(), std::greater<float>());
        const float threshold = *kth;
        if (!by_mass) return threshold;
        const auto is_tie = [=](float x) { return x == threshold; };
        candidates.erase(std::partition(kth, candidates.end(), is_tie), candidates.end());
        return find_mass(candidates, request.top_p * sum_exp(candidates.data(), (int64_t)candidates.size()));
    }
    const double goal = request.top_p * sum_exp(stretches.z.data(), vocab);
    if (sum_exp(candidates.data(), (int64_t)candidates.size()) < goal) stretches.collect(vocab, vocab, candidates);
    return find_mass(candidates, goal);
}

// Returns the sampled token, or -1 if the logits define no distribution: one is NaN or +infinity, or none is finite.
template <class T>
int32_t sample_row(const typename T::element* logits, const RowSampling& request, int32_t position, int64_t vocab) {
    const PaddedRow<T> row(logits, vocab);
    const float top = row.top();
    if (!std::isfinite(top)) return -1;
    if (request.temperature <= 0) {
        int64_t best = 0;
        while (largest(row.at(best)) != top) best += LANES;
        while (T::to_float(logits[best]) != top) ++best;
        return (int32_t)best;
    }
    const auto z_of = [&](int64_t i) { return (row.at(i) - top) / request.temperature; };
    const float threshold = lowest_kept(z_of, vocab, request);
    const auto weight = [&](int64_t i) {
        const vf z = z_of(i), w = exp(z);
        return select_less(z, threshold, vf{}, select_less(w, request.min_p, vf{}, w));
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
    const double target = uniform(request.seed_low, request.seed_high, (uint32_t)position) * total;
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

// Samples one token from each row of logits[count][vocab], as row rows[i] of the table says. checked[i] is the result of
// sample_row; tokens[i] is the same, but 0 instead of -1, so that it is always a valid token id.
// The reference is `sample_reference` in ops/sample.py.
template <class T>
void sample(const void* logits_, const RowSampling* table, const int32_t* rows, const int32_t* positions,
            int32_t* tokens, int32_t* checked, int64_t count, int64_t vocab) {
    const auto* logits = (const typename T::element*)logits_;
    share(count, 1, [&](Span some) {
        for (int64_t i = some.begin; i < some.end; ++i) {
            checked[i] = sample_row<T>(logits + i * vocab, table[rows[i]], positions[i], vocab);
            tokens[i] = std::max(checked[i], 0);
        }
    });
}

// Computes the three arrays of `TokenLogprobs`, each [rows], from logits [rows][vocab]. A token of -1 counts as 0.
// The reference is `token_logprobs_reference` in ops/token_logprobs.py.
template <class T>
void token_logprobs(const void* logits_, const int32_t* tokens, float* values, float* log_sums, int32_t* num_above,
                    int64_t rows, int64_t vocab) {
    share(rows, 1, [&](Span some) {
        for (int64_t r = some.begin; r < some.end; ++r) {
            const auto* logits = (const typename T::element*)logits_ + r * vocab;
            const PaddedRow<T> row(logits, vocab);
            const float top = row.top(), own = T::to_float(logits[std::max(tokens[r], 0)]);
            ExpSum weights;
            vf above{};
            for (int64_t i = 0; i < vocab; i += LANES) {
                const vf x = row.at(i);
                weights.add(x - top);
                above += by_register([=](rf v) { return v > own ? rf{} + 1.0f : rf{}; }, x);
            }
            log_sums[r] = std::isfinite(top) ? top + (float)std::log(weights.total()) : top;
            values[r] = own - log_sums[r];
            num_above[r] = (int32_t)sum(above);
        }
    });
}

// Returns a number that is larger for a higher logit, and among equal ones for a lower token id.
inline uint64_t rank_of(float logit, int64_t id) {
    uint32_t bits;
    std::memcpy(&bits, &logit, sizeof bits);
    bits = bits >> 31 ? ~bits : bits | 1u << 31;
    return (uint64_t)bits << 32 | (uint32_t)~id;
}

// Finds the k highest of logits [rows][vocab], the highest first, and their token ids, both [rows][k]; of equal logits
// those with the lowest ids. k is at most vocab.
// The reference is `top_logits_reference` in ops/token_logprobs.py.
template <class T>
void top_logits(const void* logits_, float* values, int32_t* ids, int64_t rows, int64_t vocab, int64_t k) {
    constexpr int64_t BLOCK = 4 * LANES;
    share(rows, 1, [&](Span some) {
        std::vector<float> tops, highest;  // of each block the highest logit; the k highest of these come first
        std::vector<uint64_t> found;
        for (int64_t r = some.begin; r < some.end; ++r) {
            const auto* logits = (const typename T::element*)logits_ + r * vocab;
            const PaddedRow<T> row(logits, vocab);
            tops.clear();
            for (int64_t i = 0; i < vocab; i += BLOCK) {
                vf top = row.at(i);
                for (int64_t j = LANES; j < BLOCK; j += LANES) top = maximum(top, row.at(i + j));
                const float x = largest(top);
                tops.push_back(std::isnan(x) ? INFINITY : x);
            }
            // Each of the k blocks with the highest tops has a logit that is at least the lowest of these tops. So the
            // k highest logits are, too.
            float least = -INFINITY;
            if ((int64_t)tops.size() >= k) {
                highest = tops;
                std::nth_element(highest.begin(), highest.begin() + k - 1, highest.end(), std::greater<>());
                least = highest[k - 1];
            }
            found.clear();
            for (int64_t i = 0; i < vocab; i += BLOCK) {
                if (tops[i / BLOCK] < least) continue;
                for (int64_t id = i; id < std::min(vocab, i + BLOCK); ++id) {
                    const float logit = T::to_float(logits[id]);
                    if (!(logit < least)) found.push_back(rank_of(logit, id));
                }
            }
            std::partial_sort(found.begin(), found.begin() + k, found.end(), std::greater<>());
            for (int64_t i = 0; i < k; ++i) {
                ids[r * k + i] = (int32_t)(uint32_t)~found[i];
                values[r * k + i] = T::to_float(logits[ids[r * k + i]]);
            }
        }
    });
}

}  // namespace
