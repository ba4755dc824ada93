"""Tells how much memory this process may still take: the machine's, or less where a limit leaves less."""

import os
import resource
from contextlib import suppress
from pathlib import Path

from nanovllm.utils.cgroups import list_cgroups

PROCESS = Path("/proc/self")
MACHINE = Path("/proc/meminfo")
CGROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""For each version of control groups: the files of the limit and of the use, and how names in memory.stat begin."""

ROOM = 256 << 20
"""Bytes that libraries take beside weights and KV cache, for example for the stacks of their threads. Where a limit
leaves less, they may end the process: tokenizers did so with 60 MiB."""
CPU_CACHE_LIMIT = 4 << 30
"""Bytes that the KV cache takes on a CPU at most, where the user does not say."""

share: int | None = None
"""The bytes that this process may take, where it shares the machine with others of its kind; None: all that is free."""


def cpu_cache_budget() -> int:
    """Return the bytes that the KV cache takes on a CPU, where the user does not say: other programs run there, too."""
    return min(free_memory() // 4, CPU_CACHE_LIMIT)


def free_memory() -> int:
    """Return the bytes that can be allocated without swapping, and without leaving a limit of this process."""
    free = [_read_free_of_machine(), *(limit - used for limit, used in _read_limits().values())]
    return max(min(free), 0)


def find_memory_limits() -> dict[str, int]:
    """Return the limits of this process in bytes, by name.

    The names are "RLIMIT_AS", "RLIMIT_DATA", "data_parallel_size" (see `share`) and "cgroup".
    """
    return {name: limit for name, (limit, _) in _read_limits().items()}


def check_memory_limits() -> None:
    """Raise a ValueError if RLIMIT_AS or RLIMIT_DATA leaves so little that libraries would end the process."""
    for name, (limit, used) in _read_limits().items():
        if name.startswith("RLIMIT") and limit - used < ROOM:
            raise ValueError(
                f"{name} is {limit >> 20} MiB, which leaves this process {max(limit - used, 0) >> 20} MiB; an engine "
                f"needs at least {ROOM >> 20} MiB beside weights and KV cache: raise the limit (ulimit)"
            )


def _read_free_of_machine() -> int:
    with suppress(OSError):
        for line in MACHINE.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _read_limits() -> dict[str, tuple[int, int]]:
    """Return (limit, used) in bytes for each limit; of several cgroups that one which leaves least."""
    limits = {}
    with suppress(OSError, ValueError, IndexError):
        # /proc/PID/statm counts pages: all of the address space, the resident ones, the resident ones of
        # files, and in the sixth place data and stack.
        pages = [int(number) * os.sysconf("SC_PAGE_SIZE") for number in (PROCESS / "statm").read_text().split()]
        for name, kind, used in (
            ("RLIMIT_AS", resource.RLIMIT_AS, pages[0]),
            ("RLIMIT_DATA", resource.RLIMIT_DATA, pages[5]),
        ):
            limit = resource.getrlimit(kind)[0]
            if limit != resource.RLIM_INFINITY:
                limits[name] = (limit, used)
        if share is not None:
            limits["data_parallel_size"] = (share, pages[1] - pages[2])  # what is resident, without files
    cgroups = []
    for folder, version in list_cgroups("memory"):
        with suppress(OSError, ValueError, KeyError):  # no limit ("max"), or no such file
            cgroups.append(_read_cgroup(folder, version))
    if cgroups:
        limits["cgroup"] = min(cgroups, key=lambda group: group[0] - group[1])
    return limits


def _read_cgroup(folder: Path, version: int) -> tuple[int, int]:
    """Return (limit, used) in bytes of one control group; raises a ValueError if it has no limit.

    What the kernel can drop, the cache of files, does not count as used. See the kernel's cgroup-v2.rst and
    cgroup-v1/memory.rst.
    """
    limit, used, prefix = CGROUP_FILES[version]
    num_bytes = int((folder / limit).read_text())
    if num_bytes >= 1 << 62:  # version 1 has no word for "no limit"
        raise ValueError
    counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    droppable = int(counts[f"{prefix}inactive_file"]) + int(counts[f"{prefix}active_file"])
    return num_bytes, int((folder / used).read_text()) - droppable


def check_free_memory(num_bytes: int, free: int, what: str, advice: str) -> None:
    """Raise a ValueError if `what`, which takes num_bytes, is larger than the device's free memory."""
    if num_bytes > free:
        raise ValueError(
            f"{what} would take {num_bytes / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free: {advice}"
        )
