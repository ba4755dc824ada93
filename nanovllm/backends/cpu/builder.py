"""The program that runs the C++ compiler for library.py. It and the compiler end with their parent, whatever ends that.

    python builder.py PLACE COMPILER ARGUMENT...

It makes a new folder in PLACE, and has the compiler write a library there. Then it prints one line of JSON:

    {"path": the library's}
    {"error": the compiler's}
    {"place_error": why there can be no folder in PLACE}

When its standard input ends, or its parent has ended, it kills the compiler and removes the folder. Whatever ends the
parent closes the input, SIGKILL included. So nothing is left of it.

It loads nothing of the package, and so starts in a few hundredths of a second.
"""

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

PREFIX = "nanovllm-build-"
"""The folders in which libraries are compiled begin so."""
BEAT = 1.0
"""Seconds between two looks whether the parent lives: forks of it keep the input open."""


def main() -> None:
    """Build a library, as the arguments say, and keep it until the parent has taken it."""
    parent = os.getppid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the compiler would inherit
    place, *command = sys.argv[1:]
    remove_remains(Path(place))
    try:
        folder = make_folder(place)
    except OSError as error:
        print_line(place_error=str(error))
        return
    try:
        compiler = start_compiler(command, folder)
    except OSError as error:
        print_line(error=str(error))
    else:
        while os.getppid() == parent and not select.select([sys.stdin], [], [], BEAT)[0]:
            pass
        if compiler.returncode is None:  # otherwise its number may belong to others by now
            with suppress(ProcessLookupError):
                os.killpg(compiler.pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # the thread that waits for the compiler may still print


def start_compiler(command: list[str], folder: str) -> "subprocess.Popen[str]":
    """Start the compiler, and a thread that reports its end."""
    path = os.path.join(folder, "library.so")
    compiler = subprocess.Popen(
        [*command, "-o", path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"TMPDIR": folder},  # it makes files of its own
        process_group=0,  # it starts processes of its own
    )
    threading.Thread(target=report, args=(compiler, path), daemon=True).start()
    return compiler


def report(compiler: "subprocess.Popen[str]", path: str) -> None:
    """Wait for the compiler, and tell the parent what became of it."""
    _, errors = compiler.communicate()
    if compiler.returncode == 0:
        print_line(path=path)
    else:
        print_line(error=errors or f"it ended with exit status {compiler.returncode}")


def print_line(**message: str) -> None:
    with suppress(OSError):  # the parent has ended
        print(json.dumps(message), flush=True)


def make_folder(place: str) -> str:
    """Make a folder in `place`, which this process has locked as long as it lives."""
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process has taken it for what a killed one left
            continue
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(folder):
            return folder
        os.close(lock)  # it was taken before it was locked


def remove_remains(place: Path) -> None:
    """Remove the folders in `place` that processes of this user have left because they were killed."""
    with suppress(OSError):
        for folder in place.glob(f"{PREFIX}*"):
            if folder.lstat().st_uid == os.geteuid():
                remove_if_left(folder)


def remove_if_left(folder: Path) -> None:
    """Remove a folder unless the process that has made it lives, and so has locked it."""
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


if __name__ == "__main__":
    main()
