"""What this machine has: devices, number formats, memory."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def resolve_device(name: str) -> torch.device:
    """The device called name ("auto", "cpu", "cuda", "cuda:1"); ValueError if there is no such device here.

    "cuda" becomes the current one, with its number: which one is current may change, and differs between threads.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f'device is {name!r}; it must be "cpu", "cuda" or "auto"')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError('device is "cuda", but torch finds no CUDA device here; use device="cpu" or "auto"')
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}, but there are {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is computed rather than emulated."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities = torch.cpu.get_capabilities()
    return any(bool(capabilities.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def resolve_dtype(name: str, device: torch.device, hf_config: "PretrainedConfig") -> torch.dtype:
    """The dtype called name; "auto" is the model's own where the machine computes it natively, else float32."""
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]  # EngineConfig has checked the name
    dtype = getattr(hf_config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    if dtype == torch.float16 and device.type == "cuda":
        return torch.float16
    if dtype == torch.bfloat16 and has_native_bfloat16(device):
        return torch.bfloat16
    return torch.float32


def physical_cores() -> int:
    """Cores that this process may run on, hyperthreads of one core counted once."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in cpus:
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def limit_threads() -> None:
    """On a CPU, compute with a thread for each physical core, unless the user chose with OMP_NUM_THREADS.

    The kernels keep a core's arithmetic units busy: a second thread on it only adds waiting. Never raises the number.
    """
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > physical_cores():
        torch.set_num_threads(physical_cores())


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
