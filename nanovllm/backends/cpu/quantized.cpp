// The kernels for quantised matrices: a library of its own, compiled when the first model asks for it.
//
// quantized.h describes how the matrices are stored, and linear.h and team.h do the rest. The reference is
// `TorchMatrix` in features/quantized/torch_matrix.py.

#include "exported.h"
#include "quantized.h"

namespace {

// Packs codes [out][in] (two of 4 bits in a byte, the first in the lower half) into packed [panels][chunks][bytes].
// Columns beyond `out` and inputs beyond `in` get the code 0. The rows are copied to a tile as wide as a cache line,
// because they are often a power of two apart and would compete for the same few cache sets.
template <class Q> void pack_codes(Q q, const uint8_t* codes, uint8_t* packed, int64_t out, int64_t in) {
    constexpr int64_t WIDTH = 64;
    const Quantized m = {nullptr, {}, {}, nullptr, in, out, in, out};
    const int64_t chunks = m.chunks<Q>(), row_bytes = in * Q::BITS / 8, chunk_bytes = Q::INPUTS * Q::BITS / 8;
    share(m.panels(), quarter(m.panels()), [&](Span some) {
        uint8_t tile[PANEL][WIDTH];
        for (int64_t p = some.begin; p < some.end; ++p)
            for (int64_t start = 0; start < row_bytes; start += WIDTH) {
                const int64_t count = std::min(WIDTH, row_bytes - start);
                for (int64_t c = 0; c < PANEL; ++c) {
                    std::memset(tile[c], 0, WIDTH);
                    if (p * PANEL + c < out) std::memcpy(tile[c], codes + (p * PANEL + c) * row_bytes + start, count);
                }
                uint8_t* chunk = packed + (p * chunks + start / chunk_bytes) * Q::BYTES;
                for (int64_t i = 0; i < count; i += chunk_bytes, chunk += Q::BYTES) q.put(chunk, tile[0] + i, WIDTH);
            }
    });
}

// Returns a product that is rounded before something is added to it, as torch rounds it.
inline float round_product(float a, float b) {
    float product = a * b;
    asm("" : "+m"(product));
    return product;
}

// Writes the weights of the rows `indices` to y[count][in], rounded to the format P.
template <class Q> void weight_rows(Q q, const Quantized& m, const int32_t* indices, void* y_, int64_t count) {
    using P = typename Q::left;
    share(count, quarter_unless_small(count, count * m.in), [&](Span some) {
        std::vector<float> weights(m.in + LANES);
        std::vector<typename P::element> line(m.in + LANES);
        for (int64_t r = some.begin; r < some.end; ++r) {
            const int64_t panel = indices[r] / PANEL, column = indices[r] % PANEL;
            const uint8_t* chunk = m.codes + panel * m.chunks<Q>() * Q::BYTES;
            for (int64_t start = 0; start < m.in; start += m.group) {
                const int64_t row = panel * m.groups() + start / m.group, part = column / PART_LANES * PART_LANES;
                const float scale = m.scales.at(row, part)[column - part];
                const float minimum = m.minima.values ? m.minima.at(row, part)[column - part] : 0;
                const float zero = m.zeros ? m.zeros[row * PANEL + column] : 0;
                for (int64_t i = start; i < std::min(start + m.group, m.in); ++i) {
                    const float code = q.code(chunk + i / Q::INPUTS * Q::BYTES, (int)column, (int)(i % Q::INPUTS));
                    const float scaled = round_product(code - zero, scale);
                    weights[i] = m.minima.values ? scaled - minimum : scaled;
                }
            }
            for (int64_t i = 0; i < m.in; i += LANES) P::narrow(&line[i], load<vf>(&weights[i]));
            std::memcpy((typename P::element*)y_ + r * m.in, line.data(), m.in * sizeof(line[0]));
        }
    });
}

// Says how many bytes a chunk has, and how many inputs.
template <class Q> void chunk_sizes(Q, int64_t* sizes) {
    sizes[0] = Q::BYTES;
    sizes[1] = Q::INPUTS;
}

// The numbers of the formats: 8 bits without the code -128, which is slower; 8 bits with it; 6 bits; and 4 bits, by
// each of the tables.
enum { INT8 = 0, WHOLE_INT8 = 1, INT6 = 2, INT4 = 3, INT4_FROM_ZERO = 4, INT4_IQ = 5 };

// Calls body(format) with a value of the format for left sides of P.
template <class P, class Body> void with_format(int64_t number, Body body) {
    if (number == INT8) body(Int8<P, false>{});
    else if (number == WHOLE_INT8) body(Int8<P, LOOKS_UP_LINES<P>>{});
    else if (number == INT6) body(std::conditional_t<LOOKS_UP_LINES<P>, Int6<P>, Int8<P, false>>{});
    else if (number == INT4) body(int4<P, SIGNED>());
    else if (number == INT4_FROM_ZERO) body(int4<P, FROM_ZERO>());
    else body(int4<P, IQ4>());
}

}  // namespace

extern "C" {

// Exports the template `name` for the chosen format, and for left sides of both types T: see EXPORT_CALL. A kernel takes a
// matrix as TENSORS and SIZES, of which MATRIX makes a `Quantized`.
#define EXPORT_CODES(name, arguments, ...) \
    EXPORT_CALL(name, with_format<T>(format, [&](auto chosen) { name arguments; }), __VA_ARGS__, int64_t format)

#define MATRIX                                                                                                  \
    {codes, {scales, factors, shared, halves != 0}, {minima, minimum_factors, shared, halves != 0}, zeros, in, out, \
     group, row}
#define TENSORS                                                                                    \
    const uint8_t *codes, const void *scales, const int8_t *factors, const void *minima,           \
        const int8_t *minimum_factors, const float *zeros
#define SIZES int64_t in, int64_t out, int64_t group, int64_t shared, int64_t halves, int64_t row

EXPORT_CODES(pack_codes, (chosen, codes, packed, out, in), const uint8_t* codes, uint8_t* packed, int64_t out,
             int64_t in)
EXPORT_CODES(weight_rows, (chosen, MATRIX, indices, y, count), TENSORS, const int32_t* indices, void* y, int64_t count,
             SIZES)
EXPORT_CODES(linear_codes, (chosen, x, MATRIX, bias, y, rows), const void* x, TENSORS, const void* bias, void* y,
             int64_t rows, SIZES)
EXPORT_CODES(grouped_codes, (chosen, x, MATRIX, offsets, y, experts), const void* x, TENSORS, const int32_t* offsets,
             void* y, int64_t experts, SIZES)
EXPORT_CODES(chunk_sizes, (chosen, sizes), int64_t* sizes)

}
