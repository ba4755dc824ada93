// Products by AMX, the matrix unit of Intel's processors since Sapphire Rapids.
//
// AMX has eight registers of 16 rows x 64 bytes. One instruction multiplies a register of 16 rows x 16 units by one
// of 16 units x 16 columns, and adds to a register of 16 rows x 16 sums. A unit is two bfloat16 numbers or four bytes.
// With bytes the sums are exact. With bfloat16 the instruction sums the products of the lower halves of the units, and
// those of the upper halves, each from 0 on and in order. Then it adds the two, and the result to the float32 sum. So a
// row's sums do not depend on the rows beside it.
#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__AVX512VNNI__) && \
    defined(__linux__)
#define WITH_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t AMX_ROWS = 16, AMX_UNITS = 16;
constexpr int64_t AMX_BLOCK_ROWS = 2 * AMX_ROWS;  // rows that are multiplied by the same columns before the next ones

#ifdef WITH_AMX

// Asks whether this process may use AMX: the system must save 8 KiB more for each of its threads then. It says no if a
// thread's stack for signals is too small for that.
inline bool request_amx() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
const bool IS_AMX_ALLOWED = request_amx();

// Whether products with left sides of T are computed by AMX.
template <class T> inline bool uses_amx() { return sizeof(typename T::element) == 2 && IS_AMX_ALLOWED; }

// Says that memory is read and written here. GCC does not know it of the instructions for these registers.
inline void access_memory() { asm volatile("" ::: "memory"); }

// Returns whether the results of `rows` rows are written past the caches: `count` elements of each row, at y and below
// it, where rows are `ldy` elements apart. A store to a line that is not in a cache reads the line first, and for many
// rows that takes longer than the product. So their lines go to memory, if they are whole. ~AmxRegisters makes them
// visible to other threads.
template <class E> inline bool goes_past_caches(const E* y, int64_t ldy, int64_t count, int64_t rows) {
    constexpr int64_t LINE = 64, FEW_LINES = 64;  // few lines stay in the L1 cache until they are written
    const bool are_whole = count * 2 == LINE && (uintptr_t)y % LINE == 0 && ldy * 2 % LINE == 0;
    return IS_AMX_ALLOWED && sizeof(E) == 2 && rows > FEW_LINES && are_whole;
}

// Sets the registers up for products of `rows` rows, and releases them at the end of the block. Registers 0 to 5 have
// as many rows, at most 16, and 6 and 7 have the 16 units of columns. Does nothing if not `is_used`.
class AmxRegisters {
  public:
    AmxRegisters(int64_t rows, bool is_used) : is_used_(is_used) {
        if (!is_used) return;
        struct alignas(64) { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } layout = {};
        layout.palette = 1;
        for (int i = 0; i < 8; ++i) {
            layout.bytes[i] = 64;
            layout.rows[i] = (uint8_t)(i < 6 ? std::min(rows, AMX_ROWS) : AMX_UNITS);
        }
        access_memory();
        _tile_loadconfig(&layout);
        access_memory();
    }
    ~AmxRegisters() {
        if (!is_used_) return;
        _tile_release();
        _mm_sfence();  // other threads see what goes_past_caches before they read it
    }
    AmxRegisters(const AmxRegisters&) = delete;
    AmxRegisters& operator=(const AmxRegisters&) = delete;

  private:
    bool is_used_;
};

