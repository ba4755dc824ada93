"""Times the configurations of the split, the filter and products of few rows on this GPU, each after a test that it is
right.

python scripts/gpu_sweep.py                 on a GPU
TRITON_INTERPRET=1 python scripts/gpu_sweep.py --check-only    the proof alone, anywhere
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from helpers.kernel_cases import assert_attends, assert_same_tokens, attention_case, attention_tolerance, sample_case

from benchmarks.bench_kernels import (
    DTYPE,
    MODELS,
    VOCAB_SIZE,
    Bench,
    list_products,
    make_sampling,
    make_weights,
    microseconds,
    num_sets,
    randn,
    time_attention,
)
from nanovllm.backends.gpu import few_rows, paged_decode, sample_filter
from nanovllm.backends.gpu.few_rows import FewRowsMatrix
from nanovllm.backends.gpu.sample import sample
from nanovllm.backends.gpu.triton_backend import TritonBackend
from nanovllm.ops.silu_and_mul import silu_and_mul_reference

# (keys in a tile, warps, stages): those that compile for sm_90 without a spill; then programs of a multiprocessor.
# AHEAD is timed with those that the engine uses.
SPLITS = [(64, 4, 3), (64, 8, 3), (32, 4, 4), (32, 4, 3), (64, 4, 4)]
CODE_SPLITS = [(128, 4, 3), (64, 4, 3), (128, 4, 2), (128, 8, 2), (128, 8, 3)]
AT_ONCE = [3, 2, 4, 6]
CUTS = [
    (32, 6, 128, 4),
    (32, 6, 128, 0),
    (32, 6, 128, 8),
    (32, 6, 264, 4),
    (16, 6, 128, 4),
    (64, 4, 128, 4),
    (32, 4, 128, 4),
]
"""Products of few rows: (columns of a tile, stages, least programs, steps that are asked for ahead)."""
FILTERS = [(4, 64, 16), (4, 32, 16), (4, 32, 8), (8, 32, 16)]
"""(marks, parts at a time, warps)."""


@contextmanager
def use_split(tile: int, warps: int, stages: int, at_once: int, ahead: bool) -> Iterator[None]:
    usual = paged_decode.split_config

    def config(*arguments: int) -> dict[str, int]:
        registers = (1 << 16) // (32 * warps * at_once) // 8 * 8
        changed = {"num_warps": warps, "num_stages": stages, "maxnreg": min(max(registers, 64), 248)}
        changed["AHEAD"] = ahead
        return {**usual(*arguments), **changed}

    with ExitStack() as changes:
        changes.enter_context(mock.patch.object(paged_decode, "key_tile", lambda *sizes: tile))
        changes.enter_context(mock.patch.object(paged_decode, "split_config", config))
        changes.enter_context(mock.patch.object(paged_decode, "programs_at_once", lambda *arguments: at_once))
        yield


@contextmanager
def use_filter(marks: int, parts: int, warps: int) -> Iterator[None]:
    usual = sample_filter.filter_config

    def config(*arguments: object) -> dict[str, int]:
        return {**usual(*arguments), "MARKS": marks, "PARTS": parts, "num_warps": warps}

    with mock.patch.object(sample_filter, "filter_config", config):
        yield


@contextmanager
def use_cut(columns: int, stages: int, programs: int, ahead: int) -> Iterator[None]:
    usual = few_rows.few_rows_config

    def config(cut: few_rows.Cut, *flags: bool) -> dict[str, int]:
        return {**usual(cut, *flags), "AHEAD": ahead}

    with ExitStack() as changes:
        changes.enter_context(mock.patch.object(few_rows, "choose_columns", lambda out_size: (columns, stages)))
        changes.enter_context(mock.patch.object(few_rows, "MIN_PROGRAMS", programs))
        changes.enter_context(mock.patch.object(few_rows, "few_rows_config", config))
        yield


def check_cut(on_gpu: bool) -> None:
    """Compare sums in one part and in several with torch's, and with what follows them."""
    for out_size, in_size in ((200, 1024), (6144, 256)):
        weight = (in_size**-0.5 * torch.randn(out_size, in_size)).to(DTYPE if on_gpu else torch.float16)
        weight = weight.to("cuda" if on_gpu else "cpu")
        x = torch.randn(5, in_size).to(weight)
        residual = torch.randn(5, out_size).to(weight)
        matrix = FewRowsMatrix(weight)
        product = F.linear(x.float(), weight.float())
        eps = torch.finfo(weight.dtype).eps
        for found, expected in (
            (matrix.multiply(x, None, residual), product + residual.float()),
            (matrix.multiply_gated(x), silu_and_mul_reference(product)),
        ):
            torch.testing.assert_close(found.float(), expected, rtol=4 * eps, atol=4 * eps)


