// Products with quantised matrices: whole numbers of 8, 6 or 4 bits, and the scales and minima that make weights of
// them.
//
// A matrix [out][in] is cut into panels of 32 outputs, the columns of a product. A panel is one stream of memory:
//
//     inputs          0 ..            INPUTS ..       2 INPUTS ..
//     panel 0:     [ chunk 0      ][ chunk 1      ][ chunk 2      ] ...   outputs  0 to 31
//     panel 1:     [ chunk 0      ][ chunk 1      ][ chunk 2      ] ...   outputs 32 to 63
//     scales:      [ 32 numbers of group 0        ][ 32 of group 1 ...    and minima, zeros
//
//     a chunk of 8 bits:  2 inputs x 32 columns, in  64 bytes
//     a chunk of 4 bits:  4 inputs x 32 columns, in  64 bytes, two codes in each
//     a chunk of 6 bits:  8 inputs x 32 columns, in 192 bytes: three lines of 64 have a code in the lower six bits of
//                         each byte, and the upper two bits of the three bytes at a place are the fourth code
//
// Words used here:
//     code      what is stored of a weight                  number    the whole number that a code means
//     group     inputs in a row that share a scale          step      the inputs that one multiply-add takes: one of
//     left      the rows of x, the left side                          float32, or two of bfloat16 in a 32-bit lane
//     right     numbers of a step, widened to x's type      register  PART_LANES columns of a panel
//     DEPTH     steps of a block of the left side, whose    tile      rows and columns whose sums stay in registers: at
//               rows are LEFT_ROW steps apart                         most MAX_TILE_ROWS rows
//     piece     rows that are computed together             share     gives a piece of some items to each thread
//
// An element of a product is the sum over groups of
//     scale (sum of x number - zero (sum of x)) - minimum (sum of x),
// where the inner sums add from the first input of the group to the last; by AMX, as amx.h says. No order depends on
// how many rows are computed together. So each element has the same bits for one row as for many, and for any number of
// threads.
#pragma once

#include <type_traits>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "linear.h"

namespace {

constexpr int LINE = 64, REGISTERS = 2 * PARTS;  // bytes of a cache line, and registers for a panel's columns

// How many inputs a step of a product takes: two where the processor multiplies pairs of bfloat16. P is Float or
// BFloat16, the format of the left side.
template <class P> constexpr int PER_STEP = P::PER_UNIT / P::STEPS;

// The format of columns that have been widened: pairs of bfloat16, or float32.
template <class P> using Wide = std::conditional_t<PER_STEP<P> == 2, P, Float>;

// Whether the processor multiplies pairs of P and has AVX-512: then bytes become pairs by its own instructions.
template <class P> constexpr bool IN_PAIRS = PER_STEP<P> == 2 && PARTS == 1;

// Whether products with left sides of P have a loop of their own for small groups: bfloat16 has with AVX-512 and AVX2.
template <class P> constexpr bool HAS_GROUP_LOOP = IN_PAIRS<P> || (HAS_NARROW && P::PER_UNIT == 2);

// Makes the right side of one step from whole numbers. All of them are exact in either format.
template <class P, class Q> inline rf widen_numbers(const Q& q, const uint8_t* chunk, int step, int v) {
    typedef uint32_t ru __attribute__((vector_size(REGISTER)));
    const int k = step * PER_STEP<P>;
    const rf first = __builtin_convertvector(q.numbers(chunk, k, v), rf);
    if constexpr (PER_STEP<P> == 1) return first;
    const rf second = __builtin_convertvector(q.numbers(chunk, k + 1, v), rf);
    return (rf)((ru)second | (ru)first >> 16);  // the lower halves are zero
}

constexpr uint16_t to_bfloat16(int number) {  // exact up to 256
    int magnitude = number < 0 ? -number : number, exponent = 127;
    if (magnitude == 0) return 0;
    for (; magnitude >= 2 << (exponent - 127);) ++exponent;
    return (uint16_t)((number < 0) << 15 | exponent << 7 | ((magnitude << 7 >> (exponent - 127)) & 127));
}

// The lower and upper bytes of the bfloat16 numbers 0 to 63, and of those from -32 to 31 that 6 bits mean.
struct Tables {
    alignas(64) uint8_t low[64] = {}, high[64] = {}, six_low[64] = {}, six_high[64] = {};
    constexpr Tables() {
        for (int i = 0; i < 64; ++i) {
            const uint16_t number = to_bfloat16(i), six = to_bfloat16((i ^ 32) - 32);
            low[i] = (uint8_t)number, high[i] = (uint8_t)(number >> 8);
            six_low[i] = (uint8_t)six, six_high[i] = (uint8_t)(six >> 8);
        }
    }
};
constexpr Tables TABLES;

// The tables of what 4 bits mean: signed numbers, numbers from 0 on, and those of GGUF's IQ4. AVX-512 looks a number up in
// a register whatever it is, so there all tables share one form, for ANY. Elsewhere each table has loops of its own.
enum Nibbles { SIGNED, FROM_ZERO, IQ4, ANY };
struct NibbleTables {
    int flip, numbers[16] = {};                       // a stored code is the given one ^ flip
    alignas(32) uint8_t low[32] = {}, high[32] = {};  // of the bfloat16 numbers
    alignas(64) uint16_t bfloat16[32] = {};
    alignas(64) float floats[16] = {};
    constexpr NibbleTables(Nibbles nibbles) : flip(nibbles == SIGNED ? 8 : 0) {
        constexpr int OF_IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        for (int i = 0; i < 16; ++i)
            numbers[i] = nibbles == IQ4 ? OF_IQ4[i] : nibbles == FROM_ZERO ? i : (i ^ 8) - 8;
        for (int i = 0; i < 32; ++i) {
            bfloat16[i] = to_bfloat16(numbers[i & 15]);
            low[i] = (uint8_t)bfloat16[i], high[i] = (uint8_t)(bfloat16[i] >> 8);
        }
        for (int i = 0; i < 16; ++i) floats[i] = (float)numbers[i];
    }
};
template <Nibbles NIBBLES> constexpr NibbleTables NIBBLE_TABLES{NIBBLES};

// Whether the numbers of a line of bytes are looked up, to make pairs of P.
#ifdef __AVX512VBMI__
template <class P> constexpr bool LOOKS_UP_LINES = IN_PAIRS<P>;
#else
template <class P> constexpr bool LOOKS_UP_LINES = false;
#endif

// The formats say how a chunk stores codes:
//     BITS              of a code before it is packed           BYTES, INPUTS, STEPS    of a chunk
//     place(column, k)  where a code lies, counted in codes     put     writes a chunk from PANEL rows of codes
//     right             register v of the columns of a step, in the way that is fastest for so many ROWS
//     numbers           the same of one input, as whole numbers
//     code              the number of a single code
//     HAS_SMALL_GROUPS  whether small groups have a loop of their own

// Bytes from -127 to 127; with WHOLE, -128 too, which differs where lines are looked up.
template <class P, bool WHOLE> struct Int8 {
    using left = P;
    static constexpr int BITS = 8, BYTES = LINE, INPUTS = BYTES / PANEL, STEPS = INPUTS / PER_STEP<P>;
    static constexpr bool LOOKED_UP = LOOKS_UP_LINES<P> && !WHOLE;  // the byte is a sign and the index of a table
    static constexpr bool HAS_SMALL_GROUPS = !WHOLE;
    static constexpr int place(int column, int k) {
        if (LOOKED_UP) return column % 16 / 4 * 16 + column / 16 * 8 + column % 4 * 2 + k;  // see _mm512_unpacklo_epi8
        return IN_PAIRS<P> ? column * INPUTS + k : k * PANEL + column;
    }
    static inline void put(uint8_t* chunk, const uint8_t* rows, int64_t row) {
        for (int c = 0; c < PANEL; ++c)
            for (int k = 0; k < INPUTS; ++k) {
                const int number = (int8_t)rows[c * row + k];
                chunk[place(c, k)] = (uint8_t)(LOOKED_UP && number < 0 ? 128 - number : number);
            }
    }
    static inline float code(const uint8_t* chunk, int column, int k) {
        const int stored = chunk[place(column, k)];
        if (LOOKED_UP) return (float)(stored < 128 ? stored : 128 - stored);
        return (int8_t)stored;
    }
    static inline ri numbers(const uint8_t* chunk, int k, int v) {
        return widen_bytes(chunk + k * PANEL + v * PART_LANES);
    }
    template <int ROWS = MAX_TILE_ROWS> static inline rf right(const uint8_t* chunk, int step, int v) {
#ifdef __AVX512VBMI__
        if constexpr (LOOKED_UP) {
            const __m512i c = load<__m512i>(chunk), sign = _mm512_set1_epi8(-128);
            // From 64 to 127, the upper byte is 0x42 and the lower one twice the number. A table has the others: to look
            // up in 64 bytes takes one instruction, in 128 it takes three.
            const __m512i twice = _mm512_add_epi8(c, c), upper = _mm512_set1_epi8(0x42);
            const __mmask64 is_below = ~_mm512_movepi8_mask(twice);
            const __m512i low = _mm512_mask_permutexvar_epi8(twice, is_below, c, load<__m512i>(TABLES.low));
            const __m512i magnitude = _mm512_mask_permutexvar_epi8(upper, is_below, c, load<__m512i>(TABLES.high));
            const __m512i high = _mm512_ternarylogic_epi32(magnitude, c, sign, 0xF8);  // magnitude | (c & sign)
            return (rf)(v ? _mm512_unpackhi_epi8(low, high) : _mm512_unpacklo_epi8(low, high));
        }
#endif
#ifdef __AVX512BF16__
        if constexpr (IN_PAIRS<P>) {
            const uint8_t* half = chunk + v * BYTES / 2;
            const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(half)));
            const __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(half + 16)));
            return (rf)_mm512_cvtne2ps_pbh(second, first);
        }
