// The kernels for quantised matrices: a library of its own, compiled when the first model asks for it.
//
// quantized.h describes how the matrices are stored, and linear.h and team.h do the rest. The reference is
// `TorchMatrix` in features/quantized/torch_matrix.py.

#include "exported.h"
#include "quantized.h"

namespace {

// Packs codes [out][in] (two of 4 bits in a byte, the first in the lower half) into packed [panels][chunks][CHUNK].
// Columns beyond `out` and inputs beyond `in` get the number 0. The rows are copied to a tile as wide as a cache line,
// because they are often a power of two apart and would compete for the same few cache sets.
template <class Q> void pack_codes(const uint8_t* codes, uint8_t* packed, int64_t out, int64_t in) {
    constexpr int64_t WIDTH = 64;
    const Quantized m = {nullptr, nullptr, nullptr, in, out, in};
    const int64_t chunks = m.chunks<Q>(), row_bytes = in * Q::BITS / 8, chunk_bytes = Q::INPUTS * Q::BITS / 8;
    share(m.panels(), quarter(m.panels()), [&](Span some) {
        uint8_t tile[PANEL][WIDTH];
        for (int64_t p = some.begin; p < some.end; ++p)
            for (int64_t start = 0; start < row_bytes; start += WIDTH) {
                const int64_t count = std::min(WIDTH, row_bytes - start);
                for (int64_t c = 0; c < PANEL; ++c) {
                    std::memset(tile[c], Q::ZERO, WIDTH);
                    if (p * PANEL + c < out) std::memcpy(tile[c], codes + (p * PANEL + c) * row_bytes + start, count);
                }
                uint8_t* chunk = packed + (p * chunks + start / chunk_bytes) * CHUNK;
                for (int64_t i = 0; i < count; i += chunk_bytes, chunk += CHUNK) Q::put(chunk, tile[0] + i, WIDTH);
            }
    });
}

// Writes the weights of the rows `indices` to y[count][in], rounded to the format P.
template <class Q> void weight_rows(const Quantized& m, const int32_t* indices, void* y_, int64_t count) {
    using P = typename Q::left;
    share(count, quarter_unless_small(count, count * m.in), [&](Span some) {
        std::vector<float> weights(m.in + LANES);
        std::vector<typename P::element> line(m.in + LANES);
        for (int64_t r = some.begin; r < some.end; ++r) {
            const int64_t panel = indices[r] / PANEL, column = indices[r] % PANEL;
            const uint8_t* chunk = m.codes + panel * m.chunks<Q>() * CHUNK;
            for (int64_t i = 0; i < m.in; ++i) {
                const int64_t at = (panel * m.groups() + i / m.group) * PANEL + column;
                const float code = Q::code(chunk + i / Q::INPUTS * CHUNK, (int)column, (int)(i % Q::INPUTS));
                weights[i] = (code - (m.zeros ? m.zeros[at] : 0)) * m.scales[at];
            }
            for (int64_t i = 0; i < m.in; i += LANES) P::narrow(&line[i], load<vf>(&weights[i]));
            std::memcpy((typename P::element*)y_ + r * m.in, line.data(), m.in * sizeof(line[0]));
        }
    });
}

// The numbers of the formats: 8 bits without the code -128, which is slower; 8 bits with it; 4 bits.
enum { INT8 = 0, WHOLE_INT8 = 1, INT4 = 2 };

// Calls body(format) with a value of the format for left sides of P.
template <class P, class Body> void with_format(int64_t number, Body body) {
    if (number == INT8) body(Int8<P, false>{});
    else if (number == WHOLE_INT8) body(Int8<P, true>{});
    else body(Int4<P>{});
}

}  // namespace

extern "C" {

// Exports the template `name` of a format, for left sides of both types.
#define EXPORT_CODES(name, arguments, ...)                                                                   \
    EXPORT_CALL(name, with_format<T>(format, [&](auto chosen) { name<decltype(chosen)> arguments; }), __VA_ARGS__, \
                int64_t format)

EXPORT_CODES(pack_codes, (codes, packed, out, in), const uint8_t* codes, uint8_t* packed, int64_t out, int64_t in)
EXPORT_CODES(weight_rows, ({codes, scales, zeros, in, out, group}, indices, y, count),
             const uint8_t* codes, const float* scales, const float* zeros, const int32_t* indices, void* y,
             int64_t count, int64_t in, int64_t out, int64_t group)
EXPORT_CODES(linear_codes, (x, {codes, scales, zeros, in, out, group}, bias, y, rows),
             const void* x, const uint8_t* codes, const float* scales, const float* zeros, const void* bias, void* y,
             int64_t rows, int64_t in, int64_t out, int64_t group)
EXPORT_CODES(grouped_codes, (x, {codes, scales, zeros, in, out, group}, offsets, y, experts),
             const void* x, const uint8_t* codes, const float* scales, const float* zeros, const int32_t* offsets,
             void* y, int64_t experts, int64_t in, int64_t out, int64_t group)

}
