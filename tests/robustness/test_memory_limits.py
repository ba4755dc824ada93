"""Free memory is what the process's limits leave; what does not fit is refused with the option to change."""

import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.utils import cgroups, memory
from nanovllm.utils.memory import find_memory_limits, free_memory

GIB = 1 << 30


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB free whose process has no cgroup yet."""
    for name in ("PROCESS", "CGROUPS"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(memory, "PROCESS", tmp_path / "PROCESS")
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path / "CGROUPS")
    monkeypatch.setattr(cgroups, "OWN_CGROUPS", tmp_path / "PROCESS" / "cgroup")
    monkeypatch.setattr(memory, "MACHINE", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text(f"MemTotal: {128 << 20} kB\nMemAvailable: {64 << 20} kB\n")
    (tmp_path / "PROCESS" / "cgroup").write_text("")
    return tmp_path


def make_group(files: Path, path: str, limit: str, used: int, droppable: int, version: int = 2) -> None:
    """Make a cgroup. `droppable` is the cache of files, which counts as used, but can be had."""
    folder = files / "CGROUPS" / ("" if version == 2 else "memory") / path
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{used}\n")
    half = droppable // 2
    (folder / "memory.stat").write_text(
        f"anon 7\n{prefix}inactive_file {half}\n{prefix}active_file {droppable - half}\n"
    )


def join(files: Path, *lines: str) -> None:
    (files / "PROCESS" / "cgroup").write_text("".join(f"{line}\n" for line in lines))


def test_without_limits_all_that_the_machine_has_is_free(files: Path) -> None:
    assert free_memory() == 64 * GIB and find_memory_limits() == {}
    (files / "PROCESS" / "cgroup").unlink()
    assert free_memory() == 64 * GIB


def test_one_of_several_replicas_has_its_share_less_what_it_has_taken(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = resource.getpagesize()
    (files / "PROCESS" / "statm").write_text(f"{20 * GIB // page} {5 * GIB // page} {3 * GIB // page} 1 0 1 0\n")
    monkeypatch.setattr(memory, "share", 8 * GIB)
    assert free_memory() == 6 * GIB and find_memory_limits() == {"data_parallel_size": 8 * GIB}
    monkeypatch.setattr(memory, "share", GIB)
    assert free_memory() == 0
    memory.check_memory_limits()  # that is about limits which end a process


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_leaves_its_limit_less_what_it_uses(version: int, files: Path) -> None:
    make_group(files, "jobs/mine", str(8 * GIB), used=5 * GIB, droppable=2 * GIB, version=version)
    join(files, "0::/jobs/mine" if version == 2 else "4:memory,hugetlb:/jobs/mine", "3:cpu:/elsewhere")
    assert free_memory() == 5 * GIB and find_memory_limits() == {"cgroup": 8 * GIB}


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_around_it_may_leave_less(version: int, files: Path) -> None:
    unlimited = "max" if version == 2 else str(2**63 - 4096)
    make_group(files, "jobs/mine", unlimited, used=0, droppable=0, version=version)
    make_group(files, "jobs", str(6 * GIB), used=5 * GIB, droppable=0, version=version)
    join(files, "0::/jobs/mine" if version == 2 else "4:memory:/jobs/mine")
    assert free_memory() == GIB and find_memory_limits() == {"cgroup": 6 * GIB}


@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container_the_path_may_be_the_host_s(version: int, files: Path) -> None:
    make_group(files, "", str(4 * GIB), used=GIB, droppable=0, version=version)
    join(files, "0::/../../docker/abc" if version == 2 else "4:memory:/docker/abc")
    assert free_memory() == 3 * GIB


def test_a_group_beyond_its_limit_leaves_nothing(files: Path) -> None:
    make_group(files, "", str(GIB), used=2 * GIB, droppable=0)
    join(files, "0::/")
    assert free_memory() == 0


@pytest.mark.parametrize("text", ["0::/x\n", "no line of three parts", "0::/\n", "\0"])
def test_odd_files_are_no_limit(text: str, files: Path) -> None:
    (files / "PROCESS" / "cgroup").write_text(text)
    (files / "CGROUPS" / "memory.max").write_text("many")
    assert free_memory() == 64 * GIB


@pytest.mark.parametrize(("name", "place"), [("RLIMIT_AS", 0), ("RLIMIT_DATA", 5)])
def test_a_limit_of_the_process_leaves_less(
    name: str, place: int, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = ["0"] * 7
    pages[place] = str(GIB // resource.getpagesize())
    (files / "PROCESS" / "statm").write_text(" ".join(pages))
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    limits = {getattr(resource, name): (3 * GIB, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, unlimited))
    assert free_memory() == 2 * GIB and find_memory_limits() == {name: 3 * GIB}


def test_a_limit_that_leaves_next_to_nothing_is_refused(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "PROCESS" / "statm").write_text(f"{GIB // resource.getpagesize()} 0 0 0 0 0 0")
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    limits = {resource.RLIMIT_AS: (GIB + (60 << 20), resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits.get(kind, unlimited))
    with pytest.raises(ValueError, match=r"RLIMIT_AS is 1084 MiB, which leaves this process 60 MiB; an engine needs"):
        LLM("tiny-qwen3", device="cpu")


# ---- the KV cache on a CPU


def count_tokens(**options: Any) -> int:
    with LLM("tiny-qwen3", device="cpu", **options) as llm:
        return llm.stats()["num_blocks"] * llm.engine.config.block_size


def test_the_default_cache_holds_what_max_num_seqs_can_use() -> None:
    assert count_tokens(max_num_seqs=3, max_model_len=256) == 3 * 256
    assert count_tokens(max_num_seqs=2, max_model_len=100, kvcache_block_size=16) == 2 * 112  # in whole blocks
    assert count_tokens(max_num_seqs=1, max_model_len=64, num_kvcache_blocks=9, kvcache_block_size=16) == 9 * 16


def test_the_default_cache_is_a_quarter_of_what_a_cgroup_leaves(files: Path) -> None:
    make_group(files, "", str(2 * GIB), used=2 * GIB - (64 << 20), droppable=0)
    join(files, "0::/")
    cache = 16 << 20
    assert count_tokens(dtype="float32") == count_tokens(dtype="float32", kvcache_memory_bytes=cache)


def test_what_a_cgroup_has_no_room_for_is_refused_with_its_option(files: Path) -> None:
    make_group(files, "", str(2 * GIB), used=2 * GIB - (64 << 20), droppable=0)
    join(files, "0::/")
    with pytest.raises(ValueError, match=r"1\.00 GiB, and 0\.06 GiB are free: lower kvcache_memory_bytes"):
        LLM("tiny-qwen3", device="cpu", kvcache_memory_bytes=GIB)
    make_group(files, "", str(2 * GIB), used=2 * GIB - (16 << 20), droppable=0)
    with pytest.raises(ValueError, match=r"one sequence of max_model_len=\d+ needs .*kvcache_memory_bytes"):
        LLM("tiny-qwen3", device="cpu", dtype="float32", max_model_len=4096)
    make_group(files, "", str(2 * GIB), used=2 * GIB - (1 << 20), droppable=0)
    with pytest.raises(ValueError, match=r"the weights would take .* choose a smaller model, a smaller dtype, or"):
        LLM("tiny-qwen3", device="cpu")


# ---- real limits, in processes of their own

LOAD = """
import resource, sys
import nanovllm.llm, transformers
from nanovllm import LLM
for line in sys.stdin:
    kind, place, room, model = line.split()
    used = int(open("/proc/self/statm").read().split()[int(place)]) * resource.getpagesize()
    before = resource.getrlimit(getattr(resource, kind))
    resource.setrlimit(getattr(resource, kind), (used + int(room), before[1]))
    try:
        LLM(model, device="cpu", load_format="dummy", max_model_len=256, kvcache_memory_bytes=8 << 30)
    except ValueError as error:
        print(" ".join(str(error).split()), flush=True)
    resource.setrlimit(getattr(resource, kind), before)
