// Edits logits by the rule that is stated in features/edits/edit_logits.py.
#pragma once

#include "vectors.h"

namespace {

// Edits one row in place. A word of the mask holds the bits of 32 tokens; a 0 bit forbids its token. counts[t] is twice
// the number of times that token t was generated, plus 1 if it is in the prompt. A token with count 0 gets no
// penalty. `penalties` holds the repetition, the frequency and the presence penalty.
void edit_row(float* x, const uint32_t* mask, const int32_t* counts, const float* penalties, int64_t vocab) {
    if (mask)
        for (int64_t start = 0; start < vocab; start += 32) {
            const uint32_t word = mask[start / 32];
            if (word == ~0u) continue;
            for (int64_t t = start; t < std::min(vocab, start + 32); ++t)
                if (!(word >> (t - start) & 1) && x[t] < INFINITY) x[t] = -INFINITY;
        }
    if (counts)
        for (int64_t t = 0; t < vocab; ++t) {
            const int32_t count = counts[t];
            if (count == 0) continue;
            x[t] = x[t] > 0 ? x[t] / penalties[0] : x[t] * penalties[0];
            x[t] = x[t] - penalties[1] * (float)(count >> 1);
            x[t] = x[t] - penalties[2] * (float)(count > 1);
        }
}

}  // namespace
