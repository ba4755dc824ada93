"""Programs that import vllm, unchanged, on this engine: what they get is what transformers says, in float32.

pip installs them into two environments of their own, which see the packages of this one. Where a package cannot be
installed, the tests are skipped. docs/programs.md has the numbers.
"""

import fcntl
import json
import os
import subprocess
import sys
import sysconfig
import venv
from typing import Any

import pytest
from helpers.paths import ROOT, TESTS

pytestmark = [pytest.mark.slow, pytest.mark.longest]

ENVIRONMENTS = {
    "evaluations": {
        "trl": "1.16.0",
        "peft": "0.21.2",
        "lm_eval": "0.4.13",
        "lighteval": "0.13.0",
        "outlines": "1.3.3",
        "langchain-community": "0.4.2",
    },
    "pipelines": {"llama-index-llms-vllm": "0.8.0", "distilabel": "1.5.3"},  # lighteval wants an older nltk
}
PROGRAMS = TESTS / "helpers" / "programs"


def make_environment(name: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the Python of an environment that has the programs. Processes that test at the same time share it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / name
    refusal = shared / f"{name}.txt"
    python = folder / "bin" / "python"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not refusal.exists():
            venv.create(folder)
            (packages,) = folder.glob("lib/python*/site-packages")
            (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
            wanted = [f"{package}=={version}" for package, version in ENVIRONMENTS[name].items()]
            pip = [sys.executable, "-m", "pip", "--python", str(python)]
            command = [*pip, "install", "-q", "--no-compile", "--retries", "1", *wanted]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900)
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            refusal.write_text("" if done.returncode == 0 else (errors or ["pip has failed"])[-1])
    if reason := refusal.read_text():
        pytest.skip(f"the programs cannot be installed: {reason}")
    return str(python)


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_environment("evaluations", tmp_path_factory)


@pytest.fixture(scope="module")
def other_interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_environment("pipelines", tmp_path_factory)


def run(interpreter: str, *arguments: str) -> dict[str, Any]:
    """Run a program under `nanovllm run`, and return the JSON of its last line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_DATASETS_OFFLINE": "1"}
    command = [interpreter, "-m", "nanovllm", "run", *arguments]
    done = subprocess.run(command, cwd=PROGRAMS, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.startswith("vllm is nanovllm ")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("temperature", "sleep", "peft"),
    [(1.0, True, False), (0.7, False, True)],
    ids=["temperature 1, asleep between steps", "temperature 0.7, an adapter"],
)
def test_grpos_sampler_and_trainer_agree_and_tokens_are_the_trained_models(
    interpreter: str, temperature: float, sleep: bool, peft: bool
) -> None:
    """The tolerance is ten times the largest difference of float32 sums that was seen, 2e-5. A wrong mode of
    log-probabilities gives 0.05 and more, and ratios of 0.6 to 2."""
    found = run(interpreter, "grpo.py", json.dumps([temperature, sleep, peft]))
    assert found["steps"] == 3
    assert found["difference"] < 2e-4
    assert found["ratios"] == pytest.approx([1] * 6, abs=2e-4)
    assert found["engine"] == found["trained"]


def test_the_harnesss_own_class_says_what_hf_and_ours_say(interpreter: str) -> None:
    """Log-likelihoods are sums of up to a few hundred float32 numbers: 5e-5 was seen."""
    found = run(interpreter, "harness.py")
    numbers: dict[str, list[float]] = {}
    for name, tasks in found.items():
        choices = [answer for resps in tasks["choose"] for ((answer, _),) in resps]
        numbers[name] = [float(value) for value in choices] + [float(resps[0][0]) for resps in tasks["roll"]]
    assert len(numbers["hf"]) == 9
    for name in ("vllm", "nanovllm"):
        assert numbers[name] == pytest.approx(numbers["hf"], abs=1e-3)
        assert found[name]["answer"] == found["hf"]["answer"]


def test_lighteval_scores_and_generates_as_transformers_does(interpreter: str) -> None:
    found = run(interpreter, "--claim", "0.10.1", "light.py")
    for scores, expected in zip(found["scores"], found["expected_scores"], strict=True):
        assert scores == pytest.approx(expected, abs=1e-3)
    assert len(found["texts"]) == 3
    assert found["texts"] == [text.split("\n")[0] for text in found["expected_texts"]]


def test_outlines_gives_the_greedy_text_and_outputs_of_the_type(interpreter: str) -> None:
    found = run(interpreter, "typed.py")
    assert found["text"] == found["expected"]
    assert [text for (text,) in found["batch"]] == found["expected_batch"]
    assert found["choice"] in ("yes", "no") and found["number"] and found["person"] in (3, 4)


def test_langchain_gives_the_greedy_text_and_loses_no_option(interpreter: str) -> None:
    found = run(interpreter, "chain.py")
    assert found["batch"] == found["expected"]
    assert found["text"] == found["expected"][0]
    assert found["stopped"] == found["text"].split(found["text"][-1])[0]
    assert "best_of, which others have, is not supported here as 4" in found["refused"]


def test_llama_index_gives_the_greedy_text(other_interpreter: str) -> None:
    found = run(other_interpreter, "index.py")
    assert found["text"] == found["expected"]


def test_the_processes_of_distilabels_pipeline_give_the_greedy_texts(other_interpreter: str) -> None:
    found = run(other_interpreter, "distil.py")
    assert found["texts"] == found["expected"]
    assert len(found["answers"]) == 3 and found["counts"] == [8, 8, 8]