#endif
        return widen_numbers<P>(Int8{}, chunk, step, v);
    }
};

#ifdef __AVX512VBMI__
// Numbers from -32 to 31 in six bits, for pairs of bfloat16. The codes of step 3 are in the upper two bits of the others'
// bytes; the instruction that looks up 64 bytes leaves them out.
template <class P> struct Int6 {
    using left = P;
    static constexpr int BITS = 8, BYTES = 3 * LINE, INPUTS = 8, STEPS = INPUTS / 2;
    static constexpr bool HAS_SMALL_GROUPS = true;
    static constexpr int place(int column, int k) { return Int8<P, false>::place(column, k % 2); }  // in a line
    static inline void put(uint8_t* chunk, const uint8_t* rows, int64_t row) {
        for (int c = 0; c < PANEL; ++c)
            for (int k = 0; k < 2; ++k) {
                uint8_t* at = chunk + place(c, k);
                const uint8_t *codes = rows + c * row + k, last = codes[6];
                for (int line = 0; line < 3; ++line)
                    at[line * LINE] = (uint8_t)((codes[2 * line] & 63) | (last >> 2 * line & 3) << 6);
            }
    }
    static inline float code(const uint8_t* chunk, int column, int k) {
        const uint8_t* at = chunk + place(column, k);
        const int upper = at[0] >> 6 | at[LINE] >> 6 << 2 | at[2 * LINE] >> 6 << 4;
        return (float)(((k / 2 < 3 ? at[k / 2 * LINE] & 63 : upper) ^ 32) - 32);
    }
    template <int ROWS = MAX_TILE_ROWS> static inline rf right(const uint8_t* chunk, int step, int v) {
        __m512i codes;
        if (step < 3) codes = load<__m512i>(chunk + step * LINE);
        else {
            const __m512i first = _mm512_srli_epi16(load<__m512i>(chunk), 6);
            const __m512i second = _mm512_srli_epi16(load<__m512i>(chunk + LINE), 4);
            const __m512i third = _mm512_srli_epi16(load<__m512i>(chunk + 2 * LINE), 2);
            const __m512i two = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), first, second, 0xCA);  // bits of `first`
            codes = _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), two, third, 0xCA);  // where the mask has 1
        }
        const __m512i low = _mm512_permutexvar_epi8(codes, load<__m512i>(TABLES.six_low));
        const __m512i high = _mm512_permutexvar_epi8(codes, load<__m512i>(TABLES.six_high));
        return (rf)(v ? _mm512_unpackhi_epi8(low, high) : _mm512_unpacklo_epi8(low, high));
    }
};
#else
template <class P> using Int6 = Int8<P, false>;
#endif

