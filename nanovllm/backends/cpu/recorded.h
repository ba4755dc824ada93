// Calls of kernels that Python has recorded, made again without Python between them. recorded_steps.py says what for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

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

// Defines name_again, which calls the kernel `name` with recorded arguments.
#define AGAIN(name) \
    void name##_again(int64_t threads, const Word* words) { call_again(name, threads, words); }
