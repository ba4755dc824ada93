"""One follower as rank 0 sees it: a process, and the socket on which it reports.

Followers and replicas are started here. Each is a program of this folder with a socket to the user's process, over
which objects go as pickles.
"""

import faulthandler
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

BEAT = 1.0
"""Seconds between two signs of life. A follower or replica also looks as often whether its parent process is still the
user's, because the socket stays open as long as a fork of that holds it."""
POLL = 1.0
"""Seconds of one wait for a report. Silence is counted in such waits and not by the clock: when a machine goes on after
a pause, only one wait has ended, and the followers have time to report."""
LAUNCHER = "import sys; fd, *sys.path = sys.argv[1:]; from nanovllm.features.distributed.{} import main; main(int(fd))"
"""A program that calls a module's `main`. The folders to import from are arguments, because PYTHONPATH cannot hold a
folder with a colon in its name."""
MEETING = "NANOVLLM_MEETING"
"""The variable of a follower's environment that holds the folder where the ranks meet. The follower removes the folder
if rank 0 is killed, even before it has got its first object."""


def start_process(
    program: str, start: Any, variables: Mapping[str, str], fds: tuple[int, ...] = ()
) -> "tuple[Connection, subprocess.Popen[bytes]]":
    """Start a process that runs a program of this folder, and return the socket to it, and the process.

    The program's `main` gets the descriptor of its end, which `receive_start` takes.

    Args:
        start: the first object that the process gets.
        variables: added to the environment.
        fds: further descriptors that the process inherits.
    """
    path = [os.fspath(folder) or os.getcwd() for folder in sys.path]
    connection, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", LAUNCHER.format(program), str(theirs.fileno()), *path],
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *fds),
            start_new_session=True,  # a Ctrl-C of the terminal goes to the user's process alone
        )
    with suppress(OSError):  # it has ended, which whoever reads from the socket sees
        connection.send(start)
    return connection, process


def receive_start(fd: int) -> tuple[Connection, int, Any]:
    """Begin a program that `start_process` has started.

    Args:
        fd: the descriptor of the socket.

    Returns:
        The socket, the id of the user's process, and the first object that came.

    Raises:
        OSError, EOFError: the user's process ended before it had sent the whole object.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the user's process
    faulthandler.enable()
    connection = Connection(fd)
    os.set_inheritable(fd, False)
    return connection, os.getppid(), connection.recv()


def show_life(connection: Connection, sending: threading.Lock) -> None:
    """Send an empty dict to the user's process, as a sign of life. Never wait for that process.

    Args:
        sending: held while anything is sent.
    """
    room = select.poll()  # select.select refuses large descriptors
    room.register(connection, select.POLLOUT)
    # If the socket is full, the user's process does not read now: it is stopped, or has no requests.
    if room.poll(0) and sending.acquire(blocking=False):  # what is being sent is a sign of life, too
        with suppress(OSError):  # the user's process has just ended
            connection.send({})
        sending.release()


def describe_silence(process: "subprocess.Popen[bytes]", seconds: int) -> str:
    """Return that a process has been silent for too long."""
    return f"its process {process.pid} has given no sign of life for {seconds} s"


def describe_end(process: "subprocess.Popen[bytes]", seconds: float | None = None) -> str:
    """Wait for the end of a process, at most so many seconds, and return how it ended."""
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:  # a driver may keep it
        return f"its process {process.pid} has closed its socket, and does not end"
    signal_names = {number.value: number.name for number in signal.Signals}
    how = f"was killed by {signal_names.get(-code, -code)}" if code < 0 else f"ended with exit status {code}"
    return f"its process {process.pid} {how}"


class FollowerProcess:
    """The process of one follower, which runs worker.py."""

    def __init__(self, start: dict[str, Any], meeting: Path, num_threads: int) -> None:
        """Start the process.

        Args:
            start: the argument of `worker.follow`.
            meeting: the folder where the ranks meet.
            num_threads: how many threads of the host compute.
        """
        self.rank: int = start["rank"]
        self.max_silence: int = start["config"].max_silence
        self.stages: set[str] = set()
        """The stages that it has reported: see `worker.follow`."""
        self.watcher: threading.Thread | None = None
        """The thread of rank 0 that reads its reports."""
        variables = {MEETING: str(meeting), "OMP_NUM_THREADS": str(num_threads)}
        self.connection, self.process = start_process("worker", start, variables, (start["ring_fd"],))

    def read_reports(self) -> Iterator[dict[str, Any]]:
        """Yield each report until the process ends; {} is a sign of life, or a second without one.

        Raises:
            TimeoutError: it neither reports nor ends.
        """
        num_silent = 0
        while num_silent * POLL < self.max_silence:
            try:
                has_come = self.connection.poll(POLL)
                report: dict[str, Any] = self.connection.recv() if has_come else {}
            except (EOFError, OSError):  # an OSError: it was killed before it had read everything
                return
            num_silent = 0 if has_come else num_silent + 1
            yield report
        raise TimeoutError(describe_silence(self.process, self.max_silence))
