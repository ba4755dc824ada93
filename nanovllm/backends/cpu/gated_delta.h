// The operators of hybrids: linear attention's, and the gate of attention's outputs.
#pragma once

#include <vector>

#include "operators.h"

namespace {

// The sequences of a step, as StepInputs has them. Tokens cu_seqlens[i] to cu_seqlens[i + 1] belong to sequence
// i, whose state is that of row rows[i]. The sequence is new if these are all tokens that it has.
struct Sequences {
    const int32_t *cu_seqlens, *lens, *rows;

    int64_t tokens(int64_t i) const { return cu_seqlens[i + 1] - cu_seqlens[i]; }
    bool is_new(int64_t i) const { return lens[i] == tokens(i); }
};

constexpr int64_t CONV_TOKENS = 16, MAX_CONV_WIDTH = 8;

// Computes y[tokens][channels] = silu(the weighted sum of the last `width` inputs of each channel). Threads share
// pieces of CONV_TOKENS tokens of a sequence. The first piece of a sequence is the only one that needs the state, so it
// also replaces the state, by copies of x, when it has computed its own tokens.
// The reference is `causal_conv_reference` in features/families/qwen3_5/ops.py.
template <class T>
void causal_conv(const void* x_, const void* weight_, void* state_, void* y_, const int32_t* cu_seqlens,
                 const int32_t* lens, const int32_t* rows, int64_t seqs, int64_t channels, int64_t width,
                 int64_t stride) {
    using E = typename T::element;
    const E* weight = (const E*)weight_;
    const Sequences sequences = {cu_seqlens, lens, rows};
    const int64_t kept = width - 1;
    struct Piece { int64_t seq, first, tokens; };
    std::vector<Piece> pieces;
    for (int64_t s = 0; s < seqs; ++s)
        for (int64_t count = sequences.tokens(s), first = 0; first < count; first += CONV_TOKENS)
            pieces.push_back({s, first, std::min(CONV_TOKENS, count - first)});
    const std::vector<E> zeros(channels);
    share(pieces.size(), quarter_unless_small(pieces.size(), cu_seqlens[seqs] * channels), [&](Span some) {
        for (int64_t i = some.begin; i < some.end; ++i) {
            const Piece piece = pieces[i];
            const E* x = (const E*)x_ + cu_seqlens[piece.seq] * stride;
            E* state = (E*)state_ + rows[piece.seq] * kept * channels;
            const bool is_new = sequences.is_new(piece.seq);
            const auto input = [&](int64_t t) {  // of token t of the sequence; t < 0: of a token of an earlier step
                return t >= 0 ? x + t * stride : is_new ? zeros.data() : state + (kept + t) * channels;
            };
            for (int64_t t = piece.first; t < piece.first + piece.tokens; ++t) {
                const E* inputs[MAX_CONV_WIDTH];
                for (int64_t j = 0; j < width; ++j) inputs[j] = input(t - kept + j);
                E* y = (E*)y_ + (cu_seqlens[piece.seq] + t) * channels;
                for (int64_t c = 0; c < channels; c += LANES) {
                    vf total{};
                    for (int64_t j = 0; j < width; ++j)
                        total += T::widen(weight + j * channels + c) * T::widen(inputs[j] + c);
                    T::narrow(y + c, silu(round_to<T>(total)));
                }
            }
            if (piece.first > 0) continue;
            const int64_t count = sequences.tokens(piece.seq);
            for (int64_t j = 0; j < kept; ++j)  // what is read from the state lies behind what is written
                std::memcpy(state + j * channels, input(count - kept + j), channels * sizeof(E));
        }
    });
}

// The tokens whose q and k are normalised at a time, and the columns of S that one thread takes through all tokens of a
// sequence. S is stored block of columns by block, each [key dim][columns]; 32 columns of 128 rows fit into an L1 cache
// of 32 KiB.
constexpr int64_t DELTA_TOKENS = 16, STATE_VECTORS = 2, STATE_COLUMNS = STATE_VECTORS * LANES;

// What the columns of a head's state have in common for one token. qk is the product of q and k.
struct DeltaInputs {
    alignas(64) float q[MAX_HEAD_DIM], k[MAX_HEAD_DIM];
    float decay, beta, qk;
};

// Writes scale * x / |x| to y, in float32.
template <class T> void l2_normalise(const typename T::element* x, float* y, int64_t dim, float scale) {
    vf squares{};
    for (int64_t i = 0; i < dim; i += LANES) { const vf v = T::widen(x + i); squares += v * v; }
    const float factor = scale / std::sqrt(sum(squares) + 1e-6f);
    for (int64_t i = 0; i < dim; i += LANES) store(y + i, T::widen(x + i) * factor);
}

inline float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))); }

