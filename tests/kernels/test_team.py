"""The team of the CPU kernels computes every item once, in any process, and no caller waits for ever.

team_checks.cpp calls it as engines do, under sanitizers. A machine that lacks what Linux has still runs the engine.
"""

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.backends.cpu import library as cpu_library
from nanovllm.backends.cpu.backend import CpuBackend, NativeMatrix
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.utils import cgroups, machine
from nanovllm.utils.machine import cpu_quota, limit_threads, num_threads, physical_cores, torch_in_one_thread
from nanovllm.utils.memory import free_memory

if reason := CpuBackend.why_cannot(torch.device("cpu")):
    pytest.skip(reason, allow_module_level=True)

HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture
def threads() -> Iterator[None]:
    """Three, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing_and_every_item_is_computed_once(sanitizer: str, tmp_path: Path) -> None:
    if (compiler := shutil.which("g++")) is None:
        pytest.skip("needs g++")
    program = tmp_path / "checks"
    flags = ["-O1", "-g", "-std=c++17", "-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    command = [compiler, *flags, "-I", str(cpu_library.SOURCES), str(HELPERS / "team_checks.cpp"), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "cannot find" in built.stderr:
        pytest.skip(f"needs the library of -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
    done = subprocess.run([str(program)], env=environment, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stdout) == (0, "every item once\n"), done.stderr


def multiply(x: Tensor, matrix: NativeMatrix, times: int = 1) -> Tensor:
    for _ in range(times):
        y = matrix.multiply(x, None)
    return y


@pytest.fixture
def product() -> tuple[Tensor, NativeMatrix]:
    torch.manual_seed(0)
    return torch.randn(9, 512), NativeMatrix(cpu_library.cpu_library(), torch.randn(640, 512), Scratch())


def test_callers_in_several_threads_get_the_same_bits(product: tuple[Tensor, NativeMatrix], threads: None) -> None:
    def call(_: int) -> Tensor:
        torch.set_num_threads(3)  # a setting of each Python thread
        return multiply(*product, times=200)

    alone = multiply(*product)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(y, alone) for y in pool.map(call, range(8)))


def test_a_forked_child_has_a_team_of_its_own(product: tuple[Tensor, NativeMatrix], threads: None) -> None:
    expected = multiply(*product)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if torch.equal(multiply(*product, times=50), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(multiply(*product), expected)


GENERATE_FOR_EVER = """
import sys
from nanovllm import LLM, SamplingParams
with LLM(sys.argv[1], dtype="float32", attention_backend="cpu", max_model_len=64, num_kvcache_blocks=8) as llm:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    print("ready", flush=True)
    try:
        while True:
            llm.generate([[5] * 9] * 4, params, use_tqdm=False)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(len(llm.generate([[5] * 9], params, use_tqdm=False)))
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_call_whose_threads_are_at_work(random_model: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-c", GENERATE_FOR_EVER, str(random_model)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n1\n"


def test_torchs_operators_stay_in_the_callers_thread_and_the_kernels_keep_theirs(threads: None) -> None:
    with torch_in_one_thread():
        assert torch.get_num_threads() == 1 and num_threads() == 3
    assert torch.get_num_threads() == 3 and num_threads() == 3
    torch.set_num_threads(2)
    assert num_threads() == 2


def test_no_step_with_the_cpu_kernels_has_two_pools(
    random_model: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    run_layers = ModelRunner.run_layers

    def look(*arguments: object) -> object:
        seen.append((torch.get_num_threads(), num_threads()))
        return run_layers(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "run_layers", look)
    with LLM(random_model, dtype="float32", attention_backend="cpu", max_model_len=64, num_kvcache_blocks=8) as llm:
        torch.set_num_threads(3)  # the engine took the physical cores
        llm.generate([[5] * 50], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert set(seen) == {(1, 3)} and torch.get_num_threads() == 3


COUNT_WAKE_UPS = """
import json, os, sys, time
from pathlib import Path
import torch
from nanovllm import LLM, SamplingParams

def count():
    time.sleep(0.3)  # idle threads spin first, and then sleep
    tasks = Path("/proc/self/task").iterdir()
    return {task.name: (task / "status").read_text().partition("voluntary_")[2] for task in tasks}

def find_woken(work):
    before = count()
    work()
    after = count()
    return {thread for thread in after if after[thread] != before.get(thread)} - {str(os.getpid())}

def compute_in_torch():
    torch.ones(1 << 22).exp_()

model, options, seed = sys.argv[1], json.loads(sys.argv[2]), 3
with LLM(model, max_model_len=1024, num_kvcache_blocks=16, dtype="float32", **options) as llm:
    torch.set_num_threads(3)
    compute_in_torch()  # torch makes its threads
    pool = find_woken(compute_in_torch) & find_woken(compute_in_torch)
    params = [SamplingParams(temperature=t, seed=seed, max_tokens=4, ignore_eos=True) for t in (0, 1.0)]
    params.append(SamplingParams(max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=1, presence_penalty=0.5))
    woken = find_woken(lambda: llm.generate([[5 + i] * 400 for i in range(3)], params, use_tqdm=False))
    print(json.dumps([len(pool), len(pool & woken), len(pool & find_woken(compute_in_torch))]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc, which counts the wake-ups of a thread")
def test_no_operator_of_torch_wakes_torchs_threads_beside_the_cpu_kernels(random_model: Path) -> None:
    """A step of 1,200 tokens is long enough for torch to wake its threads, and with plain torch it does."""
    counts = {}
    for backend in ("cpu", "torch"):
        options = json.dumps({"attention_backend": backend})
        command = [sys.executable, "-c", COUNT_WAKE_UPS, str(random_model), options]
        environment = {**os.environ, "OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        counts[backend] = json.loads(done.stdout)
    # The threads that torch has, those that the engine woke, and those that torch alone wakes afterwards.
    assert counts == {"cpu": [2, 0, 2], "torch": [2, 2, 2]}


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, float("inf")),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2.0),
        ("4:cpu,cpuacct:/d\n1:memory:/m\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu:/d\n", {"cpu/d/cpu.cfs_quota_us": "50000\n", "cpu/d/cpu.cfs_period_us": "100000\n"}, 0.5),
        ("0::/../x\n", {}, None),
    ],
)
def test_a_containers_quota_of_processor_time_limits_the_threads(
    own: str, files: dict[str, str], quota: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(cgroups, "CGROUPS", tmp_path)
    monkeypatch.setattr(cgroups, "OWN_CGROUPS", tmp_path / "own")
    assert cpu_quota() == (float("inf") if quota is None else quota)
    found = [8]
    monkeypatch.setattr(machine, "physical_cores", lambda of_one_socket: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: found[-1])
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads()
    assert found[-1] == {None: 4, 1.5: 2, 2.0: 2, 0.5: 1}.get(quota, 4)


# ---- machines that lack what Linux or GCC has


def test_the_engine_runs_without_what_only_linux_has(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: no /proc, no control groups, no affinity, no memfd, no huge pages."""
    from nanovllm.features.distributed.ring import make_anonymous_file

    missing = Path("/does/not/exist")
    for module, name in ((cgroups, "CGROUPS"), (cgroups, "OWN_CGROUPS"), (machine, "CPUS")):
        monkeypatch.setattr(module, name, missing)
    for module, name in (
        (os, "sched_getaffinity"),
        (os, "memfd_create"),
        (os, "posix_fadvise"),
        (mmap, "MADV_HUGEPAGE"),
    ):
        monkeypatch.delattr(module, name, raising=False)
    real_open = open

    def open_but_not_proc(file: object, *arguments: object, **options: object) -> object:
        if str(file).startswith(("/proc/", "/sys/")):
            raise FileNotFoundError(file)
        return real_open(file, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", open_but_not_proc)
    monkeypatch.setattr("io.open", open_but_not_proc)
    assert physical_cores() == os.cpu_count() and cpu_quota() == float("inf") and free_memory() > 0
    os.close(make_anonymous_file())
    outputs = []
    for backend in ("torch", "cpu"):
        options = {"dtype": "float32", "attention_backend": backend, "max_model_len": 64}
        with LLM(random_model, **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=5)
            outputs.append(llm.generate([[5] * 20], params, use_tqdm=False)[0]["token_ids"])
    assert outputs[0] == outputs[1]
