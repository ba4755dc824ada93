"""How near our kernels come to what this GPU can do: attention, the fused small kernels, the sampler.

Every figure stands beside a ceiling measured in the same run: bytes against a large copy, FLOP against a large bfloat16
matmul. Launches are captured in CUDA graphs, as in the engine, and go round several sets of tensors, together larger
than the L2 cache, so that it does not flatter. The last line of the output is one JSON document.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import commit
from nanovllm.backends import AttentionMetadata, Backend
from nanovllm.kernels.norm_rope_store import NormRope
from nanovllm.kernels.sample import SamplingValues
from nanovllm.resolve import Work, resolve_backend

DTYPE = torch.bfloat16
ITEMSIZE = 2
VOCAB_SIZE = 151_936


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
        us, percent: how long the call took, and the floor's share of it.
    """

    kernel: str
    model: str
    shape: str
    amount: float
    unit: str
    floor_us: float
    us: float
    percent: float


def microseconds(launches: list[Callable[[], object]], before: Callable[[], None] | None = None) -> float:
    """Time of one launch: a graph of all of them (at least 24, going round), the median of ten replays.

    Args:
        before: captured once, ahead of them; its time is part of theirs, as it is in a step of 24 layers.
    """
    rounds = -(-24 // len(launches))

    def step() -> None:
        if before is not None:
            before()
        for launch in launches * rounds:
            launch()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles, and warms the allocator
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (len(launches) * rounds))
    return float(np.median(times[2:]))


