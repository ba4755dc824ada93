"""Compiling the C++ kernels in cpu/ on first use, and calling them.

The library is built for exactly this machine, in a few seconds, and kept in the user's cache folder under a name made
of the source, the compiler and the processor.
"""

import ctypes
import functools
import hashlib
import logging
import math
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

PANEL = 32
"""Columns of a packed weight's panel, as in cpu/linear.h."""

SOURCES = Path(__file__).with_name("cpu")

FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fPIC", "-shared")

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    # name: how many pointers, integers and floats it takes, in this order
    "linear": (4, 3, 0),
    "attend": (7, 6, 1),
    "route": (6, 4, 0),
    "grouped_linear": (4, 3, 0),
    "combine": (4, 3, 0),
    "add_rms_norm": (5, 2, 1),
    "silu_and_mul": (2, 2, 0),
    "norm_rope_store": (9, 5, 1),
    "sample": (9, 2, 0),
}
_UNITS_ONLY = {"pack": (2, 2, 0), "packed_rows": (3, 2, 0), "advise_huge_pages": (1, 1, 0), "touch_pages": (1, 1, 0)}
_SUFFIXES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class CpuLibrary:
    """The compiled kernels. Tensors must be contiguous and on the CPU; shapes are the caller's to check."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._functions = {}
        for name, signature in _SIGNATURES.items():
            for dtype, suffix in _SUFFIXES.items():
                self._functions[name, dtype] = _declare(library, f"{name}_{suffix}", signature)
        # Logits are edited in float32, whatever the model's dtype.
        self._functions["edit_logits", torch.float32] = _declare(library, "edit_logits", (6, 2, 0))
        self._units_only = {name: _declare(library, name, signature) for name, signature in _UNITS_ONLY.items()}

    def call(self, name: str, dtype: torch.dtype, *arguments: Tensor | float | None) -> None:
        """Run the kernel for dtype. Tensors go as their addresses, None as a null pointer."""
        self._functions[name, dtype](*[a.data_ptr() if isinstance(a, Tensor) else a for a in arguments])

    def pack(self, weight: Tensor, in_place: bool = False) -> Tensor:
        """weight [out, in] -> the flat tensor of its panels: in place that of weight itself, if panels divide it."""
        out_features, in_features = weight.shape
        if in_place and out_features % PANEL == 0:
            packed = weight.view(-1)
        else:
            packed = torch.empty(-(-out_features // PANEL) * PANEL * in_features, dtype=weight.dtype)
            self.advise_huge_pages(packed)
        self._units_only["pack"](weight.data_ptr(), packed.data_ptr(), out_features, _units(weight))
        return packed

    def packed_rows(self, packed: Tensor, indices: Tensor, in_features: int) -> Tensor:
        """Rows [n, in_features] of the packed matrix; indices int32 [n]."""
        rows = torch.empty(len(indices), in_features, dtype=packed.dtype)
        pointers = (packed.data_ptr(), indices.data_ptr(), rows.data_ptr())
        self._units_only["packed_rows"](*pointers, len(indices), _units(rows))
        return rows

    def advise_huge_pages(self, tensor: Tensor) -> None:
        """Let a large tensor that is not written to yet live in huge pages, which are faster to stream."""
        storage = tensor.untyped_storage()
        self._units_only["advise_huge_pages"](storage.data_ptr(), storage.nbytes())

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A large tensor of zeros, its memory there at once: as new pages that the system gives, written to no more."""
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        zeros = torch.frombuffer(memory, dtype=dtype).view(*shape)
        self._units_only["touch_pages"](zeros.data_ptr(), zeros.nbytes)
        return zeros


def _units(matrix: Tensor) -> int:
    """32-bit units of a row."""
    return matrix.shape[1] * matrix.element_size() // 4


def _declare(library: ctypes.CDLL, name: str, signature: tuple[int, int, int]) -> "ctypes._NamedFuncPointer":
    function = getattr(library, name)
    pointers, integers, floats = signature
    function.argtypes = [_POINTER] * pointers + [_INT] * integers + [_FLOAT] * floats
    function.restype = None
    return function  # type: ignore[no-any-return]


@functools.cache
def cpu_library() -> CpuLibrary:
    """The library, compiled if need be; RuntimeError where that is not possible."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler is found (install g++)")
    try:
        return _load(compiler)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise RuntimeError(f"its kernels cannot be compiled: {detail[-2000:]}") from error


def cache_folder() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/nanovllm, by default ~/.cache/nanovllm."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"


def _load(compiler: str) -> CpuLibrary:
    """From the cache, or compiled into it; where it cannot be written, for this process alone."""
    sources = sorted(SOURCES.glob("*"))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    key = "\0".join((*(source.read_text() for source in sources), version, " ".join(FLAGS), _processor()))
    folder = cache_folder()
    target = folder / f"cpu_kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if target.is_file():
        return CpuLibrary(target)
    start = time.perf_counter()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch, kept = tempfile.TemporaryDirectory(dir=folder), True
    except OSError as error:
        logger.warning("the CPU kernels are compiled anew by each process: %s cannot be written (%s)", folder, error)
        scratch, kept = tempfile.TemporaryDirectory(), False
    with scratch:
        built = Path(scratch.name) / target.name
        command = [compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(built)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        if kept:
            built = built.replace(target)  # atomic: processes that build at the same time do not see half a file
        library = CpuLibrary(built)  # which needs the file no more
    logger.info("compiled the CPU kernels in %.1f s%s", time.perf_counter() - start, f": {target}" if kept else "")
    return library


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(
        next((line for line in lines if line.startswith(key)), "") for key in ("flags", "Features", "model\t")
    )
