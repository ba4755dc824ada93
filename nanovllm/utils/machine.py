"""What this machine has: devices, number formats, memory."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is computed rather than emulated."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


CPUS = Path("/sys/devices/system/cpu")


def physical_cores(of_one_socket: bool = False) -> int:
    """Cores that this process may run on, hyperthreads of one core counted once; of all sockets, or of one of them:
    that which has most."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in cpus:
        topology = CPUS / f"cpu{cpu}" / "topology"
        try:
            cores.add(tuple((topology / name).read_text() for name in ("physical_package_id", "thread_siblings_list")))
        except OSError:
            cores.add(("", str(cpu)))
    return max(Counter(socket for socket, _ in cores).values()) if of_one_socket else len(cores)


def limit_threads() -> None:
    """On a CPU, compute with a thread for each physical core of one socket, unless the user chose with OMP_NUM_THREADS.

    The kernels keep a core's arithmetic units busy: a second thread on it only adds waiting. And threads of two sockets
    wait for each other's memory: an engine on each socket does more (docs/benchmarks-log.md). Never raises the number.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), physical_cores(of_one_socket=True)))


SMALL_MODEL, FEW_TOKENS = 10_000_000, 32
"""Parameters and a step's tokens up to which threads gain little, and where they spin without bound may lose much."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch and the CPU kernels compute in the caller's thread alone, unless OMP_NUM_THREADS says otherwise."""
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within, new tensors are of that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def free_memory() -> int:
    """Bytes of memory that can be had without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
