"""Compiles the C++ kernels in cpu/ on first use, and calls them through ctypes.

Each library is compiled for exactly this machine, in a few seconds. It is kept in the user's cache folder, under a name
with a hash of the sources, the compiler, its flags and the processor.
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
import struct
import subprocess
import tempfile
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from nanovllm.utils.integers import ceil_div
from nanovllm.utils.machine import num_threads

if TYPE_CHECKING:
    _Function = ctypes._NamedFuncPointer

logger = logging.getLogger(__name__)

PANEL = 32
"""Columns in a panel of a packed weight, as in cpu/linear.h."""

SOURCES = Path(__file__).parent

FLAGS = ("-O3", "-march=native", "-std=c++17", "-pthread", "-fno-math-errno", "-fPIC", "-shared")

NATIVE = ("-march=native", "-mcpu=native")
"""Two ways to ask for this processor's own instructions. Some versions of Clang for Arm know only the second."""

Signature = tuple[int, int, int]
"""How many pointers, integers and floats a function takes, in this order, after the number of threads.

ctypes does not know: a wrong number ends the process.
"""

_SIGNATURES = {  # one function for each dtype
    "linear": (4, 3, 0),
    "attend": (7, 6, 1),
    "route": (6, 4, 0),
    "grouped_linear": (4, 3, 0),
    "combine": (4, 3, 0),
    "add_rms_norm": (5, 3, 1),
    "silu_and_mul": (2, 2, 0),
    "sigmoid_and_mul": (3, 3, 0),
    "norm_rope_store": (9, 6, 1),
    "causal_conv": (7, 4, 0),
    "gated_delta": (9, 6, 0),
    "gated_rms_norm": (4, 4, 1),
    "sample": (6, 2, 0),
    "token_logprobs": (5, 2, 0),
}
_WITHOUT_DTYPE = {
    "pack": (2, 2, 0),
    "packed_rows": (3, 2, 0),
    "gather_rows": (3, 2, 0),
    "advise_huge_pages": (1, 1, 0),
    "touch_pages": (1, 1, 0),
    "step_inputs": (12, 4, 0),
    "store_samples": (3, 1, 0),
    "repeat": (1, 1, 0),
}
_PLAIN = frozenset((int, float, bool, type(None)))
"""Types that ctypes takes as they are. Looking one up takes a third of the time of isinstance."""

_SUFFIXES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class RecordedCalls:
    """Calls of kernels, in the order in which they were made. `repeat` makes them again, in C++.

    Attributes:
        can_repeat: False if C++ cannot make one of the calls again, because AGAIN does not name its kernel.
    """

    def __init__(self) -> None:
        self.can_repeat = True
        self._words: list[array[int]] = []
        self._calls = array("q")
        """Two words for each call: the address of the function that makes it again, and that of its arguments."""

    def __len__(self) -> int:
        return len(self._words)

    def add(self, function: "_Function", arguments: list[Any]) -> None:
        """Add a call.

        Args:
            function: the kernel.
            arguments: what it was given after the number of threads: addresses and numbers.
        """
        address = ctypes.cast(function.again, ctypes.c_void_p).value  # type: ignore[attr-defined]
        if address is None:
            self.can_repeat = False
            return
        kinds = function.argtypes[1:]
        words = array("q", [_to_word(kind, a) for kind, a in zip(kinds, arguments, strict=True)])
        self._words.append(words)
        self._calls.extend((address, words.buffer_info()[0]))

    def repeat(self) -> None:
        """Make the calls again. All that they read and write must still be at the same addresses."""
        cpu_library().repeat(self._calls)


def _to_word(kind: type, argument: float | None) -> int:
    """Return an argument as the 64 bits that cpu/recorded.h reads."""
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<f", argument), "little")
    return int(argument or 0)


_recorded: ContextVar[RecordedCalls | None] = ContextVar("recorded", default=None)
"""Where this thread's calls are recorded; None if they are not."""


@contextmanager
def record_calls() -> Iterator[RecordedCalls]:
    """Within, every call of a kernel by this thread is recorded."""
    calls = RecordedCalls()
    try:
        _recorded.set(calls)
        yield calls
    finally:
        _recorded.set(None)


