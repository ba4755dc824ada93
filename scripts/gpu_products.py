"""Times products by each form of quantised weights on this GPU, beside bfloat16, each after a test that it is right.

python scripts/gpu_products.py                 on a GPU
TRITON_INTERPRET=1 python scripts/gpu_products.py --check-only    the proof alone, anywhere
"""

import argparse
import json
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from helpers.kernel_cases import DEVICE, HALF
from helpers.quantized_cases import make_codes, make_floats
from torch import Tensor

from benchmarks.bench_kernels import describe, microseconds, num_sets
from nanovllm.backends.gpu.quantized import Operators, PairedTritonMatrix, TritonMatrix
from nanovllm.backends.gpu.triton_backend import TritonBackend
from nanovllm.features.quantized.codes import Codes
from nanovllm.features.quantized.formats import InputScales

ROWS = (1, 16, 64, 128, 256, 512, 2048, 8192)
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
"""Outputs and inputs of Qwen3-8B's matrices."""

exact = partial(Operators(TritonBackend()).make_matrix, input_scales=None)
rounded = partial(Operators(TritonBackend()).make_matrix, input_scales=InputScales.GROUP)
rounded_by_token = partial(Operators(TritonBackend()).make_matrix, input_scales=InputScales.TOKEN)


def copied(codes: Codes, dtype: torch.dtype) -> TritonMatrix:
    """Return a matrix with a copy of 16 bits, which takes the place of dequantising in each product of many rows."""
    matrix = TritonMatrix(codes, dtype)
    matrix.keep_copy()
    return matrix


FORMS: dict[str, tuple[Callable[[tuple[int, int]], Codes], Callable[..., Any]]] = {
    "int8": (lambda shape: make_codes(shape, 8, 0, False), exact),
    "int8 in pairs": (lambda shape: make_codes(shape, 8, 0, False), PairedTritonMatrix),
    "int8 with a copy": (lambda shape: make_codes(shape, 8, 0, False), copied),
    "int8-dynamic": (lambda shape: make_codes(shape, 8, 0, False), rounded),
    "w8a8": (lambda shape: make_codes(shape, 8, 0, False), rounded_by_token),
    "4 bits": (lambda shape: make_codes(shape, 4, 128, True), exact),
    "4 bits in pairs": (lambda shape: make_codes(shape, 4, 128, True), PairedTritonMatrix),
    "4 bits, int8-dynamic": (lambda shape: make_codes(shape, 4, 128, True), rounded),
    "fp8-codes, blocks": (lambda shape: make_floats(shape, 128), exact),
    "fp8-codes, rows": (lambda shape: make_floats(shape, 0), exact),
    "fp8 by fp8, blocks": (lambda shape: make_floats(shape, 128), rounded),
}
"""A function that makes the codes of a matrix, and one that makes the matrix of codes and a dtype."""


def check(form: str) -> None:
    """Compare with the dequantised product, of a size that the interpreter can compute."""
    make, make_matrix = FORMS[form]
    codes = make((200, 512))
    multiply = make_matrix(codes, HALF).multiply
    for num_rows in (1, 17, 130):
        x = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE, HALF)
        exact = x.double() @ codes.dequantize().double().T
        error = float((multiply(x, None).double() - exact).norm() / exact.norm())
        bound = 0.05 if codes.has_floats else 0.015
        assert error < (bound if make_matrix in (rounded, rounded_by_token) else 0.005), (form, num_rows, error)


def make_products(form: str | None, shape: tuple[int, int]) -> list[Callable[[Tensor], Tensor]]:
    """Return products with matrices of one form, more than the L2 cache holds; of bfloat16 weights if there is none."""
    out_size, in_size = shape
    count = num_sets(out_size * in_size * (2 if form is None else 1))
    if form is None:
        weight = torch.randn(out_size, in_size, dtype=torch.bfloat16, device="cuda")
        return [partial(F.linear, weight=weight.clone()) for _ in range(count)]
    make, make_matrix = FORMS[form]
    codes = make(shape)  # takes a second on the CPU
    return [partial(make_matrix(deepcopy(codes), torch.bfloat16).multiply, bias=None) for _ in range(count)]


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
    on_gpu = torch.cuda.is_available()
    results: list[dict[str, object]] = []
    lacks_fp8 = on_gpu and torch.cuda.get_device_capability() < (8, 9)
    for form in (None, *(form for form in args.forms if form != "fp8 by fp8, blocks" or not lacks_fp8)):
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
