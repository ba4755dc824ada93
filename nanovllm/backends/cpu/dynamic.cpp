// The kernels for products in whole numbers: a library of its own, compiled with -ffp-contract=off when the first model
// asks for it. dynamic.h says how. The reference is `multiply_rounded` in features/quantized/dynamic.py.

#include "dynamic.h"
#include "exported.h"

namespace {

// Writes the weights of the rows `indices` to y[count][in], rounded to the format P.
template <class P> void dynamic_rows(const Matrix& m, const int32_t* indices, void* y, int64_t count) {
    share(count, quarter_unless_small(count, count * m.in), [&](Span some) {
        std::vector<float> weights(m.in + LANES);
        std::vector<typename P::element> line(m.in + LANES);
        for (int64_t r = some.begin; r < some.end; ++r) {
            const int64_t row = indices[r];
            const uint8_t* codes = m.codes + row / PANEL * m.panel_bytes() + row % PANEL * STEP;
            for (int64_t i = 0; i < m.in; ++i) {
                const uint8_t stored = codes[i / STEP * STEP_BYTES + Dot::PLACES[i % STEP]];
                weights[i] = (float)(int8_t)(stored ^ Dot::SHIFT) * m.scales[row];
            }
            for (int64_t i = 0; i < m.in; i += LANES) narrow<P>(&line[i], load<vf>(&weights[i]));
            std::memcpy((typename P::element*)y + r * m.in, line.data(), m.in * sizeof(line[0]));
        }
    });
}

}  // namespace

extern "C" {

// Returns whether the processor has an instruction that multiplies bytes and adds four products.
int multiplies_bytes() {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
    return 1;
#else
    return 0;
#endif
}

// Packs int8 codes [out][in], from -127 to 127. The rows are copied to a tile as wide as a cache line, because they are
// often a power of two apart and would compete for the same few cache sets.
void pack_dynamic(int64_t threads, const uint8_t* codes, uint8_t* packed, int64_t out, int64_t in) {
    num_threads = threads;
    constexpr int64_t TILE = 64;
    const Matrix m = {nullptr, nullptr, in, out};
    share(m.panels(), quarter(m.panels()), [&](Span some) {
        uint8_t tile[PANEL][TILE];
        for (int64_t p = some.begin; p < some.end; ++p)
            for (int64_t start = 0; start < in; start += TILE) {
                const int64_t count = std::min(TILE, in - start);
                for (int64_t c = 0; c < PANEL; ++c) {
                    std::memset(tile[c], 0, TILE);
                    if (p * PANEL + c < out) std::memcpy(tile[c], codes + (p * PANEL + c) * in + start, count);
                }
                uint8_t* to = packed + p * m.panel_bytes() + start / STEP * STEP_BYTES;
                for (int64_t i = 0; i < count; i += STEP, to += STEP_BYTES)
                    for (int64_t c = 0; c < PANEL; ++c)
                        for (int k = 0; k < STEP; ++k)
                            to[c * STEP + Dot::PLACES[k]] = (uint8_t)(tile[c][i + k] ^ Dot::SHIFT);
            }
    });
}

KERNEL(pack_dynamic)
EXPORT(linear_dynamic, (x, {codes, scales, in, out}, bias, y, rows), const void* x, const uint8_t* codes,
       const float* scales, const void* bias, void* y, int64_t rows, int64_t in, int64_t out)
EXPORT(grouped_dynamic, (x, {codes, scales, in, out}, offsets, y, experts), const void* x, const uint8_t* codes,
       const float* scales, const int32_t* offsets, void* y, int64_t experts, int64_t in, int64_t out)
EXPORT(dynamic_rows, ({codes, scales, in, out}, indices, y, count), const uint8_t* codes, const float* scales,
       const int32_t* indices, void* y, int64_t count, int64_t in, int64_t out)

}