class KernelLibrary:
    """Compiled kernels. Tensors are on the CPU, and contiguous where a kernel takes no stride; the caller checks that.

    Attributes:
        source: the C++ file of `SOURCES` that has the kernels. The library's file has its name, too.
        typed: the functions that are there once for each dtype.
        untyped: the functions that are there once: dtypes do not matter to them.
        flags: of the compiler, in addition to FLAGS.
    """

    source: ClassVar[str]
    typed: ClassVar[Mapping[str, Signature]]
    untyped: ClassVar[Mapping[str, Signature]] = {}
    flags: ClassVar[tuple[str, ...]] = ()

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._functions: dict[tuple[str, torch.dtype | None], _Function] = {}
        for name, signature in self.typed.items():
            for dtype, suffix in _SUFFIXES.items():
                self._functions[name, dtype] = _declare(library, f"{name}_{suffix}", signature)
        for name, signature in self.untyped.items():
            self._functions[name, None] = _declare(library, name, signature)
        self.declare_others(library)

    def declare_others(self, library: ctypes.CDLL) -> None:
        """Declare the functions that are neither typed nor untyped."""

    def call(self, name: str, dtype: torch.dtype | None, *arguments: Tensor | float | None) -> None:
        """Run the kernel for dtype (None: a function without one). A tensor becomes its address, None null.

        Raises:
            TypeError: a wrong number of arguments. C++ would read, or free, memory that is not its own.
        """
        function = self._functions[name, dtype]
        # ctypes refuses too few arguments by itself, but passes a surplus one on.
        if len(arguments) != len(function.argtypes) - 1:
            raise TypeError(f"{name} takes {len(function.argtypes) - 1} arguments, not {len(arguments)}")
        addresses: list[Any] = [a if type(a) in _PLAIN else a.data_ptr() for a in arguments]  # type: ignore[union-attr]
        function(num_threads(), *addresses)
        if (calls := _recorded.get()) is not None:
            calls.add(function, addresses)


