// Vectors of 16 float32 lanes, and the two number formats of weights and caches.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#ifdef __ARM_NEON
#include <arm_neon.h>
#endif

using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;

// For functions of vectors: a call that is not inlined passes them through memory.
#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace {

// Lanes of a vector, columns of a panel of a packed matrix, and the largest head. library.py reads these numbers here.
constexpr int LANES = 16, PANEL = 32, MAX_HEAD_DIM = 256;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

// The bytes of a vector register, and how many rows a product computes at a time. The innermost loop uses vectors of
// this size, because compilers keep wider ones in memory, which is too slow there.
#if defined(__AVX512F__)
constexpr int REGISTER = 64, REGISTER_ROWS = 12;
#elif defined(__AVX__)
constexpr int REGISTER = 32, REGISTER_ROWS = 3;
#else
constexpr int REGISTER = 16, REGISTER_ROWS = 3;
#endif
typedef float rf __attribute__((vector_size(REGISTER)));
typedef int32_t ri __attribute__((vector_size(REGISTER)));
constexpr int PARTS = 64 / REGISTER, PART_LANES = LANES / PARTS;

template <class V> inline V load(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V> inline void store(void* p, V v) { std::memcpy(p, &v, sizeof v); }
inline vf splat(float x) { return vf{} + x; }

// Returns body(a register of each vector), for all registers. Compilers compare vectors that are wider than a register
// lane by lane, which takes ten times as long. So comparisons use this. The union stays in registers; memcpy would not.
union Registers { vf whole; rf parts[PARTS]; };
template <class Body, class... Vectors> ALWAYS_INLINE vf by_register(Body body, Vectors... vectors) {
    Registers result;
    for (int p = 0; p < PARTS; ++p) result.parts[p] = body(Registers{vectors}.parts[p]...);
    return result.whole;
}

// These functions take registers and vectors. On AVX2 GCC keeps the parts of a vector in memory, so the innermost loops
// take registers.
template <class V> ALWAYS_INLINE V maximum(V a, V b) {
    if constexpr (sizeof(V) == REGISTER) return a > b ? a : b;
    else return by_register([](rf x, rf y) { return x > y ? x : y; }, a, b);
}
// Returns `yes` in the lanes where a < limit, else `no`.
template <class V> ALWAYS_INLINE V select_less(V a, float limit, V yes, V no) {
    if constexpr (sizeof(V) == REGISTER) return a < limit ? yes : no;
    else return by_register([=](rf x, rf y, rf n) { return x < limit ? y : n; }, a, yes, no);
}
// Returns -1 in the lanes that are NaN, else 0. The magnitude of a NaN, as a whole number, is above infinity's.
template <class V> ALWAYS_INLINE auto is_nan(V v) {
    typedef int32_t Integers __attribute__((vector_size(sizeof(V))));
    return (0x7f800000 - ((Integers)v & 0x7fffffff)) >> 31;
}

// Returns a register of signed bytes as 32-bit numbers.
ALWAYS_INLINE ri widen_bytes(const void* at) {
#if defined(__AVX512F__)
    return (ri)_mm512_cvtepi8_epi32(load<__m128i>(at));
#elif defined(__AVX2__)
    return (ri)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at));
#else
    typedef int8_t bytes __attribute__((vector_size(PART_LANES)));
    typedef int16_t words __attribute__((vector_size(2 * PART_LANES)));  // compilers double a width well
    return __builtin_convertvector(__builtin_convertvector(load<bytes>(at), words), ri);
#endif
}

// Combines the 16 lanes into one number: the two halves first, then the halves of the result, and so on. The halves are
// loaded as vectors from a copy in memory, because compilers make slow code of single lanes and of vectors whose
// address is taken.
template <class Combine> inline float reduce(vf v, Combine combine) {
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    alignas(64) float e[LANES];
    store(e, v);
    store(e, combine(load<v8>(e), load<v8>(e + 8)));
    const v4 four = combine(load<v4>(e), load<v4>(e + 4));
    return combine(combine(four[0], four[2]), combine(four[1], four[3]));
}
inline float sum(vf v) { return reduce(v, [](auto a, auto b) { return a + b; }); }
inline float largest(vf v) { return reduce(v, [](auto a, auto b) { return a > b ? a : b; }); }

// Computes exp(x) for x <= 88, to about 2 units in the last place, as 2^n times a polynomial in the remainder (Cody and
// Waite 1980). It returns 0 below -87.
template <class V> ALWAYS_INLINE V exp(V x) {
    typedef int32_t Integers __attribute__((vector_size(sizeof(V))));
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    V n = (x * 1.44269504f + magic) - magic;
    V r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    V p = ((1.9875691e-4f * r + 1.3981999e-3f) * r + 8.3334519e-3f) * r + 4.1665796e-2f;
    p = (p * r + 1.6666665e-1f) * r + 0.5f;
    V y = p * r * r + r + 1.0f;
    Integers exponent = (__builtin_convertvector(n, Integers) + 127) << 23;
    return select_less(x, -87.0f, V{}, y * (V)exponent);
}

