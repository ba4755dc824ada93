"""The script for the first hour on a GPU brings its compiled kernels back in one file, and other machines use them."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from _pytest.mark.expression import Expression
from helpers.paths import ROOT, TESTS
from torch.profiler import ProfilerActivity, profile

from benchmarks.bench_compare import RIVALS
from nanovllm.config import EngineConfig

SCRIPT = ROOT / "scripts" / "gpu_first_hour.sh"


def run(out: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {"OUT": str(out), "TRITON_CACHE_DIR": str(cache), "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", SCRIPT, *arguments], env=os.environ | variables, capture_output=True, text=True, check=False
    )


def compile_into(cache: Path) -> bool:
    """Compile a small kernel for a GPU, in a process of its own. Returns whether the cache had it already."""
    script = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nanovllm.backends.gpu.gate_and_mul import _gate_and_mul_kernel as kernel

def listen(cache_hit, **others):
    print(cache_hit)

triton.knobs.compilation.listener = listen
values = {"codes_ptr": None, "scales_ptr": None, "SILU": True, "BLOCK": 64, "PDL": False}
signature = {}
for name in kernel.arg_names:
    signature[name] = "constexpr" if name in values else "*fp32" if name.endswith("_ptr") else "i32"
constants = {(kernel.arg_names.index(name),): value for name, value in values.items()}
compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
assert compiled.asm["cubin"]
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip() == "True"


@pytest.mark.slow
def test_kernels_that_came_back_are_not_compiled_again(tmp_path: Path) -> None:
    """Triton lists a kernel's files by full path, and takes them for lost if one is missing."""
    pytest.importorskip("triton")
    out = tmp_path / "out"
    first = tmp_path / "first"
    second = tmp_path / "second"
    assert not compile_into(first)
    assert compile_into(first)
    assert run(out, first, "pack").returncode == 0
    assert [path.name for path in out.iterdir()] == ["triton-cache.tgz"]
    shutil.rmtree(first)
    assert run(tmp_path / "other", second, "pack", str(out / "triton-cache.tgz")).returncode == 0
    suffixes = {path.suffix for path in second.rglob("*.*")}
    assert ".cubin" in suffixes and not suffixes & {".ttir", ".ttgir", ".llir", ".ptx", ".source"}
    assert compile_into(second)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["gpu_sweep.py", "gpu_products.py"])
