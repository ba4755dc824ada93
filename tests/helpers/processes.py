"""Looks at processes through /proc, and waits for what they do."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def is_alive(pid: int) -> bool:
    """Return whether a process runs. One that has ended, and that nobody has waited for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def list_children(pid: int) -> list[int]:
    """Return the living child processes of a process, in ascending order."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == pid and state not in "ZX":
            found.append(int(entry.name))
    return sorted(found)


def list_followers(pid: int) -> list[int]:
    """Return the children that run the program of a follower: ranks 1 to n - 1, in the order of their start."""
    found = []
    for child in list_children(pid):
        try:
            if b"distributed.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
        except OSError:
            continue
    return found


def list_segments() -> set[str]:
    """Return the names of all shared memory."""
    return set(os.listdir("/dev/shm"))


def wait_for(condition: Callable[[], Any], seconds: float = 50.0) -> Any:
    """Return the condition's value once it is true. Fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"still not so after {seconds} s"
        time.sleep(0.01)
    return value
