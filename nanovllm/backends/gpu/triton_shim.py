"""Imports Triton once, and says what differs between its versions and between GPUs.

Every kernel imports `triton` and `tl` from here. Triton decides between its compiler and its CPU interpreter when a
kernel is decorated, so `INTERPRETED` is read once, at import.
"""

import os
from functools import cache
from importlib import import_module
from typing import Any

import torch

# Triton 3.9 warns that its default will change, unless this says that products and sums are fused, as they were.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

INTERPRETED = bool(triton.knobs.runtime.interpret)
# launch.py knows which arguments a compiled kernel's `run` takes in these versions.
LAUNCHES_DIRECTLY = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)

_SHARED_KIB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}


@cache
def shared_memory_kib(device: torch.device) -> int:
    """Return the KiB of shared memory that a program may use (CUDA C++ Programming Guide, "Compute capabilities")."""
    if device.type != "cuda":
        return 227
    return _SHARED_KIB.get(torch.cuda.get_device_capability(device), 99)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors. In the interpreter, where programs run one by one, it is a small number."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n: arange in a kernel takes no other size."""
    return 1 << (n - 1).bit_length()
