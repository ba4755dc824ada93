"""Threads that work ahead: on items that come next, and on files, whatever is wrong with them."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import enumerate as threads

import pytest

from nanovllm.models.weight_reader import read_ahead
from nanovllm.utils.work_ahead import is_unwanted, work_ahead


def wait() -> None:
    for thread in threads():
        if thread.name == "read ahead":
            thread.join(100)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of each piece that the system was asked for and gave."""
    pieces: list[int] = []
    send = os.sendfile

    def counted(*arguments: int) -> int:
        pieces.append(send(*arguments))
        return pieces[-1]

    monkeypatch.setattr(os, "sendfile", counted)
    yield pieces


def test_files_are_read_to_their_end_up_to_a_limit(
    tmp_path: Path, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_bytes(bytes(1000))
    read_ahead(files)
    wait()
    assert sum(sent) == 3000
    sent.clear()
    monkeypatch.setattr("nanovllm.models.weight_reader.READ_AHEAD", 1500)
    read_ahead(files)
    wait()
    assert sum(sent) == 1500


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_be_read_ahead_is_left_to_whoever_reads_it(tmp_path: Path) -> None:
    read_ahead([tmp_path / "missing.safetensors", tmp_path])
    wait()


def test_work_in_hand_learns_that_nobody_waits_for_it_any_more_and_the_rest_is_not_begun() -> None:
    begun = []

    def work(number: int) -> None:
        begun.append(number)
        while not is_unwanted():
            time.sleep(0.001)

    tasks = work_ahead(range(5), work, 2)
    assert next(tasks)[0] == 0
    assert not is_unwanted(), "this thread has no work of that kind"
    tasks.close()
    assert begun == [0]
    assert [task.result() for _, task in work_ahead("ab", lambda _: is_unwanted(), 1)] == [False, False]
