"""A follower as rank 0 sees it: a process, and the socket on which it reports."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

SILENCE = 60
"""Seconds without a sign of life, of which a follower gives one a second, after which it counts as failed. So many,
because one that loads a large library from a slow disk gives none until it has it."""
POLL = 1.0
"""Silence is counted in waits of so many seconds: when a paused machine goes on, one of them ends at once, and the
others leave the followers time to be heard of."""
COMMAND = "import sys; fd, *sys.path = sys.argv[1:]; from nanovllm.distributed.worker import main; main(int(fd))"
"""The folders to import from are arguments: a list in PYTHONPATH could hold none with a colon in its name."""


class FollowerProcess:
    """Ranks 1 to n-1 are each one of these: `worker.py` in a process of its own."""

    def __init__(self, rank: int, start: dict[str, Any], ring_fd: int, num_threads: int | None) -> None:
        """Start it.

        Args:
            start: what `worker.follow` is to be told, as JSON.
            ring_fd: a descriptor for it to inherit.
            num_threads: to compute with; None leaves it to the environment.
        """
        self.rank = rank
        self.stages: set[str] = set()
        self.watcher: threading.Thread | None = None
        self.socket, theirs = socket.socketpair()
        self.socket.sendall(json.dumps(start).encode() + b"\n")  # it waits in the socket
        self.socket.settimeout(POLL)
        path = [os.fspath(folder) or os.getcwd() for folder in sys.path]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND, str(theirs.fileno()), *path],
                env=os.environ | ({} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), ring_fd),
                start_new_session=True,  # a Ctrl-C of the terminal goes to rank 0 alone
            )

    def reports(self) -> Iterator[dict[str, Any]]:
        """What it reports, until it ends: {} is a sign of life, or a second without one.

        Raises:
            TimeoutError: it neither reports nor ends.
        """
        rest, quiet = b"", 0
        while True:
            try:
                received = self.socket.recv(1 << 16)
            except TimeoutError:
                quiet += 1
                if quiet >= SILENCE:
                    message = f"its process {self.process.pid} has given no sign of life for {SILENCE} s"
                    raise TimeoutError(message) from None
                yield {}
                continue
            except OSError:
                return  # it was killed with something unread: the same as an end
            if not received:
                return
            quiet = 0
            *lines, rest = (rest + received).split(b"\n")
            yield from (json.loads(line) if line else {} for line in lines)

    def how_it_ended(self) -> str:
        """Waits for the end."""
        code = self.process.wait()
        known = {number.value: number.name for number in signal.Signals}
        how = f"was killed by {known.get(-code, -code)}" if code < 0 else f"ended with exit status {code}"
        return f"its process {self.process.pid} {how}"
