"""A system without what only Linux has, and with a compiler as macOS has, runs the example, ranks and a job.

helpers/like_macos takes these things away in the child processes of a test, those of other ranks included. The compiler
knows neither -fopenmp nor -march=native, is called clang++, and says that the system is not Linux.
"""

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

from nanovllm import LLM, SamplingParams

LIKE_MACOS = ROOT / "tests" / "helpers" / "like_macos"
COMPILER = """#!/bin/sh
for argument; do
    case "$argument" in
    -fopenmp | -march=native)
        echo "clang: error: unsupported option '$argument'" >&2
        exit 1 ;;
    esac
done
PATH={path} exec g++ -w -U__linux__ -U__linux -Ulinux -U__gnu_linux__ "$@" -O0
"""
"""Compiles without optimisation, which takes a third of the time."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that finds itself on such a system, with a cache folder of its own."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which does clang++'s work")
    tools = tmp_path_factory.mktemp("tools")
    compiler = tools / "clang++"
    compiler.write_text(COMPILER.format(path=os.environ["PATH"]))
    compiler.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("CXX", "TRITON_INTERPRET")}
    path = os.pathsep.join([str(LIKE_MACOS), str(ROOT)])
    return kept | {"PATH": str(tools), "PYTHONPATH": path, "XDG_CACHE_HOME": str(tools / "cache")}


def run(environment: dict[str, str], *command: str, folder: Path = ROOT) -> str:
    """Run Python and return what it prints."""
    done = subprocess.run([sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_prints_the_same(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--temperature", "0", "--max-tokens", "12", "what is 17 + 25?", "count from 7 to 21"]
    monkeypatch.setattr(sys, "argv", ["example.py", *arguments])
    runpy.run_path(str(ROOT / "example.py"), run_name="__main__")
    expected = capsys.readouterr().out
    assert "42" in expected
    assert run(environment, "example.py", *arguments) == expected


GENERATE = """
import json, os, platform, sys
from nanovllm import LLM, SamplingParams

assert not os.path.exists("/proc/self") and not hasattr(os, "memfd_create") and not hasattr(os, "sched_getaffinity")
options, *arguments = map(json.loads, sys.argv[1:])
with LLM(**options) as llm:
    outputs = llm.generate(arguments[0], SamplingParams(**arguments[1]), use_tqdm=False)
print(json.dumps([output["token_ids"] for output in outputs]))
"""
PROMPTS = [[5] * 20, [7, 8, 9]]
PARAMS = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_the_cpu_kernels_and_ranks_give_the_same_tokens(
    environment: dict[str, str], ranks: dict[str, int], random_model: Path
) -> None:
    options = {"model": str(random_model), "dtype": "float32", "max_model_len": 64, "num_kvcache_blocks": 8}
    with LLM(**options, attention_backend="torch") as llm:  # type: ignore[arg-type]
        outputs = llm.generate(PROMPTS, SamplingParams(**PARAMS), use_tqdm=False)  # type: ignore[arg-type]
    options |= ranks | {"attention_backend": "cpu"}
    printed = run(environment, "-c", GENERATE, json.dumps(options), json.dumps(PROMPTS), json.dumps(PARAMS))
    assert json.loads(printed) == [output["token_ids"] for output in outputs]


@pytest.mark.slow
def test_the_report_on_the_machine_and_a_job_of_files_work(environment: dict[str, str], tmp_path: Path) -> None:
    report = run(environment, "-m", "nanovllm", "doctor")
    assert "/dev/shm" not in report and "cpu backend          chosen" in report
    body = {"messages": [{"role": "user", "content": "what is 17 + 25?"}], "max_tokens": 12, "temperature": 0}
    line = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    run(
        environment,
        "-m",
        "nanovllm",
        "run-batch",
        "-i",
        "in.jsonl",
        "-o",
        "out.jsonl",
        "--model",
        "tiny-qwen3",
        folder=tmp_path,
    )
    assert "42" in (tmp_path / "out.jsonl").read_text()
