// The kernels for CPUs: products with packed matrices, attention over the paged cache, and the operators between them.
//
// This is plain C++ with the vector extensions of GCC and Clang. Python calls it through ctypes; it needs no headers of
// torch, so it compiles in seconds. library.py builds it with -march=native. It uses AMX, AVX-512 BF16 or Arm's dot
// product of bfloat16 where the processor has them; elsewhere the same code runs more slowly.
//
// Products and attention repeat one step: 16 float32 sums += (a unit of A, broadcast) x (16 units of B). A *unit* is 32
// bits along the summed dimension: two bfloat16 numbers or one float32 number. So B is stored as rows of units,
// [summed units][columns]. linear.h describes how weights are stored, and paged_cache.h how K and V are.

#include "attention.h"
#include "edit_logits.h"
#include "experts.h"
#include "exported.h"
#include "gated_delta.h"
#include "linear.h"
#include "operators.h"
#include "sample.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

extern "C" {

// Returns whether the system refuses AMX to this process, although the processor has it.
int is_amx_refused() {
#ifdef WITH_AMX
    return !IS_AMX_ALLOWED;
#else
    return 0;
#endif
}

EXPORT(linear, (x, packed, bias, y, rows, in, out),
       const void* x, const uint32_t* packed, const void* bias, void* y, int64_t rows, int64_t in, int64_t out)
EXPORT(route, (logits, slots, weights, places, tokens, offsets, num_tokens, experts, k, normalize, stride),
       const void* logits, const int64_t* slots, float* weights, int32_t* places, int32_t* tokens, int32_t* offsets,
       int64_t num_tokens, int64_t experts, int64_t k, int64_t normalize, int64_t stride)
EXPORT(grouped_linear, (x, packed, offsets, y, experts, in, out),
       const void* x, const uint32_t* packed, const int32_t* offsets, void* y, int64_t experts, int64_t in,
       int64_t out)
EXPORT(combine, (y, weights, places, shared, gate, out, tokens, k, size, gate_stride),
       const void* y, const float* weights, const int32_t* places, const void* shared, const void* gate, void* out,
       int64_t tokens, int64_t k, int64_t size, int64_t gate_stride)
EXPORT(attend, (q, k, v, k_scales, v_scales, tables, cu_seqlens, lens, out, seqs, max_blocks, kv_heads, group, dim,
       block_size, scale, window, softcap, sinks),
       const void* q, const void* k, const void* v, const float* k_scales, const float* v_scales,
       const int32_t* tables, const int32_t* cu_seqlens, const int32_t* lens, void* out, int64_t seqs,
       int64_t max_blocks, int64_t kv_heads, int64_t group, int64_t dim, int64_t block_size, float scale,
       int64_t window, float softcap, const float* sinks)
EXPORT(add_rms_norm, (x, residual, weight, y, sum, rows, size, is_wide, eps),
       const void* x, const void* residual, const void* weight, void* y, void* sum, int64_t rows, int64_t size,
       int64_t is_wide, float eps)
EXPORT(silu_and_mul, (gate_up, y, rows, size),
       const void* gate_up, void* y, int64_t rows, int64_t size)
EXPORT(norm_rope_store, (qkv, is_wide, qw, kw, cos_sin, positions, slots, q, k, v, k_scales, v_scales, tokens, heads,
       kv_heads, dim, block_size, eps),
       const void* qkv, const void* qw, const void* kw, const float* cos_sin, const int32_t* positions,
       const int64_t* slots, void* q, void* k, void* v, float* k_scales, float* v_scales, int64_t tokens, int64_t heads,
       int64_t kv_heads, int64_t dim, int64_t block_size, int64_t is_wide, float eps)
EXPORT(causal_conv, (x, weight, state, y, cu_seqlens, lens, rows, seqs, channels, width, stride),
       const void* x, const void* weight, void* state, void* y, const int32_t* cu_seqlens, const int32_t* lens,
       const int32_t* rows, int64_t seqs, int64_t channels, int64_t width, int64_t stride)
EXPORT(gated_delta, (qkv, gates, a_log, dt_bias, state, cu_seqlens, lens, rows, out, seqs, key_heads, value_heads,
       key_dim, value_dim, gates_stride),
       const void* qkv, const void* gates, const float* a_log, const float* dt_bias, float* state,
       const int32_t* cu_seqlens, const int32_t* lens, const int32_t* rows, void* out, int64_t seqs, int64_t key_heads,
       int64_t value_heads, int64_t key_dim, int64_t value_dim, int64_t gates_stride)
EXPORT(gated_rms_norm, (x, gate, weight, y, tokens, heads, dim, gate_stride, eps),
       const void* x, const void* gate, const void* weight, void* y, int64_t tokens, int64_t heads, int64_t dim,
       int64_t gate_stride, float eps)
EXPORT(sigmoid_and_mul, (x, gate, y, tokens, size, gate_stride),
       const void* x, const void* gate, void* y, int64_t tokens, int64_t size, int64_t gate_stride)
EXPORT(sample, (logits, table, rows, positions, tokens, checked, count, vocab),
       const void* logits, const RowSampling* table, const int32_t* rows, const int32_t* positions, int32_t* tokens,
       int32_t* checked, int64_t count, int64_t vocab)
EXPORT(token_logprobs, (logits, tokens, values, log_sums, num_above, rows, vocab),
       const void* logits, const int32_t* tokens, float* values, float* log_sums, int32_t* num_above, int64_t rows,
       int64_t vocab)
EXPORT(top_logits, (logits, values, ids, rows, vocab, k),
       const void* logits, float* values, int32_t* ids, int64_t rows, int64_t vocab, int64_t k)

// Edits the rows `indices` of logits in place. masks [edited][words] may be null, which forbids no token; counts and
// penalties [edited][3] may be null, which penalises none. rows[i] is the row of counts for edited row i. Logits are
// edited in float32, whatever the model's dtype.
// The reference is `edit_logits_reference` in features/edits/edit_logits.py.
void edit_logits_float32(int64_t threads, float* logits, const int32_t* indices, const uint32_t* masks,
                         const int32_t* rows, const int32_t* counts, const float* penalties, int64_t edited,
                         int64_t vocab) {
    num_threads = threads;
    const int64_t words = (vocab + 31) / 32;
    share(edited, 1, [&](Span some) {
        for (int64_t i = some.begin; i < some.end; ++i)
            edit_row(logits + indices[i] * vocab, masks ? masks + i * words : nullptr,
                     counts ? counts + rows[i] * vocab : nullptr, penalties + 3 * i, vocab);
    });
}

// Makes the inputs of a step from a plan and the tables of all rows. The planned id -1 stands for the row's last token.
// A token of the padding row gets the slot -1. The planned ids are as many as num_scheduled sums to. Of the block tables,
// which are as long as the longest sequence may be, only the entries that a sequence has are copied: nobody reads others.
// The reference is `step_inputs_reference` in ops/step_inputs.py.
void step_inputs(int64_t, const int32_t* rows, const int32_t* num_computed, const int32_t* num_scheduled,
                 const int32_t* planned_ids, const int32_t* tables, const int32_t* last_token, int32_t* token_ids,
                 int32_t* positions, int64_t* slots, int32_t* cu_seqlens, int32_t* seq_lens, int32_t* block_tables,
                 int64_t num_seqs, int64_t padding_row, int64_t width, int64_t block_size) {
    int32_t t = 0;
    for (int64_t s = 0; s < num_seqs; ++s) {
        const int32_t row = rows[s], *table = tables + row * width;
        cu_seqlens[s] = t;
        seq_lens[s] = num_computed[s] + num_scheduled[s];
        const int64_t count = (seq_lens[s] + block_size - 1) / block_size;
        std::copy_n(table, std::min(count, width), block_tables + s * width);
        for (int32_t position = num_computed[s]; position < seq_lens[s]; ++position, ++t) {
            token_ids[t] = planned_ids[t] < 0 ? last_token[row] : planned_ids[t];
            positions[t] = position;
            slots[t] = row == padding_row ? -1 : table[position / block_size] * block_size + position % block_size;
        }
    }
    cu_seqlens[num_seqs] = t;
}

// Writes each token to its row's place in last_token. Of several tokens of a row the last one stays.
// The reference is `store_samples_reference` in ops/sample.py.
void store_samples(int64_t, const int32_t* tokens, const int32_t* rows, int32_t* last_token, int64_t count) {
    for (int64_t i = 0; i < count; ++i) last_token[rows[i]] = tokens[i];
}

// Makes recorded calls one after another. Each has two words: the address of a function that AGAIN defines, and that of
// its arguments.
void replay(int64_t threads, const Word* calls, int64_t num_words) {
    for (const Word* call = calls; call < calls + num_words; call += 2) {
        const auto again = from_word<void (*)(int64_t, const Word*)>(call[0]);
        again(threads, from_word<const Word*>(call[1]));
    }
}

// Makes the system allocate the pages of new memory; all threads share the work. `start` is the start of a page. Linux
// 5.14 and later can allocate many pages in one call, which takes half as long as one page fault for each.
void touch_pages(int64_t threads, void* start, int64_t bytes) {
    num_threads = threads;
    const int64_t page = 4096, pages = bytes / page;
    share(pages, quarter(pages), [&](Span some) {
        char* first = (char*)start + some.begin * page;
        const int64_t size = (some.end - some.begin) * page;
#ifdef MADV_POPULATE_WRITE
        if (madvise(first, size, MADV_POPULATE_WRITE))
#endif
            std::memset(first, 0, size);
    });
}

KERNEL(pack)
AGAIN(packed_rows)
AGAIN(gather_rows)
KERNEL(edit_logits_float32)
AGAIN(step_inputs)
AGAIN(store_samples)
KERNEL(replay)
KERNEL(touch_pages)
}
