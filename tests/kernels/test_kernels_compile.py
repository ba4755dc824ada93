"""Every Triton kernel compiles for the GPUs we name, in every configuration that the engine launches, without a GPU."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT, TESTS

pytest.importorskip("triton")

from nanovllm.backends.gpu.paged_decode import programs_at_once

SHARED_KIB = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that one program may use (CUDA C++ Programming Guide, "Compute capabilities")."""


def compile_all(*arguments: str) -> list[dict[str, Any]]:
    """In a process of its own: here Triton may be in its interpreter, and cannot be in both."""
    script = TESTS / "helpers" / "compile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    compiled: list[dict[str, Any]] = json.loads(result.stdout)
    return compiled


def find_kernels() -> Iterator[tuple[str, set[str]]]:
    """Yield each kernel of the package with the names of the functions that launch it.

    A kernel is a function for Triton's compiler that no other such function calls.
    """
    functions: list[ast.FunctionDef] = []
    for path in (ROOT / "nanovllm" / "backends" / "gpu").glob("*.py"):
        functions += [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    mentioned = {
        node.name: {name.id for name in ast.walk(node) if isinstance(name, ast.Name)} - {node.name}
        for node in functions
    }
    compiled = {
        node.name for node in functions if "triton.jit" in map(ast.unparse, map(_strip_call, node.decorator_list))
    }
    for kernel in compiled - {name for inner in compiled for name in mentioned[inner]}:
        launchers = {name for name in mentioned.keys() - compiled if kernel in mentioned[name]}
        yield kernel, launchers | {name for name in mentioned if launchers & mentioned[name]}


def _strip_call(decorator: ast.expr) -> ast.expr:
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def test_every_kernel_is_compared_with_its_reference() -> None:
    """By the names that the comparing tests use: those of the functions that launch it."""
    compares = [
        *(TESTS / "kernels").glob("*.py"),
        *(TESTS / "models").glob("*.py"),
        *(TESTS / "helpers").glob("*_cases.py"),
    ]
    text = " ".join(path.read_text() for path in compares if path != Path(__file__))
    names = set(re.findall(r"\w+", text)) | {"paged_prefill"}  # the cases of `attend` call it through the backend
    found = dict(find_kernels())
    assert len(found) > 15, "as the package has"
    assert [kernel for kernel, launchers in found.items() if not launchers & names] == []


def check(compiled: list[dict[str, Any]]) -> None:
    missing = {name for name, _ in find_kernels()} - {result["kernel"] for result in compiled}
    assert not missing, "launches() in tests/helpers/compile_kernels.py yields every kernel"
    for result in compiled:
        assert result["shared"] <= SHARED_KIB[result["arch"]] * 1024, result
        check_waits_first(result)
        if result["types"].get("x_ptr") == "*i8":
            # For sm_100 and sm_120 Triton 3.6 has an assembler that fuses them in pairs, though it is told not to.
            assert result["fused"] == result["stack"] == 0, f"products and sums are rounded once, or spills: {result}"
        has_codes = result["types"].get("k_cache_ptr") == "*i16"
        if result["arch"] == 90:
            # Triton 3.6 has two registers too few for the split with groups of 8, whose registers are limited. Experts
            # of 4 bits in groups of 32 have two too few for tiles of 32 rows: the compiler takes 64.
            config = result["config"]
            is_short = result["kernel"] == "_product_kernel" and config["BLOCK_M"] == config["BLOCK_K"] == 32
            most = 8 if is_short or (result["kernel"] == "_split_kernel" and not has_codes) else 0
            if result["own"] == "*fp32" or result["kernel"] == "_prefill_kernel":
                most = 256
            assert result["stack"] <= most, f"spills: {result}"
        if result["config"].get("maxnreg") == 255:
            assert result["stack"] == 0, f"spills, though two programs at most share the registers: {result}"
        if result["kernel"] == "_prefill_kernel":
            # Heads of 256 take most registers: more rows than these spill kilobytes on sm_80. With both a window and a
            # cap, two registers have no room on sm_100.
            config = result["config"]
            most = 8 if config["WINDOW"] and config["SOFTCAP"] and result["arch"] == 100 else 0
            if result["arch"] == 120:
                most = 48  # prompts over a cache of codes, with a window; no kernel of decodes spills there
            assert result["stack"] <= most or config["HEAD_DIM"] < 256, result
            if config["WINDOW"] or config["SOFTCAP"]:
                assert result["stack"] <= most and result["narrow_loads"] == 0, result
            continue
        # What a step of decodes launches reads nothing two bytes at a time, and logits sixteen.
        # But for the two gates of a head, which in a step with prompts are those of a chunk; for the gate of a shared
        # expert; for the logits of a router that stand beside such gates: a thread has eight of them; and for a query's
        # even and odd dimensions, once a chunk of a cache of codes; and for a bias of 128 columns.
        most = {
            "_gated_delta_kernel": 2,
            "_prepare_chunks_kernel": 20,
            "_split_kernel": 32 if has_codes else 0,
            "_product_kernel": 1,
        }
        # GGUF's scales and minima of 16 bits: of a thread's columns, once for each group of a step.
        num_halves = list(result["types"].values()).count("*fp16") * result["config"].get("GROUPS", 0)
        most[result["kernel"]] = most.get(result["kernel"], 0) + 8 * num_halves
        most["_combine_experts_kernel"] = result["config"].get("HAS_SHARED", 0)
        most["_choose_experts_kernel"] = 8 if "logits_stride" in result["types"] else 0
        assert result["narrow_loads"] <= most.get(result["kernel"], 0), result
        assert result["wide_loads"] >= 2 or "logits_ptr" not in result["types"], result


def check_waits_first(result: dict[str, Any]) -> None:
    """A kernel that may start before its predecessor has ended touches no memory before it has waited for that."""
    has_it = result["arch"] >= 90
    assert result["dependent"] == has_it, result
    waits = ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
    assert result["order"][:2] == waits if has_it else not set(waits) & set(result["order"]), result
    assert len(result["order"]) > 2, result


def check_routing_is_short(compiled: list[dict[str, Any]]) -> None:
    """A warp chooses a token's experts of 128 in some 380 instructions, and sorts in two short loops over all pairs.

    One program of 4 warps used to do all: 3,700 instructions of a warp for each 16 tokens, one after another.
    """
    for result in compiled:
        if result["kernel"] == "_choose_experts_kernel":
            assert result["config"]["TOKENS"] == result["config"]["num_warps"]
            # 256 experts take 630 instructions, and 1,070 if logits are read one at a time.
            each = 5 if "logits_stride" in result["types"] else 4
            assert result["instructions"] <= each * result["config"]["EXPERTS"], result
        if result["kernel"] == "_sort_pairs_kernel":
            assert result["instructions"] <= 800, result


def check_pipelined(compiled: list[dict[str, Any]]) -> None:
    """There is one buffer of K and V fewer than stages. Were the page's number looked up in its own iteration, that
    would be a stage, and there would be another one fewer (38,912 bytes at head_dim 128)."""
    for result in compiled:
        if result["kernel"] == "_split_kernel":
            config = result["config"]
            itemsize = 4 if result["own"] == "*fp32" else 2
            if result["types"].get("k_cache_ptr") == "*i16":
                itemsize = 1
            tile = config["TILE"] * config["HEAD_DIM"] * itemsize
            assert result["shared"] >= (config["num_stages"] - 1) * 2 * tile, result
            # All programs of the grid run at once: they share 64 Ki registers, of which a warp takes multiples of 256,
            # and the shared memory, 1 KiB more than one program may have, of which CUDA takes 1 KiB for each.
            at_once = programs_at_once(config, itemsize, SHARED_KIB[result["arch"]])
            assert at_once * 32 * config["num_warps"] * -(-result["reg"] // 8) * 8 <= 1 << 16, result
            assert at_once * (result["shared"] + 1024) <= (SHARED_KIB[result["arch"]] + 1) * 1024, result


def check_few_rows(compiled: list[dict[str, Any]]) -> None:
    """They ask for their first weights before they wait, which only helps where they may start early.

    A multiprocessor has room for two programs, on sm_120 for one, and all loads of their loop are asynchronous.
    """
    for result in compiled:
        if result["kernel"] == "_product_kernel" and result["config"]["AHEAD"]:
            # A line has 64 numbers, and a thread asks for one line at a time.
            lines = result["config"]["AHEAD"] * result["config"]["BLOCK_N"] * result["config"]["BLOCK_K"] // 64
            assert result["asked_ahead"] == (lines // 128 if result["arch"] >= 90 else 0), result
            assert result["stack"] == 0 and result["reg"] <= 128 and result["instructions"] < 1000, result
            assert result["shared"] <= min(96, SHARED_KIB[result["arch"]]) * 1024, result


@pytest.mark.targets
@pytest.mark.longest
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("--quick", "90"), id="few-90"),
        pytest.param(("--quick", "--dtype", "float32", "90"), id="few-float32-90"),
        # sm_80 has the instructions of sm_89, but for fp8, and takes bfloat16.
        pytest.param(("--quick", "--dtype", "float16", "89"), id="few-float16-89"),
        *(pytest.param(("--quick", arch), id=f"few-{arch}") for arch in ("80", "100", "120")),
        pytest.param(("--largest", "90"), id="models-90"),
    ],
)
def test_kernels_compile_within_shared_memory_and_without_spills(arguments: tuple[str, ...]) -> None:
    """The largest of each kind, on each architecture, and on sm_90 those of every model."""
    compiled = compile_all(*arguments)
    check(compiled)
    check_routing_is_short(compiled)
    check_pipelined(compiled)
    check_few_rows(compiled)