// Numbers of four bits, by one of the tables. A 32-bit lane holds eight numbers of two columns, 16 apart. But with AVX2 a
// byte holds two inputs of one column, and the lower or upper halves of 32 bytes are the columns of one step. For a
// single row, two tables of 16 bytes make pairs of bfloat16 numbers of them. More rows use as much time for
// multiplying as for converting, which then needs as few registers as possible.
//
// Zen 3 shuffles and shifts in two of its four pipes, and one of these two is needed for half of the multiply-adds: a
// single row waits for it. Whole numbers are multiplied in other pipes. So there products take the place of shifts.
template <class P, Nibbles NIBBLES> struct Int4 {
    using left = P;
    static constexpr int BITS = 4, BYTES = LINE, INPUTS = 2 * BYTES / PANEL, STEPS = INPUTS / PER_STEP<P>;
    static constexpr bool HAS_SMALL_GROUPS = true;
    const NibbleTables& tables;  // those of NIBBLES
#ifdef __AVX512F__
    const rf looked_up = IN_PAIRS<P> ? load<rf>(tables.bfloat16) : load<rf>(tables.floats);
#endif
#if defined(__AVX2__) && !defined(__AVX512F__)
    static constexpr bool LOOKED_UP = true;
#else
    static constexpr bool LOOKED_UP = false;
#endif
    static constexpr int place(int column, int k) {
        if (LOOKED_UP) {
            const int byte = column % 8 / 4 * 16 + column / 16 * 8 + column % 4 * 2 + column / 8 % 2;
            return 2 * (k / 2 * PANEL + byte) + k % 2;
        }
        const int half = IN_PAIRS<P> ? k % 2 * 4 + k / 2 * 2 : k * 2;
        return column % LANES * 8 + half + column / LANES;
    }
    inline void put(uint8_t* chunk, const uint8_t* rows, int64_t row) const {
        std::memset(chunk, 0, BYTES);
        for (int c = 0; c < PANEL; ++c)
            for (int k = 0; k < INPUTS; ++k) {
                const int number = (rows[c * row + k / 2] >> k % 2 * 4 & 15) ^ tables.flip, at = place(c, k);
                chunk[at / 2] = (uint8_t)(chunk[at / 2] | number << at % 2 * 4);
            }
    }
    inline float code(const uint8_t* chunk, int column, int k) const {
        const int at = place(column, k);
        return tables.floats[chunk[at / 2] >> at % 2 * 4 & 15];
    }
    static inline ri numbers(const uint8_t* chunk, int k, int v) {
        return numbers_of(load<ri>(chunk + v % PARTS * REGISTER) << (28 - 4 * (2 * k + v / PARTS)));
    }
    // Returns the numbers of the codes in the uppermost four bits of each lane.
    static inline ri numbers_of(ri lanes) {
        typedef uint32_t ru __attribute__((vector_size(REGISTER)));
        if (NIBBLES == SIGNED) return lanes >> 28;
        ri numbers = (ri)((ru)lanes >> 28);
        const int* table = NIBBLE_TABLES<IQ4>.numbers;
        for (int lane = 0; NIBBLES == IQ4 && lane < PART_LANES; ++lane) numbers[lane] = table[numbers[lane]];
        return numbers;
    }
#if defined(__AVX2__) && !defined(__AVX512F__)
    // Returns words >> 4.
    static inline __m256i shift_words(__m256i words) {
#ifdef __znver3__
        return _mm256_mulhi_epu16(words, _mm256_set1_epi16(1 << 12));
#else
        return _mm256_srli_epi16(words, 4);
#endif
    }
    // Returns numbers << 16.
    static inline ri shift_numbers(ri numbers) {
#ifdef __znver3__
        ri product;  // Compilers make a shift of the intrinsic function.
        asm("vpmulld %2, %1, %0" : "=x"(product) : "x"(numbers), "x"(ri{} + (1 << 16)));
        return product;
#else
        return numbers << 16;
#endif
    }
#endif
    template <int ROWS = MAX_TILE_ROWS> inline rf right(const uint8_t* chunk, int step, int v) const {
#ifdef __AVX512F__
        // The instructions look at the lowest bits of an index only.
        const int shift = 4 * (2 * step + v);
#ifdef __AVX512BF16__
        if constexpr (IN_PAIRS<P>) {
            typedef uint16_t words __attribute__((vector_size(BYTES)));
            const words index = load<words>(chunk) >> (uint16_t)shift;
            return (rf)_mm512_permutexvar_epi16((__m512i)index, (__m512i)looked_up);
        }
#endif
        const __m512i index = (__m512i)(load<ri>(chunk) >> shift);
        return (rf)_mm512_permutexvar_ps(index, (__m512)looked_up);
#elif defined(__AVX2__)
        const __m256i codes = load<__m256i>(chunk + step / 2 * PANEL);
        if (ROWS > 1 && NIBBLES != IQ4) {
            const ri two = (ri)(v / 2 ? _mm256_unpackhi_epi16(codes, codes) : _mm256_unpacklo_epi16(codes, codes));
            return __builtin_convertvector(numbers_of(two << (12 - 8 * (v % 2) - 4 * (step % 2))), rf);
        }
        const __m256i numbers = _mm256_and_si256(step % 2 ? shift_words(codes) : codes, _mm256_set1_epi8(15));
        const __m256i low = _mm256_shuffle_epi8(load<__m256i>(NIBBLE_TABLES<NIBBLES>.low), numbers);
        const __m256i high = _mm256_shuffle_epi8(load<__m256i>(NIBBLE_TABLES<NIBBLES>.high), numbers);
        const ri two = (ri)(v / 2 ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high));
        return (rf)(v % 2 ? two & ~0xffff : shift_numbers(two));
#else
        return widen_numbers<P>(*this, chunk, step, v);
#endif
    }
};

// Returns the format of four bits for a table.
template <class P, Nibbles NIBBLES> inline auto int4() {
    return Int4<P, REGISTER == LINE ? ANY : NIBBLES>{NIBBLE_TABLES<NIBBLES>};
}

// Returns a register of float16 numbers as float32.
ALWAYS_INLINE rf widen_halves(const uint16_t* at) {
#if defined(__AVX512F__)
    return (rf)_mm512_cvtph_ps(load<__m256i>(at));
#elif defined(__F16C__)
    return (rf)_mm256_cvtph_ps(load<__m128i>(at));
#else
    typedef uint16_t halves __attribute__((vector_size(REGISTER / 2)));
    const ri bits = __builtin_convertvector(load<halves>(at), ri), magnitude = bits & 0x7fff;
    const rf value = (rf)(magnitude << 13) * 0x1p112f;  // exact for the smallest numbers, too
    return (rf)((ri)value | (bits & 0x8000) << 16 | ((magnitude >= 0x7c00) & 0x7f800000));
#endif
}

