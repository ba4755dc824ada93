"""A quantised matrix with a copy of 16 bits multiplies many rows by it, and has the bits that it has without."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.kernel_cases import DEVICE, HALF, poisoned_memory, randn
from helpers.quantized_cases import FORMATS, make_codes, make_floats
from torch import nn

pytest.importorskip("triton")

from helpers.pretend_cuda import noted

from nanovllm.backends.gpu.quantized import (
    CopiedMatrix,
    Operators,
    PairedTritonMatrix,
    RoundedTritonMatrix,
    TritonMatrix,
    find_copied,
    keep_copies,
)
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.features.quantized.codes import Codes

FORMS = [*(make_codes((70, 256), *form) for form in FORMATS), make_floats((70, 256), 128)]
SORTED = make_codes((70, 256), 4, 128, True, is_sorted=True)


@pytest.fixture(autouse=True)
def no_memory_is_zero_by_luck():
    with poisoned_memory():
        yield


def make_runner(*matrices: Any) -> Any:
    modules = [nn.Module() for _ in matrices]
    for module, matrix in zip(modules, matrices, strict=True):
        module.packed = matrix
    return SimpleNamespace(model=nn.ModuleList(modules), config=SimpleNamespace(dtype="float16"))


@pytest.mark.parametrize("codes", FORMS, ids=lambda codes: f"{codes.bits}-{codes.group_size}")
def test_many_rows_meet_the_copy_and_few_the_codes(codes: Codes) -> None:
    matrix = TritonMatrix(codes, HALF)
    most = matrix.row_limits[-1]
    bias = randn(70, dtype=HALF)
    x = randn(most + 1, 256, dtype=HALF)
    expected = [matrix.multiply(x[:rows], bias) for rows in (most, most + 1)]
    matrix.keep_copy()
    assert matrix.copy is not None and matrix.count_copy_bytes() == 2 * matrix.copy.numel()
    with noted() as launches:
        matrix.multiply(x, bias)
    assert launches == []  # nothing is dequantised
    found = [matrix.multiply(x[:rows], bias) for rows in (most, most + 1)]
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("codes", [make_codes((70, 200), 8, 0, False), SORTED], ids=["int8", "sorted int4"])
def test_each_form_has_the_same_copy(codes: Codes) -> None:
    """Its columns are in the order of the inputs."""
    for matrix in (TritonMatrix(codes, HALF), PairedTritonMatrix(codes, HALF)):
        matrix.keep_copy()
        weights = codes.dequantize().to(HALF)
        assert matrix.copy is not None and torch.equal(matrix.copy, weights)
        x = randn(matrix.row_limits[-1] + 1, codes.in_features, dtype=HALF)
        assert torch.equal(matrix.multiply(x, None), torch.nn.functional.linear(x, weights))


def test_new_weights_come_into_the_copy() -> None:
    """CUDA graphs read it."""
    operators = Operators(TritonKernels(DEVICE))
    old, new = (operators.make_matrix(make_codes((9, 64), 8, 0, False, seed), HALF, None) for seed in (0, 1))
    old.keep_copy()
    place = old.copy.data_ptr()
    assert operators.keep_place(old, new) is old
    assert old.copy.data_ptr() == place and new.copy is None
    x = randn(200, 64, dtype=HALF)
    assert torch.equal(old.multiply(x, None), new.multiply(x, None))


@pytest.mark.parametrize("lacking", [0, 1])
def test_copies_are_all_or_none_and_cost_what_is_left_above_a_full_cache(
    lacking: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says which. Whoever rounds its inputs, or is no matrix of codes, needs no copy."""
    codes = make_codes((9, 64), 8, 0, False)
    shared = TritonMatrix(codes, HALF)
    matrices = [shared, shared, PairedTritonMatrix(codes, HALF), RoundedTritonMatrix(codes, HALF), None]
    runner = make_runner(*matrices)
    copied = find_copied(runner.model.modules())
    assert copied == [matrices[0], matrices[2]]
    needed = 2 * 2 * 9 * 64
    with caplog.at_level(logging.INFO):
        assert keep_copies(runner, needed - lacking) == (0 if lacking else needed)
    assert all((matrix.copy is None) == bool(lacking) for matrix in copied)
    assert len(caplog.records) == 1 and ("not made" in caplog.text) == bool(lacking)
    assert keep_copies(make_runner(None, matrices[3]), 1 << 40) == 0


def test_a_model_that_is_loaded_again_gets_its_copies_again() -> None:
    """After LLM.sleep(2), say."""
    backend = TritonKernels(DEVICE)
    matrix: CopiedMatrix = TritonMatrix(make_codes((9, 64), 8, 0, False), HALF)
    backend.pack_weights(make_runner(matrix).model.modules())
    assert matrix.copy is None
    backend.keeps_copies = True
    backend.pack_weights(make_runner(matrix).model.modules())
    assert matrix.copy is not None
