"""Imports Triton where it can be of use. Elsewhere stand-ins let the kernels' files be imported, for their references.

Every kernel imports `triton` and `tl` from here. Triton decides between its compiler and its CPU interpreter when a
kernel is decorated, so `INTERPRETED` is read once, at import.
"""

import os
import sys
from functools import cache
from typing import Any

import torch

# Triton 3.9 warns that its default will change, unless this says that products and sums are fused, as they were.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

triton: Any
tl: Any

try:
    # Importing Triton takes a fifth of a second. If torch is built without CUDA, only tests need it: they ask for its
    # interpreter, or have imported it already.
    if not torch.backends.cuda.is_built() and not {"triton", "TRITON_INTERPRET"} & {*sys.modules, *os.environ}:
        raise ImportError("nothing here can run its kernels")
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]

    HAS_TRITON = True
    INTERPRETED = bool(triton.knobs.runtime.interpret)
    # launch.py knows which arguments a compiled kernel's `run` takes in these versions.
    LAUNCHES_DIRECTLY = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)
except ImportError:

    class _Absent:
        """Stands in for both modules: every attribute is this object, and as a decorator it returns the function."""

        def __getattr__(self, name: str) -> "_Absent":
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if len(args) == 1 and callable(args[0]) else self

    triton = tl = _Absent()
    HAS_TRITON = INTERPRETED = LAUNCHES_DIRECTLY = False

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
