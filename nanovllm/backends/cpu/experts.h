// Mixture of experts: choose the experts of each token, multiply by their matrices, and sum their results by weight.
#pragma once

#include <vector>

#include "linear.h"
#include "operators.h"

namespace {

// Routes tokens by logits[tokens][experts], whose rows are `stride` apart. First it chooses the k experts of each token;
// of experts with equal logits, the lowest number wins. Then it sorts the (token, expert) pairs by expert with a counting
// sort. The pairs of padding tokens get the extra expert number `experts`, so they come last.
// The reference is `route_reference` in features/families/qwen3_moe/ops.py.
template <class T>
void route(const void* logits_, const int64_t* slots, float* weights, int32_t* places, int32_t* tokens,
           int32_t* offsets, int64_t num_tokens, int64_t experts, int64_t k, int64_t normalize, int64_t stride) {
    std::vector<int32_t> chosen(num_tokens * k), next(experts + 2);
    share(num_tokens, quarter_unless_small(num_tokens, num_tokens * experts), [&](Span some) {
        for (int64_t t = some.begin; t < some.end; ++t) {
            std::vector<float> p(experts + LANES, -INFINITY);
            const auto* logits = (const typename T::element*)logits_ + t * stride;
            std::transform(logits, logits + experts, p.begin(), T::to_float);
            const float top = *std::max_element(p.begin(), p.begin() + experts);
            vf totals{};
            for (int64_t i = 0; i < experts; i += LANES) {
                const vf w = exp(load<vf>(&p[i]) - top);  // 0 beyond the last expert
                store(&p[i], w);
                totals += w;
            }
            const float all = sum(totals);
            // The sum of an ordinary row is at least 1. It is NaN if a logit is NaN or +inf, or if all are -inf. A
            // broken row is set to zeros, so all experts tie and it goes to the first k of them. Its weights are NaN,
            // as in the reference, so that the sampler notices the broken row.
            const bool is_broken = !(all > 0);
            if (is_broken) std::fill(p.begin(), p.end(), 0.0f);
            float of_chosen = 0, *weight = weights + t * k;
            for (int64_t j = 0; j < k; ++j) {
                const auto best = std::max_element(p.begin(), p.begin() + experts);
                chosen[t * k + j] = slots[t] < 0 ? (int32_t)experts : (int32_t)(best - p.begin());
                of_chosen += weight[j] = *best;
                *best = -1;
            }
            const float total = normalize ? of_chosen : all;
            for (int64_t j = 0; j < k; ++j)
                weight[j] = is_broken ? NAN : round_to<T>(splat(weight[j] / total))[0];
        }
    });
    for (const int32_t expert : chosen) ++next[expert + 1];
    for (int64_t e = 0; e <= experts; ++e) next[e + 1] += offsets[e] = next[e];
    for (int64_t i = 0; i < num_tokens * k; ++i) {
        places[i] = next[chosen[i]]++;
        tokens[places[i]] = (int32_t)(i / k);
    }
}

// Computes y[r][out] = x[r][in] W_e^T for every expert e and its rows r from offsets[e] to offsets[e + 1]. W_e is
// packed, and `out` is a multiple of PANEL. Threads share the panels of the experts that have rows, so each panel is
// read from memory once.
// The reference is `grouped_linear_reference` in features/families/qwen3_moe/ops.py.
template <class T>
void grouped_linear(const void* x, const uint32_t* packed, const int32_t* offsets, void* y, int64_t experts,
                    int64_t in, int64_t out) {
    using E = typename T::element;
    const int64_t matrix = in / T::PER_UNIT * out, panels = out / PANEL;
    std::vector<int32_t> touched;
    for (int32_t e = 0; e < experts; ++e)
        if (offsets[e] < offsets[e + 1]) touched.push_back(e);
    const int64_t items = (int64_t)touched.size() * panels;
    share(items, quarter(items), [&](Span some) {
        for (int64_t i = some.begin, n; i < some.end; i += n) {
            const int64_t expert = touched[i / panels], p = i % panels, first = offsets[expert];
            n = std::min(panels - p, some.end - i);
            multiply_panels<T>((const E*)x + first * in, packed + expert * matrix, nullptr, (E*)y + first * out,
                               offsets[expert + 1] - first, in, out, {p, p + n, true});
        }
    });
}

// Computes out[t][size] = the sum over j of y[places[t][j]] weights[t][j], in float32 and in the order of j. If there is
// a shared expert, shared[t][size] times the sigmoid of its gate comes last. Gates of tokens are gate_stride apart.
// The reference is `combine_reference` in features/families/qwen3_moe/ops.py.
template <class T>
void combine(const void* y_, const float* weights, const int32_t* places, const void* shared, const void* gate,
             void* out_, int64_t tokens, int64_t k, int64_t size, int64_t gate_stride) {
    using E = typename T::element;
    const int64_t vectors = size / LANES, items = tokens * vectors;
    share(items, quarter_unless_small(items, items * LANES * k), [&](Span some) {
        for (int64_t i = some.begin; i < some.end; ++i) {
            const int64_t t = i / vectors, v = i % vectors * LANES;
            vf total = {};
            for (int64_t j = t * k; j < (t + 1) * k; ++j)
                total += T::widen((const E*)y_ + places[j] * size + v) * weights[j];
            if (shared)
                total += T::widen((const E*)shared + t * size + v) *
                         sigmoid(splat(T::to_float(((const E*)gate)[t * gate_stride])));
            T::narrow((E*)out_ + t * size + v, total);
        }
    });
}

}  // namespace
