// Every token's product with the matrix of its expert, and the weighted sum of what its experts computed.
#pragma once

#include <vector>

#include "linear.h"

namespace {

// y[offsets[e] .. offsets[e + 1]][out] = x[the same rows][in] W_e^T for every expert e; W_e is packed, and `out` is a
// multiple of PANEL. Threads share the panels of the experts that have rows: each is read from memory once.
template <class T>
void grouped_linear(const void* x, const uint32_t* packed, const int32_t* offsets, void* y, int64_t experts,
                    int64_t in, int64_t out) {
    using E = typename T::element;
    const int64_t matrix = in / T::PER_UNIT * out, panels = out / PANEL;
    std::vector<int32_t> touched;
    for (int32_t e = 0; e < experts; ++e)
        if (offsets[e] < offsets[e + 1]) touched.push_back(e);
#pragma omp parallel
    {
        const Share mine = share_of((int64_t)touched.size() * panels);
        for (int64_t i = mine.begin, n; i < mine.end; i += n) {
            const int64_t expert = touched[i / panels], p = i % panels, first = offsets[expert];
            n = std::min(panels - p, mine.end - i);
            multiply_panels<T>((const E*)x + first * in, packed + expert * matrix, nullptr, (E*)y + first * out,
                               offsets[expert + 1] - first, in, out, p, p + n);
        }
    }
}

// out[tokens][size] = the sum of y[places[t][j]] weights[t][j] over j, in float32 and in the order of j.
template <class T>
void combine(const void* y_, const float* weights, const int32_t* places, void* out_, int64_t tokens, int64_t k,
             int64_t size) {
    using E = typename T::element;
#pragma omp parallel for schedule(static) collapse(2)
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t v = 0; v < size; v += LANES) {
            vf total = {};
            for (int64_t j = t * k; j < (t + 1) * k; ++j)
                total += T::widen((const E*)y_ + places[j] * size + v) * weights[j];
            T::narrow((E*)out_ + t * size + v, total);
        }
}

}  // namespace
