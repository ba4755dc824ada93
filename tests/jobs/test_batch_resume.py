"""Batch jobs without a model: what is left after whatever ends a job, and how the next run resumes."""

import gzip
import io
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.batch_jobs import InstantLLM, openai_line, read_answers, run, texts_by_id, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm.apps.jobs.compact_sets import LineSet
from nanovllm.apps.jobs.job import Status
from nanovllm.apps.jobs.manifest import Manifest
from nanovllm.apps.jobs.results_file import ResultsFile, open_results

LINES = [openai_line(f"id-{i}", prompt="x" * (i + 1)) for i in range(30)]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "nanovllm")
    return caplog


# ---- resuming


def undisturbed(tmp_path: Path, lines: list[Any]) -> tuple[Path, list[dict[str, Any]]]:
    source = write_lines(tmp_path / "in", lines)
    run(source, tmp_path / "whole")
    return source, sorted_answers(tmp_path / "whole")


def sorted_answers(path: Path) -> list[dict[str, Any]]:
    answers = read_answers(path)
    for answer in answers:
        del answer["checksum"]
        if answer["error"] is None:
            del answer["response"]["body"]["created"]
    return sorted(answers, key=lambda answer: answer["id"])


MIXED = [*LINES[:6], b"{", LINES[2], *LINES[6:12], {"prompt": "plain"}, openai_line("late", prompt="")]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_cut_at_any_byte_a_job_resumes_to_the_same_answers(tmp_path: Path, data: st.DataObject) -> None:
    source, expected = undisturbed(tmp_path, MIXED)
    whole = (tmp_path / "whole").read_bytes()
    cut = data.draw(st.integers(1, len(whole)))
    (tmp_path / "out").write_bytes(whole[:cut] + data.draw(st.sampled_from([b"", b"\0\0\0", b"\0\n\0"])))
    (tmp_path / "out.job.json").write_bytes((tmp_path / "whole.job.json").read_bytes())
    assert run(source, tmp_path / "out") == Status.LINES_FAILED
    assert sorted_answers(tmp_path / "out") == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("CUDA error"), ValueError("a defect")])
