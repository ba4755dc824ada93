"""Measures the linear attention of Qwen3.5-0.8B's 18 layers on a CPU, beside the floor of its bytes.

    python benchmarks/bench_states.py

A decode reads and writes the state of its row, 1 MiB a layer. The floor is the time in which this machine reads and
writes as many bytes of a large tensor, in place, measured before and after. Best of seven. Projections are not a part
of it: they are products like any other.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measuring import make_inputs
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.hybrids import Operators as CpuHybridOperators

LAYERS = 18
HEADS = 16
DIM = 128
WIDTH = 4
CHANNELS = 3 * HEADS * DIM


def best_ms(work: Callable[[], object], repeat: int = 7) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return min(times)


def rewrite_rate() -> float:
    """Return the bytes a millisecond that this machine reads and writes, both counted, in place."""
    x = torch.ones(64 << 20)
    return 2 * x.nbytes / best_ms(lambda: x.mul_(1.0))


def measure(operators: CpuHybridOperators, num_seqs: int, length: int, rate: float) -> None:
    """Print a row of the table: milliseconds of all layers, by operator, and the floor of the states' bytes."""
    dtype = torch.bfloat16
    tokens = num_seqs * length
    before = 1 if length == 1 else 0
    inputs = make_inputs(num_seqs, length, before + length, torch.zeros(num_seqs, 1, dtype=torch.int32))
    states = [torch.ones(num_seqs + 1, HEADS, DIM, DIM) for _ in range(LAYERS)]
    conv = torch.zeros(num_seqs + 1, WIDTH - 1, CHANNELS, dtype=dtype)
    x = torch.randn(tokens, CHANNELS + HEADS * DIM + 2 * HEADS, generator=torch.Generator().manual_seed(0)).to(dtype)
    qkv, z, gates = x.split((CHANNELS, HEADS * DIM, 2 * HEADS), dim=1)
    weight = torch.full((WIDTH, CHANNELS), 0.25, dtype=dtype)
    ones = torch.ones(HEADS)
    mixed = operators.causal_conv(qkv, weight, conv, inputs)
    out = operators.gated_delta(mixed, gates, ones, ones, states[0], inputs)
    delta = best_ms(lambda: [operators.gated_delta(mixed, gates, ones, ones, state, inputs) for state in states])
    convolution = best_ms(lambda: [operators.causal_conv(qkv, weight, conv, inputs) for _ in states])
    norm = torch.ones(DIM, dtype=dtype)
    norms = best_ms(lambda: [operators.gated_rms_norm(out, z, norm, 1e-6) for _ in states])
    floor = 2 * LAYERS * num_seqs * states[0][0].nbytes / rate
    cells = (f"{delta:.2f}", f"{floor:.2f}", f"{convolution:.2f}", f"{norms:.2f}", f"{1000 * delta / tokens:.0f}")
    print(f"| {num_seqs} x {length} | {' | '.join(cells)} |", flush=True)


@torch.inference_mode()
def main() -> None:
    operators = CpuHybridOperators(CpuBackend())
    rate = rewrite_rate()
    print(f"{torch.get_num_threads()} threads; {rate / 1e6:.1f} GB/s read and written in place\n")
    print("| sequences x tokens | gated delta, ms | floor, ms | convolution, ms | norm, ms | us a token |")
    print("| --- |" + " --- |" * 5)
    for num_seqs, length in ((1, 1), (8, 1), (32, 1), (1, 512), (8, 64)):
        measure(operators, num_seqs, length, rate)
    print(f"\n{rewrite_rate() / 1e6:.1f} GB/s afterwards")


if __name__ == "__main__":
    main()