// Rounds to bfloat16, to nearest and ties to even. The lower halves of the result are zero.
template <class V> ALWAYS_INLINE V round_to_bfloat16(V v) {
    typedef int32_t Integers __attribute__((vector_size(sizeof(V))));
    const Integers u = (Integers)v, rounded = u + 0x7fff + ((u >> 16) & 1), nan = is_nan(v);
    return (V)(((nan & 0x7fc00000) | (~nan & rounded)) & ~0xffff);
}
inline vh narrow_to_bfloat16(vf v) { return __builtin_convertvector((vi)round_to_bfloat16(v) >> 16, vh); }

// Float and BFloat16 say how a product multiplies its elements. It takes a unit of its right side in STEPS steps, each
// with one `left` of its left side. `put_left` converts 16 elements of the left side beforehand; `put_register` rounds a
// register of float32 numbers to such elements, too. A unit of float32 takes one step. So
// does a unit of two bfloat16 numbers if the processor multiplies bfloat16; else a step widens one of the two numbers.
struct Float {
    using element = float;
    using left = float;
    static constexpr int PER_UNIT = 1, STEPS = 1;
    static inline rf right(ri unit, int) { return (rf)unit; }
    static inline rf fma(rf acc, left a, rf b) { return acc + a * b; }
    static inline void put_left(left* p, const element* from) { store(p, load<vf>(from)); }
    static inline void put_register(left* p, rf v) { store(p, v); }
    static inline vf widen(const element* p) { return load<vf>(p); }
    static inline void narrow(element* p, vf v) { store(p, v); }
    static inline float to_float(element x) { return x; }
};

struct BFloat16 {
    using element = uint16_t;
    static constexpr int PER_UNIT = 2;
#ifdef __AVX512BF16__
    using left = uint32_t;
    static constexpr int STEPS = 1;
    static inline rf right(ri unit, int) { return (rf)unit; }
    static inline rf fma(rf acc, left a, rf b) {
        return (rf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)b, (__m512bh)_mm512_set1_epi32((int)a));
    }
    static inline void put_left(left* p, const element* from) { std::memcpy(p, from, LANES * sizeof(*from)); }
    static inline void put_register(left* p, rf v) { narrow((element*)p, v); }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    using left = uint32_t;
    static constexpr int STEPS = 1;
    static inline rf right(ri unit, int) { return (rf)unit; }
    static inline rf fma(rf acc, left a, rf b) {
        const bfloat16x8_t both = vreinterpretq_bf16_u32(vdupq_n_u32(a));
        return (rf)vbfdotq_f32((float32x4_t)acc, vreinterpretq_bf16_f32((float32x4_t)b), both);
    }
    static inline void put_left(left* p, const element* from) { std::memcpy(p, from, LANES * sizeof(*from)); }
    static inline void put_register(left* p, rf v) {
        typedef uint16_t halves __attribute__((vector_size(REGISTER / 2)));
        store(p, __builtin_convertvector((ri)round_to_bfloat16(v) >> 16, halves));
    }
#else
    using left = float;
    static constexpr int STEPS = 2;
    static inline rf right(ri unit, int step) { return (rf)(step ? unit & ~0xffff : unit << 16); }
    static inline rf fma(rf acc, left a, rf b) { return acc + a * b; }
    static inline void put_left(left* p, const element* from) { store(p, widen(from)); }
    static inline void put_register(left* p, rf v) { store(p, round_to_bfloat16(v)); }
#endif
    static inline vf widen(const element* p) {
#ifdef __AVX512BF16__
        return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
        return (vf)(__builtin_convertvector(load<vh>(p), vi) << 16);
#endif
    }
    static inline void narrow(element* p, vf v) {  // rounds to nearest, ties to even
#ifdef __AVX512BF16__
        store(p, _mm512_cvtneps_pbh((__m512)v));
#else
        store(p, narrow_to_bfloat16(v));
#endif
    }
    static inline float to_float(element x) {
        uint32_t u = (uint32_t)x << 16;
        float f;
        std::memcpy(&f, &u, 4);
        return f;
    }
};

// Returns the start of a cache line, with room for `size` elements, in memory that `owner` holds.
template <class E> inline E* cache_lines(std::vector<E>& owner, size_t size) {
    constexpr size_t LINE = 64;
    owner.resize(std::max(owner.size(), size + LINE / sizeof(E)));
    return (E*)(((uintptr_t)owner.data() + LINE - 1) / LINE * LINE);
}

// Rounds v to the format T and converts it back to float32.
template <class T> inline vf round_to(vf v) {
    typename T::element e[LANES];
    T::narrow(e, v);
    return T::widen(e);
}

}  // namespace
