"""Runs the command of a job on Ray in a child process, because Ray may end the process that it works in.

If the raylet of the command's machine dies, Ray's C++ ends the process at once, with status 1. The status 1 of a job
means that every line is answered, so somebody else must say how the job ended. The child reports its end over a pipe;
if it did not, the parent takes 0 and 1 for a broken job.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from nanovllm.jobs.job import Status

VARIABLE = "NANOVLLM_GUARD"
"""Tells the child the descriptor of the pipe, and its parent's process id."""

_PR_SET_PDEATHSIG = 1


def works_on_ray(arguments: Sequence[str]) -> bool:
    """Tell whether a command works on Ray."""
    return "run-batch" in arguments[:1] and "--ray" in arguments


def run_in_child(arguments: Sequence[str]) -> int:
    """Run the command in a child process, and return its status. Ctrl-C and SIGTERM are passed on to it."""
    reports, theirs = os.pipe()
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []
    """Signals that came before there was a child."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    child = subprocess.Popen(
        [sys.executable, "-m", "nanovllm", *arguments],
        env=os.environ | {VARIABLE: f"{theirs} {os.getpid()}"},
        pass_fds=[theirs],
        start_new_session=True,  # a Ctrl-C of the terminal comes once, from this process
    )
    os.close(theirs)
    for early_number in early:
        child.send_signal(early_number)
    code = child.wait()
    report = os.read(reports, 1)
    os.close(reports)
    if report:
        return report[0]
    if code < 0:
        return 128 - code  # as a shell tells a signal
    if code not in (Status.OK, Status.LINES_FAILED):
        return code
    sys.stderr.write("ERROR Ray ended the job: this machine's raylet has died; run the command again to resume\n")
    return Status.BROKEN


def enter_child() -> int | None:
    """Begin the child, if this process is one: it ends with its parent. Return the descriptor for `report_end`."""
    if VARIABLE not in os.environ:
        return None
    descriptor, parent = map(int, os.environ.pop(VARIABLE).split())
    os.set_inheritable(descriptor, False)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(Status.BROKEN)
    return descriptor


def report_end(descriptor: int, status: int) -> None:
    """Tell the parent the status."""
    os.write(descriptor, bytes([status]))