// Computes c[16 or, if TALL, 32 rows][16 or, if WIDE, 32 columns] = (or, with `add`, +=) a[rows][k] x b[k][columns],
// where k counts units. left(i) and right(i) return the addresses of 16 units of a and b from i on. Rows of a are
// `left_row` units apart, those of b `right_row`, and the second 16 columns of b are `right_vector` from the first ones.
// Rows of c are `ldc` floats apart. Rows from `rows` on are padding: a and c have memory for as many as the registers
// have. The block calls prepare(i, end) before it needs the units i to `end` of b, while AMX still multiplies earlier
// ones.
template <bool TALL, bool WIDE, class Left, class Right, class Prepare>
inline void amx_block(int64_t rows, Left left, int64_t left_row, Right right, int64_t right_row, int64_t right_vector,
                      int64_t k, float* c, int64_t ldc, bool add, Prepare prepare) {
    const int64_t c_bytes = ldc * 4;
    float* c_below = c + AMX_ROWS * ldc;
    const auto multiply = [](const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t b_row, int64_t b_vector) {
        const int64_t a_bytes = a_row * 4, b_bytes = b_row * 4;
        _tile_loadd(6, b, b_bytes);
        _tile_loadd(4, a, a_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (WIDE) _tile_loadd(7, b + b_vector, b_bytes);
        if (WIDE) _tile_dpbf16ps(1, 4, 7);
        if (TALL) _tile_loadd(5, a + AMX_ROWS * a_row, a_bytes);
        if (TALL) _tile_dpbf16ps(2, 5, 6);
        if (TALL && WIDE) _tile_dpbf16ps(3, 5, 7);
    };
    prepare(0, std::min(AMX_UNITS, k));
    access_memory();
    if (add) {
        _tile_loadd(0, c, c_bytes);
        if (WIDE) _tile_loadd(1, c + LANES, c_bytes);
        if (TALL) _tile_loadd(2, c_below, c_bytes);
        if (TALL && WIDE) _tile_loadd(3, c_below + LANES, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    int64_t i = 0;
    for (; i + AMX_UNITS <= k; i += AMX_UNITS) {
        if (i + AMX_UNITS < k) prepare(i + AMX_UNITS, std::min(i + 2 * AMX_UNITS, k));
        access_memory();
        multiply(left(i), left_row, right(i), right_row, right_vector);
    }
    if (i < k) {  // zeros complete the last units: whatever follows in memory could be NaN
        alignas(64) uint32_t a[AMX_BLOCK_ROWS * AMX_UNITS] = {}, b[AMX_UNITS * 2 * LANES] = {};
        for (int64_t r = 0; r < std::min(rows, AMX_BLOCK_ROWS); ++r)
            std::copy_n(left(i) + r * left_row, k - i, a + r * AMX_UNITS);
        for (int64_t u = 0; u < k - i; ++u) {
            std::copy_n(right(i) + u * right_row, LANES, b + u * 2 * LANES);
            if (WIDE) std::copy_n(right(i) + u * right_row + right_vector, LANES, b + u * 2 * LANES + LANES);
        }
        access_memory();
        multiply(a, AMX_UNITS, b, 2 * LANES, LANES);
    }
    _tile_stored(0, c, c_bytes);
    if (WIDE) _tile_stored(1, c + LANES, c_bytes);
    if (TALL) _tile_stored(2, c_below, c_bytes);
    if (TALL && WIDE) _tile_stored(3, c_below + LANES, c_bytes);
    access_memory();
}

// Calls the `amx_block` for the first AMX_BLOCK_ROWS of `rows` rows, and 1 or 2 vectors of 16 columns.
template <class... Arguments> inline void amx_block_of(int64_t rows, int vectors, Arguments... arguments) {
    const bool is_tall = rows > AMX_ROWS;
    if (vectors > 1) is_tall ? amx_block<true, true>(rows, arguments...) : amx_block<false, true>(rows, arguments...);
    else is_tall ? amx_block<true, false>(rows, arguments...) : amx_block<false, false>(rows, arguments...);
}

#else

constexpr bool IS_AMX_ALLOWED = false;
template <class T> constexpr bool uses_amx() { return false; }
template <class E> constexpr bool goes_past_caches(const E*, int64_t, int64_t, int64_t) { return false; }
struct AmxRegisters { AmxRegisters(int64_t, bool) {} };

#endif

}  // namespace