def num_sets(nbytes: int) -> int:
    """How many sets of so many bytes are four times the L2 cache, within a quarter of the free memory."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(-(-4 * l2 // nbytes), 64, free // 4 // nbytes))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device="cuda")


class Bench:
    """The ceilings, measured at the start, and the results as they come."""

    def __init__(self) -> None:
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        copy = torch.empty_like(source)
        self.copy_gbs = 2 * source.numel() / microseconds([lambda: copy.copy_(source)]) / 1e3
        a, b = randn(8192, 8192), randn(8192, 8192)
        self.matmul_tflops = 2 * 8192**3 / microseconds([lambda: torch.mm(a, b)]) / 1e6
        self.results: list[Result] = []

    def bytes(self, kernel: str, model: str, shape: str, us: float, nbytes: float) -> None:
        self._add(kernel, model, shape, us, nbytes, "bytes", nbytes / self.copy_gbs / 1e3)

    def flops(self, kernel: str, model: str, shape: str, us: float, flop: float) -> None:
        self._add(kernel, model, shape, us, flop, "FLOP", flop / self.matmul_tflops / 1e6)

    def _add(self, kernel: str, model: str, shape: str, us: float, amount: float, unit: str, floor_us: float) -> None:
        self.results.append(Result(kernel, model, shape, amount, unit, floor_us, us, 100 * floor_us / us))
        print(
            f"{kernel:18} {model:5} {shape:22} {amount / 1e6:12.1f} M{unit:5} floor {floor_us:9.1f} us, "
            f"took {us:9.1f} us: {100 * floor_us / us:5.1f} %"
        )


def metadata_of(num_seqs: int, query_len: int, seq_len: int, block_size: int, num_blocks: int) -> AttentionMetadata:
    """num_seqs equal sequences in shuffled blocks."""
    per_seq = -(-seq_len // block_size)
    tables = torch.randperm(num_blocks, device="cuda")[: num_seqs * per_seq].view(num_seqs, per_seq).int()
    query_lens = np.full(num_seqs, query_len, np.int32)
    return AttentionMetadata(
        num_decodes=num_seqs if query_len == 1 else 0,
        cu_seqlens_q=torch.arange(0, num_seqs * query_len + 1, query_len, dtype=torch.int32, device="cuda"),
        seq_lens=torch.full((num_seqs,), seq_len, dtype=torch.int32, device="cuda"),
        block_tables=tables,
        slot_mapping=torch.full((num_seqs * query_len,), -1, device="cuda"),
        query_lens_cpu=query_lens,
        seq_lens_cpu=np.full(num_seqs, seq_len, np.int32),
    )


def time_attention(backend: Backend, model: Model, num_seqs: int, query_len: int, seq_len: int) -> tuple[float, int]:
    """Microseconds a layer, and the bytes of K and V that it reads."""
    block_size = backend.default_block_size
    num_blocks = num_seqs * -(-seq_len // block_size)
    shape = (num_blocks, block_size, model.num_kv_heads, model.head_dim)
    read = 2 * num_seqs * seq_len * model.num_kv_heads * model.head_dim * ITEMSIZE
    caches = [backend.allocate_cache(shape, DTYPE, torch.device("cuda")) for _ in range(num_sets(read))]
    for cache in caches:
        for side in cache:
            side.normal_()
    metadata = metadata_of(num_seqs, query_len, seq_len, block_size, num_blocks)
    q = randn(num_seqs * query_len, model.num_heads, model.head_dim)
    scale = model.head_dim**-0.5
    metadata_of_step = backend.prepare_attention(metadata, caches[0], model.num_heads)
    launches = [lambda cache=cache: backend.attend(q, cache, metadata_of_step, scale) for cache in caches]
    return microseconds(launches, before=lambda: backend.prepare_attention(metadata, caches[0], model.num_heads)), read


def bench_decode(bench: Bench, name: str, backend: Backend, batches: list[int], contexts: list[int]) -> None:
    model = MODELS[name]
    for context in contexts:
        for batch in batches:
            shape = f"{batch} x {context}"
            needed = 2 * batch * context * model.num_kv_heads * model.head_dim * ITEMSIZE
            torch.cuda.empty_cache()
            if needed > torch.cuda.mem_get_info()[0] // 2:
                print(f"{backend.name + ' decode':24} {name:5} {shape:24} skipped: {needed / 2**30:.0f} GiB do not fit")
                continue
            us, read = time_attention(backend, model, batch, 1, context)
            q_and_out = 2 * batch * model.num_heads * model.head_dim * ITEMSIZE
            bench.bytes(f"{backend.name} decode", name, shape, us, read + q_and_out)


def bench_prefill(bench: Bench, name: str, backend: Backend) -> None:
    model = MODELS[name]
    for shape, (num_seqs, new, prefix) in PREFILLS.items():
        us, _ = time_attention(backend, model, num_seqs, new, prefix + new)
        pairs = num_seqs * (new * prefix + new * (new + 1) / 2)  # of a query and a key that it sees
        bench.flops(f"{backend.name} prefill", name, shape, us, 4 * pairs * model.num_heads * model.head_dim)


def small_kernels(backend: Backend, model: Model, num_tokens: int) -> Iterator[tuple[str, float, int]]:
    """(name, microseconds, bytes read and written) of each."""
    hidden, head_dim = model.hidden_size, model.head_dim
    heads = model.num_heads + 2 * model.num_kv_heads
    weight, head_weight = randn(hidden), randn(head_dim)
    row = num_tokens * hidden * ITEMSIZE

    rows = [(randn(num_tokens, hidden), randn(num_tokens, hidden)) for _ in range(num_sets(2 * row))]
    yield "rms_norm", microseconds([lambda x=x: backend.rms_norm(x, weight, 1e-6) for x, _ in rows]), 2 * row
    launches = [lambda x=x, r=r: backend.add_rms_norm(x, r, weight, 1e-6) for x, r in rows]
    yield "add_rms_norm", microseconds(launches), 4 * row

    size = 2 * num_tokens * model.intermediate_size * ITEMSIZE
    pairs = [randn(num_tokens, 2 * model.intermediate_size) for _ in range(num_sets(size))]
    yield "silu_and_mul", microseconds([lambda x=x: backend.silu_and_mul(x) for x in pairs]), size * 3 // 2
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
    yield "norm_rope_store", microseconds(launches), 2 * size + num_tokens * head_dim * 4


def bench_sampler(bench: Bench, backend: Backend, batches: list[int]) -> None:
    """Percent is of reading the logits once: what sampling without a filter does."""
    kinds = {
        "greedy": (0.0, 0, 1.0),
        "no filter": (1.0, 0, 1.0),
        "top_k 20 top_p 0.95": (0.6, 20, 0.95),  # Qwen3's generation_config.json
        "top_p 0.95": (0.6, 0, 0.95),
    }
    for batch in batches:
        size = batch * VOCAB_SIZE * ITEMSIZE
        sets = [3 * randn(batch, VOCAB_SIZE) for _ in range(num_sets(size))]
        seeds, positions = torch.arange(batch, device="cuda"), torch.zeros(batch, dtype=torch.int32, device="cuda")
        for kind, (temperature, top_k, top_p) in kinds.items():
            values = SamplingValues(
                torch.full((batch,), temperature, device="cuda"),
                torch.full((batch,), top_k, dtype=torch.int32, device="cuda"),
                torch.full((batch,), top_p, device="cuda"),
                torch.zeros(batch, device="cuda"),
                seeds,
                positions,
            )
            launches = [lambda x=x, v=values: backend.sample(x, v) for x in sets]
            bench.bytes("sample", "", f"{batch}, {kind}", microseconds(launches), size)


def describe() -> dict[str, str]:
    """Machine, versions and commit, for the record."""
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
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 16384], help="sizes for the small kernels")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels.py measures GPU kernels, and there is no CUDA device here (torch.cuda.is_available())")

    device = torch.device("cuda")
    backends = []
    for name in args.backends or ["triton", "flash_attn"]:
        try:
            backends.append(resolve_backend(name, Work(device, DTYPE, head_dim=128, group=2))())
        except ValueError as error:
            if args.backends:
                sys.exit(str(error))
            print(error)
    machine = describe()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    bench = Bench()
    print(f"ceilings: copy {bench.copy_gbs:.0f} GB/s, bf16 matmul {bench.matmul_tflops:.0f} TFLOP/s")
    for name in args.models:
        for backend in backends:
            bench_decode(bench, name, backend, args.batches, args.contexts)
            bench_prefill(bench, name, backend)
        for num_tokens in args.tokens:
            for kernel, us, nbytes in small_kernels(backends[0], MODELS[name], num_tokens):
                bench.bytes(kernel, name, f"{num_tokens} tokens", us, nbytes)
    bench_sampler(bench, backends[0], args.batches)
    ceilings = {"copy_gbs": round(bench.copy_gbs, 1), "matmul_tflops": round(bench.matmul_tflops, 1)}
    results = [asdict(result) for result in bench.results]
    for result in results:
        result.update({key: round(result[key], 2) for key in ("us", "floor_us", "percent")})
    print(json.dumps({**machine, **ceilings, "results": results}))


if __name__ == "__main__":
    main()