"""
"""Loads a model within one limit after the other."""


LITTLE = (60 << 20, "tiny-qwen3", r"MiB beside weights and KV cache: raise the limit \(ulimit\)")
WEIGHTS = (
    GIB,
    "qwen3-0.6b",
    r"the weights would take 1\.11 GiB, and (0\.9\d|1\.00) GiB are free: choose a smaller model",
)
CACHE = (GIB, "tiny-qwen3", "GiB are free: lower kvcache_memory_bytes")


@pytest.mark.slow
def test_a_real_limit_is_refused_with_its_option() -> None:
    cases: list[tuple[Any, ...]] = [
        ("RLIMIT_AS", 0, *WEIGHTS),
        ("RLIMIT_AS", 0, *LITTLE),
        ("RLIMIT_DATA", 5, *WEIGHTS),
        ("RLIMIT_AS", 0, *CACHE),
        ("RLIMIT_DATA", 5, *CACHE),
    ]
    lines = "".join(f"{kind} {place} {room} {model}\n" for kind, place, room, model, _ in cases)
    done = subprocess.run([sys.executable, "-c", LOAD], input=lines, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for said, (*_, words) in zip(done.stdout.splitlines(), cases, strict=True):
        assert re.search(words, said), said


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes. Error code 12"),
        ValueError("model.safetensors cannot be read: Cannot allocate memory (os error 12)"),
    ],
)
def test_memory_that_runs_out_is_answered_with_options(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out(*_: object) -> None:
        raise error

    monkeypatch.setattr("nanovllm.load.make_runner", run_out)
    with pytest.raises(ValueError, match=r"memory ran out .* Lower kvcache_memory_bytes or max_num_batched_tokens"):
        LLM("tiny-qwen3", device="cpu")
