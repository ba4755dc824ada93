"""Times the configurations of the split, the filter and products on this GPU, each after a test that it is right.

python scripts/gpu_sweep.py                 on a GPU
python scripts/gpu_sweep.py --only codes
TRITON_INTERPRET=1 python scripts/gpu_sweep.py --check-only    the proof alone, anywhere
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from helpers.kernel_cases import assert_attends, assert_same_tokens, attention_case, attention_tolerance, sample_case
from helpers.quantized_cases import make_codes

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
from nanovllm.backends.gpu import product as products
from nanovllm.backends.gpu.few_rows import FewRowsMatrix
from nanovllm.backends.gpu.product import Tile
from nanovllm.backends.gpu.quantized import TritonMatrix
from nanovllm.backends.gpu.sample import sample
from nanovllm.backends.gpu.triton_backend import TritonBackend
from nanovllm.features.families.qwen3_moe.ops import route_reference
from nanovllm.features.quantized.codes import Codes, InputScales, Scales
from nanovllm.features.quantized.torch_matrix import TorchMatrix
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
CODES_TILES = [
    Tile(16, 32, 6, 4),
    Tile(16, 64, 4, 4),
    Tile(64, 64, 3, 4),
    Tile(64, 128, 3, 8),
    Tile(128, 64, 3, 8),
    Tile(128, 128, 3, 8),
]
"""Tiles of products by codes, those of the engine first of each height."""
ROUNDED_TILES = [
    Tile(16, 64, 5, 4, 3),
    Tile(16, 32, 6, 4, 3),
    Tile(16, 64, 5, 4, 6),
    Tile(64, 128, 4, 4, 2),
    Tile(64, 64, 4, 4, 2),
    Tile(64, 128, 4, 4, 1),
    Tile(128, 128, 3, 8, 1),
    Tile(128, 128, 3, 8, 2),
    Tile(128, 256, 3, 8, 1),
]
"""The same of w8a8."""
EXPERT_TILES = [Tile(16, 64, 3, 4), Tile(16, 128, 3, 4), Tile(32, 64, 3, 4), Tile(64, 128, 3, 8), Tile(128, 64, 3, 8)]
"""The same of experts by codes."""
EXPERTS = (128, 8, 2048, 1536)
"""Experts of Qwen3-30B-A3B, how many a token has, and the inputs and outputs of their first product."""
MOST_ROWS = 2**16
"""More rows than any product here has. A matrix of codes keeps a count for each tile of so many."""
FORMS = {"int8": (8, 0, False), "4 bits": (4, 128, True)}
"""Bits, group size, whether there are zeros."""
MATRICES = {"gate_up": (24576, 4096), "down": (4096, 12288), "qkv": (6144, 4096)}
"""(outputs, inputs) of Qwen3-8B's matrices."""
ROWS = (1, 16, 64, 128, 192, 512)


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
    for out_size, in_size in ((200, 1024), (6144 if on_gpu else 600, 256)):
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


def time_few_rows(name: str, num_rows: int) -> dict[str, float]:
    """Return the microseconds of each product of a model in a graph of such products, with dependent launches."""
    times = {}
    for product_name, (out_size, in_size) in list_products(MODELS[name]).items():
        x = randn(num_rows, in_size)
        matrices = [FewRowsMatrix(weight) for weight in make_weights(out_size, in_size)]
        times[product_name] = microseconds([lambda x=x, matrix=matrix: matrix.multiply(x) for matrix in matrices])
    return times


@contextmanager
def use_tile(tiles: str, tile: Tile) -> Iterator[None]:
    """Take one tile for any number of rows, or of tokens.

    Args:
        tiles: the name of those in product.py that it takes the place of.
    """
    with mock.patch.object(products, tiles, ((MOST_ROWS, tile),)):
        yield


def check_matrix(on_gpu: bool, form: tuple[int, int, bool]) -> None:
    """Compare with the dequantised matrix."""
    dtype = DTYPE if on_gpu else torch.float16
    codes = make_codes((200, 1152), *form)
    x = torch.randn(70, 1152).to(codes.codes.device, dtype)
    eps = torch.finfo(dtype).eps
    found = TritonMatrix(codes, dtype).multiply(x, None)
    expected = x.float() @ codes.dequantize().T
    torch.testing.assert_close(found.float(), expected, rtol=2 * eps, atol=1e-2)


