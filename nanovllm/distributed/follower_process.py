"""One follower as rank 0 sees it: a process, and the socket on which it reports. Replicas are started here, too."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

SILENCE = 60
"""A follower that gave no sign of life for so many seconds counts as failed. Usually it gives one a second; but while
it loads a large library from a slow disk it gives none."""
POLL = 1.0
"""Seconds of one wait for a report. Silence is counted in such waits and not by the clock: when a machine goes on after
a pause, only one wait has ended, and the followers have time to report."""
COMMAND = "import sys; fd, *sys.path = sys.argv[1:]; from nanovllm.distributed.{} import main; main(int(fd))"
"""The folders to import from are arguments, because PYTHONPATH cannot hold a folder with a colon in its name."""


def start_process(program: str, fds: tuple[int, ...], variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a process that runs a program of this folder, and calls its `main` with the first descriptor.

    Args:
        fds: the descriptors that the process inherits.
        variables: added to the environment.
    """
    path = [os.fspath(folder) or os.getcwd() for folder in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", COMMAND.format(program), str(fds[0]), *path],
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,  # a Ctrl-C of the terminal goes to the user's process alone
    )


def describe_end(process: "subprocess.Popen[bytes]") -> str:
    """Wait for the end of a process, and return how it ended."""
    code = process.wait()
    signal_names = {number.value: number.name for number in signal.Signals}
    how = f"was killed by {signal_names.get(-code, -code)}" if code < 0 else f"ended with exit status {code}"
    return f"its process {process.pid} {how}"


class FollowerProcess:
    """The process of one follower, which runs worker.py."""

    def __init__(self, rank: int, start: dict[str, Any], ring_fd: int, num_threads: int | None) -> None:
        """Start the process.

        Args:
            rank: 1 to n - 1.
            start: the argument of `worker.follow`, which is sent as JSON.
            ring_fd: the ring's descriptor, which the process inherits.
            num_threads: how many threads compute; None leaves that to the environment.
        """
        self.rank = rank
        self.stages: set[str] = set()
        """The stages that it has reported: see `worker.follow`."""
        self.watcher: threading.Thread | None = None
        """The thread of rank 0 that reads its reports."""
        self.socket, theirs = socket.socketpair()
        self.socket.sendall(json.dumps(start).encode() + b"\n")  # the socket keeps it until the process reads
        self.socket.settimeout(POLL)
        variables = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
        with theirs:
            self.process = start_process("worker", (theirs.fileno(), ring_fd), variables)

    def read_reports(self) -> Iterator[dict[str, Any]]:
        """Yield each report until the process ends; {} is a sign of life, or a second without one.

        Raises:
            TimeoutError: it neither reports nor ends.
        """
        rest = b""
        num_silent = 0
        while True:
            try:
                received = self.socket.recv(1 << 16)
            except TimeoutError:
                num_silent += 1
                if num_silent * POLL >= SILENCE:
                    message = f"its process {self.process.pid} has given no sign of life for {SILENCE} s"
                    raise TimeoutError(message) from None
                yield {}
                continue
            except OSError:
                return  # it was killed before it had read everything: the same as an end
            if not received:
                return
            num_silent = 0
            *lines, rest = (rest + received).split(b"\n")
            yield from (json.loads(line) if line else {} for line in lines)
