"""Tells whether torch can compute in this process: after a fork it may wait for threads that are not there."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch

STATE = Path("/proc/self/stat")
NO_PROGRAM_SINCE_FORK = 0x40
"""Linux's PF_FORKNOEXEC, among the flags of a process."""
SECONDS = 10.0
"""A process that computes for so long what takes milliseconds hangs."""
NUM_ELEMENTS = 1 << 20
"""Torch shares the work on so many among its threads."""


def check_fork() -> None:
    """Raise a RuntimeError if torch would hang here, because it computed with several threads before a fork.

    The threads of OpenMP do not follow into a forked process, and the OpenMP of most builds of torch waits for them.
    Nothing tells whether there were any. So a forked process has a child of its own compute, which can be killed.
    """
    if not _is_forked():
        return
    child = os.fork()
    if child == 0:
        try:
            torch.ones(NUM_ELEMENTS).exp_()
        finally:
            os._exit(0)
    has_computed = False
    try:
        has_computed = _wait(child)
    finally:
        if not has_computed:
            os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
    if not has_computed:
        raise RuntimeError(
            "this process was forked after torch had computed with several threads, and torch would hang in it: start "
            "processes with spawn or subprocess, or fork before anything is computed"
        )


def _is_forked() -> bool:
    """Return whether this process has started no program since its fork. Where Linux does not say, return False."""
    try:
        fields = STATE.read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return bool(int(fields[6]) & NO_PROGRAM_SINCE_FORK)


def _wait(child: int) -> bool:
    """Return whether a child ends in time, and collect it then."""
    until = time.monotonic() + SECONDS
    with suppress(ChildProcessError):  # a program may ignore SIGCHLD, and then nobody has to collect its children
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
    return True
