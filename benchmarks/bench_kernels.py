"""Measures how near our kernels come to what this GPU can do: attention, the fused small kernels, the sampler, and
products of few rows beside torch's.

Every figure stands beside a ceiling measured in the same run. Kernels that all but only read are compared with the sum
of a large tensor, others with a large copy, and FLOP with a large bfloat16 matmul. CUDA graphs capture the launches,
as in the engine, and go round several sets of tensors, together larger than the L2 cache, which would flatter them.

Each kernel is timed twice: by itself, and with dependent launches, where it may start before its predecessor has ended.
In the second figure a kernel hides its start behind a copy of itself. In the engine its neighbours are mostly torch's,
so percentages are of the first figure. The last line of the output is one JSON document.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measuring import commit, make_inputs
from nanovllm.backends import Backend
from nanovllm.backends.gpu import launch as launch_module
from nanovllm.backends.gpu.few_rows import MAX_ROWS, FewRowsMatrix
from nanovllm.backends.gpu.route import route
from nanovllm.engine.plan import ROW_SAMPLING
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.runner.resolve import Work, resolve_backend
from nanovllm.utils.integers import ceil_div

DTYPE = torch.bfloat16
ITEMSIZE = 2
VOCAB_SIZE = 151_936
KV_TYPES = {"auto": DTYPE, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


class Model(NamedTuple):
    """The shape of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int


MODELS = {"0.6B": Model(16, 8, 128, 1024, 3072), "8B": Model(32, 8, 128, 4096, 12288)}
PREFILLS = {  # name: (sequences, new tokens of each, cached prefix of each)
    "1 x 8192": (1, 8192, 0),
    "4 x 2048": (4, 2048, 0),
    "16 x 512": (16, 512, 0),
    "1 x 2048 after 6144": (1, 2048, 6144),
}


@dataclass(frozen=True)
class Result:
    """One measurement.

    Attributes:
        amount: what a call must at least read and write, in bytes, or compute, in FLOP; unit says which.
        floor_us: how long this takes at the ceiling that was measured in the same run.
        us, percent: how long the call took by itself, and the floor's share of it.
        dependent_us: how long it took with dependent launches.
    """

    kernel: str
    model: str
    shape: str
    amount: float
    unit: str
    floor_us: float
    us: float
    percent: float
    dependent_us: float


class Times(NamedTuple):
    """Microseconds of one call: by itself, and with dependent launches."""

    us: float
    dependent_us: float


def microseconds(launches: list[Callable[[], object]], before: Callable[[], None] | None = None) -> float:
    """Return the time of one launch: the median of ten replays of a graph of all of them (at least 24, going round).

    Args:
        before: captured once, ahead of them. Its time is part of theirs, as it is in a step of 24 layers.
    """
    rounds = ceil_div(24, len(launches))

    def step() -> None:
        if before is not None:
            before()
        for launch in launches * rounds:
            launch()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still write the inputs
    with torch.cuda.stream(stream):  # compiles, and warms the allocator
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(12):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (len(launches) * rounds))
    return float(np.median(times[2:]))


def time_both(launches: list[Callable[[], object]], before: Callable[[], None] | None = None) -> Times:
    """Time launches as `microseconds` does, without dependent launches and with them."""
    dependent_us = microseconds(launches, before)
    with mock.patch.object(launch_module, "_dependent_launches", lambda device: {"PDL": False}):
        return Times(microseconds(launches, before), dependent_us)


def num_sets(nbytes: int) -> int:
    """Return how many sets of so many bytes are four times the L2 cache, within a quarter of the free memory."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(ceil_div(4 * l2, nbytes), 64, free // 4 // nbytes))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda")


class Bench:
    """The ceilings, measured at the start, and the results as they come."""

    def __init__(self) -> None:
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        copy = torch.empty_like(source)
        self.copy_gbs = 2 * source.numel() / microseconds([lambda: copy.copy_(source)]) / 1e3
        numbers = source.view(torch.float32)
        self.read_gbs = source.numel() / microseconds([lambda: numbers.sum()]) / 1e3
        a = randn(8192, 8192)
        b = randn(8192, 8192)
        self.matmul_tflops = 2 * 8192**3 / microseconds([lambda: torch.mm(a, b)]) / 1e6
        self.results: list[Result] = []

    def add_read(self, kernel: str, model: str, shape: str, times: Times, nbytes: float) -> None:
        """Add a kernel that reads nbytes and writes next to nothing."""
        self._add(kernel, model, shape, times, nbytes, "bytes", nbytes / self.read_gbs / 1e3)

    def add_copy(self, kernel: str, model: str, shape: str, times: Times, nbytes: float) -> None:
        """Add a kernel that reads and writes nbytes in all."""
        self._add(kernel, model, shape, times, nbytes, "bytes", nbytes / self.copy_gbs / 1e3)

    def add_product(self, kernel: str, model: str, shape: str, times: Times, flop: float) -> None:
        self._add(kernel, model, shape, times, flop, "FLOP", flop / self.matmul_tflops / 1e6)

    def _add(
        self, kernel: str, model: str, shape: str, times: Times, amount: float, unit: str, floor_us: float
    ) -> None:
        us, dependent_us = times
        percent = 100 * floor_us / us
        self.results.append(Result(kernel, model, shape, amount, unit, floor_us, us, percent, dependent_us))
        print(
            f"{kernel:18} {model:5} {shape:22} {amount / 1e6:12.1f} M{unit:5} floor {floor_us:9.1f} us, "
            f"took {us:9.1f} us: {percent:5.1f} %; {dependent_us:9.1f} us with dependent launches"
        )


def make_sampling(num_rows: int, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return a table of packed sampling values, the same for all rows but for their seeds."""
    table = np.zeros(num_rows, ROW_SAMPLING)
    table["temperature"] = temperature
    table["top_k"] = top_k
    table["top_p"] = top_p
    table["seed_low"] = np.arange(num_rows)
    return torch.from_numpy(table.view(np.int32).reshape(num_rows, -1)).to("cuda")