def check_rounded(on_gpu: bool) -> None:
    """Compare with plain torch, bit for bit: of the engine's type on a GPU, in the interpreter in float16."""
    dtype = DTYPE if on_gpu else torch.float16
    codes = replace(make_codes((300, 1152), 8, 0, False), input_scales=InputScales.TOKEN)
    x = torch.randn(70, 1152).to(codes.codes.device, dtype)
    found = TritonMatrix(codes, dtype).multiply(x, None)
    torch.testing.assert_close(found, TorchMatrix(codes, dtype).multiply(x, None), rtol=0, atol=0)


def time_matrix(
    form: tuple[int, int, bool], shape: tuple[int, int], num_rows: int, input_scales: InputScales | None
) -> float:
    """Return the microseconds of one product by a matrix that is in no cache, with the rounding of its inputs."""
    out_size, in_size = shape
    x = randn(num_rows, in_size)
    count = num_sets(out_size * in_size * form[0] // 8)
    drawn = (replace(draw_codes(shape, form), input_scales=input_scales) for _ in range(count))
    matrices = [TritonMatrix(codes, DTYPE) for codes in drawn]
    return microseconds([lambda matrix=matrix: matrix.multiply(x, None) for matrix in matrices])


def draw_codes(shape: tuple[int, ...], form: tuple[int, int, bool]) -> Codes:
    """Return random codes on the GPU."""
    bits, group_size, has_zeros = form
    *leading, in_size = shape
    group_size = group_size or in_size
    codes = torch.randint(0, 256, (*leading, in_size * bits // 8), dtype=torch.uint8, device="cuda")
    scales = torch.rand(*leading, in_size // group_size, device="cuda")
    zeros = torch.full(scales.shape, 7, dtype=torch.int16, device="cuda") if has_zeros else None
    return Codes(bits, codes.view(torch.int8) if bits == 8 else codes, Scales(scales), zeros, group_size)


def check_experts(on_gpu: bool, form: tuple[int, int, bool]) -> None:
    """Compare with plain torch."""
    dtype = DTYPE if on_gpu else torch.float16
    codes = make_codes((3, 70, 256), *form)
    x = torch.randn(40, 256).to(codes.codes.device, dtype)
    slots = torch.arange(40, device=x.device)
    routing = route_reference(torch.randn(40, 3).to(x.device), 2, True, slots)
    found = TritonMatrix(codes, dtype).multiply_pairs(x, routing, True)
    expected = TorchMatrix(codes, dtype).multiply_pairs(x, routing, True)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-2)


def time_experts(form: tuple[int, int, bool], num_tokens: int) -> float:
    """Return the microseconds of one product of all experts, whose matrices are in no cache."""
    num_experts, k, in_size, out_size = EXPERTS
    x = randn(num_tokens, in_size)
    routing = route_reference(randn(num_tokens, num_experts), k, True, torch.arange(num_tokens, device="cuda"))
    experts = [TritonMatrix(draw_codes((num_experts, out_size, in_size), form), DTYPE) for _ in range(2)]
    return microseconds([lambda one=one: one.multiply_pairs(x, routing, True) for one in experts])


def check_split(on_gpu: bool, kv_dtype: torch.dtype) -> None:
    dtype = DTYPE if on_gpu else torch.float16
    stored = dtype if kv_dtype == DTYPE else kv_dtype
    lengths = [1, 63, 500, 0, 2100] if on_gpu else [1, 63, 0, 500]
    case = attention_case([1] * len(lengths), lengths, 128, 2, 128, dtype, kv_dtype=stored)
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
    case = sample_case(VOCAB_SIZE, DTYPE) if on_gpu else sample_case(5000, DTYPE).select(6, 10, 12)
    assert_same_tokens(case, sample(*case.arguments()))


def time_filter(top_k: int, top_p: float) -> float:
    """Return the microseconds of the whole sampler for 256 rows."""
    batch = 256
    table = make_sampling(batch, 0.6, top_k, top_p)
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    sets = [3 * randn(batch, VOCAB_SIZE) for _ in range(num_sets(batch * VOCAB_SIZE * 2))]
    return microseconds([lambda x=x: sample(x, table, rows, rows) for x in sets])


def sweep_splits(on_gpu: bool, bench: Bench | None) -> Iterator[dict[str, object]]:
    """Check each configuration of the split. If there is a bench, yield what it takes."""
    checked = set()
    for kv_dtype, (tile, warps, stages), at_once, ahead in list_splits():
        differences = (kv_dtype, tile, at_once, ahead)
        if not on_gpu and differences in checked:
            continue  # the interpreter knows no warps and no stages
        checked.add(differences)
        with use_split(tile, warps, stages, at_once, ahead):
            check_split(on_gpu, kv_dtype)
            for batch, context in ((1, 1024), (1, 16384), (64, 1024), (256, 1024)) if bench else ():
                (us, _), read = time_attention(TritonBackend(), MODELS["0.6B"], batch, 1, context, kv_dtype)
                percent = round(100 * read / us / 1e3 / bench.read_gbs, 1)
                config = f"tile {tile} warps {warps} stages {stages} at once {at_once}{' ahead' * ahead}"
                name = f"split {kv_dtype} {config}, {batch} x {context}"
                yield {"name": name, "us": round(us, 1), "percent": percent}


def sweep_filters(on_gpu: bool, bench: Bench | None) -> Iterator[dict[str, object]]:
    """Check each configuration of the filter. If there is a bench, yield what it takes."""
    for marks, parts, warps in FILTERS:
        with use_filter(marks, parts, warps):
            check_filter(on_gpu)
            for top_k, top_p in ((0, 1.0), (20, 0.95), (0, 0.95)) if bench else ():
                us = time_filter(top_k, top_p)
                name = f"sample marks {marks} parts {parts} warps {warps}, top_k {top_k} top_p {top_p}"
                yield {"name": name, "us": round(us, 1)}


def sweep_cuts(on_gpu: bool, bench: Bench | None) -> Iterator[dict[str, object]]:
    """Check each way to cut products of few rows. If there is a bench, yield what it takes."""
    for columns, stages, programs, ahead in CUTS:
        with use_cut(columns, stages, programs, ahead):
            check_cut(on_gpu)
            config = f"columns {columns} stages {stages} programs {programs} ahead {ahead}"
            for model, num_rows in product(MODELS, (1, 32)) if bench else ():
                for matrix, us in time_few_rows(model, num_rows).items():
                    yield {"name": f"cut {config}, {matrix} of {model}, {num_rows} rows", "us": round(us, 1)}


def sweep_codes(on_gpu: bool, bench: Bench | None) -> Iterator[dict[str, object]]:
    """Check each tile of products by codes. If there is a bench, yield what it takes."""
    for (name, form), tile in product(FORMS.items(), CODES_TILES):
        with use_tile("CODES_TILES", tile):
            check_matrix(on_gpu, form)
            for (matrix, shape), num_rows in product(MATRICES.items(), ROWS) if bench else ():
                if (tile.rows > 16) == (num_rows > 16):
                    us = time_matrix(form, shape, num_rows, None)
                    yield {"name": f"{name} {tuple(tile)}, {matrix} of 8B, {num_rows} rows", "us": round(us, 1)}


def sweep_experts(on_gpu: bool, bench: Bench | None) -> Iterator[dict[str, object]]:
    """Check each tile of experts by codes. If there is a bench, yield what it takes."""
    for (name, form), tile in product(FORMS.items(), EXPERT_TILES):
        with use_tile("CODES_EXPERT_TILES", tile):
            check_experts(on_gpu, form)
            for num_tokens in ROWS if bench else ():
                us = time_experts(form, num_tokens)
                yield {"name": f"experts {name} {tuple(tile)}, {num_tokens} tokens", "us": round(us, 1)}


def sweep_rounded(on_gpu: bool, bench: Bench | None) -> Iterator[dict[str, object]]:
    """Check each tile of w8a8. If there is a bench, yield what it takes."""
    for tile in ROUNDED_TILES:
        with use_tile("ROUNDED_TILES", tile):
            check_rounded(on_gpu)
            for (matrix, shape), num_rows in product(MATRICES.items(), ROWS) if bench else ():
                if (tile.rows > 16) == (num_rows > 16):
                    us = time_matrix(FORMS["int8"], shape, num_rows, InputScales.TOKEN)
                    yield {"name": f"w8a8 {tuple(tile)}, {matrix} of 8B, {num_rows} rows", "us": round(us, 1)}


SWEEPS = {
    "splits": sweep_splits,
    "filters": sweep_filters,
    "cuts": sweep_cuts,
    "codes": sweep_codes,
    "experts": sweep_experts,
    "rounded": sweep_rounded,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--only", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    args = parser.parse_args()
    bench = None if args.check_only else Bench()
    if bench:
        print(f"read {bench.read_gbs:.0f} GB/s")
    results: list[dict[str, object]] = []
    for name in args.only:
        for result in SWEEPS[name](torch.cuda.is_available(), bench):
            results.append(result)
            print(", ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