class CpuLibrary(KernelLibrary):
    """The kernels of kernels.cpp: all but those of quantised matrices."""

    source = "kernels.cpp"
    typed = _SIGNATURES
    untyped = _WITHOUT_DTYPE

    def declare_others(self, library: ctypes.CDLL) -> None:
        # Logits are edited in float32, whatever the model's dtype.
        self._functions["edit_logits", torch.float32] = _declare(library, "edit_logits", (6, 2, 0))
        library.is_amx_refused.restype = ctypes.c_int64
        if library.is_amx_refused():
            logger.warning(
                "the system does not let this process use AMX, the processor's matrix unit (a thread's signal stack is "
                "too small for it): bfloat16 is multiplied more slowly, and sums have other bits than with AMX"
            )

    def pack(self, weight: Tensor, in_place: bool = False) -> Tensor:
        """Return the flat tensor of the panels of weight [out, in].

        With in_place, panels are written over the weight itself if `out` is a multiple of PANEL.
        """
        out_features, in_features = weight.shape
        if in_place and out_features % PANEL == 0:
            packed = weight.view(-1)
        else:
            packed = torch.empty(ceil_div(out_features, PANEL) * PANEL * in_features, dtype=weight.dtype)
            self.advise_huge_pages(packed)
        self.call("pack", None, weight, packed, out_features, _units_per_row(weight))
        return packed

    def packed_rows(self, packed: Tensor, indices: Tensor, rows: Tensor) -> None:
        """Write the rows of the packed matrix at indices int32 [n] to rows [n, in]."""
        self.call("packed_rows", None, packed, indices, rows, len(indices), _units_per_row(rows))

    def repeat(self, calls: "array[int]") -> None:
        """Make recorded calls again: see `RecordedCalls`."""
        self._functions["repeat", None](num_threads(), calls.buffer_info()[0], len(calls) // 2)

    def advise_huge_pages(self, tensor: Tensor) -> None:
        """Ask for huge pages, which are faster to stream, for a large tensor that is not written to yet."""
        storage = tensor.untyped_storage()
        self._functions["advise_huge_pages", None](1, storage.data_ptr(), storage.nbytes())

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a large tensor of zeros. All threads touch its pages now; the system gives pages of zeros."""
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        zeros = torch.frombuffer(memory, dtype=dtype).view(*shape)
        self.advise_huge_pages(zeros)
        self.call("touch_pages", None, zeros, zeros.nbytes)
        return zeros


def _units_per_row(matrix: Tensor) -> int:
    """Return how many units of 32 bits a row has."""
    return matrix.shape[1] * matrix.element_size() // 4


def _declare(library: ctypes.CDLL, name: str, signature: Signature) -> "_Function":
    function: _Function = getattr(library, name)
    pointers, integers, floats = signature
    threads = [ctypes.c_int64]
    function.argtypes = threads + [ctypes.c_void_p] * pointers + [ctypes.c_int64] * integers + [ctypes.c_float] * floats
    function.restype = None
    # A function that no recorded step calls has no name_again.
    function.again = getattr(library, f"{name}_again", None)  # type: ignore[attr-defined]
    return function


@functools.cache
def cpu_library() -> CpuLibrary:
    """Return the library that every model needs. See `open_library`."""
    return open_library(CpuLibrary)


AnyLibrary = TypeVar("AnyLibrary", bound=KernelLibrary)


def open_library(kind: type[AnyLibrary]) -> AnyLibrary:
    """Return a library, compiled if need be.

    Raises:
        RuntimeError: it cannot be compiled here; the message says why.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler is found (install g++)")
    try:
        return _load(compiler, kind)
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise RuntimeError(f"its kernels cannot be compiled: {detail[-2000:]}") from error


def cache_folder() -> Path:
    """Return the folder of compiled kernels: $XDG_CACHE_HOME/nanovllm, by default ~/.cache/nanovllm."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"


def _load(compiler: str, kind: type[AnyLibrary]) -> AnyLibrary:
    """Load a library from the cache folder, or compile it there (elsewhere if the folder cannot be written)."""
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    key = "\0".join(
        (*(source.read_text() for source in sources), version, " ".join((*FLAGS, *kind.flags)), _processor())
    )
    folder = cache_folder()
    target = folder / f"cpu_{Path(kind.source).stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if target.is_file():
        return kind(target)
    start = time.perf_counter()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        build_folder = tempfile.TemporaryDirectory(dir=folder)
        is_kept = True
    except OSError as error:
        logger.warning("the CPU kernels are compiled anew by each process: %s cannot be written (%s)", folder, error)
        build_folder = tempfile.TemporaryDirectory()
        is_kept = False
    with build_folder:
        built = Path(build_folder.name) / target.name
        command = [compiler, *_usable_flags(compiler), *kind.flags, str(SOURCES / kind.source), "-o", str(built)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        if is_kept:
            # Another process may be loading the file: replace is atomic, so nobody reads half of it.
            built = built.replace(target)
        library = kind(built)  # once loaded, the library does not need its file
    place = f": {target}" if is_kept else ""
    name = "the CPU kernels" if kind is CpuLibrary else f"the CPU kernels of {kind.source}"
    logger.info("compiled %s in %.1f s%s", name, time.perf_counter() - start, place)
    return library


def _usable_flags(compiler: str) -> list[str]:
    """Return FLAGS with the way to ask for this processor's instructions that the compiler knows."""
    others = [flag for flag in FLAGS if flag != "-march=native"]
    if len(others) == len(FLAGS):
        return others  # they name another processor
    for native in NATIVE:
        empty = [compiler, native, "-x", "c++", "-fsyntax-only", os.devnull]
        if subprocess.run(empty, capture_output=True, timeout=60).returncode == 0:
            return [native, *others]
    logger.warning("%s knows neither of %s: the CPU kernels may be slow", compiler, " and ".join(NATIVE))
    return others


def _processor() -> str:
    """Return the processor's features, which -march=native depends on: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(
        next((line for line in lines if line.startswith(key)), "") for key in ("flags", "Features", "model\t")
    )
