"""Tests of kernels for other machines run when their sources change, and their record says so only if they passed."""

import shutil
import sys
from pathlib import Path
from subprocess import CalledProcessError

import pytest
from helpers.paths import ROOT

from scripts import check_targets

LACKS = "this processor lacks amx_bf16"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of all that the digest may be of."""
    for name in ("nanovllm/backends", "tests/kernels", "tests/helpers"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_change_of_a_kernel_or_of_what_tests_it_is_noticed(copy: Path) -> None:
    digests = {check_targets.compute_digest(copy)}
    assert digests == {check_targets.compute_digest()}
    names = [
        "nanovllm/backends/cpu/linear.h",
        "nanovllm/backends/gpu/paged_decode.py",
        "tests/kernels/test_processors.py",
        "tests/kernels/test_kernels.py",
        "tests/kernels/test_kernels_compile.py",
        "tests/helpers/compile_kernels.py",
        "tests/helpers/cpu_checks.py",
        "tests/helpers/foreign_kernels.cpp",
        "pyproject.toml",
    ]
    for name in names:
        with (copy / name).open("a") as file:
            file.write("\n")
        digests.add(check_targets.compute_digest(copy))
    (copy / "nanovllm/backends/cpu/new.h").touch()
    digests.add(check_targets.compute_digest(copy))
    assert len(digests) == len(names) + 2
    (copy / "tests/helpers/schemas.py").unlink()
    assert check_targets.compute_digest(copy) in digests, "no test of kernels imports it"


def test_every_test_for_targets_is_among_them() -> None:
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.targets" in path.read_text()}
    marked.remove(Path(__file__))
    assert len(marked) > 1 and marked <= set(check_targets.find_tests())


@pytest.mark.parametrize(
    ("skipped", "is_recorded"),
    [(set(), True), ({LACKS}, True), ({LACKS, "needs qemu-user"}, False)],
    ids=["nothing skipped", "a processor", "an emulator, too"],
)
def test_the_record_is_written_if_all_passed_and_nothing_was_missing(
    skipped: set[str], is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    monkeypatch.setattr(check_targets, "RECORD", tmp_path / "targets.json")
    monkeypatch.setattr(check_targets, "compute_digest", lambda: "of the sources")  # a second each time
    monkeypatch.setattr(check_targets, "run_all", lambda: runs.append(1) or skipped)
    for _ in range(2):
        check_targets.main([])
    assert check_targets.RECORD.exists() == is_recorded
    assert len(runs) == (1 if is_recorded else 2), "they run until they are recorded"
    check_targets.main(["--always"])
    assert len(runs) == (2 if is_recorded else 3)


def test_a_test_that_fails_leaves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_targets, "RECORD", tmp_path / "targets.json")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CalledProcessError):
        check_targets.main(["--always"])
    assert not check_targets.RECORD.exists()
