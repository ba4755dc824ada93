"""Measures what it costs that each piece of a product's columns converts the left side of all rows anew.

    OMP_NUM_THREADS=1 python benchmarks/evidence/bench_pieces.py

The product of 2,048 rows with a matrix is computed in two calls, each with half of the columns, and in eight. The
difference is what the conversion costs. The table has one thread's processor time, in ms: the best of nine rounds.
"""

import time

import torch
from torch import Tensor

from nanovllm.backends.cpu.library import cpu_library

ROWS = 2048
MATRICES = {"qkv": (1024, 4096), "o": (2048, 1024), "gate and up": (1024, 6144), "down": (3072, 1024)}
"""Of Qwen3-0.6B: [in, out] features."""


def multiply(x: Tensor, parts: list[Tensor], out_features: int) -> float:
    """Multiply x by all parts. Return the processor time in seconds."""
    y = torch.empty(len(x), out_features // len(parts), dtype=x.dtype)
    start = time.process_time()
    for part in parts:
        cpu_library().call("linear", x.dtype, x, part, None, y, *x.shape, y.shape[1])
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    for name, (in_features, out_features) in MATRICES.items():
        x = torch.randn(ROWS, in_features).bfloat16()
        parts: dict[int, list[Tensor]] = {}
        for count in (2, 8):
            weights = torch.randn(count, out_features // count, in_features).bfloat16()
            parts[count] = [cpu_library().pack(weight) for weight in weights]
        best = {count: float("inf") for count in parts}
        for _ in range(9):
            for count, some in parts.items():
                best[count] = min(best[count], multiply(x, some, out_features))
        print(f"{name:12s} two {best[2] * 1e3:7.2f}   eight {best[8] * 1e3:7.2f}   {best[8] / best[2]:.3f}", flush=True)


if __name__ == "__main__":
    main()
