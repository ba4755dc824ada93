"""The C++ kernels with AddressSanitizer and UndefinedBehaviorSanitizer in them, and a program that calls them.

    LD_PRELOAD=libasan.so python -m helpers.instrumented_kernels LIBRARY fuzz SECONDS

AddressSanitizer must be the first library of a process, so the program is a process of its own. It draws shapes and
compares each kernel with its reference. `overrun` and `misalign` in place of `fuzz` do something wrong on purpose, and
show that the sanitizers see it.
"""

import functools
import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from helpers.cpu_checks import (
    BF16,
    CPU,
    FP32,
    PLAIN,
    VARIANTS,
    alike_tolerance,
    attend_after_storing,
    make_variant,
    rounding,
)
from helpers.delta_cases import DeltaLayer, assert_delta_is_the_reference
from helpers.dynamic_checks import check_dynamic_experts, check_dynamic_products
from helpers.edit_cases import edit_case
from helpers.kernel_cases import assert_tokens_near, sample_case
from helpers.quantized_checks import FORMATS, check_quantized_experts, check_quantized_products
from nanovllm.backends.cpu import backend as cpu_backend
from nanovllm.backends.cpu import dynamic as dynamic_cpu
from nanovllm.backends.cpu import quantized as cpu_matrix
from nanovllm.backends.cpu.backend import CpuBackend, NativeMatrix
from nanovllm.backends.cpu.dynamic import DynamicLibrary
from nanovllm.backends.cpu.edit_logits import Operators as CpuEditOperators
from nanovllm.backends.cpu.experts import Operators as CpuExpertOperators
from nanovllm.backends.cpu.hybrids import Operators as CpuHybridOperators
from nanovllm.backends.cpu.library import FLAGS, PANEL, SOURCES, CpuLibrary
from nanovllm.backends.cpu.quantized import QuantizedLibrary
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.backends.torch_backend import TorchBackend
from nanovllm.features.edits.edit_logits import edit_logits_reference
from nanovllm.features.families.qwen3_moe.ops import (
    SharedOutput,
    combine_reference,
    grouped_linear_reference,
    route_reference,
)

COMPILER = os.environ.get("CXX") or "g++"
SANITIZERS = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
FAULT = 99
"""The exit status of a process in which a sanitizer found a fault."""


