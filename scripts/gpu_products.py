"""Times products by each form of quantised weights on this GPU, beside bfloat16, each after a test that it is right.

python scripts/gpu_products.py                 on a GPU
TRITON_INTERPRET=1 python scripts/gpu_products.py --check-only    the proof alone, anywhere
"""

import argparse
import json
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from helpers.kernel_cases import DEVICE, HALF
from helpers.quantized_cases import make_codes
from torch import Tensor

from benchmarks.bench_kernels import describe, microseconds, num_sets
from nanovllm.backends.gpu.quantized import TritonMatrix
from nanovllm.features.quantized.codes import Codes, InputScales

ROWS = (1, 16, 64, 128, 256, 512, 2048, 8192)
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
"""Outputs and inputs of Qwen3-8B's matrices."""

FORMS: dict[str, tuple[int, int, bool, InputScales | None]] = {
    "int8": (8, 0, False, None),
    "w8a8": (8, 0, False, InputScales.TOKEN),
    "4 bits": (4, 128, True, None),
    "8 bits in groups": (8, 128, False, None),
}
"""Bits, group size (0: a row), whether there are zeros, and how inputs are rounded."""


def make_matrix(form: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Codes, TritonMatrix]:
    """Return random codes, and the matrix that they make."""
    *numbers, input_scales = FORMS[form]
    codes = replace(make_codes(shape, *numbers), input_scales=input_scales)
    return codes, TritonMatrix(codes, dtype)


def check(form: str) -> None:
    """Compare with the dequantised product, of a size that the interpreter can compute."""
    codes, matrix = make_matrix(form, (200, 512), HALF)
    for num_rows in (1, 17, 130):
        x = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE, HALF)
        exact = x.double() @ codes.dequantize().double().T
        error = float((matrix.multiply(x, None).double() - exact).norm() / exact.norm())
        assert error < (0.005 if codes.input_scales is None else 0.015), (form, num_rows, error)


def make_products(form: str | None, shape: tuple[int, int]) -> list[Callable[[Tensor], Tensor]]:
    """Return products with matrices of one form, more than the L2 cache holds; of bfloat16 weights if there is none."""
    out_size, in_size = shape
    count = num_sets(out_size * in_size * (2 if form is None else 1))
    if form is None:
        weight = torch.randn(out_size, in_size, dtype=torch.bfloat16, device="cuda")
        return [partial(F.linear, weight=weight.clone()) for _ in range(count)]
    codes, _ = make_matrix(form, shape, torch.bfloat16)  # takes a second on the CPU
    return [partial(TritonMatrix(deepcopy(codes), torch.bfloat16).multiply, bias=None) for _ in range(count)]


def time_products(products: list[Callable[[Tensor], Tensor]], in_size: int, num_rows: int) -> float:
    """Return the microseconds of a product."""
    x = torch.randn(num_rows, in_size, dtype=torch.bfloat16, device="cuda")
    return microseconds([partial(product, x) for product in products])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), metavar="FORM", help="; ".join(FORMS))
    args = parser.parse_args()
    results: list[dict[str, object]] = []
    for form in (None, *args.forms):
        if form is not None:
            check(form)
            print(f"{form} is right", flush=True)
        for name in () if args.check_only else args.shapes:
            products = make_products(form, SHAPES[name])
            times = {num_rows: round(time_products(products, SHAPES[name][1], num_rows), 1) for num_rows in ROWS}
            results.append({"form": form or "bfloat16", "matrix": name, "us": times})
            print(f"{form or 'bfloat16'}, {name}: {times} us", flush=True)
    print(json.dumps(results if args.check_only else {"machine": describe(), "results": results}))


if __name__ == "__main__":
    main()