def time_attention(
    backend: Backend, model: Model, num_seqs: int, query_len: int, seq_len: int, kv_dtype: torch.dtype = DTYPE
) -> tuple[Times, int]:
    """Return the times of a layer, and the bytes of K and V that it reads. Codes of one byte have scales of 4 bytes."""
    block_size = backend.default_block_size
    per_seq = ceil_div(seq_len, block_size)
    num_blocks = num_seqs * per_seq
    shape = (num_blocks, block_size, model.num_kv_heads, model.head_dim)
    head_bytes = model.head_dim + 4 if kv_dtype.itemsize == 1 else model.head_dim * kv_dtype.itemsize
    read = 2 * num_seqs * seq_len * model.num_kv_heads * head_bytes
    caches = [backend.allocate_cache(shape, kv_dtype, torch.device("cuda")) for _ in range(num_sets(read))]
    for part in (part for cache in caches for part in cache if part is not None):
        part.copy_(8 * torch.randn(part.shape, device="cuda"))
    tables = torch.randperm(num_blocks, device="cuda").view(num_seqs, per_seq).int()
    inputs = make_inputs(num_seqs, query_len, seq_len, tables)
    q = randn(num_seqs * query_len, model.num_heads, model.head_dim)
    scale = model.head_dim**-0.5
    prepared = backend.prepare_attention(inputs, caches[0], model.num_heads)
    launches = [lambda cache=cache: backend.attend(q, cache, prepared, scale) for cache in caches]
    return time_both(launches, before=lambda: backend.prepare_attention(inputs, caches[0], model.num_heads)), read


def bench_decode(
    bench: Bench, name: str, backend: Backend, batches: list[int], contexts: list[int], kv_dtype: torch.dtype
) -> None:
    model = MODELS[name]
    for context in contexts:
        for batch in batches:
            shape = f"{batch} x {context}"
            needed = 2 * batch * context * model.num_kv_heads * model.head_dim * ITEMSIZE
            torch.cuda.empty_cache()
            if needed > torch.cuda.mem_get_info()[0] // 2:
                print(f"{backend.name + ' decode':24} {name:5} {shape:24} skipped: {needed / 2**30:.0f} GiB do not fit")
                continue
            times, read = time_attention(backend, model, batch, 1, context, kv_dtype)
            q_and_out = 2 * batch * model.num_heads * model.head_dim * ITEMSIZE
            bench.add_read(f"{backend.name} decode", name, shape, times, read + q_and_out)


def bench_prefill(bench: Bench, name: str, backend: Backend) -> None:
    model = MODELS[name]
    for shape, (num_seqs, new, prefix) in PREFILLS.items():
        times, _ = time_attention(backend, model, num_seqs, new, prefix + new)
        pairs = num_seqs * (new * prefix + new * (new + 1) / 2)  # of a query and a key that it sees
        bench.add_product(f"{backend.name} prefill", name, shape, times, 4 * pairs * model.num_heads * model.head_dim)


