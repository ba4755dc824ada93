"""Takes away what macOS lacks. Python imports it at its start from a folder of PYTHONPATH: see test_without_linux.py.

macOS has no /proc, /sys and /dev/shm, no masks of CPUs, no memory without a name, no advice for huge pages, no counts
of single threads, and `sendfile` sends to sockets only. Triton is not installed there. The processor is an Arm.
"""

import builtins
import io
import mmap
import os
import platform
import resource
import sys
from collections.abc import Callable
from typing import Any

MISSING = ("/proc", "/sys", "/dev/shm")


def refuse_missing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a path that finds nothing within MISSING."""

    def find(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if any(text == folder or text.startswith(folder + "/") for folder in MISSING):
            raise FileNotFoundError(2, "No such file or directory", text)
        return function(path, *arguments, **options)

    return find


def send_to_sockets_only(*arguments: object) -> int:
    raise OSError(38, "Socket operation on non-socket")


platform.machine = lambda: "arm64"
io.open = builtins.open = refuse_missing(open)
for name in ("open", "stat", "lstat", "listdir", "scandir", "access"):
    setattr(os, name, refuse_missing(getattr(os, name)))
for module, prefixes in (
    (os, ("sched_getaffinity", "sched_setaffinity", "memfd_create", "posix_f", "pidfd_open", "eventfd", "copy_file")),
    (mmap, ("MADV_", "MAP_POPULATE")),
    (resource, ("RUSAGE_THREAD", "prlimit")),
):
    for name in [name for name in dir(module) if name.startswith(prefixes)]:
        delattr(module, name)
os.sendfile = send_to_sockets_only
sys.modules["triton"] = None  # type: ignore[assignment]  # so `import triton` fails