// Reads the inputs of one token and one value head. b and a are the gates; rate is exp(a_log).
template <class T>
void read_delta_inputs(const typename T::element* q, const typename T::element* k, float b, float a, float rate,
                       int64_t key_dim, DeltaInputs& to) {
    l2_normalise<T>(q, to.q, key_dim, 1.0f / std::sqrt((float)key_dim));
    l2_normalise<T>(k, to.k, key_dim, 1.0f);
    vf products{};
    for (int64_t i = 0; i < key_dim; i += LANES) products += load<vf>(to.q + i) * load<vf>(to.k + i);
    to.qk = sum(products);
    to.beta = 1.0f / (1.0f + std::exp(-b));
    to.decay = std::exp(-rate * softplus(a));
}

// Takes VECTORS * LANES columns of S through one token. It reads S twice: for the products of k and q with S, and to
// change it. It needs no product with the new S, because q (decay S + k d) = decay (q S) + (q k) d.
template <class T, int64_t VECTORS>
void delta_token(const DeltaInputs& in, const typename T::element* v, float* s, typename T::element* out,
                 int64_t key_dim) {
    constexpr int64_t COLUMNS = VECTORS * LANES, N = VECTORS * PARTS;
    alignas(64) float by_k[COLUMNS], by_q[COLUMNS], change[COLUMNS];
    const float decay = in.decay;
    rf k_sums[N]{}, q_sums[N]{}, d[N];
    for (int64_t i = 0; i < key_dim; ++i)
        for (int64_t n = 0; n < N; ++n) {
            const rf part = load<rf>(s + i * COLUMNS + n * PART_LANES);
            k_sums[n] += in.k[i] * part;
            q_sums[n] += in.q[i] * part;
        }
    for (int64_t n = 0; n < N; ++n) {
        store(by_k + n * PART_LANES, k_sums[n]);
        store(by_q + n * PART_LANES, q_sums[n]);
    }
    for (int64_t c = 0; c < COLUMNS; c += LANES) {
        const vf difference = in.beta * (T::widen(v + c) - decay * load<vf>(by_k + c));
        store(change + c, difference);
        T::narrow(out + c, decay * load<vf>(by_q + c) + in.qk * difference);
    }
    for (int64_t n = 0; n < N; ++n) d[n] = load<rf>(change + n * PART_LANES);
    for (int64_t i = 0; i < key_dim; ++i)
        for (int64_t n = 0; n < N; ++n) {
            float* part = s + i * COLUMNS + n * PART_LANES;
            store(part, decay * load<rf>(part) + in.k[i] * d[n]);
        }
}