def test_every_configuration_of_the_sweep_is_right(script: str) -> None:
    """Without a GPU, the script proves in the interpreter what it times on one."""
    pytest.importorskip("triton")
    program = (
        "import runpy, sys; from helpers.quick_interpreter import quicken; quicken(); "
        "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    paths = os.pathsep.join([str(TESTS), str(ROOT / "scripts"), *sys.path])
    result = subprocess.run(
        [sys.executable, "-c", program, ROOT / "scripts" / script, "--check-only"],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_every_step_chooses_tests_and_options_that_exist(tmp_path: Path) -> None:
    """All calls, with stand-ins for Python and the sanitizer that note their arguments.

    A call leaves its log and the kernels, because few files may come back from a machine.
    """
    python = tmp_path / "python"
    python.write_text(f'#!/usr/bin/env bash\nprintf "%s\\037" "$@" >> {tmp_path}/calls\necho >> {tmp_path}/calls\n')
    python.chmod(0o755)
    (tmp_path / "compute-sanitizer").symlink_to(python)
    cache = tmp_path / "cache"  # apart from the logs: tar fails if a file that it reads still grows
    cache.mkdir()
    environment = os.environ | {"OUT": str(tmp_path / "out"), "TRITON_CACHE_DIR": str(cache), "PYTHON": str(python)}
    environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    environment |= {"NANO_VLLM_PYTHON": str(python), "VLLM_PYTHON": str(python)}
    names = []
    for number in map(str, range(1, 11)):
        result = subprocess.run(["bash", SCRIPT, number], env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0 and "failed" not in result.stdout, result
        assert f"writes {tmp_path}/out/call-{number}.log" in result.stdout.splitlines()[0]
        assert {path.name for path in (tmp_path / "out").iterdir()} == {f"call-{number}.log", "triton-cache.tgz"}
        names += re.findall(r"^=== (\S+):", (tmp_path / "out" / f"call-{number}.log").read_text(), re.MULTILINE)
        (tmp_path / "out" / f"call-{number}.log").unlink()
    calls = [line.split("\037")[:-1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert len(calls) == len(names) > 0
    remaining = {f"tests/gpu/{path.name}": read_tests(path.name) for path in (ROOT / "tests" / "gpu").glob("*.py")}
    del remaining["tests/gpu/test_gpu_first_hour.py"]
    for call in calls:
        script = next((ROOT / part for part in call if part.endswith(".py")), None)
        if script is not None and "pytest" not in call:
            texts = script.read_text()
            if script.name == "bench.py":
                texts += (ROOT / "nanovllm" / "apps" / "bench.py").read_text()
                texts += (ROOT / "benchmarks" / "bench_compare.py").read_text()
                texts += " ".join(f'"--{name}-python"' for name in RIVALS)
                texts += " ".join(f'"--{field.name.replace("_", "-")}"' for field in fields(EngineConfig))
            for option in (part for part in call if part.startswith("--")):
                assert f'"{option}"' in texts, call
        elif script is not None:
            tests = read_tests(script.name)
            if "-k" in call:
                expression = Expression.compile(call[call.index("-k") + 1])
                tests = {name for name in tests if expression.evaluate(name.__contains__)}
            assert tests, call
            remaining[str(script.relative_to(ROOT))] -= tests
    assert not any(remaining.values()), "no step runs these"


def test_a_step_that_takes_its_whole_time_takes_none_from_the_next() -> None:
    calls = SCRIPT.read_text().partition("\ncase ")[2].split(";;")[:10]
    limits = [sum(map(int, re.findall(r"^ +step \S+ (\d+) ", call, re.MULTILINE))) for call in calls]
    assert min(limits) > 0 and max(limits) <= 570
    assert sum(limits[:3]) <= 750, "a quarter of an hour has room for them, and for the start of a machine"


def test_what_a_rival_said_is_in_the_log_of_the_call(tmp_path: Path) -> None:
    """Its own file is in a folder that a machine need not bring back."""
    python = tmp_path / "python"
    python.write_text("#!/usr/bin/env bash\n")
    python.chmod(0o755)
    said = tmp_path / "cache" / "nanovllm" / "bench" / "vllm.log"
    said.parent.mkdir(parents=True)
    said.write_text("no kernel image is available\n")
    environment = os.environ | {"OUT": str(tmp_path / "out"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    environment |= {"PYTHON": str(python), "VLLM_PYTHON": str(python), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run(["bash", SCRIPT, "2"], env=environment, capture_output=True, check=True)
    assert "no kernel image is available" in (tmp_path / "out" / "call-2.log").read_text()


@pytest.mark.slow
def test_a_step_whose_time_is_over_is_interrupted(tmp_path: Path) -> None:
    """pytest then prints what it has found. When it is terminated, it prints nothing."""
    python = tmp_path / "python"
    python.write_text(
        "#!/usr/bin/env bash\n[[ $* == *splits* ]] || exit 0\n"
        "trap 'echo interrupted; kill $!; exit 1' INT\nsleep 60 & wait\n"
    )
    python.chmod(0o755)
    script = tmp_path / "scripts" / "short.sh"
    script.parent.mkdir()
    script.write_text(re.sub(r"step sweep \d+", "step sweep 6", SCRIPT.read_text()))
    environment = os.environ | {"OUT": str(tmp_path / "out"), "TRITON_CACHE_DIR": str(tmp_path), "PYTHON": str(python)}
    result = subprocess.run(["bash", script, "6"], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "failed: sweep" in result.stdout
    assert "interrupted" in (tmp_path / "out" / "call-6.log").read_text()


def read_tests(name: str) -> set[str]:
    """Return the names of a file's tests."""
    return set(re.findall(r"^def (test_\w+)", (ROOT / "tests" / "gpu" / name).read_text(), re.MULTILINE))


def test_an_archive_that_is_not_there_ends_the_call(tmp_path: Path) -> None:
    result = run(tmp_path / "out", tmp_path / "cache", "pack", str(tmp_path / "none" / "triton-cache.tgz"))
    assert result.returncode == 2
    assert f"cannot unpack {tmp_path}/none/triton-cache.tgz" in result.stderr


def test_products_are_listed_by_shape() -> None:
    pytest.importorskip("triton")
    from scripts.gpu_profile import describe_products

    x = torch.ones(3, 8)
    weights = [torch.ones(8, 4), torch.ones(8, 5)]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        for _ in range(2):
            for weight in weights:
                x @ weight
                torch.addmm(torch.ones(5), x, weights[1])
    head, *lines = describe_products(profiled.key_averages(group_by_input_shape=True), 2)
    assert head.split() == ["us", "a", "step", "number", "us", "each", "product"]
    found = {line.split(None, 3)[3]: float(line.split()[1]) for line in lines}
    assert found == {"mm [3, 8] x [8, 4]": 1, "mm [3, 8] x [8, 5]": 1, "addmm [3, 8] x [8, 5]": 2}
