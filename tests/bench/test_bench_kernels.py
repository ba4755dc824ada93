"""bench_kernels.py does not flatter: percentages are without dependent launches, and of the right ceiling."""

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from helpers.rehearsal import rehearse

from benchmarks import bench_kernels
from benchmarks.bench_kernels import Bench, Model, Times, time_both
from nanovllm.backends.gpu import launch as launch_module
from nanovllm.backends.gpu.launch import Launch
from nanovllm.backends.gpu.rms_norm import rms_norm

READ_GBS = 200.0
COPY_GBS = 100.0
MATMUL_TFLOPS = 3.0
PRODUCTS = {"torch product", "own product", "torch mlp", "own mlp"}
READING = {"triton decode", "sample", "token_logprobs", "route"} | PRODUCTS
"""Kernels that write next to nothing."""
COPYING = {"rms_norm", "add_rms_norm", "silu_and_mul", "norm_rope_store"}


def test_both_figures_are_measured_of_the_same_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with dependent launches a kernel is launched with them and without, and each figure says which."""
    configs: list[list[dict[str, int]]] = []
    launched: list[Launch] = []

    def measure(launches: list[Callable[[], object]], before: Callable[[], None] | None = None) -> float:
        launched.clear()
        for some in launches:
            some()
        configs.append([launch.config for launch in launched])
        return 5.0 if launched[0].config["PDL"] else 7.0

    monkeypatch.setattr(bench_kernels, "microseconds", measure)
    monkeypatch.setattr(launch_module, "_dependent_launches", lambda device: {"PDL": True, "launch_pdl": True})
    token = launch_module._receiver.set(launched.append)
    try:
        x = torch.ones(4, 64)
        times = time_both([lambda: rms_norm(x, x[0], 1e-6)] * 3)
    finally:
        launch_module._receiver.reset(token)
    assert times == Times(us=7.0, dependent_us=5.0)
    (alone,) = [found for found in configs if not found[0]["PDL"]]
    (dependent,) = [found for found in configs if found[0]["PDL"]]
    assert len(alone) == len(dependent) == 3
    assert not any(config["PDL"] or config.get("launch_pdl") for config in alone)
    assert all(config["PDL"] and config["launch_pdl"] for config in dependent)


def run_once(launches: list[Callable[[], object]], before: Callable[[], None] | None = None) -> Times:
    """Take the place of `time_both`. Products run: in the rehearsal they take few milliseconds."""
    if before is None and len(launches) == 1:
        launches[0]()
    return Times(us=8.0, dependent_us=2.0)


@pytest.mark.slow
def test_every_kernel_stands_beside_its_own_ceiling(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole program, on a card that is not there: nothing is timed, but everything is set up and reported."""

    def set_ceilings(bench: Bench) -> None:
        bench.copy_gbs = COPY_GBS
        bench.read_gbs = READ_GBS
        bench.matmul_tflops = MATMUL_TFLOPS
        bench.results = []

    monkeypatch.setattr(Bench, "__init__", set_ceilings)
    monkeypatch.setattr(bench_kernels, "time_both", run_once)
    monkeypatch.setattr(bench_kernels, "num_sets", lambda nbytes: 1)
    monkeypatch.setattr(bench_kernels, "PREFILLS", {"1 x 16": (1, 16, 0)})
    monkeypatch.setattr(bench_kernels, "MODELS", {"0.6B": Model(4, 2, 32, 64, 96)})
    monkeypatch.setattr(bench_kernels, "VOCAB_SIZE", 500)
    arguments = ["--models", "0.6B", "--backends", "triton", "--batches", "2", "--contexts", "64", "--tokens", "16"]

    def run(*more: str) -> tuple[list[str], list[dict[str, Any]]]:
        with mock.patch.object(sys, "argv", ["bench_kernels.py", *arguments, *more]), rehearse():
            bench_kernels.main()
        *lines, last = capsys.readouterr().out.splitlines()
        return lines, json.loads(last)["results"]

    assert {result["kernel"] for result in run("--only-products", "--rows", "3")[1]} == PRODUCTS
    lines, results = run()
    assert {result["kernel"] for result in results} == READING | COPYING | {"triton prefill"}
    for result in results:
        rates = {"triton prefill": 1e6 * MATMUL_TFLOPS} | dict.fromkeys(COPYING, 1e3 * COPY_GBS)
        floor_us = result["amount"] / rates.get(result["kernel"], 1e3 * READ_GBS)
        assert result["floor_us"] == pytest.approx(floor_us, abs=0.006)
        assert (result["us"], result["dependent_us"]) == (8.0, 2.0)
        assert result["percent"] == pytest.approx(100 * floor_us / 8.0, abs=0.006)
    printed = [line for line in lines if "floor" in line]
    assert len(printed) == len(results)
    assert all("8.0 us:" in line and "2.0 us with dependent launches" in line for line in printed)


def test_more_rows_than_our_own_product_takes_are_refused() -> None:
    with mock.patch.object(sys, "argv", ["bench_kernels.py", "--rows", "33"]), pytest.raises(SystemExit) as caught:
        bench_kernels.main()
    assert "at most 32 rows" in str(caught.value)
