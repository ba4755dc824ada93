"""The CPU kernels built for other processors than this one compute what the references do."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cpu_checks import (
    BF16,
    FP32,
    assert_attends_alike,
    check_codes,
    check_packed_products,
    check_sampled_tokens,
    check_small_operators,
    make_variant,
)
from helpers.dynamic_checks import check_dynamic_experts, check_dynamic_products
from helpers.edit_cases import check_edited_logits
from helpers.family_checks import check_experts, check_gates, check_linear_attention
from helpers.foreign_kernels import HAS_EMULATOR, ForeignLibrary
from helpers.quantized_checks import FORMATS, check_quantized_experts, check_quantized_products

from nanovllm.backends.cpu import library as cpu_library
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.dynamic import DynamicLibrary
from nanovllm.backends.cpu.quantized import QuantizedLibrary

pytestmark = [pytest.mark.targets, pytest.mark.longest]  # begun late, two processes would each build the same libraries

NEEDS: dict[str, set[str]] = {
    "x86-64-v3": {"avx2", "fma"},
    "cascadelake": {"avx512f", "avx512_vnni"},
    "armv8-a": set(),
    "armv8.6-a+bf16": set(),  # it has a dot product of bfloat16
    "x86-64": set(),
    "skylake-avx512": {"avx512f", "avx512bw", "avx512dq", "avx512cd", "avx512vl"},
    "armv8.2-a+dotprod": set(),
    "cooperlake": {"avx512f", "avx512_vnni", "avx512_bf16"},
    "native without AMX": {"amx_bf16", "amx_int8"},
}
"""Features that a processor needs to run code built for another."""

EVERYTHING = ("x86-64-v3", "cascadelake", "armv8-a", "armv8.6-a+bf16", "cooperlake", "native without AMX")
"""The processors for which all kernels are built. For the others it is only those that multiply in whole numbers."""


def missing(processor: str) -> str | None:
    from nanovllm.apps.doctor import read_processor

    if processor.startswith("arm"):
        return None if HAS_EMULATOR else "needs g++-aarch64-linux-gnu and qemu-user"
    if platform.machine() != "x86_64":
        return "needs an x86-64 processor"
    unknown = NEEDS[processor].difference(read_processor()[1])
    return f"this processor lacks {', '.join(sorted(unknown))}" if unknown else None


@pytest.fixture(scope="module", params=EVERYTHING)
def libraries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Both libraries, built for a processor: run by this one where it can, else by an emulator."""
    if reason := missing(request.param):
        pytest.skip(reason)
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param.startswith("arm"):
        library = ForeignLibrary(folder, request.param)
        return library, library
    built, quantized = build(folder, request.param, [cpu_library.CpuLibrary, QuantizedLibrary])
    return built, quantized


def build(folder: Path, processor: str, kinds: Sequence[type[cpu_library.KernelLibrary]]) -> list[Any]:
    """Build libraries for another x86-64 processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        name = processor.removesuffix(" without AMX")
        flags = [f"-march={name}" if flag == "-march=native" else flag for flag in cpu_library.FLAGS]
        if name != processor:
            flags += ["-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"]
        patch.setattr(cpu_library, "FLAGS", flags)
        return [cpu_library._load("g++", kind) for kind in kinds]


@pytest.fixture
def library(libraries: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("nanovllm.backends.cpu.quantized.quantized_library", lambda: libraries[1])
    return libraries[0]


@pytest.fixture
def backend(library: Any, monkeypatch: pytest.MonkeyPatch) -> CpuBackend:
    monkeypatch.setattr("nanovllm.backends.cpu.backend.cpu_library", lambda: library)
    return CpuBackend()


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_products_are_the_references(library: Any, dtype: Any) -> None:
    check_packed_products(library, dtype, 208, 50)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_small_operators_are_the_references(backend: CpuBackend, dtype: Any) -> None:
    check_small_operators(backend, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("shape", [(64, 7, 16), (128, 2, 64)], ids=str)
def test_attention_is_the_reference(backend: CpuBackend, shape: tuple[int, int, int], dtype: Any) -> None:
    everything = make_variant((33, 2.0, True), 2 * shape[1])
    for kv_dtype in (None, torch.int8):
        for variant in (None, everything):
            assert_attends_alike(backend, shape, dtype, kv_dtype, variant)
    check_codes(backend, shape[0], dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_sampled_tokens_are_the_references(backend: CpuBackend, dtype: Any) -> None:
    check_sampled_tokens(backend, 4096, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_experts_are_the_references(backend: CpuBackend, dtype: Any) -> None:
    check_experts(backend, dtype)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_linear_attention_is_the_reference(backend: CpuBackend, dtype: Any) -> None:
    check_linear_attention(backend, dtype)
    check_gates(backend, dtype)


def test_edited_logits_are_the_references(backend: CpuBackend) -> None:
    check_edited_logits(backend)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", FORMATS)
def test_quantised_products_are_those_of_the_weights(name: str, request: pytest.FixtureRequest) -> None:
    """An emulator is slow: each of two emulated processors has all formats and both types, but half of the pairs."""
    processor = request.node.callspec.params["libraries"]
    dtypes = [BF16, FP32]
    if processor.startswith("arm"):
        dtypes = [dtypes[(list(FORMATS).index(name) + EVERYTHING.index(processor)) % 2]]
    for dtype in dtypes:
        check_quantized_products(name, dtype, 208, 50)
        check_quantized_experts(name, dtype, 64, 40)


@pytest.mark.parametrize("processor", NEEDS)
def test_products_in_whole_numbers_have_the_same_bits_on_every_processor(
    processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of plain torch. Tiles, instructions and widths of vectors differ."""
    if reason := missing(processor):
        pytest.skip(reason)
    if processor.startswith("arm"):
        library: Any = ForeignLibrary(tmp_path, processor, DynamicLibrary)
        sizes = [(1, 13), (300,)]
    else:
        (library,) = build(tmp_path, processor, [DynamicLibrary])
        sizes = [(*range(1, 27), 300)]
    monkeypatch.setattr("nanovllm.backends.cpu.dynamic.dynamic_library", lambda: library)
    for rows in sizes:
        for dtype in (BF16, FP32):
            check_dynamic_products(208, 50, dtype, rows)
            check_dynamic_products(390, 130, dtype, rows)
    check_dynamic_experts(208, 50, BF16)