def test_whatever_ends_a_job_its_answers_stay_and_the_same_command_resumes(
    error: BaseException, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    source, expected = undisturbed(tmp_path, MIXED)
    out = tmp_path / "out"
    status = run(source, out, {"dies_after": 7, "error": error})
    assert status == (Status.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Status.BROKEN)
    first = out.read_bytes()
    assert first.endswith(b"\n") and len([a for a in read_answers(out) if a["error"] is None]) == 7
    assert run(source, out) == Status.LINES_FAILED
    assert out.read_bytes().startswith(first) and sorted_answers(out) == expected


def test_a_job_that_is_done_loads_no_model_and_tells_the_same_status(tmp_path: Path) -> None:
    source, _ = undisturbed(tmp_path, MIXED)
    before = (tmp_path / "whole").read_bytes()
    assert run(source, tmp_path / "whole", {"no such option": 1}, stats=str(tmp_path / "stats")) == Status.LINES_FAILED
    assert (tmp_path / "whole").read_bytes() == before
    stats = json.loads((tmp_path / "stats").read_text())
    assert stats["num_earlier"] == len(MIXED) and stats["num_failed"] == 3 and stats["num_generated_tokens"] == 0


def test_another_input_or_option_is_refused_and_overwrite_starts_anew(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    source = write_lines(tmp_path / "in", LINES)
    out = tmp_path / "out"
    assert run(source, out, {"dies_after": 5}) == Status.BROKEN
    before = out.read_bytes()
    assert run(source, out, seed=1) == Status.USAGE
    assert "options.seed was 0 and is 1" in log.text and "--overwrite" in log.text
    assert run(source, out, quantization="int8") == Status.USAGE
    assert "options.quantization was None and is 'int8'" in log.text
    assert run(source, out, kv_cache_dtype="int8") == Status.USAGE
    assert "options.kv_cache_dtype was 'auto' and is 'int8'" in log.text
    write_lines(source, LINES[1:])
    assert run(source, out) == Status.USAGE
    assert "input.num_lines was 30 and is 29" in log.text
    assert out.read_bytes() == before
    assert run(source, out, seed=1, overwrite=True) == Status.OK
    assert len(texts_by_id(out)) == 29


def test_options_of_pace_and_memory_may_change_and_so_may_the_inputs_place(tmp_path: Path) -> None:
    source, expected = undisturbed(tmp_path, MIXED)
    run(source, tmp_path / "out", {"dies_after": 5})
    packed = tmp_path / "moved.gz"
    packed.write_bytes(gzip.compress(source.read_bytes()))
    assert run(packed, tmp_path / "out", max_num_seqs=3, gpu_memory_utilization=0.5) == Status.LINES_FAILED
    assert sorted_answers(tmp_path / "out") == expected


def test_a_file_that_is_no_jobs_is_not_touched(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    source = write_lines(tmp_path / "in", LINES)
    (tmp_path / "out").write_text("my thesis")
    assert run(source, tmp_path / "out") == Status.USAGE
    assert (tmp_path / "out").read_text() == "my thesis" and "out.job.json" in log.text
    assert run(source, source) == Status.USAGE
    assert source.read_bytes().count(b"\n") == len(LINES)


def test_a_damaged_line_among_whole_ones_is_named_and_nothing_is_thrown_away(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    source, expected = undisturbed(tmp_path, MIXED)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    (tmp_path / "whole").write_bytes(b"".join([*lines[:3], b"?" * 9 + b"\n", *lines[4:]]))
    assert run(source, tmp_path / "whole") == Status.USAGE
    assert "line 4 is damaged" in log.text
    (tmp_path / "whole").write_bytes(b"".join(lines[:3] + lines[4:]))
    assert run(source, tmp_path / "whole") == Status.LINES_FAILED
    assert sorted_answers(tmp_path / "whole") == expected


def open_empty(path: Path) -> ResultsFile:
    return open_results(str(path), Manifest(path, {}), LineSet(), overwrite=False)[0]


def test_two_processes_do_not_write_the_same_results(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    source = write_lines(tmp_path / "in", LINES)
    journal = open_empty(tmp_path / "out")
    assert run(source, tmp_path / "out") == Status.USAGE
    assert "another process" in log.text
    journal.close()


def test_an_answer_is_in_the_file_as_soon_as_it_is_given_and_on_the_disk_soon_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.apps.jobs.results_file.SYNC_SECONDS", 0.01)
    synced: list[int] = []
    real_fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real_fsync(fd)))
    journal = open_empty(tmp_path / "out")
    journal.append(b"an answer\n")
    assert (tmp_path / "out").read_bytes() == b"an answer\n"
    wait_until(lambda: 10 in synced)  # no further append is needed for it
    journal.close()


def wait_until(condition: Any, seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


# ---- pipes


def test_from_and_to_pipes_a_job_runs_and_says_that_it_cannot_be_resumed(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in", LINES)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(source.read_bytes())))
    assert run("-", tmp_path / "out") == Status.OK
    assert len(texts_by_id(tmp_path / "out")) == 30 and "cannot be resumed" in log.text
    assert not (tmp_path / "out.job.json").exists()
    assert run("-", tmp_path / "out") == Status.USAGE  # what is there is not thrown away unasked
    log.clear()
    assert run(source, "/dev/null") == Status.OK
    assert "cannot be resumed" in log.text


def test_standard_output_gets_results_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in", LINES)
    assert run(source, "-") == Status.OK
    lines = capfd.readouterr().out.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(line["custom_id"] for line in LINES)


# ---- what goes wrong outside


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_reported_and_nothing_is_corrupt(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    source, expected = undisturbed(tmp_path, MIXED)
    out = tmp_path / "out"
    for limit in (1500, 3000):
        with files_of_at_most(limit):
            assert run(source, out) == Status.OUTPUT_FAILED
        assert "File too large" in log.text and "cannot be written" in log.text
        assert limit - 700 < out.stat().st_size <= limit
        assert out.read_bytes().endswith(b"\n") and read_answers(out)
    assert run(source, out) == Status.LINES_FAILED
    assert sorted_answers(out) == expected


def test_a_full_device_and_a_disk_that_fails_later_are_reported(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in", LINES)
    assert run(source, "/dev/full") == Status.OUTPUT_FAILED
    assert "No space left" in log.text

    def fail(_: ResultsFile) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ResultsFile, "_sync", fail)
    assert run(source, tmp_path / "out") == Status.OUTPUT_FAILED
    assert "Input/output error" in log.text


@pytest.mark.parametrize(("name", "words"), [("no/such", "does not exist"), (".", "is a folder")])
def test_an_output_that_cannot_be_opened_is_a_usage_error(
    name: str, words: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    source = write_lines(tmp_path / "in", LINES)
    assert run(source, tmp_path / name) == Status.USAGE
    assert words in log.text
    assert run(source, tmp_path / "out", stats=str(tmp_path / "no/such")) == Status.USAGE
    assert "--stats" in log.text


def test_an_input_that_cannot_be_read_is_a_usage_error(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    assert run(tmp_path / "absent", tmp_path / "out") == Status.USAGE
    (tmp_path / "in.gz").write_bytes(gzip.compress(json.dumps(LINES[0]).encode() * 50)[:-9])
    assert run(tmp_path / "in.gz", tmp_path / "out") == Status.USAGE
    assert "does not exist" in log.text and "in.gz cannot be read" in log.text
    assert not (tmp_path / "out").exists()


def test_sigterm_ends_a_job_as_ctrl_c_does_with_a_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in", LINES)

    def answer(self: InstantLLM, token_ids: list[int], params: Any) -> dict[str, Any]:
        if len(self.requests) == 20:
            signal.raise_signal(signal.SIGTERM)
        return real_answer(self, token_ids, params)

    real_answer = InstantLLM._answer
    monkeypatch.setattr(InstantLLM, "_answer", answer)
    assert run(source, tmp_path / "out") == Status.TERMINATED
    assert 5 < len(read_answers(tmp_path / "out")) < 20
    monkeypatch.undo()
    assert run(source, tmp_path / "out") == Status.OK
    assert len(texts_by_id(tmp_path / "out")) == 30


@pytest.mark.parametrize("is_held", [True, False])
def test_sigterm_goes_to_whoever_holds_sigint_and_ends_the_job_where_sigint_is_ignored(
    is_held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine holds SIGINT until its step has ended. A shell's background job ignores it."""
    held: list[int] = []

    def hold(number: int, frame: Any) -> None:
        held.append(number)

    def answer(self: InstantLLM, token_ids: list[int], params: Any) -> dict[str, Any]:
        if len(self.requests) == 20:
            before = signal.signal(signal.SIGINT, hold if is_held else signal.SIG_IGN)
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.signal(signal.SIGINT, before)
        return real_answer(self, token_ids, params)

    real_answer = InstantLLM._answer
    monkeypatch.setattr(InstantLLM, "_answer", answer)
    status = run(write_lines(tmp_path / "in", LINES), tmp_path / "out")
    assert status == (Status.OK if is_held else Status.TERMINATED)
    assert set(held) == ({signal.SIGINT} if is_held else set())
