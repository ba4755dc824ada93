// What Python needs to call kernels, and to have recorded calls made again. recorded_steps.py says what for.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "team.h"
#include "vectors.h"

namespace {

// The kinds of a kernel's arguments, as letters of Python's struct: an address, a float, or a whole number.
template <class A> constexpr char letter_of() {
    constexpr bool is_address = std::is_pointer<A>::value, is_float = std::is_same<A, float>::value;
    static_assert(is_address || is_float || std::is_same<A, int64_t>::value, "Python passes no other kinds");
    return is_address ? 'P' : is_float ? 'f' : 'q';
}
template <class... A> constexpr char LETTERS[] = {letter_of<A>()..., 0};

// Returns the letters of all arguments but the first, which says how many threads share the work.
template <class... A> constexpr const char* letters_of(void (*)(int64_t, A...)) { return LETTERS<A...>; }

// An argument of a recorded call: an address, a whole number, or the bits of a float in the lower half.
typedef int64_t Word;

template <class A> inline A from_word(Word word) {
    A argument;
    std::memcpy(&argument, &word, sizeof argument);
    return argument;
}

template <class... A, size_t... I>
inline void call_with(void (*kernel)(int64_t, A...), int64_t threads, const Word* words, std::index_sequence<I...>) {
    kernel(threads, from_word<A>(words[I])...);
}

// Calls a kernel with the arguments in `words`.
template <class... A> inline void call_again(void (*kernel)(int64_t, A...), int64_t threads, const Word* words) {
    call_with(kernel, threads, words, std::index_sequence_for<A...>{});
}

}  // namespace

// Defines name_arguments, from which Python learns what the kernel `name` takes.
#define KERNEL(name) const char* name##_arguments = letters_of(name);

// Does the same, and defines name_again, which calls the kernel with recorded arguments.
#define AGAIN(name) \
    KERNEL(name)    \
    void name##_again(int64_t threads, const Word* words) { call_again(name, threads, words); }

// Defines the kernels name_bfloat16 and name_float32, which make `call`, where T is that type.
#define EXPORT_CALL(name, call, ...)                      \
    void name##_bfloat16(int64_t threads, __VA_ARGS__) {  \
        using T = BFloat16;                               \
        num_threads = threads;                            \
        call;                                             \
    }                                                     \
    void name##_float32(int64_t threads, __VA_ARGS__) {   \
        using T = Float;                                  \
        num_threads = threads;                            \
        call;                                             \
    }                                                     \
    AGAIN(name##_bfloat16)                                \
    AGAIN(name##_float32)

// The same, where the call is that of the template `name` for T.
#define EXPORT(name, arguments, ...) EXPORT_CALL(name, name<T> arguments, __VA_ARGS__)
