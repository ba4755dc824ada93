"""Facts about this machine (number formats, cores), and the settings of torch that depend on them."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

from nanovllm.utils.cgroups import list_cgroups

CPUS = Path("/sys/devices/system/cpu")


def physical_cores(of_one_socket: bool = False) -> int:
    """Return the number of cores that this process may use; the hyperthreads of a core count as one.

    Args:
        of_one_socket: count only the socket with the most cores.
    """
    counts = [len(cores) for cores in list_sockets()]
    return max(counts) if of_one_socket else sum(counts)


def list_sockets() -> list[list[set[int]]]:
    """Return the cores of each socket that this process may use, each core as the numbers of its hyperthreads."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    sockets: dict[str, dict[str, set[int]]] = {}
    for cpu in sorted(cpus):
        topology = CPUS / f"cpu{cpu}" / "topology"
        try:
            socket, core = ((topology / name).read_text() for name in ("physical_package_id", "thread_siblings_list"))
        except OSError:
            socket = ""
            core = str(cpu)
        sockets.setdefault(socket, {}).setdefault(core, set()).add(cpu)
    return [list(cores.values()) for cores in sockets.values()]


def cpu_quota() -> float:
    """Return how many cores' time the control groups of this process may use; infinity if they set no limit.

    Containers limit processor time in this way: `docker run --cpus 1.5`, or Kubernetes' `limits`.
    """
    return min((_read_quota(folder, version) for folder, version in list_cgroups("cpu")), default=math.inf)


def _read_quota(folder: Path, version: int) -> float:
    """Return the limit that one control group sets, in cores."""
    try:
        if version == 2:
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return math.inf
    return math.inf if limit in ("max", "-1") else int(limit) / int(period)


def limit_threads() -> None:
    """Let torch use at most one thread for each physical core of one socket, unless OMP_NUM_THREADS is set.

    A second thread on a core adds nothing but waiting, because one keeps its arithmetic units busy. Threads of two
    sockets wait for each other's memory: an engine on each socket does more (docs/using.md). More threads than
    a container's quota of processor time would all be stopped when it is used up.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        cores = min(torch.get_num_threads(), physical_cores(of_one_socket=True), cpu_quota())
        torch.set_num_threads(max(1, math.ceil(cores)))


_num_threads: ContextVar[int | None] = ContextVar("num_threads", default=None)
"""How many threads the CPU kernels have in this thread's steps, where it is not as many as torch has."""


def num_threads() -> int:
    """Return how many threads share the work of a CPU kernel: as many as torch has."""
    return _num_threads.get() or torch.get_num_threads()


@contextmanager
def torch_in_one_thread() -> Iterator[None]:
    """Let torch compute in the caller's thread, and the CPU kernels in as many threads as before.

    Torch's threads and those of the kernels would keep each other from running while they wait for work.
    """
    before = torch.get_num_threads()
    token = _num_threads.set(num_threads())
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _num_threads.reset(token)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors within the block of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