def small_kernels(backend: Backend, model: Model, num_tokens: int) -> Iterator[tuple[str, Times, int]]:
    """Yield (name, times, bytes read and written) of each."""
    hidden = model.hidden_size
    head_dim = model.head_dim
    heads = model.num_heads + 2 * model.num_kv_heads
    weight = randn(hidden)
    head_weight = randn(head_dim)
    row = num_tokens * hidden * ITEMSIZE

    rows = [(randn(num_tokens, hidden), randn(num_tokens, hidden)) for _ in range(num_sets(2 * row))]
    yield "rms_norm", time_both([lambda x=x: backend.rms_norm(x, weight, 1e-6) for x, _ in rows]), 2 * row
    launches = [lambda x=x, r=r: backend.add_rms_norm(x, r, weight, 1e-6) for x, r in rows]
    yield "add_rms_norm", time_both(launches), 4 * row

    size = 2 * num_tokens * model.intermediate_size * ITEMSIZE
    pairs = [randn(num_tokens, 2 * model.intermediate_size) for _ in range(num_sets(size))]
    yield "silu_and_mul", time_both([lambda x=x: backend.silu_and_mul(x) for x in pairs]), size * 3 // 2
    del rows, pairs, launches

    block_size = backend.default_block_size
    shape = (4 * num_tokens // block_size + 1, block_size, model.num_kv_heads, head_dim)
    cache = backend.allocate_cache(shape, DTYPE, torch.device("cuda"))
    slots = torch.arange(num_tokens, device="cuda")
    size = num_tokens * heads * head_dim * ITEMSIZE
    inputs = [(randn(num_tokens, heads * head_dim), slots + num_tokens * (i % 4)) for i in range(num_sets(size))]
    positions = torch.arange(num_tokens, device="cuda", dtype=torch.int32)
    norms = NormRope(head_weight, head_weight, 1e-6, torch.randn(num_tokens, head_dim, device="cuda"))
    launches = [lambda x=x, s=s: backend.norm_rope_store(x, norms, positions, cache, s) for x, s in inputs]
    yield "norm_rope_store", time_both(launches), 2 * size + num_tokens * head_dim * 4


def list_products(model: Model) -> dict[str, tuple[int, int]]:
    """Return the shapes [out, in] of the matrices of a layer, and of the head."""
    queries = model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    return {
        "qkv": (queries + 2 * keys, model.hidden_size),
        "o": (model.hidden_size, queries),
        "gate_up": (2 * model.intermediate_size, model.hidden_size),
        "down": (model.hidden_size, model.intermediate_size),
        "head": (VOCAB_SIZE, model.hidden_size),
    }


def make_weights(out_size: int, in_size: int) -> list[Tensor]:
    """Return matrices that are together larger than the L2 cache."""
    return [in_size**-0.5 * randn(out_size, in_size) for _ in range(num_sets(out_size * in_size * ITEMSIZE))]


def bench_products(bench: Bench, name: str, rows: list[int]) -> None:
    """Time products of few rows: torch's, and those of our own kernel, which no engine uses by itself."""
    for product, (out_size, in_size) in list_products(MODELS[name]).items():
        weights = make_weights(out_size, in_size)
        matrices = [FewRowsMatrix(weight) for weight in weights]
        for num_rows in rows:
            x = randn(num_rows, in_size)
            size = (out_size * in_size + num_rows * (out_size + in_size)) * ITEMSIZE
            shape = f"{num_rows}, {product}"
            launches = [lambda x=x, weight=weight: F.linear(x, weight) for weight in weights]
            bench.add_read("torch product", name, shape, time_both(launches), size)
            launches = [lambda x=x, matrix=matrix: matrix.multiply(x) for matrix in matrices]
            bench.add_read("own product", name, shape, time_both(launches), size)


def run_mlp(backend: Backend, norm: Tensor, x: Tensor, residual: Tensor, gate_up: Tensor, down: Tensor) -> None:
    """Run an MLP and the norm before it as a layer does, by torch's products."""
    normed, _ = backend.add_rms_norm(x, residual, norm, 1e-6)
    F.linear(backend.silu_and_mul(F.linear(normed, gate_up)), down)


def run_own_mlp(backend: Backend, norm: Tensor, x: Tensor, gate_up: FewRowsMatrix, down: FewRowsMatrix) -> None:
    """Run the same by our own products, of the sum of x and the residual. So it ends with the next sum."""
    normed = backend.rms_norm(x, norm, 1e-6)
    down.multiply(gate_up.multiply_gated(normed), None, x)


def bench_mlp(bench: Bench, name: str, backend: Backend, rows: list[int]) -> None:
    """Time an MLP with the norm before it, as a layer has it: by torch's products, and by our own.

    With dependent launches this is what our own kernel is for: it asks for its weights while a norm runs.
    """
    model = MODELS[name]
    hidden = model.hidden_size
    size = 3 * hidden * model.intermediate_size * ITEMSIZE
    norm = randn(hidden)
    shapes = (2 * model.intermediate_size, hidden), (hidden, model.intermediate_size)
    pairs = [tuple(shape[1] ** -0.5 * randn(*shape) for shape in shapes) for _ in range(num_sets(size))]
    own_pairs = [tuple(map(FewRowsMatrix, pair)) for pair in pairs]
    for num_rows in rows:
        x = randn(num_rows, hidden)
        residual = randn(num_rows, hidden)
        launches = [lambda x=x, r=residual, pair=pair: run_mlp(backend, norm, x, r, *pair) for pair in pairs]
        bench.add_read("torch mlp", name, str(num_rows), time_both(launches), size)
        launches = [lambda x=x, pair=pair: run_own_mlp(backend, norm, x, *pair) for pair in own_pairs]
        bench.add_read("own mlp", name, str(num_rows), time_both(launches), size)


def bench_sampler(bench: Bench, backend: Backend, batches: list[int]) -> None:
    """Time the sampler. Percent is of reading the logits once, which is all that sampling without a filter needs."""
    kinds = {
        "greedy": (0.0, 0, 1.0),
        "no filter": (1.0, 0, 1.0),
        "top_k 20 top_p 0.95": (0.6, 20, 0.95),  # Qwen3's generation_config.json
        "top_p 0.95": (0.6, 0, 0.95),
    }
    for batch in batches:
        size = batch * VOCAB_SIZE * ITEMSIZE
        sets = [3 * randn(batch, VOCAB_SIZE) for _ in range(num_sets(size))]
        rows = torch.arange(batch, dtype=torch.int32, device="cuda")
        positions = torch.zeros_like(rows)
        for kind, (temperature, top_k, top_p) in kinds.items():
            table = make_sampling(batch, temperature, top_k, top_p)
            launches = [lambda x=x, table=table, rows=rows: backend.sample(x, table, rows, rows) for x in sets]
            bench.add_read("sample", "", f"{batch}, {kind}", time_both(launches), size)
        launches = [lambda x=x, ids=positions: backend.token_logprobs(x, ids) for x in sets]
        bench.add_read("token_logprobs", "", str(batch), time_both(launches), size)


def bench_routing(bench: Bench) -> None:
    """Time the routing of Qwen3-30B-A3B's tokens. The floor, of reading the logits, is far below a launch's cost."""
    for num_tokens in (1, 64, 256, 512):
        size = num_tokens * 128 * ITEMSIZE
        sets = [randn(num_tokens, 128) for _ in range(num_sets(size))]
        slots = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
        launches = [lambda x=x, slots=slots: route(x, 8, True, slots) for x in sets]
        bench.add_read("route", "30B", f"{num_tokens} tokens", time_both(launches), size)


def describe() -> dict[str, str]:
    """Return machine, versions and commit, for the record."""
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backends", nargs="+", choices=["triton", "flash_attn"], help="default: all that run here")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 1024, 4096, 16384])
    parser.add_argument("--kv-cache-dtype", choices=KV_TYPES, default="auto", help="of decode attention")
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 16384], help="sizes for the small kernels")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 32], help="of the products of few rows")
    parser.add_argument("--only-products", action="store_true", help="time these products and the MLP alone")
    args = parser.parse_args()
    if max(args.rows) > MAX_ROWS:
        sys.exit(f"--rows has {max(args.rows)}, and our own product takes at most {MAX_ROWS} rows")
    if not torch.cuda.is_available():
        sys.exit("bench_kernels.py measures GPU kernels, and there is no CUDA device here (torch.cuda.is_available())")

    device = torch.device("cuda")
    backends = []
    for name in args.backends or ["triton", "flash_attn"]:
        try:
            backends.append(resolve_backend(name, Work(device, DTYPE, head_dim=128, group=2))(device))
        except ValueError as error:
            if args.backends:
                sys.exit(str(error))
            print(error)
    machine = describe()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    bench = Bench()
    rates = f"copy {bench.copy_gbs:.0f} GB/s, read {bench.read_gbs:.0f} GB/s"
    print(f"ceilings: {rates}, bf16 matmul {bench.matmul_tflops:.0f} TFLOP/s")
    for name in args.models:
        bench_products(bench, name, args.rows)
        bench_mlp(bench, name, backends[0], args.rows)
        if args.only_products:
            continue
        for backend in backends:
            bench_decode(bench, name, backend, args.batches, args.contexts, KV_TYPES[args.kv_cache_dtype])
            bench_prefill(bench, name, backend)
        for num_tokens in args.tokens:
            for kernel, times, nbytes in small_kernels(backends[0], MODELS[name], num_tokens):
                bench.add_copy(kernel, name, f"{num_tokens} tokens", times, nbytes)
    if not args.only_products:
        bench_sampler(bench, backends[0], args.batches)
        bench_routing(bench)
    ceilings = {name: round(getattr(bench, name), 1) for name in ("copy_gbs", "read_gbs", "matmul_tflops")}
    results = [asdict(result) for result in bench.results]
    for result in results:
        result.update({key: round(result[key], 2) for key in ("us", "floor_us", "percent", "dependent_us")})
    print(json.dumps({**machine, **ceilings, "results": results}))


if __name__ == "__main__":
    main()
