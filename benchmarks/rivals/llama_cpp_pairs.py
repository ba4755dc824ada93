"""Scores pairs of a context and a continuation with llama.cpp, one after the other, for bench_loglikelihoods.py.

An interpreter that has llama.cpp runs it: `PYTHON -m benchmarks.rivals.llama_cpp_pairs FILE TOKENS THREADS`, with the
pairs as JSON in its input. The output is the seconds, the seconds of processors, and each log-likelihood. Tokens that
begin a pair as they began the one before are not computed again, but for the context's last one: its logits are read.
"""

import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.rivals.llama_cpp import Batch, Sequence, print_errors


def tokenize(vocab: Any, text: str) -> list[int]:
    raw = text.encode()
    room = (llama_cpp.llama_token * (len(raw) + 8))()
    count = llama_cpp.llama_tokenize(vocab, raw, len(raw), room, len(room), True, True)
    return list(room[:count])


def score(context: Any, batch: Batch, num_tokens: int, before: list[int], ids: list[int], num_scored: int) -> float:
    """Return the log-likelihood of the last tokens.

    Args:
        num_tokens: of the vocabulary.
        before: what is in the cache.
    """
    first = len(ids) - num_scored - 1
    num_kept = next((i for i, (old, new) in enumerate(zip(before, ids, strict=False)) if old != new), len(before))
    num_kept = min(num_kept, first)
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(context), 0, num_kept, -1)
    batch.clear()
    sequence = Sequence(0, ids[num_kept:-1], 0)
    sequence.num_computed = num_kept
    batch.add(sequence)
    batch.logits[first - num_kept : batch.raw.n_tokens] = 1
    if status := llama_cpp.llama_decode(context, batch.raw):
        raise RuntimeError(f"llama_decode returned {status}")
    total = 0.0
    for row in range(first, len(ids) - 1):
        raw = llama_cpp.llama_get_logits_ith(context, row - num_kept)
        logits = np.ctypeslib.as_array(raw, (num_tokens,)).astype(np.float64)
        largest = logits.max()
        total += float(logits[ids[row + 1]] - largest - np.log(np.exp(logits - largest).sum()))
    return total


def main() -> None:
    path, length, threads = sys.argv[1:]
    pairs = json.load(sys.stdin)
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(print_errors, None)
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = int(length)
    params.n_threads = params.n_threads_batch = int(threads)
    context = llama_cpp.llama_init_from_model(model, params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    num_tokens = llama_cpp.llama_vocab_n_tokens(vocab)
    batch = Batch()
    before = tokenize(vocab, "a b")
    score(context, batch, num_tokens, [], before, 1)
    before = before[:-1]
    start = time.perf_counter()
    processor = time.process_time()
    found = []
    for head, tail in pairs:
        ids = tokenize(vocab, head + tail)
        found.append(score(context, batch, num_tokens, before, ids, len(ids) - len(tokenize(vocab, head))))
        before = ids[:-1]
    print(json.dumps([time.perf_counter() - start, time.process_time() - processor, found]))


if __name__ == "__main__":
    main()