// A number for each group and column: floats [panels][groups / shared][PANEL], each of so many neighbouring groups. If
// there are factors [panels][groups][PANEL], it is the float times the factor. `values` may be null: then all are 0.
struct Scales {
    const void* values;
    const int8_t* factors;
    int64_t shared;
    bool are_halves;
    // Returns the numbers of a register that begins with `column`. `row` counts the groups of all panels.
    ALWAYS_INLINE rf at(int64_t row, int64_t column) const {
        const uint32_t of_value = (uint32_t)row / (uint32_t)shared;  // a quotient of 64 bits takes longer
        const int64_t place = of_value * (int64_t)PANEL + column;
        const rf value = are_halves ? widen_halves((const uint16_t*)values + place)
                                    : load<rf>((const float*)values + place);
        if (!factors) return value;
        return value * __builtin_convertvector(widen_bytes(factors + row * PANEL + column), rf);
    }
    // Reads the numbers of all columns.
    ALWAYS_INLINE void read(int64_t row, rf* to) const {
        const int64_t place = (uint32_t)row / (uint32_t)shared * (int64_t)PANEL;
        if (are_halves)
#pragma GCC unroll 24
            for (int v = 0; v < REGISTERS; ++v) to[v] = widen_halves((const uint16_t*)values + place + v * PART_LANES);
        else
#pragma GCC unroll 24
            for (int v = 0; v < REGISTERS; ++v) to[v] = load<rf>((const float*)values + place + v * PART_LANES);
        if (factors)
#pragma GCC unroll 24
            for (int v = 0; v < REGISTERS; ++v)
                to[v] *= __builtin_convertvector(widen_bytes(factors + row * PANEL + v * PART_LANES), rf);
    }
    // Moves on by so many groups of a panel.
    void skip(int64_t rows) {
        if (values) values = (const uint8_t*)values + rows / shared * PANEL * (are_halves ? 2 : 4);
        if (factors) factors += rows * PANEL;
    }
};

// Describes a packed matrix. `zeros` may be null. `group` is the number of inputs that share a scale. The rows of a
// product with it are `row` elements apart.
struct Quantized {
    const uint8_t* codes;
    Scales scales, minima;
    const float* zeros;
    int64_t in, out, group, row;
    int64_t panels() const { return (out + PANEL - 1) / PANEL; }
    int64_t groups() const { return (in + group - 1) / group; }
    bool needs_sums() const { return zeros || minima.values; }
    template <class Q> int64_t chunks() const { return (in + Q::INPUTS - 1) / Q::INPUTS; }
    // Moves on by so many matrices of this size.
    template <class Q> void skip(int64_t count) {
        const int64_t rows = count * panels() * groups();
        codes += count * panels() * chunks<Q>() * Q::BYTES;
        scales.skip(rows);
        minima.skip(rows);
        if (zeros) zeros += rows * PANEL;
    }
};

constexpr int64_t AHEAD = 256 * LINE;  // bytes: how far ahead of its reads a product prefetches

// Where a tile prefetches while it reads a chunk: from `at`, which moves on by `chunk` bytes each time.
struct Ahead {
    const uint8_t* at;
    int64_t chunk;
};

// Computes c[ROWS][16 VECTORS] = (or, with `add`, +=) a x the codes of some columns: all of one or two panels that are
// `panel` bytes apart, or 16 of one panel, from register FROM on. As in `tile`, every sum stays in a register and adds
// its products in the order of the inputs. With KEEP, it writes the widened columns to `kept`. `c` and `kept` begin with
// the panel's first column.
template <int ROWS, int VECTORS, int FROM, bool KEEP, class Q>
inline void code_tile(Q q, const typename Q::left::left* a, const uint8_t* b, int64_t panel, int64_t chunks, float* c,
                      bool add, Ahead ahead, float* __restrict kept) {
    using P = Wide<typename Q::left>;
    constexpr int WIDTH = VECTORS * PARTS, SUMS = ROWS * WIDTH, LDC = std::max(VECTORS * LANES, PANEL);
    c += FROM * PART_LANES;
    rf acc[SUMS];
#pragma GCC unroll 24
    for (int j = 0; j < SUMS; ++j) acc[j] = add ? load<rf>(c + j / WIDTH * LDC + j % WIDTH * PART_LANES) : rf{};
    for (int64_t i = 0; i < chunks; ++i) {
        for (int p = 0; FROM == 0 && p < VECTORS; p += 2)
            for (int byte = 0; byte < Q::BYTES; byte += LINE)
                __builtin_prefetch(ahead.at + i * ahead.chunk + p / 2 * panel + byte, 0, 2);
#pragma GCC unroll 24
        for (int step = 0; step < Q::STEPS; ++step) {
            rf right[WIDTH];
#pragma GCC unroll 24
            for (int v = 0; v < WIDTH; ++v) {
                const int at = FROM + v;
                right[v] = q.template right<ROWS>(b + i * Q::BYTES + at / REGISTERS * panel, step, at % REGISTERS);
                if (KEEP) store(kept + (i * Q::STEPS + step) * PANEL + at * PART_LANES, right[v]);
            }
#pragma GCC unroll 24
            for (int j = 0; j < SUMS; ++j)
                acc[j] = P::fma(acc[j], a[j / WIDTH * LEFT_ROW + i * Q::STEPS + step], right[j % WIDTH]);
        }
    }
#pragma GCC unroll 24
    for (int j = 0; j < SUMS; ++j) store(c + j / WIDTH * LDC + j % WIDTH * PART_LANES, acc[j]);
}

