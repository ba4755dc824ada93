"""Batch jobs with the built-in model, as processes of their own that are killed: nothing lost, nothing twice."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.batch_jobs import openai_line, read_answers, texts_by_id, write_lines

from nanovllm.apps.jobs.job import Job, Status
from nanovllm.apps.jobs.run import run_job
from nanovllm.config import EngineConfig

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,  # few, so that a run takes long enough to be killed in its midst
    "kvcache_memory_bytes": 32 << 20,
    "seed": 7,
}
NUM_LINES = 72


def make_line(number: int) -> Any:
    """By turns greedy, with a seed of its own, with one from its id; chats and completions; some bad.

    Of six lines the second three ask what the first three ask.
    """
    if number % 16 == 15:
        return b'{"custom_id": "torn'
    asked = number - 3 * (number % 6 // 3)
    sampling = [{"temperature": 0}, {"seed": asked}, {}][asked % 3]
    limits = {"max_tokens": 20 + asked % 30, "ignore_eos": True}
    if asked % 2:
        return openai_line(f"id-{number}", prompt=f"Question {asked}:", **sampling, **limits)
    messages = [{"role": "user", "content": f"What is the capital of country {asked}?"}]
    return openai_line(f"id-{number}", messages=messages, **sampling, **limits)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("job") / "in.jsonl", map(make_line, range(NUM_LINES)))


@pytest.fixture(scope="module")
def undisturbed(source: Path) -> Path:
    """The results of a run that nothing disturbed."""
    results = source.with_name("undisturbed.jsonl")
    finish(source, results)
    return results


def start(source: Path, results: Path) -> "subprocess.Popen[str]":
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, "-m", "nanovllm", "run-batch", "--model=tiny-qwen3", *options]
    command += ["-i", str(source), "-o", str(results)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def disturb(process: "subprocess.Popen[str]", results: Path, num_answers: int, number: signal.Signals) -> str:
    """Send a signal once there are so many answers more; returns what the process has said."""
    goal = count_lines(results) + num_answers
    while count_lines(results) < goal and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(number)
    said = process.communicate(timeout=600)[1]
    assert count_lines(results) < NUM_LINES, "it ended before it was disturbed"
    return said


def finish(source: Path, results: Path) -> None:
    """Run the job to its end, in this process."""
    job = Job(str(source), str(results), EngineConfig("tiny-qwen3", **OPTIONS), "tiny-qwen3")
    assert run_job(job) == Status.LINES_FAILED


def assert_same(results: Path, undisturbed: Path) -> None:
    """Every line is answered exactly once, and with the same text."""
    ids = [answer["id"] for answer in read_answers(results)]
    assert sorted(ids) == sorted(f"batch_req_{number}" for number in range(1, NUM_LINES + 1))
    texts = texts_by_id(undisturbed)
    assert texts_by_id(results) == texts and len(texts) == NUM_LINES - 4


@pytest.mark.slow
def test_killed_interrupted_and_terminated_it_loses_nothing_and_repeats_nothing(
    source: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """It is killed at a random moment; test_attack_kills.py has more of them. Signals that it sees it reports."""
    results = tmp_path / "out.jsonl"
    process = start(source, results)
    disturb(process, results, random.Random(os.getpid()).randint(1, 15), signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    for number, status in ((signal.SIGINT, Status.INTERRUPTED), (signal.SIGTERM, Status.TERMINATED)):
        process = start(source, results)
        said = disturb(process, results, 8, number)
        assert process.returncode == status, said
        assert results.read_bytes().endswith(b"\n")
        assert f"{count_lines(results)} of {NUM_LINES} lines answered" in said and "Traceback" not in said
        assert "the same command goes on" in said
    finish(source, results)
    assert_same(results, undisturbed)
