"""Measures the CPU kernels on a processor: products and decode attention, built for several, beside torch's.

    python benchmarks/bench_processors.py --march x86-64-v3 cascadelake native
    python benchmarks/bench_processors.py --blocks 16 32 64
    python benchmarks/bench_processors.py --window 512

All products of 12 of Qwen3-0.6B's layers, with bfloat16 also with weights of 8 and 4 bits (groups of 128) and in whole
numbers (int8-dynamic), and the attention of its 28; best of seven, in turn. A cell is milliseconds, and what share that
makes of two rates measured just before: at which memory is read, and at which the same column computes float32 products
of 256 rows.

With --window it measures something else: attention with a sliding window, in pairs with full attention.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measuring import make_inputs
from nanovllm.backends import KVCache
from nanovllm.backends.cpu import library as cpu_library
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.dynamic import DynamicLibrary
from nanovllm.backends.cpu.quantized import CpuMatrix, QuantizedLibrary
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.features.quantized.codes import Codes, InputScales, Scales
from nanovllm.ops.attention import AttentionVariant
from nanovllm.ops.step_inputs import StepInputs

LAYERS = 12
HEADS = 16
KV_HEADS = 8
DIM = 128
PAIRS = 15
SHAPES = [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)]
"""(in, out) of a layer's matrices."""


class Built(NamedTuple):
    """The kernels for one processor."""

    backend: CpuBackend
    quantized: QuantizedLibrary
    dynamic: DynamicLibrary


def build(march: str) -> Built:
    flags = [f"-march={march}" if flag == "-march=native" else flag for flag in cpu_library.FLAGS]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, XDG_CACHE_HOME=folder),
        mock.patch.object(cpu_library, "FLAGS", flags),
    ):
        compiler = os.environ.get("CXX", "g++")
        library = cpu_library._load(compiler, cpu_library.CpuLibrary)
        quantized = cpu_library._load(compiler, QuantizedLibrary)
        dynamic = cpu_library._load(compiler, DynamicLibrary)
    with mock.patch("nanovllm.backends.cpu.backend.cpu_library", lambda: library):
        return Built(CpuBackend(), quantized, dynamic)