// Says how many rows a tile of codes has, and how many the first of several pieces has. Where tiles are narrow, codes
// leave registers for the sums of four rows, and two rows need no narrow tile.
constexpr int MOST_CODE_ROWS = HAS_NARROW ? MAX_TILE_ROWS + 1 : MAX_TILE_ROWS;
inline int64_t first_code_rows(int64_t rows) {
    const int64_t rest = rows % MAX_TILE_ROWS;
    if (HAS_NARROW) return rest <= 1 ? MAX_TILE_ROWS + rest : rest;
    return rows / ((rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS);
}

// Calls the `code_tile` for `rows` <= MOST_CODE_ROWS rows and 1 or, for few rows, 2 panels.
template <bool KEEP, int ROWS = MOST_CODE_ROWS, class Q>
inline void code_tile_of(Q q, int64_t rows, int64_t panels, const typename Q::left::left* a, const uint8_t* b,
                         int64_t panel, int64_t chunks, float* c, bool add, Ahead ahead, float* kept = nullptr) {
    if constexpr (ROWS >= (KEEP ? LEAST_PIECE_ROWS : 1)) {
        if (rows != ROWS)
            return code_tile_of<KEEP, ROWS - 1>(q, rows, panels, a, b, panel, chunks, c, add, ahead, kept);
        if constexpr (ROWS <= FEW_TILE_ROWS && !KEEP)
            if (panels == 2) return code_tile<ROWS, 4, 0, KEEP>(q, a, b, panel, chunks, c, add, ahead, kept);
        if constexpr (HAS_NARROW && ROWS >= MAX_TILE_ROWS) {
            code_tile<ROWS, 1, 0, KEEP>(q, a, b, panel, chunks, c, add, ahead, kept);
            code_tile<ROWS, 1, PARTS, KEEP>(q, a, b, panel, chunks, c, add, ahead, kept);
        } else code_tile<ROWS, 2, 0, KEEP>(q, a, b, panel, chunks, c, add, ahead, kept);
    }
}

#ifdef WITH_AMX
// Computes c[rows][PANEL] = (or, with `add`, +=) a x the codes of a panel, by AMX. left(i) returns the address of a's
// units from i on. The first AMX_BLOCK_ROWS rows widen the columns, just before they multiply them. If there are more
// rows, all widened columns are kept for them, and there are at most DEPTH units. Else FEW_KEPT units are kept: those
// that are multiplied, and those that are widened meanwhile.
template <class Q, class Left>
inline void amx_code_tiles(Q q, int64_t rows, Left left, const uint8_t* b, int64_t chunks, float* c, bool add,
                           const uint8_t* ahead) {
    alignas(64) uint32_t kept[DEPTH * PANEL];
    constexpr int64_t FEW_KEPT = 4 * AMX_UNITS;  // so few stay in the L1 cache
    const int64_t num_kept = rows <= AMX_BLOCK_ROWS ? FEW_KEPT : DEPTH, k = chunks * Q::STEPS;
    const auto right = [&](int64_t i) { return kept + i % num_kept * PANEL; };
    const auto widen = [&](int64_t unit, int64_t end) {
        uint32_t* to = kept + unit % num_kept * PANEL;
        for (int64_t i = unit / Q::STEPS; i * Q::STEPS < end; ++i) {
            for (int byte = 0; byte < Q::BYTES; byte += LINE) __builtin_prefetch(ahead + i * Q::BYTES + byte, 0, 2);
#pragma GCC unroll 24
            for (int step = 0; step < Q::STEPS; ++step)
                for (int v = 0; v < REGISTERS; ++v, to += LANES) store(to, q.right(b + i * Q::BYTES, step, v));
        }
    };
    amx_block_of(rows, 2, left, LEFT_ROW, right, PANEL, LANES, k, c, PANEL, add, widen);
    for (int64_t r = AMX_BLOCK_ROWS; r < rows; r += AMX_BLOCK_ROWS) {
        const auto below = [=](int64_t i) { return left(i) + r * LEFT_ROW; };
        amx_block_of(rows - r, 2, below, LEFT_ROW, right, PANEL, LANES, k, c + r * PANEL, PANEL, add,
                     [](int64_t, int64_t) {});
    }
}
#endif

// Does the same for any number of rows, and at most DEPTH steps. Too many rows for one tile are cut into pieces: the
// first piece keeps the widened columns for the others, and the pieces share the prefetching between them.
template <class Q>
inline void code_tiles(Q q, int64_t rows, int64_t panels, const typename Q::left::left* a, const uint8_t* b,
                       int64_t panel, int64_t chunks, float* c, bool add, const uint8_t* ahead) {
#ifdef WITH_AMX
    if constexpr (IN_PAIRS<typename Q::left>)
        if (uses_amx<typename Q::left>())
            return amx_code_tiles(q, rows, [=](int64_t i) { return a + i; }, b, chunks, c, add, ahead);
#endif
    if (rows <= MOST_CODE_ROWS)
        return code_tile_of<false>(q, rows, panels, a, b, panel, chunks, c, add, {ahead, Q::BYTES});
    alignas(64) float kept[DEPTH * PANEL];
    const int64_t widened = first_code_rows(rows), others = rows - widened, steps = chunks * Q::STEPS;
    const int64_t pieces = 1 + (others + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    const int64_t ahead_row = (Q::BYTES / 4 / Q::STEPS + pieces - 1) / pieces;
    code_tile_of<true>(q, widened, 1, a, b, panel, chunks, c, add, {ahead, 4 * Q::STEPS * ahead_row}, kept);
    Columns wide = {(const uint32_t*)kept, PANEL, LANES, (const uint32_t*)ahead, ahead_row};
    row_pieces(others, MAX_TILE_ROWS, [&](int64_t first, int64_t count) {
        first += widened;
        wide.ahead += steps * ahead_row;
        tile_of<Wide<typename Q::left>, OTHER>(count, 2, a + first * LEFT_ROW, wide, steps, c + first * PANEL, PANEL, add);
    });
}

// Adds a group's sums, times the scales, to `totals`; both are [rows][width].
inline void add_group(const Quantized& m, int64_t group, int64_t panel, int64_t panels, int64_t rows, const float* sums,
                      const float* input_sums, float* totals) {
    const int64_t groups = m.groups(), width = panels * PANEL;
    for (int64_t v = 0; v < width; v += PART_LANES) {
        const int64_t row = (panel + v / PANEL) * groups + group, column = v % PANEL;
        const rf scale = m.scales.at(row, column), zero = m.zeros ? load<rf>(m.zeros + row * PANEL + column) : rf{};
        const rf minimum = m.minima.values ? m.minima.at(row, column) : rf{};
        for (int64_t r = 0; r < rows; ++r) {
            float* to = totals + r * width + v;
            rf sum = load<rf>(sums + r * width + v);
            if (m.zeros) sum -= zero * input_sums[group * rows + r];
            rf total = (group ? load<rf>(to) : rf{}) + sum * scale;
            if (m.minima.values) total -= minimum * input_sums[group * rows + r];
            store(to, total);
        }
    }
}

// A product with small groups multiplies a run of groups at a time, whose widened columns fit the L1 cache. Where there
// are registers enough, the totals of its rows stay in them, beside the sums of a group: so a tile has half of the rows
// that it would have without. With AVX2 the totals stay in the L1 cache, and a tile that widens has WIDENED_ROWS.
constexpr bool TOTALS_STAY = !HAS_NARROW;
constexpr int MOST_GROUP_ROWS = TOTALS_STAY ? FEW_TILE_ROWS : MAX_TILE_ROWS;
constexpr int WIDENED_ROWS = TOTALS_STAY ? MOST_GROUP_ROWS : 2;
constexpr int MOST_TOGETHER = 2, MOST_SMALL = 64;  // groups, inputs of a group
constexpr int64_t RUN = DEPTH / 2;                 // steps

// Says whether the groups of a matrix are multiplied so.
template <class Q> inline bool has_small_groups(const Quantized& m) {
    const int64_t steps = m.group / PER_STEP<typename Q::left>;
    return Q::HAS_SMALL_GROUPS && HAS_GROUP_LOOP<typename Q::left> && m.group < m.in && m.group <= MOST_SMALL &&
           !m.zeros && RUN % (MOST_TOGETHER * steps) == 0 && !uses_amx<typename Q::left>();
}

// The columns of a run, widened, and the scales and minima of its groups as float32.
struct Kept {
    alignas(64) float columns[RUN * PANEL];
    alignas(64) float scales[RUN * PANEL];
    alignas(64) float minima[RUN * PANEL];
};

// Where rows are cut into pieces, the first piece has so many rows, and any other LEAST_GROUP_ROWS at least.
inline int64_t first_group_rows(int64_t rows) {
    if (!TOTALS_STAY) return std::min<int64_t>(rows, WIDENED_ROWS);
    return rows / ((rows + MOST_GROUP_ROWS - 1) / MOST_GROUP_ROWS);
}
constexpr int LEAST_GROUP_ROWS = TOTALS_STAY ? (MOST_GROUP_ROWS + 1) / 2 : 1;

// A line of a run: PANEL numbers, in registers or in memory.
struct Line {
    rf values[REGISTERS];
    ALWAYS_INLINE rf operator[](int v) const { return values[v]; }
};
struct KeptLine {
    const float* values;
    ALWAYS_INLINE rf operator[](int v) const { return load<rf>(values + v * PART_LANES); }
};

// Reads a run of a matrix, line by line: `codes` are those of its chunks, and `row` counts the groups of all panels up to
// its first. With KEEP, it writes to `kept` what it has read.
template <class Q, bool KEEP> struct ReadRun {
    static constexpr int STEPS = Q::STEPS, MOST_ROWS = WIDENED_ROWS, TOGETHER = TOTALS_STAY ? MOST_TOGETHER : 1;
    static constexpr int LEAST_ROWS = !KEEP ? 1 : TOTALS_STAY ? LEAST_GROUP_ROWS : WIDENED_ROWS;
    const Q q;
    const Quantized& m;
    const uint8_t* codes;
    int64_t row;
    Kept& kept;
    ALWAYS_INLINE Line columns(int64_t chunk, int step) const {
        const uint8_t* at = codes + chunk * Q::BYTES;
        if (step == 0)
            for (int byte = 0; byte < Q::BYTES; byte += LINE) __builtin_prefetch(at + AHEAD + byte, 0, 2);
        Line line;
#pragma GCC unroll 24
        for (int v = 0; v < REGISTERS; ++v) line.values[v] = q.template right<1>(at, step, v);
        return keep(kept.columns, chunk * STEPS + step, line);
    }
    ALWAYS_INLINE Line scales(int64_t g) const { return keep(kept.scales, g, read(m.scales, row + g)); }
    ALWAYS_INLINE Line minima(int64_t g) const { return keep(kept.minima, g, read(m.minima, row + g)); }
    static ALWAYS_INLINE Line read(const Scales& from, int64_t row) {
        Line line;
        from.read(row, line.values);
        return line;
    }
    static ALWAYS_INLINE Line keep(float* to, int64_t place, Line line) {
        if (KEEP)
#pragma GCC unroll 24
            for (int v = 0; v < REGISTERS; ++v) store(to + place * PANEL + v * PART_LANES, line.values[v]);
        return line;
    }
};

// Reads what was kept.
struct ReadKept {
    static constexpr int STEPS = 1, MOST_ROWS = MOST_GROUP_ROWS, LEAST_ROWS = LEAST_GROUP_ROWS;
    static constexpr int TOGETHER = MOST_TOGETHER;
    const Kept& kept;
    ALWAYS_INLINE KeptLine columns(int64_t chunk, int) const { return {kept.columns + chunk * PANEL}; }
    ALWAYS_INLINE KeptLine scales(int64_t g) const { return {kept.scales + g * PANEL}; }
    ALWAYS_INLINE KeptLine minima(int64_t g) const { return {kept.minima + g * PANEL}; }
};

// Adds the products of ROWS rows and the groups from `begin` to `end` of a run, of `chunks` chunks each, to totals
// [ROWS][PANEL], in the order of `add_group`. input_sums [groups][rows] begins with the first of these rows; it is null
// if the matrix has no minima. TOGETHER groups have their sums at the same time: where rows are few, that hides the
// latency of the multiply-add. With AVX2 widening one row hides it already, and needs the registers. `run` is a copy,
// because compilers read its fields anew after each store otherwise.
template <class P, int ROWS, int TOGETHER, class Run>
ALWAYS_INLINE void add_groups(const typename P::left* a, int64_t begin, int64_t end, int64_t chunks, Run run,
                              const float* input_sums, int64_t rows, float* totals) {
    constexpr int SUMS = ROWS * REGISTERS;
    rf total[SUMS];
    if (TOTALS_STAY)
#pragma GCC unroll 24
        for (int j = 0; j < SUMS; ++j) total[j] = load<rf>(totals + j * PART_LANES);
    for (int64_t g = begin; g < end; g += TOGETHER) {
        rf acc[TOGETHER * SUMS];
#pragma GCC unroll 24
        for (int j = 0; j < TOGETHER * SUMS; ++j) acc[j] = rf{};
        for (int64_t i = 0; i < chunks; ++i)
#pragma GCC unroll 24
            for (int n = 0; n < TOGETHER; ++n)
#pragma GCC unroll 24
                for (int step = 0; step < Run::STEPS; ++step) {
                    const int64_t chunk = (g + n) * chunks + i;
                    const auto columns = run.columns(chunk, step);
#pragma GCC unroll 24
                    for (int v = 0; v < REGISTERS; ++v) {
                        rf column = columns[v];
                        if (HAS_NARROW) hold(column);
#pragma GCC unroll 24
                        for (int r = 0; r < ROWS; ++r) {
                            rf& sum = acc[n * SUMS + r * REGISTERS + v];
                            sum = P::fma(sum, a[r * LEFT_ROW + chunk * Run::STEPS + step], column);
                        }
                    }
                }
        if (!TOTALS_STAY) asm("" : : : "memory");  // else compilers keep copies of the totals on the stack
#pragma GCC unroll 24
        for (int n = 0; n < TOGETHER; ++n) {
            const auto scales = run.scales(g + n);
            const auto minima = input_sums ? run.minima(g + n) : scales;
#pragma GCC unroll 24
            for (int v = 0; v < REGISTERS; ++v) {
                const rf scale = scales[v], minimum = minima[v];
#pragma GCC unroll 24
                for (int r = 0; r < ROWS; ++r) {
                    const int j = r * REGISTERS + v;
                    if (!TOTALS_STAY) total[j] = load<rf>(totals + j * PART_LANES);
                    total[j] += acc[n * SUMS + j] * scale;
                    if (input_sums) total[j] -= minimum * input_sums[(g + n) * rows + r];
                    if (!TOTALS_STAY) store(totals + j * PART_LANES, total[j]);
                }
            }
        }
    }
    if (TOTALS_STAY)
#pragma GCC unroll 24
        for (int j = 0; j < SUMS; ++j) store(totals + j * PART_LANES, total[j]);
}

// Calls `add_groups` for a piece of the rows, and `count` groups.
template <class P, class Run, int ROWS = Run::MOST_ROWS>
inline void add_groups_of(int64_t piece, const typename P::left* a, int64_t count, int64_t chunks, Run run,
                          const float* input_sums, int64_t rows, float* totals) {
    if constexpr (ROWS >= Run::LEAST_ROWS) {
        if (piece != ROWS)
            return add_groups_of<P, Run, ROWS - 1>(piece, a, count, chunks, run, input_sums, rows, totals);
        constexpr int TOGETHER = ROWS == 1 ? Run::TOGETHER : TOTALS_STAY && ROWS <= 3 ? 2 : 1;
        const int64_t most = count / TOGETHER * TOGETHER;
        add_groups<P, ROWS, TOGETHER>(a, 0, most, chunks, run, input_sums, rows, totals);
        if (most < count) add_groups<P, ROWS, 1>(a, most, count, chunks, run, input_sums, rows, totals);
    }
}

// Does the same for a run that is kept. It is not inlined: GCC would leave sums of two rows in memory with AVX2.
template <class P, class Q>
__attribute__((noinline)) void keep_groups(int64_t piece, const typename P::left* a, int64_t count, int64_t chunks,
                                           ReadRun<Q, true> run, const float* input_sums, int64_t rows, float* totals) {
    add_groups_of<P>(piece, a, count, chunks, run, input_sums, rows, totals);
}

// Computes totals [rows][PANEL] = x times a panel whose groups are small. The first piece of the rows reads a run of the
// matrix, and keeps what it has widened for the others.
template <class Q>
inline void multiply_small_groups(Q q, const typename Q::left::left* x, int64_t rows, const Quantized& m, int64_t panel,
                                  const float* input_sums, float* totals) {
    using P = typename Q::left;
    Kept kept;
    const int64_t chunks = m.chunks<Q>(), groups = m.groups(), group = m.group / Q::INPUTS;
    std::fill_n(totals, rows * PANEL, 0.0f);
    for (int64_t g = 0, count; g < groups; g += count) {
        const int64_t first = g * group, step = first * Q::STEPS;
        count = std::min((RUN - step % RUN) / Q::STEPS, chunks - first) / group;  // whole groups of this run
        const int64_t each = count ? group : chunks - first;                      // or a part of one, the last
        count = std::max<int64_t>(count, 1);
        const uint8_t* codes = m.codes + (panel * chunks + first) * Q::BYTES;
        const auto* a = x + step / DEPTH * rows * LEFT_ROW + step % DEPTH;
        const float* sums = m.minima.values ? input_sums + g * rows : nullptr;
        const int64_t widened = first_group_rows(rows);
        const auto multiply = [&](int64_t r, int64_t piece, auto run, int64_t chunks_each) {
            add_groups_of<P>(piece, a + r * LEFT_ROW, count, chunks_each, run, sums ? sums + r : nullptr, rows,
                             totals + r * PANEL);
        };
        const ReadRun<Q, true> keep{q, m, codes, panel * groups + g, kept};
        if (widened < rows) keep_groups<P>(widened, a, count, each, keep, sums, rows, totals);
        else multiply(0, rows, ReadRun<Q, false>{q, m, codes, panel * groups + g, kept}, each);
        row_pieces(rows - widened, MOST_GROUP_ROWS, [&](int64_t r, int64_t piece) {
            multiply(widened + r, piece, ReadKept{kept}, each * Q::STEPS);
        });
    }
}

// Computes y[rows][columns] = x times `panels` panels from `panel` on, + bias unless that is null. x is in the blocks
// that put_left makes. input_sums [groups][rows] are the sums of x, if the matrix has zeros or minima.
template <class Q>
inline void multiply_codes(Q q, const typename Q::left::left* x, const float* input_sums, int64_t rows,
                           const Quantized& m, int64_t panel, int64_t panels, const typename Q::left::element* bias,
                           typename Q::left::element* y, int64_t columns) {
    using P = typename Q::left;
    constexpr int64_t DEEP = DEPTH / Q::STEPS;  // chunks of a block
    const int64_t part = (uses_amx<P>() ? AMX_SUMMED : SUMMED) / Q::STEPS;  // chunks summed at a time
    alignas(64) float sums[MOST_ROWS * PANEL], several[MOST_ROWS * PANEL];
    float* totals = m.group < m.in ? several : sums;  // a single group's sums become the totals where they are
    const int64_t chunks = m.chunks<Q>(), width = panels * PANEL, group = std::max<int64_t>(m.group / Q::INPUTS, 1);
    const uint8_t* first = m.codes + panel * chunks * Q::BYTES;
    int64_t i = 0;
    if constexpr (Q::HAS_SMALL_GROUPS && HAS_GROUP_LOOP<P>)
        if (has_small_groups<Q>(m)) {
            multiply_small_groups(q, x, rows, m, panel, input_sums, totals);
            i = chunks;
        }
#ifdef WITH_AMX
    if constexpr (IN_PAIRS<P>)
        if (uses_amx<P>() && rows <= AMX_BLOCK_ROWS && m.group >= m.in) {
            amx_code_tiles(q, rows, left_units(x, rows), first, chunks, sums, false, first + AHEAD);
            add_group(m, 0, panel, 1, rows, sums, input_sums, totals);
            i = chunks;
        }
#endif
    for (int64_t end; i < chunks; i = end) {
        const int64_t g = m.group < m.in ? i / group : 0, group_end = m.group < m.in ? (g + 1) * group : chunks;
        const bool add = i > g * group;
        end = std::min({chunks, group_end, (i / part + 1) * part});
        const auto* left = x + i / DEEP * rows * LEFT_ROW + i % DEEP * Q::STEPS;
        // Beyond the end of these panels come the first chunks of the next ones.
        const int64_t bytes = chunks * Q::BYTES, next = i * Q::BYTES + AHEAD;
        const uint8_t *at = first + i * Q::BYTES, *fetched = first + next + (next < bytes ? 0 : (panels - 1) * bytes);
        code_tiles(q, rows, panels, left, at, bytes, end - i, sums, add, fetched);
        if (end == group_end || end == chunks) add_group(m, g, panel, panels, rows, sums, input_sums, totals);
    }
    float offsets[2 * PANEL] = {};
    if (bias) std::transform(bias, bias + columns, offsets, P::to_float);
    const bool is_past = goes_past_caches(y, m.row, columns, rows);
    for (int64_t r = 0; r < rows; ++r) {
        float* of_row = totals + r * width;
        for (int64_t v = 0; v < width; v += LANES) store(of_row + v, load<vf>(of_row + v) + load<vf>(offsets + v));
        write_row<P>(of_row, y + r * m.row, columns, is_past);
    }
}

// Sums each row of x [rows][in] within each group, to sums [groups][rows].
template <class P>
inline void sum_groups(const typename P::element* x, int64_t rows, const Quantized& m, float* sums) {
    for (int64_t r = 0; r < rows; ++r, x += m.in)
        for (int64_t start = 0; start < m.in; start += m.group) {
            const int64_t end = std::min(start + m.group, m.in);
            typename P::element rest[LANES] = {};
            vf total{};
            for (int64_t i = start; i < end; i += LANES) {
                if (i + LANES > end) std::fill(std::copy(x + i, x + end, rest), rest + LANES, 0);
                total += P::widen(i + LANES > end ? rest : x + i);
            }
            sums[start / m.group * rows + r] = sum(total);
        }
}

// One thread computes the columns of some panels of y[rows][out] = x[rows][in] W^T + bias. See multiply_panels.
template <class Q>
void multiply_code_panels(Q q, const typename Q::left::element* x, const Quantized& m,
                          const typename Q::left::element* bias, typename Q::left::element* y, int64_t rows,
                          Span panels) {
    using P = typename Q::left;
    static thread_local std::vector<typename P::left> left;
    static thread_local std::vector<float> input_sums;
    const int64_t blocks = (m.chunks<Q>() * Q::STEPS + DEPTH - 1) / DEPTH;
    // Two panels at a time hide the latency of the multiply-add. For a single row the sums of one panel hide it, too, if
    // they are in 2 registers for each step of a chunk. Then the row waits for memory, and one stream is read faster.
    // Where looking up numbers takes registers, the sums of two panels would not stay in theirs.
    const bool is_stream = rows == 1 && (2 * Q::STEPS <= REGISTERS || HAS_NARROW);
    const int64_t together = rows <= FEW_TILE_ROWS && !is_stream && !uses_amx<P>() && !has_small_groups<Q>(m) ? 2 : 1;
    const AmxRegisters registers(rows, uses_amx<P>());
    row_pieces(rows, rows_together<typename Q::left>(m.chunks<Q>() * Q::STEPS), [&](int64_t first, int64_t count) {
        auto* rows_left = cache_lines(left, (blocks * count + AMX_ROWS) * LEFT_ROW);
        if (panels.is_first) {
            put_left<P>(x + first * m.in, count, m.in, rows_left);
            input_sums.resize(std::max<size_t>(input_sums.size(), count * m.groups()));
            if (m.needs_sums()) sum_groups<P>(x + first * m.in, count, m, input_sums.data());
        }
        for (int64_t p = panels.begin; p < panels.end; p += together) {
            const int64_t n = std::min(together, panels.end - p), column = p * PANEL;
            multiply_codes(q, rows_left, input_sums.data(), count, m, p, n, bias ? bias + column : nullptr,
                              y + first * m.row + column, std::min(n * PANEL, m.out - column));
        }
    });
}

// Computes y[rows][out] = x[rows][in] W^T + bias; rows of y are m.row elements apart. Each thread owns some panels of W.
// See `linear` for the rows.
template <class Q>
void linear_codes(Q q, const void* x, const Quantized& m, const void* bias, void* y, int64_t rows) {
    using E = typename Q::left::element;
    const int64_t panels = m.panels();
    row_pieces(rows, rows_together<typename Q::left>(m.chunks<Q>() * Q::STEPS), [&](int64_t first, int64_t count) {
        const int64_t piece = count * m.in * m.out > LEAST_SHARED ? (quarter(panels) + 1) / 2 * 2 : panels;
        share(panels, piece, [&](Span some) {
            multiply_code_panels(q, (const E*)x + first * m.in, m, (const E*)bias, (E*)y + first * m.row, count, some);
        });
    });
}

// Computes y[r][out] = x[r][in] W_e^T for every expert e and its rows r from offsets[e] to offsets[e + 1]. `m`
// describes the first expert's matrix, and the others follow it. See grouped_linear.
template <class Q>
void grouped_codes(Q q, const void* x, const Quantized& m, const int32_t* offsets, void* y, int64_t experts) {
    using E = typename Q::left::element;
    const int64_t panels = m.panels();
    std::vector<int32_t> touched;
    for (int32_t e = 0; e < experts; ++e)
        if (offsets[e] < offsets[e + 1]) touched.push_back(e);
    const int64_t items = (int64_t)touched.size() * panels;
    share(items, quarter(items), [&](Span some) {
        for (int64_t i = some.begin, n; i < some.end; i += n) {
            const int64_t expert = touched[i / panels], p = i % panels, first = offsets[expert];
            n = std::min(panels - p, some.end - i);
            Quantized matrix = m;
            matrix.skip<Q>(expert);
            multiply_code_panels(q, (const E*)x + first * m.in, matrix, nullptr, (E*)y + first * m.row,
                                 offsets[expert + 1] - first, {p, p + n, true});
        }
    });
}

}  // namespace
