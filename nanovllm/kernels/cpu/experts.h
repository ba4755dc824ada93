// Every token's product with the matrix of its expert.
#pragma once

#include <vector>

#include "linear.h"

namespace {

// y[offsets[e] .. offsets[e + 1]][out] = x[the same rows][in] W_e^T for every expert e; W_e is packed, and `out` is a
// multiple of PANEL. Threads share the panels of the experts that have rows: each is read from memory once.
template <class T>
void grouped_linear(const void* x_, const uint32_t* packed, const int32_t* offsets, void* y_, int64_t experts,
                    int64_t in, int64_t out) {
    using E = typename T::element;
    const auto* x = (const uint32_t*)x_;
    const int64_t k = in / T::PER_UNIT, panels = out / PANEL;
    std::vector<int32_t> touched;
    for (int32_t e = 0; e < experts; ++e)
        if (offsets[e] < offsets[e + 1]) touched.push_back(e);
#pragma omp parallel
    {
        const Share mine = share_of((int64_t)touched.size() * panels);
        for (int64_t i = mine.begin; i < mine.end; ++i) {
            const int64_t expert = touched[i / panels], p = i % panels, begin = offsets[expert];
            const uint32_t* panel = packed + (expert * panels + p) * k * PANEL;
            row_pieces(offsets[expert + 1] - begin, [&](int64_t first, int count) {
                alignas(64) float sums[MAX_TILE_ROWS * PANEL];
                const auto product = first ? tile_of<T, false> : tile_of<T, true>;
                const uint32_t* from = x + (begin + first) * k;
                product(count, from, k, {panel, PANEL, LANES, panel + AHEAD}, k, sums, PANEL, 2, false);
                for (int r = 0; r < count; ++r)
                    for (int v = 0; v < PANEL; v += LANES)
                        T::narrow((E*)y_ + (begin + first + r) * out + p * PANEL + v, load<vf>(sums + r * PANEL + v));
            });
        }
    }
}

}  // namespace