def best_of(works: dict[str, Callable[[], object]], repeat: int = 7) -> dict[str, float]:
    """Milliseconds of each, the best of several, in turn."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(repeat):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


def products(backends: dict[str, CpuBackend], dtype: torch.dtype, rows: int, repeat: int = 7) -> dict[str, float]:
    library = next(iter(backends.values())).library
    weights = [torch.full((out, size), 0.01, dtype=dtype) for _ in range(LAYERS) for size, out in SHAPES]
    packed = [library.pack(weight) for weight in weights]  # in the same order by all
    inputs = {size: torch.ones(rows, size, dtype=dtype) for size, _ in SHAPES}
    outputs = {out: torch.empty(rows, out, dtype=dtype) for _, out in SHAPES}

    def ours(backend: CpuBackend) -> None:
        for weight, panels in zip(weights, packed, strict=True):
            out, size = weight.shape
            backend.library.call("linear", dtype, inputs[size], panels, None, outputs[out], rows, size, out)

    def run_torch() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    works: dict[str, Callable[[], object]] = {name: lambda b=b: ours(b) for name, b in backends.items()}  # type: ignore[misc]
    return best_of({**works, "torch": run_torch}, repeat)


def quantized_products(built: dict[str, Built], bits: int, rows: int, dynamic: bool = False) -> dict[str, float]:
    inputs = {size: torch.ones(rows, size, dtype=torch.bfloat16) for size, _ in SHAPES}
    group = {8: 10**6, 4: 128}[bits]
    input_scales = InputScales.GROUP if dynamic else None

    def pack() -> list[CpuMatrix]:
        packed: list[CpuMatrix] = []
        for size, out in SHAPES * LAYERS:
            codes = torch.ones(out, size * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
            scales = torch.ones(out, max(1, size // group))
            made = Codes(bits, codes, Scales(scales), None, group, input_scales=input_scales)
            packed.append(CpuMatrix(made, torch.bfloat16, Scratch()))
        return packed

    def run(matrices: list[CpuMatrix]) -> None:
        for i, matrix in enumerate(matrices):
            matrix.multiply(inputs[SHAPES[i % len(SHAPES)][0]], None)

    works: dict[str, Callable[[], object]] = {}
    for march, libraries in built.items():
        with (
            mock.patch("nanovllm.backends.cpu.quantized.quantized_library", lambda one=libraries: one.quantized),
            mock.patch("nanovllm.backends.cpu.dynamic.dynamic_library", lambda one=libraries: one.dynamic),
        ):
            works[march] = partial(run, pack())
    return best_of(works)


def attention(
    backends: dict[str, CpuBackend], dtype: torch.dtype, num_seqs: int, length: int, blocks: list[int]
) -> dict[str, float]:
    """Of decodes, 28 layers; torch's is over contiguous keys and values, in a batch of equal lengths."""
    works: dict[str, Callable[[], object]] = {}
    q = torch.ones(num_seqs, HEADS, DIM, dtype=dtype)
    for size in blocks:
        width = -(-length // size)
        shape = (num_seqs * width, size, KV_HEADS, DIM)
        inputs = make_inputs(num_seqs, 1, length, torch.randperm(num_seqs * width).int().view(num_seqs, width))
        for march, backend in backends.items():
            caches = [backend.allocate_cache(shape, dtype, torch.device("cpu")) for _ in range(28)]

            def ours(
                backend: CpuBackend = backend, caches: list[KVCache] = caches, inputs: StepInputs = inputs
            ) -> None:
                for cache in caches:
                    backend.attend(q, cache, inputs, DIM**-0.5)

            works[f"{march}, {size}"] = ours
    keys = [torch.zeros(num_seqs, KV_HEADS, length, DIM, dtype=dtype) for _ in range(2 * 28)]
    query = q.view(num_seqs, HEADS, 1, DIM)

    def run_torch() -> None:
        for layer in range(28):
            F.scaled_dot_product_attention(query, keys[2 * layer], keys[2 * layer + 1], enable_gqa=True)

    return best_of({**works, "torch": run_torch})


def window_share(backend: CpuBackend, dtype: torch.dtype, num_seqs: int, num_queries: int, window: int) -> float:
    """The time of attention within a window over that of full attention, at 4,096 tokens: the median of pairs."""
    length = 4096
    width = length // 64
    inputs = make_inputs(num_seqs, num_queries, length, torch.randperm(num_seqs * width).int().view(num_seqs, width))
    cache = backend.allocate_cache((num_seqs * width, 64, KV_HEADS, DIM), dtype, torch.device("cpu"))
    q = torch.ones(num_seqs * num_queries, HEADS, DIM, dtype=dtype)

    def measure(variant: AttentionVariant | None) -> float:
        start = time.process_time()
        backend.attend(q, cache, inputs, DIM**-0.5, variant)
        return time.process_time() - start

    measure(None)
    return statistics.median(measure(AttentionVariant(window)) / measure(None) for _ in range(PAIRS))


def read_rate() -> float:
    """Bytes a second that this machine reads from memory."""
    x = torch.ones(256 << 20)
    return x.nbytes / (best_of({"": lambda: x.sum()})[""] / 1000)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--march", nargs="+", default=["native"], help="processors, by the compiler's names")
    parser.add_argument("--blocks", nargs="+", type=int, default=[64], help="block sizes of the KV cache")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 256], help="rows of the products")
    parser.add_argument("--window", type=int, help="compare attention within so many keys with full attention")
    args = parser.parse_args()
    built = {march: build(march) for march in args.march}
    backends = {march: libraries.backend for march, libraries in built.items()}
    if args.window is not None:
        for march, backend in backends.items():
            for dtype in (torch.float32, torch.bfloat16):
                prompt, decodes = (window_share(backend, dtype, *size, args.window) for size in ((1, 4096), (8, 1)))
                print(f"{march}, {dtype}: a prompt of 4,096 tokens {prompt:.3f}, 8 decodes at 4,096 {decodes:.3f}")
        return
    memory = read_rate()
    num_weights = LAYERS * sum(size * out for size, out in SHAPES)
    arithmetic = {m: 2e3 * 256 * num_weights / ms for m, ms in products(backends, torch.float32, 256, 3).items()}
    rates = ", ".join(f"{name} {rate / 1e12:.3f}" for name, rate in arithmetic.items())
    print(f"{torch.get_num_threads()} threads, reads {memory / 1e9:.1f} GB/s; TFLOP/s in float32: {rates}\n")

    def show(what: str, found: dict[str, float], num_bytes: float, num_flops: float) -> None:
        cells = (
            f"{ms:.2f}, {1e5 * num_bytes / ms / memory:.0f} %, {1e5 * num_flops / ms / arithmetic[name]:.0f} %"
            for name, ms in found.items()
        )
        print(f"| {what} | {' | '.join(cells)} |", flush=True)

    print(f"| ms, % of reading, % of arithmetic | {' | '.join(arithmetic)} |\n| --- |{' --- |' * len(arithmetic)}")
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for rows in args.rows:
            found = products(backends, dtype, rows)
            show(f"{name}, products, rows: {rows}", found, num_weights * dtype.itemsize, 2 * rows * num_weights)
            if dtype != torch.bfloat16:
                continue
            for bits in (8, 4):
                found = quantized_products(built, bits, rows)
                show(f"{bits} bits, products, rows: {rows}", found, num_weights * bits / 8, 2 * rows * num_weights)
            found = quantized_products(built, 8, rows, dynamic=True)
            show(f"int8-dynamic, products, rows: {rows}", found, num_weights, 2 * rows * num_weights)
        for num_seqs, length in ((18, 130), (32, 256)):
            times = attention(backends, dtype, num_seqs, length, args.blocks)
            keys = 28 * num_seqs * length * DIM
            num_bytes = 2 * keys * KV_HEADS * dtype.itemsize
            num_flops = 4 * keys * HEADS
            for size in args.blocks:
                found = {column: times.get(f"{column}, {size}", times["torch"]) for column in arithmetic}
                show(f"{name}, attention of {num_seqs} x {length}, blocks of {size}", found, num_bytes, num_flops)


if __name__ == "__main__":
    main()
