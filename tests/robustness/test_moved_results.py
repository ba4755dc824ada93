"""Results that other processes move, remove or change while a job writes them: noticed, told, and saved if possible."""

import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.batch_jobs import read_answers, run, run_job_that_calls, texts_by_id, write_lines

from nanovllm.apps.jobs.job import Status

NUM_LINES = 40


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "nanovllm")
    return caplog


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in", [{"prompt": f"p{i}"} for i in range(NUM_LINES)])


def rescued(said: str) -> Path:
    """The file that a message names."""
    (name,) = re.findall(r"copied to (\S+): the same command with -o \1 resumes the job", said)
    return Path(name)


def remove(out: Path) -> None:
    out.unlink()


def remove_one_of_two_links(out: Path) -> None:
    os.link(out, out.with_name("link"))
    out.unlink()


def rename(out: Path) -> None:
    out.rename(out.with_name("moved"))


def replace(out: Path) -> None:
    shutil.copy(out, out.with_name("copy"))
    os.replace(out.with_name("copy"), out)


def remove_folder(out: Path) -> None:
    shutil.rmtree(out.parent)


def move_folder(out: Path) -> None:
    out.parent.rename(out.parent.with_name("elsewhere"))


MOVES = (remove, remove_one_of_two_links, rename, replace, remove_folder, move_folder)


@pytest.mark.parametrize("after", [10, NUM_LINES - 1], ids=["in its midst", "at its end"])
@pytest.mark.parametrize("move", MOVES)
def test_results_that_were_moved_or_removed_are_copied_to_a_name_that_resumes_the_job(
    move: Callable[[Path], None], after: int, source: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    out = tmp_path / "folder" / "out"
    assert run_job_that_calls(lambda: move(out), source, out, after) == Status.OUTPUT_FAILED
    assert "was moved or removed while the job ran" in log.text and "Traceback" not in log.text
    copy = rescued(log.text)
    assert len(read_answers(copy)) == NUM_LINES
    assert run(source, copy) == Status.OK
    assert texts_by_id(copy).keys() == {str(number) for number in range(1, NUM_LINES + 1)}
    assert not list(tmp_path.glob(".nanovllm-*"))


def test_a_job_ends_soon_after_its_results_were_moved(
    source: Path, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.apps.jobs.results_file.SYNC_SECONDS", 0.01)

    def remove_and_wait() -> None:
        (tmp_path / "out").unlink()
        time.sleep(0.3)

    assert run_job_that_calls(remove_and_wait, source, tmp_path / "out") == Status.OUTPUT_FAILED
    copy = rescued(log.text)
    assert 10 <= len(read_answers(copy)) < NUM_LINES, "it was noticed by the next check, not at the end"
    assert run(source, copy) == Status.OK and len(read_answers(copy)) == NUM_LINES


def test_without_a_place_for_the_copy_the_message_says_so(
    source: Path, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_and_fill() -> None:
        (tmp_path / "out").unlink()
        monkeypatch.setattr("nanovllm.apps.jobs.results_file.token_hex", lambda _: "x" * 300)  # no file has such a name

    assert run_job_that_calls(remove_and_fill, source, tmp_path / "out") == Status.OUTPUT_FAILED
    assert "cannot be copied: " in log.text and "File name too long" in log.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out.job.json"]


@pytest.mark.parametrize("size", [0, 100, None], ids=["emptied", "cut", "appended to"])
def test_results_whose_size_another_process_changed_are_never_written_to_again(
    size: int | None, source: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    changed = b""

    def change() -> None:
        nonlocal changed
        if size is None:
            with open(out, "ab") as file:
                file.write(b"x" * 100_000)
        else:
            os.truncate(out, size)
        changed = out.read_bytes()

    assert run_job_that_calls(change, source, out) == Status.OUTPUT_FAILED
    assert "another process has changed it" in log.text and out.read_bytes() == changed
    assert run(source, out) == Status.OK
    assert sorted(a["id"] for a in read_answers(out)) == sorted(f"batch_req_{i + 1}" for i in range(NUM_LINES))


def test_a_line_that_meets_a_truncation_leaves_no_hole(
    source: Path, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is cut between check and write: the line goes to the new end, and the next is refused."""
    out = tmp_path / "out"
    real_write = os.write
    count = 0

    def write(descriptor: int, data: Any) -> int:
        nonlocal count
        count += 1
        if count == 12:
            os.truncate(out, 0)
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    assert run(source, out) == Status.OUTPUT_FAILED
    monkeypatch.undo()
    assert len(read_answers(out)) == 1 and b"\0" not in out.read_bytes()
    assert run(source, out) == Status.OK and len(read_answers(out)) == NUM_LINES


@pytest.mark.parametrize("hours", [-48, 48])
def test_a_clock_that_jumps_disturbs_no_job(
    hours: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of day decides nothing but the field `created`: intervals come from clocks that nobody sets."""
    real_time = time.time
    offset = 0.0

    def set_clock() -> None:
        nonlocal offset
        offset = hours * 3600.0

    monkeypatch.setattr(time, "time", lambda: real_time() + offset)
    assert run_job_that_calls(set_clock, source, tmp_path / "out") == Status.OK
    created = [answer["response"]["body"]["created"] for answer in read_answers(tmp_path / "out")]
    assert len(created) == NUM_LINES and abs(created[-1] - created[0]) > 47 * 3600