def time_products(name: str, num_rows: int) -> dict[str, float]:
    """Return the microseconds of each product of a model in a graph of such products, with dependent launches."""
    times = {}
    for product_name, (out_size, in_size) in list_products(MODELS[name]).items():
        x = randn(num_rows, in_size)
        matrices = [FewRowsMatrix(weight) for weight in make_weights(out_size, in_size)]
        times[product_name] = microseconds([lambda x=x, matrix=matrix: matrix.multiply(x) for matrix in matrices])
    return times


def check_split(on_gpu: bool, kv_dtype: torch.dtype) -> None:
    dtype = DTYPE if on_gpu else torch.float16
    stored = dtype if kv_dtype == DTYPE else kv_dtype
    case = attention_case([1] * 5, [1, 63, 500, 0, 2100], 128, 2, 128, dtype, kv_dtype=stored)
    assert_attends(case, TritonBackend(), attention_tolerance(dtype))


def list_splits() -> Iterator[tuple[torch.dtype, tuple[int, int, int], int, bool]]:
    """Yield the type of the cache, the configuration, how many programs a multiprocessor runs at once, and AHEAD."""
    yield DTYPE, SPLITS[0], AT_ONCE[0], True
    for split, at_once in product(SPLITS, AT_ONCE):
        yield DTYPE, split, at_once, False
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        yield kv_dtype, CODE_SPLITS[1], AT_ONCE[0], True
        for split, at_once in product(CODE_SPLITS, AT_ONCE[:2]):
            yield kv_dtype, split, at_once, False


def check_filter(on_gpu: bool) -> None:
    case = sample_case(VOCAB_SIZE if on_gpu else 9000, DTYPE)
    assert_same_tokens(case, sample(*case.arguments()))


def time_filter(top_k: int, top_p: float) -> float:
    """Return the microseconds of the whole sampler for 256 rows."""
    batch = 256
    table = make_sampling(batch, 0.6, top_k, top_p)
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    sets = [3 * randn(batch, VOCAB_SIZE) for _ in range(num_sets(batch * VOCAB_SIZE * 2))]
    return microseconds([lambda x=x: sample(x, table, rows, rows) for x in sets])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--only-products", action="store_true", help="products of few rows alone")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    results: list[dict[str, object]] = []
    if not args.check_only:
        bench = Bench()
        print(f"read {bench.read_gbs:.0f} GB/s")
    for columns, stages, programs, ahead in CUTS:
        with use_cut(columns, stages, programs, ahead):
            check_cut(on_gpu)
            for name, num_rows in () if args.check_only else product(MODELS, (1, 32)):
                config = f"columns {columns} stages {stages} programs {programs} ahead {ahead}"
                for product_name, us in time_products(name, num_rows).items():
                    name_of_all = f"product {config}, {name} {product_name} x {num_rows}"
                    results.append({"name": name_of_all, "us": round(us, 1)})
                    print(f"{name_of_all}: {us:.1f} us", flush=True)
    for kv_dtype, (tile, warps, stages), at_once, ahead in () if args.only_products else list_splits():
        with use_split(tile, warps, stages, at_once, ahead):
            check_split(on_gpu, kv_dtype)
            for batch, context in () if args.check_only else ((1, 1024), (1, 16384), (64, 1024), (256, 1024)):
                (us, _), read = time_attention(TritonBackend(), MODELS["0.6B"], batch, 1, context, kv_dtype)
                percent = round(100 * read / us / 1e3 / bench.read_gbs, 1)
                config = f"tile {tile} warps {warps} stages {stages} at once {at_once}{' ahead' * ahead}"
                name = f"split {kv_dtype} {config}, {batch} x {context}"
                results.append({"name": name, "us": round(us, 1), "percent": percent})
                print(f"{name}: {us:.1f} us, {percent} %", flush=True)
    for marks, parts, warps in () if args.only_products else FILTERS:
        with use_filter(marks, parts, warps):
            check_filter(on_gpu)
            for top_k, top_p in () if args.check_only else ((0, 1.0), (20, 0.95), (0, 0.95)):
                us = time_filter(top_k, top_p)
                name = f"sample marks {marks} parts {parts} warps {warps}, top_k {top_k} top_p {top_p}"
                results.append({"name": name, "us": round(us, 1)})
                print(f"{name}: {us:.1f} us", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
