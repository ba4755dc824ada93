"""The command: what it says of itself, and how it refuses."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from helpers.batch_jobs import write_lines
from helpers.warm import WarmPython

from nanovllm import __version__
from nanovllm.apps.cli import main
from nanovllm.apps.jobs.job import STATUS_HELP, Status
from nanovllm.config import EngineConfig
from nanovllm.utils.spin import SPIN_COUNT


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(status, stdout, stderr) of the command."""
    try:
        status = main(arguments)
    except SystemExit as error:
        status = int(error.code or 0)
    return (status, *capsys.readouterr())


def test_help_answers_without_torch() -> None:
    code = (
        "import sys; from nanovllm.apps.cli import main\n"
        "try: main(['run-batch', '--help'])\n"
        "except SystemExit: print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.endswith("[]\n") and "--max-model-len" in shown.stdout


def test_help_documents_every_option_in_engine_configs_words(capsys: pytest.CaptureFixture[str]) -> None:
    status, shown, _ = run(capsys, "run-batch", "--help")
    assert status == 0
    words = "".join(shown.split())  # as argparse breaks lines
    for field in fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert "".join(field.metadata["help"].split()) in words
        assert field.name == "model" or f"(default:{str(field.default).replace(' ', '')})" in words
    for status, text in STATUS_HELP.items():
        assert f"{status.value}  {text}" in shown


def test_python_m_runs_it() -> None:
    shown = subprocess.run([sys.executable, "-m", "nanovllm", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == __version__


def test_every_engine_option_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,  # only one of the two may be above 1
        "max_model_len": 9,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 5,
        "gpu_memory_utilization": 0.5,
        "kvcache_block_size": 32,
        "attention_backend": "torch",
        "load_format": "auto",  # with "dummy" there is no lora
        "model_impl": "transformers",
        "distributed_backend": "gloo",
        "kv_cache_dtype": "int8",
        "logprobs_mode": "processed_logprobs",
        "order": "given",
        "reasoning_parser": "qwen3",
        "tool_call_parser": "hermes",
        "quantization": "int8",
        "seed": -3,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    for field in fields(EngineConfig):
        if field.name != "model" and field.name not in given:
            kind = str(field.type)
            given[field.name] = not field.default if "bool" in kind else 5 if "int" in kind else "x"
    arguments = ["run-batch", "-i", "in", "-o", "out", "--model", "a", "--served-model-name", "b", "--overwrite"]
    for name, value in given.items():
        option = name.replace("_", "-")
        text = json.dumps(value) if isinstance(value, dict) else value
        flag = f"--{option}" if value is True else f"--no-{option}" if value is False else f"--{option}={text}"
        arguments.append(flag)
    jobs = []
    monkeypatch.setattr("nanovllm.apps.jobs.run.run_job", lambda job: jobs.append(job) or Status.OK)
    assert main(arguments) == 0
    (job,) = jobs
    assert job.config == EngineConfig("a", **given)
    assert (job.input, job.output, job.model_name, job.overwrite, job.stats) == ("in", "out", "b", True, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["run-batch"], "required"),
        (
            ["run-batch", "-i", "a", "-o", "b", "--model", "m", "--max-modl-len", "5"],
            "did you mean --max-model-len?; see nanovllm run-batch --help",
        ),
        (["run-btch"], "did you mean run-batch?; see nanovllm --help"),
        (
            ["view", "a", "--ouput", "b"],
            "unrecognized arguments: --ouput: did you mean --output?; see nanovllm view --help",
        ),
        (["run-batch", "-i", "a", "-o", "b", "--model", "m", "--max-model-len", "many"], "invalid int"),
        (["run-batch", "-i", "a", "-o", "b", "--model", "m", "--max-model-len", "0"], "at least 1"),
        (["run-batch", "-i", "a", "-o", "b", "--model", "m", "--dtype", "float8"], "dtype"),
        (["run-batch", "-i", "no/such", "-o", "b", "--model", "m"], "does not exist"),
    ],
)
def test_a_wrong_command_is_refused_with_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, said = run(capsys, *arguments)
    assert status == Status.USAGE and words in said and "Traceback" not in said
    assert said.count("\n") == 1, "one line"


def test_help_of_a_job_on_ray_starts_no_other_process() -> None:
    """In the process that guards Ray, help would look like a job that was cut off."""
    command = [sys.executable, "-m", "nanovllm", "run-batch", "--ray", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "--max-tokens VALUE" in done.stdout


@pytest.mark.parametrize("command", ["run-batch", "estimate"])
def test_help_names_what_an_option_takes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, shown, _ = run(capsys, command, "--help")
    for words in ("--max-model-len N", "--dtype DTYPE", "--gpu-memory-utilization SHARE", "--kvcache-block-size N"):
        assert words in shown
    assert " X" not in shown


def test_a_model_that_is_not_there_is_refused_and_another_may_be_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": "x"}])
    for name in ("no-folder", "nor-this"):
        status, _, said = run(
            capsys, "run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--model", str(tmp_path / name)
        )
        assert status == Status.USAGE and name in said and "another job" not in said


def test_the_command_bounds_how_long_threads_spin_before_torch_is_loaded(warm_python: WarmPython) -> None:
    """And leaves what the user has set."""
    code = (
        "import os, sys, nanovllm.apps.jobs.run, nanovllm.apps.cli\n"
        "def run_job(_): return print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT')) or 0\n"
        "nanovllm.apps.jobs.run.run_job = run_job\n"
        "nanovllm.apps.cli.main(['run-batch', '-i', 'in', '-o', 'out', '--model', 'm'])"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    for given, expected in (({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)):
        done = subprocess.run([sys.executable, "-c", code], env=environment | given, capture_output=True, text=True)
        assert done.stdout.split() == ["False", str(expected)]
    late = (
        "import os, sys\n"
        "for name in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'): os.environ.pop(name, None)\n"
        "import nanovllm\n"
        "print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    )
    assert warm_python.run(late).stdout.split() == ["True", "None"], "libgomp would not read it"


@pytest.mark.parametrize(("status", "printed"), [(1, "said\ncleaned up\n"), (130, "said\n"), (143, "said\n")])
def test_an_interrupted_command_ends_without_the_interpreters_clean_up(status: int, printed: str) -> None:
    """All that was printed arrives."""
    script = f"""
import atexit
from nanovllm.apps import cli
atexit.register(print, "cleaned up")
cli.main = lambda: print("said") or {status}
cli.run()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (status, printed, "")


ESTIMATE = "-m nanovllm estimate qwen3-8b --gpu-memory 80GB"
PRINT = "-c 'from nanovllm.apps import cli; cli.main = lambda: cli._set_up_logging() or print(5) or 0; cli.run()'"
"""A command that prints as any other, and imports no torch."""
FULL = "ERROR standard output cannot be written: No space left on device\n"
CLOSED = "ERROR standard output cannot be written: Bad file descriptor\n"


@pytest.mark.parametrize(
    ("command", "redirection", "unbuffered", "message"),
    [
        pytest.param(ESTIMATE, "> /dev/full", "", FULL, marks=pytest.mark.slow),
        (PRINT, "> /dev/full", "1", FULL),
        (PRINT, ">&-", "", CLOSED),
        (PRINT, ">&-", "1", CLOSED),
        (PRINT, "| true", "", ""),
        (PRINT, "| true", "1", ""),
    ],
    ids=["full", "full, unbuffered", "closed", "closed, unbuffered", "no reader", "no reader, unbuffered"],
)
def test_an_answer_that_cannot_be_written_is_status_3_and_no_traceback(
    command: str, redirection: str, unbuffered: str, message: str
) -> None:
    script = f"(sleep 0.2; {sys.executable} {command}) {redirection}; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", script], env=environment, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (Status.OUTPUT_FAILED, message)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_no_file_that_a_command_opens_takes_the_place_of_a_closed_stream(closed: str) -> None:
    """A library that prints would write into it."""
    code = (
        "import os, sys\n"
        "from nanovllm.apps import cli\n"
        "def main():\n"
        "    assert os.open(os.devnull, os.O_RDONLY) > 2\n"
        "    assert sys.stdin.read() == ''\n"
        "    assert all(map(os.get_inheritable, range(3)))\n"
        "    sys.stderr.write('heard')\n"
        "    return 7\n"
        "cli.main = main\n"
        "cli.run()\n"
    )
    command = ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, code]
    assert subprocess.run(command, stdin=subprocess.DEVNULL).returncode == 7


def test_help_that_cannot_be_written_is_status_3() -> None:
    script = f"{sys.executable} -m nanovllm estimate --help > /dev/full"
    done = subprocess.run(
        ["bash", "-c", script], env=os.environ | {"PYTHONUNBUFFERED": ""}, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == Status.OUTPUT_FAILED
    assert done.stderr == "ERROR standard output cannot be written: No space left on device\n"


def test_an_input_that_cannot_be_read_is_not_taken_for_the_output(tmp_path: Path) -> None:
    """Such an error has no file's name, either."""
    code = "import os; from nanovllm.apps import cli; cli.main = lambda: os.read(0, 1); cli.run()"
    with (tmp_path / "only written").open("w") as stdin:
        done = subprocess.run([sys.executable, "-c", code], stdin=stdin, capture_output=True, text=True)
    assert done.returncode == 1
    assert "OSError: [Errno 9]" in done.stderr and "standard output" not in done.stderr


def test_an_os_error_of_a_users_script_is_the_users(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise BrokenPipeError(32, 'mine')\n")
    command = [sys.executable, "-m", "nanovllm", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "BrokenPipeError: [Errno 32] mine" in done.stderr