// Applies the gated delta rule, out [tokens][value heads][value dim]. Threads share blocks of columns of the states of
// (sequence, value head). A block goes through the tokens of its sequence one after another, and each sum over the key
// dimension is in the order of that dimension. So no bit depends on the other sequences, nor on where a step begins.
// The reference is `gated_delta_reference` in features/families/qwen3_5/ops.py.
template <class T>
void gated_delta(const void* qkv_, const void* gates_, const float* a_log, const float* dt_bias, float* state,
                 const int32_t* cu_seqlens, const int32_t* lens, const int32_t* rows, void* out_, int64_t seqs,
                 int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t gates_stride) {
    using E = typename T::element;
    const Sequences sequences = {cu_seqlens, lens, rows};
    const int64_t keys = key_heads * key_dim, stride = 2 * keys + value_heads * value_dim;
    const int64_t blocks = (value_dim + STATE_COLUMNS - 1) / STATE_COLUMNS, items = seqs * value_heads * blocks;
    const int64_t elements = cu_seqlens[seqs] * value_heads * key_dim * value_dim;
    share(items, elements > SMALL ? blocks : items, [&](Span some) {
        std::vector<DeltaInputs> inputs(DELTA_TOKENS);
        for (int64_t i = some.begin; i < some.end; ++i) {
            const int64_t seq = i / blocks / value_heads, head = i / blocks % value_heads;
            const int64_t column = i % blocks * STATE_COLUMNS, key_head = head / (value_heads / key_heads);
            const bool is_whole = column + STATE_COLUMNS <= value_dim;
            float* s = state + ((rows[seq] * value_heads + head) * value_dim + column) * key_dim;
            if (sequences.is_new(seq)) std::memset(s, 0, std::min(STATE_COLUMNS, value_dim - column) * key_dim * 4);
            const float rate = std::exp(a_log[head]);
            for (int64_t first = cu_seqlens[seq], end = cu_seqlens[seq + 1]; first < end; first += DELTA_TOKENS) {
                const int64_t count = std::min(DELTA_TOKENS, end - first);
                for (int64_t t = 0; t < count; ++t) {
                    const E *q = (const E*)qkv_ + (first + t) * stride + key_head * key_dim, *k = q + keys;
                    const E *b = (const E*)gates_ + (first + t) * gates_stride + head, *a = b + value_heads;
                    read_delta_inputs<T>(q, k, T::to_float(*b), T::to_float(*a) + dt_bias[head], rate, key_dim,
                                         inputs[t]);
                }
                for (int64_t t = 0; t < count; ++t) {
                    const E* v = (const E*)qkv_ + (first + t) * stride + 2 * keys + head * value_dim + column;
                    E* out = (E*)out_ + ((first + t) * value_heads + head) * value_dim + column;
                    (is_whole ? delta_token<T, STATE_VECTORS> : delta_token<T, 1>)(inputs[t], v, s, out, key_dim);
                }
            }
        }
    });
}

// Computes y = rms_norm(x) * weight * silu(gate) for x [tokens][heads][dim], whose gates are gate_stride apart.
// The reference is `gated_rms_norm_reference` in features/families/qwen3_5/ops.py.
template <class T>
void gated_rms_norm(const void* x_, const void* gate_, const void* weight, void* y_, int64_t tokens, int64_t heads,
                    int64_t dim, int64_t gate_stride, float eps) {
    using E = typename T::element;
    const int64_t rows = tokens * heads;
    share(rows, quarter_unless_small(rows, rows * dim), [&](Span some) {
        for (int64_t r = some.begin; r < some.end; ++r) {
            const E* gate = (const E*)gate_ + r / heads * gate_stride + r % heads * dim;
            E* y = (E*)y_ + r * dim;
            rms_norm_row<T, T>((const E*)x_ + r * dim, weight, y, dim, eps);
            for (int64_t i = 0; i < dim; i += LANES) T::narrow(y + i, T::widen(y + i) * silu(T::widen(gate + i)));
        }
    });
}

// Computes y[tokens][size] = x * sigmoid(gate). It rounds after the sigmoid, as the reference does.
// The reference is `sigmoid_and_mul_reference` in features/families/qwen3_5/ops.py.
template <class T>
void sigmoid_and_mul(const void* x_, const void* gate_, void* y_, int64_t tokens, int64_t size, int64_t gate_stride) {
    using E = typename T::element;
    share(tokens, quarter_unless_small(tokens, tokens * size), [&](Span some) {
        for (int64_t t = some.begin; t < some.end; ++t) {
            const E *x = (const E*)x_ + t * size, *gate = (const E*)gate_ + t * gate_stride;
            for (int64_t i = 0; i < size; i += LANES) {
                const vf rounded = round_to<T>(sigmoid(T::widen(gate + i)));
                T::narrow((E*)y_ + t * size + i, T::widen(x + i) * rounded);
            }
        }
    });
}

}  // namespace
