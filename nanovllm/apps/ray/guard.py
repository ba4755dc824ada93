"""Runs the command of a job on Ray in a child process, because Ray may end the process that it works in.

If the raylet of the command's machine dies, Ray's C++ ends the process at once, with status 1. The status 1 of a job
means that every line is answered, so somebody else must say how the job ended. A child that comes to its own end adds
`REPORTED` to its status. If it did not, the parent takes 0 and 1 for a broken job.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from nanovllm.apps.jobs.job import Status

VARIABLE = "NANOVLLM_GUARD"
"""Tells the child its parent's process id."""
REPORTED = 64

_PR_SET_PDEATHSIG = 1


def run_in_child(arguments: Sequence[str]) -> int:
    """Run the command in a child process, and return its status. Ctrl-C and SIGTERM are passed on to it."""
    child = subprocess.Popen(
        [sys.executable, "-m", "nanovllm", *arguments],
        env=os.environ | {VARIABLE: str(os.getpid())},
        start_new_session=True,  # a Ctrl-C of the terminal comes once, from this process
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda received, _: child.send_signal(received))
    code = child.wait()
    if code >= REPORTED:
        return code - REPORTED
    if code < 0:
        return 128 - code  # as a shell tells a signal
    if code not in (Status.OK, Status.LINES_FAILED):
        return code
    sys.stderr.write("ERROR Ray ended the job: this machine's raylet has died; run the command again to resume\n")
    return Status.BROKEN


def enter_child() -> bool:
    """Tell whether this process is the child. From now on the child ends with its parent."""
    parent = os.environ.pop(VARIABLE, None)
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            os._exit(Status.BROKEN)
    return parent is not None
