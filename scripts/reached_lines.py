"""Notes which lines of a module a run of tests reaches, in whatever process: a plugin of pytest.

mutants.py has each Python of the run call `start`. A file gets a line of JSON for each line of the module that a
process reaches, and for each test that ends: its name and seconds. A test has reached what stands between the end of
the test before and its own.
"""

import json
import mmap
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

module = ""
"""The file whose lines are noted."""
notes = -1
"""The descriptor of the file that gets them."""
test: "mmap.mmap | bytes" = b""
"""The first byte of the notes. All processes see it, and it changes with each test."""
seen: set[tuple[int, int]] = set()
"""The notes of this process: the byte of a test, and a line."""
since = 0.0
"""When the test began, by `count_seconds`."""


def start(path: str, place: str) -> None:
    """Note the lines of the module at `path` in the file at `place`, which has one byte at first."""
    global module, notes, test
    module = path
    notes = os.open(place, os.O_RDWR | os.O_APPEND)
    test = mmap.mmap(notes, 1)
    trace()


def trace() -> None:
    threading.settrace(note)
    sys.settrace(note)


def note(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
    """Note the line that a frame has reached. See `sys.settrace`."""
    if frame.f_code.co_filename != module:
        return None
    place = (test[0], frame.f_lineno)
    if place not in seen:
        seen.add(place)
        write(frame.f_lineno)
    return note


def write(found: object) -> None:
    with suppress(OSError):  # a test may limit the size of files, or close all descriptors
        os.write(notes, json.dumps(found).encode() + b"\n")


def count_seconds() -> float:
    """Return the processor's time of this process and of the children that have ended: a test may start some."""
    return sum(os.times()[:4])


# ---- pytest's hooks


def pytest_runtest_logstart(nodeid: str) -> None:
    """Begin anew: each process notes all lines again for this test."""
    global since
    assert isinstance(test, mmap.mmap)
    test[0] = (test[0] + 1) % 256
    since = count_seconds()
    trace()


def pytest_runtest_logfinish(nodeid: str) -> None:
    write([count_seconds() - since, nodeid])