@functools.cache
def find_runtime() -> str | None:
    """The path of AddressSanitizer's library; None if this compiler has none."""
    if shutil.which(COMPILER) is None:
        return None
    command = [COMPILER, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return found if os.path.isabs(found) else None


def build(folder: Path) -> Path:
    """Build the libraries in a folder. Return the path of the one that every model needs."""
    flags = [flag for flag in FLAGS if flag != "-O3"]
    for kind in (QuantizedLibrary, DynamicLibrary, CpuLibrary):
        target = (folder / kind.source).with_suffix(".so")
        command = [COMPILER, *flags, *kind.flags, *SANITIZERS, str(SOURCES / kind.source), "-o", str(target)]
        subprocess.run(command, check=True)
    return target


def start(library: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run this file as a program, with an instrumented library."""
    tests = Path(__file__).parents[1]
    environment = os.environ | {
        "LD_PRELOAD": str(find_runtime()),
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FAULT}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={FAULT}",
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "helpers.instrumented_kernels", str(library), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)


# ---- the program


class Watched(CpuLibrary):
    """The instrumented kernels. A cache lies in ordinary memory, whose ends AddressSanitizer watches."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)


class Fuzzer:
    """Draws shapes, calls kernels, and compares with the references."""

    def __init__(self, library: CpuLibrary, seed: int) -> None:
        self.library = library
        self.draw = random.Random(seed)
        self.draw_quantized = random.Random(seed)  # so the other checks draw what they drew before there was this one
        self.backend = CpuBackend()
        self.reference = TorchBackend()

    def draw_tensor(self, *shape: int, dtype: torch.dtype = FP32, scale: float = 1.0) -> Tensor:
        generator = torch.Generator().manual_seed(self.draw.randrange(2**40))
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    def check_products(self, dtype: torch.dtype) -> None:
        rows = self.draw.choice([0, 1, 2, self.draw.randrange(3, 40), self.draw.randrange(40, 300)])
        size = 2 * self.draw.randrange(1, 120)
        num_columns = self.draw.randrange(1, 200)
        weight = self.draw_tensor(num_columns, size, dtype=dtype)
        bias = self.draw.choice([None, self.draw_tensor(num_columns, dtype=dtype)])
        x = self.draw_tensor(rows, size, dtype=dtype)
        matrix = NativeMatrix(self.library, weight.clone(), Scratch(), in_place=self.draw.random() < 0.5)
        found = matrix.multiply(x, bias).double()
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(found, expected, rtol=rounding(dtype), atol=rounding(dtype) * size**0.5)
        chosen = torch.tensor([self.draw.randrange(num_columns) for _ in range(rows)], dtype=torch.int64)
        assert torch.equal(matrix.rows(chosen), weight[chosen])

    def check_rows(self, dtype: torch.dtype) -> None:
        """Norms and activations."""
        rows = self.draw.randrange(0, 40)
        size = 16 * self.draw.randrange(1, 40)
        x, residual = (self.draw_tensor(rows, size, dtype=dtype, scale=3) for _ in range(2))
        weight = self.draw_tensor(size, dtype=dtype)
        close = {"rtol": rounding(dtype), "atol": 4 * rounding(dtype)}
        torch.testing.assert_close(
            self.backend.rms_norm(x, weight, 1e-6), self.reference.rms_norm(x, weight, 1e-6), **close
        )
        found, expected = (side.add_rms_norm(x, residual, weight, 1e-6) for side in (self.backend, self.reference))
        torch.testing.assert_close(found[0], expected[0], **close)
        assert torch.equal(found[1], expected[1])
        gate_up = self.draw_tensor(rows, 2 * size, dtype=dtype, scale=30)
        torch.testing.assert_close(
            self.backend.silu_and_mul(gate_up), self.reference.silu_and_mul(gate_up), rtol=close["rtol"], atol=1e-2
        )

    def check_attention(self, dtype: torch.dtype) -> None:
        """Storing and attending, with lengths around the edges of blocks."""
        block_size = 2 ** self.draw.randrange(4, 8)
        shape = (32 * self.draw.randrange(1, 9), self.draw.randrange(1, 49), block_size)
        query_lens = []
        seq_lens = []
        for _ in range(self.draw.randrange(1, 5)):
            edge = block_size * self.draw.randrange(0, 3) + self.draw.randrange(-1, 2)
            prefix = max(0, self.draw.choice([edge, self.draw.randrange(200)]))
            query_lens.append(self.draw.choice([1, 1, self.draw.randrange(1, 30)]))
            seq_lens.append(prefix + query_lens[-1])
        if sum(seq_lens) < 8:  # the helper stores the first seven tokens apart
            seq_lens[0] += 8
        kv_dtype = self.draw.choice([dtype, torch.int8])
        variant = make_variant(self.draw.choice([PLAIN, *VARIANTS]), 2 * shape[1])
        found, expected = (
            attend_after_storing(side, query_lens, seq_lens, shape, dtype, kv_dtype, variant)
            for side in (self.backend, self.reference)
        )
        torch.testing.assert_close(found, expected, atol=alike_tolerance(dtype, kv_dtype), rtol=0)

    def check_experts(self, dtype: torch.dtype) -> None:
        tokens = self.draw.choice([0, 1, self.draw.randrange(2, 90)])
        num_experts = self.draw.randrange(1, 70)
        k = self.draw.randrange(1, min(num_experts, 9) + 1)
        logits = self.draw_tensor(tokens, num_experts + 1, dtype=dtype, scale=8)
        logits, gate = logits.split([num_experts, 1], dim=1)
        slots = torch.arange(tokens)
        slots[tokens // 2 :] -= self.draw.choice([0, tokens])  # padding has the slot -1 or less
        normalize = self.draw.random() < 0.5
        operators = CpuExpertOperators(self.backend)
        routing = operators.route(logits, k, normalize, slots)
        expected = route_reference(logits, k, normalize, slots)
        assert torch.equal(routing.offsets, expected.offsets)
        size = 2 * self.draw.randrange(1, 60)
        num_columns = PANEL * self.draw.randrange(1, 4)
        weight = self.draw_tensor(num_experts, num_columns, size, dtype=dtype)
        packed = weight.clone()
        for matrix in packed:
            self.library.pack(matrix, in_place=True)
        x = self.draw_tensor(tokens, size, dtype=dtype)
        num_routed = int(routing.offsets[-1])
        product = operators.grouped_linear(x, packed, routing, gather=True)
        plain = grouped_linear_reference(x, weight, routing, gather=True)
        close = {"rtol": rounding(dtype), "atol": 2 * rounding(dtype) * size**0.5}
        torch.testing.assert_close(product[:num_routed], plain[:num_routed], **close)
        product.nan_to_num_(0.0, 0.0, 0.0)
        shared = SharedOutput(self.draw_tensor(tokens, num_columns, dtype=dtype), gate)
        for given in (None, shared):
            combined, plain = (combine(product, routing, given) for combine in (operators.combine, combine_reference))
            torch.testing.assert_close(combined, plain, rtol=rounding(dtype), atol=k * rounding(dtype) * size**0.5)

    def check_quantized(self, dtype: torch.dtype) -> None:
        draw = self.draw_quantized
        name = draw.choice(list(FORMATS))
        check_quantized_products(name, dtype, 2 * draw.randrange(1, 330), draw.randrange(1, 140))
        check_quantized_experts(name, dtype, 2 * draw.randrange(1, 60), draw.randrange(1, 70))

    def check_dynamic(self, dtype: torch.dtype) -> None:
        draw = self.draw_quantized
        rows = (1, draw.randrange(2, 13), draw.randrange(13, 280))
        check_dynamic_products(draw.randrange(1, 700), draw.randrange(1, 140), dtype, rows, draw.randrange(2**30))
        check_dynamic_experts(draw.randrange(1, 300), draw.randrange(1, 70), dtype, draw.randrange(2**30))

    def check_linear_attention(self, dtype: torch.dtype) -> None:
        group = self.draw.randrange(1, 4)
        key_heads = self.draw.randrange(1, 4)
        dims = (16 * self.draw.randrange(1, 9), 16 * self.draw.randrange(1, 9))
        layer = DeltaLayer(key_heads, group * key_heads, *dims, self.draw.randrange(1, 9), dtype)
        sequences = self.draw.randrange(1, 5)
        lens = [0, 1, 1, 2, 3, self.draw.randrange(4, 60)]
        steps = [[self.draw.choice(lens) for _ in range(sequences)] for _ in range(3)]
        operators = CpuHybridOperators(self.backend)
        assert_delta_is_the_reference(layer, operators, [s for s in steps if any(s)], 4 * rounding(dtype))

    def check_sampling(self, dtype: torch.dtype) -> None:
        vocab_size = self.draw.choice([1, 2, 17, self.draw.randrange(3, 200), self.draw.randrange(200, 9000)])
        seed = self.draw.randrange(2**30)
        case = sample_case(vocab_size, dtype, ties=self.draw.random() < 0.5, device=CPU, seed=seed)
        assert_tokens_near(case, self.backend.sample(*case.arguments()))
        logits, edits = edit_case(max(vocab_size, 6), seed)
        expected = logits.clone()
        CpuEditOperators(self.backend).edit_logits(logits, edits)
        edit_logits_reference(expected, edits)
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6, equal_nan=True)

    def run(self, seconds: float) -> dict[str, int]:
        """Call each kernel in turn until the time is over. Returns how often."""
        checks: list[Callable[[torch.dtype], None]] = [
            self.check_products,
            self.check_rows,
            self.check_attention,
            self.check_experts,
            self.check_quantized,
            self.check_dynamic,
            self.check_linear_attention,
            self.check_sampling,
        ]
        counts = {check.__name__: 0 for check in checks}
        deadline = time.monotonic() + seconds
        for check, dtype in itertools.cycle(itertools.product(checks, (BF16, FP32))):
            if time.monotonic() > deadline and min(counts.values()) > 1:
                return counts
            state = self.draw.getstate()
            try:
                check(dtype)
            except Exception as error:
                self.draw.setstate(state)
                raise AssertionError(f"{check.__name__} {dtype}, after {counts}") from error
            counts[check.__name__] += 1
        raise AssertionError("a cycle has no end")


def main(path: str, task: str, seconds: str = "1", seed: str = "0") -> None:
    library = Watched(Path(path))
    quantized = QuantizedLibrary(Path(path).with_name("quantized.so"))
    dynamic = DynamicLibrary(Path(path).with_name("dynamic.so"))
    maps = Path("/proc/self/maps").read_text()
    assert path in maps and "libasan" in maps, "the instrumented library is not the one in use"
    print(f"loaded {path}", flush=True)
    x = torch.ones(2, 64)
    if task == "overrun":
        library.call("silu_and_mul", FP32, x, torch.empty(2 * 32 - 1), 2, 32)
    elif task == "misalign":
        logits, edits = edit_case(10)
        library.call("edit_logits", FP32, logits, edits.indices.data_ptr() + 1, *edits[1:], 1, 10)
    else:
        cpu_backend.cpu_library = lambda: library  # type: ignore[assignment]
        cpu_matrix.cpu_library = lambda: library  # type: ignore[assignment]
        cpu_matrix.quantized_library = lambda: quantized  # type: ignore[assignment]
        dynamic_cpu.cpu_library = lambda: library  # type: ignore[assignment]
        dynamic_cpu.dynamic_library = lambda: dynamic  # type: ignore[assignment]
        print(Fuzzer(library, int(seed)).run(float(seconds)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
