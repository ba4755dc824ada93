"""Compiles the C++ kernels in cpu/ on first use, and calls them through ctypes.

Each library is compiled for exactly this machine, in a few seconds. It is kept in the user's cache folder, under a name
with a hash of the sources, the compiler, its flags and the processor, and one of its own bytes. A file whose bytes
have another hash is never loaded: it is compiled anew.
"""

import ctypes
import functools
import hashlib
import json
import logging
import math
import os
import platform
import re
import select
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from nanovllm.backends.cpu.builder import remove_remains
from nanovllm.backends.cpu.huge_pages import advise_huge_pages, map_memory
from nanovllm.utils.integers import ceil_div
from nanovllm.utils.machine import num_threads

if TYPE_CHECKING:
    _Function = ctypes._NamedFuncPointer

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent

NATIVE = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
"""Asks for this processor's own instructions. Some versions of Clang for Arm do not know -march=native."""

FLAGS = ("-O3", NATIVE, "-std=c++17", "-pthread", "-fno-math-errno", "-fPIC", "-shared")

MOST_SECONDS = 300
"""A compiler that takes longer is ended."""
PATIENCE = 10
"""Seconds in which the builder must end after it was told to."""

_PLAIN = frozenset((int, float, bool, type(None)))
"""Types that ctypes takes as they are. Looking one up takes a third of the time of isinstance."""

_SUFFIXES = {torch.bfloat16: "_bfloat16", torch.float32: "_float32", None: ""}

_KINDS: dict[str, Any] = {"P": ctypes.c_void_p, "q": ctypes.c_int64, "f": ctypes.c_float}
"""Kinds of arguments by the letters that exported.h has for them."""


def read_constant(name: str, source: str) -> int:
    """Return a constant that a C++ source defines as `name = number`."""
    (number,) = re.findall(rf"\b{name} = (\d+)", (SOURCES / source).read_text())
    return int(number)


LANES = read_constant("LANES", "vectors.h")
PANEL = read_constant("PANEL", "vectors.h")
MAX_HEAD_DIM = read_constant("MAX_HEAD_DIM", "vectors.h")


class RecordedCalls:
    """Calls of kernels, in the order in which they were made. `replay` makes them again, in C++.

    Attributes:
        can_replay: False if C++ cannot make one of the calls again, because AGAIN does not name its kernel.
    """

    def __init__(self) -> None:
        self.can_replay = True
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
            self.can_replay = False
            return
        kinds = function.argtypes[1:]
        words = array("q", [_to_word(kind, a) for kind, a in zip(kinds, arguments, strict=True)])
        self._words.append(words)
        self._calls.extend((address, words.buffer_info()[0]))

    def replay(self) -> None:
        """Make the calls again. All that they read and write must still be at the same addresses."""
        cpu_library().call("replay", None, *self._calls.buffer_info())


def _to_word(kind: type, argument: float | None) -> int:
    """Return an argument as the 64 bits that exported.h reads."""
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
        flags: the flags that the compiler gets in addition to FLAGS.
    """

    source: ClassVar[str]
    flags: ClassVar[tuple[str, ...]] = ()

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self._functions: dict[tuple[str, torch.dtype | None], _Function] = {}

    def call(self, name: str, dtype: torch.dtype | None, *arguments: Tensor | float | None) -> None:
        """Run the kernel for dtype (None: a function without one). A tensor becomes its address, None null.

        Raises:
            TypeError: a wrong number of arguments. C++ would read, or free, memory that is not its own.
        """
        function = self._functions.get((name, dtype)) or self._declare(name, dtype)
        # ctypes refuses too few arguments by itself, but passes a surplus one on.
        if len(arguments) != len(function.argtypes) - 1:
            raise TypeError(f"{name} takes {len(function.argtypes) - 1} arguments, not {len(arguments)}")
        addresses: list[Any] = [a if type(a) in _PLAIN else a.data_ptr() for a in arguments]  # type: ignore[union-attr]
        function(num_threads(), *addresses)
        if (calls := _recorded.get()) is not None:
            calls.add(function, addresses)

    def _declare(self, name: str, dtype: torch.dtype | None) -> "_Function":
        """Tell ctypes what a function takes, as its library says: a wrong number of arguments ends the process."""
        symbol = name + _SUFFIXES[dtype]
        function = self.library[symbol]
        letters = ctypes.c_char_p.in_dll(self.library, f"{symbol}_arguments").value or b""
        function.argtypes = [_KINDS[letter] for letter in "q" + letters.decode()]
        function.restype = None
        # A function that no recorded step calls has no name_again.
        function.again = getattr(self.library, f"{symbol}_again", None)  # type: ignore[attr-defined]
        self._functions[name, dtype] = function
        return function


class CpuLibrary(KernelLibrary):
    """The kernels of kernels.cpp: all but those of quantised matrices."""

    source = "kernels.cpp"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if self.library.is_amx_refused():
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
            advise_huge_pages(packed)
        self.call("pack", None, weight, packed, out_features, in_features * weight.element_size() // 4)
        return packed

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a large tensor of zeros. All threads touch its pages now; the system gives pages of zeros."""
        zeros = torch.frombuffer(map_memory(math.prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)
        self.call("touch_pages", None, zeros, zeros.nbytes)
        return zeros


@functools.cache
def cpu_library() -> CpuLibrary:
    """Return the library that every model needs. See `open_library`."""
    return open_library(CpuLibrary)


AnyLibrary = TypeVar("AnyLibrary", bound=KernelLibrary)


def open_library(kind: type[AnyLibrary], work: str = "") -> AnyLibrary:
    """Return a library, compiled if need be.

    Args:
        work: what it does that plain torch can do, too, although the backend has been chosen already.

    Raises:
        RuntimeError: it cannot be compiled here; the message says why, and what else can do the work.
    """
    compiler = find_compiler()
    reason = "no C++ compiler is found (install g++)"
    if compiler is not None:
        try:
            return _load(compiler, kind)
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            detail = getattr(error, "stderr", None) or str(error)
            reason = f"its kernels cannot be compiled: {detail[-2000:]}"
    if work:
        reason = f'attention_backend="cpu" cannot {work} here: {reason}. attention_backend="torch" can'
    raise RuntimeError(reason)


def find_compiler() -> str | None:
    """Return the C++ compiler: $CXX, or else the first of the usual ones that is installed; None if none is."""
    return os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)


def cache_folder() -> Path:
    """Return the folder of compiled kernels: $XDG_CACHE_HOME/nanovllm, by default ~/.cache/nanovllm."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm"


def describe_danger(path: Path) -> str | None:
    """Return how other users may change a folder or a file; None if they may not, or if there is none.

    Libraries run with the rights of their user. The administrator, user 0, may change everything anyway.
    """
    try:
        status = path.stat()
    except OSError:
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to {path} (its mode is {stat.S_IMODE(status.st_mode):o})"
    return None


def _load(compiler: str, kind: type[AnyLibrary]) -> AnyLibrary:
    """Load a library from the cache folder, or compile it there (elsewhere if the folder cannot be used)."""
    sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h"))
    flags = (*FLAGS, *kind.flags)
    key = "\0".join((*(source.read_text() for source in sources), *flags, describe_target(compiler)))
    name = f"cpu_{Path(kind.source).stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    folder = cache_folder()
    if describe_danger(folder) is None:
        remove_remains(folder)
        found = sorted(folder.glob(f"{name}-*.so"))
        for path in found:
            if _is_whole(path):
                return kind(path)
        if found:
            logger.warning("compiling anew, because this file is damaged, or others may write to it: %s", found[0])
    start = time.perf_counter()
    command = [compiler, *flags, str(SOURCES / kind.source)]
    place = ""
    try:
        target = _compile_into(folder, name, command)
    except OSError as error:
        logger.warning("the CPU kernels are compiled anew by each process: %s", error)
        with _compile(Path(tempfile.gettempdir()), command) as built:
            library = kind(built)  # once loaded, the library does not need its file
    else:
        library = kind(target)
        place = f": {target}"
    title = "the CPU kernels" if kind is CpuLibrary else f"the CPU kernels of {kind.source}"
    logger.info("compiled %s in %.1f s%s", title, time.perf_counter() - start, place)
    return library


def _is_whole(path: Path) -> bool:
    """Return whether a library in the cache folder is what `_compile_into` has left there."""
    try:
        is_ours = stat.S_ISREG(path.lstat().st_mode) and describe_danger(path) is None
        return is_ours and path.stem.endswith(f"-{_hash_file(path)}")
    except OSError:
        return False


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _compile_into(folder: Path, name: str, command: list[str]) -> Path:
    """Compile a library into the cache folder, and return its path. The end of its name is the hash of its bytes.

    Raises:
        OSError: the folder cannot be used; the message says which one to make.
        subprocess.SubprocessError: see `_compile`.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (danger := describe_danger(folder)) is not None:
        raise PermissionError(
            f"{danger}. Move it away, and make one that only you may write to: mkdir -m 700 {folder}; or set "
            "XDG_CACHE_HOME to another folder, in which it is made"
        )
    with _compile(folder, command) as built:
        built.chmod(0o644)  # whatever the umask
        with built.open("rb") as file:
            os.fsync(file.fileno())
        target = folder / f"{name}-{_hash_file(built)}.so"
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        # Another process may be loading the file: replace is atomic, so nobody reads half of it.
        return built.replace(target)


@contextmanager
def _compile(place: Path, command: list[str]) -> Iterator[Path]:
    """Within, the library that a compiler's command makes lies in a new folder in `place`. See builder.py.

    Raises:
        OSError: a folder cannot be made there.
        subprocess.SubprocessError: the library cannot be compiled.
    """
    program = [sys.executable, "-S", "-P", str(SOURCES / "builder.py"), str(place), *command]
    # A Ctrl-C of the terminal goes to this process alone. When its end of the pipe closes, the builder cleans up.
    builder = subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert builder.stdin is not None and builder.stdout is not None
    try:
        answers = select.poll()
        answers.register(builder.stdout, select.POLLIN)
        if not answers.poll(1000 * MOST_SECONDS):
            raise subprocess.TimeoutExpired(command, MOST_SECONDS)
        answer = json.loads(builder.stdout.readline() or '{"error": "the process that compiles them has been killed"}')
        if "place_error" in answer:
            raise OSError(answer["place_error"])
        if "error" in answer:
            raise subprocess.SubprocessError(answer["error"])
        yield Path(answer["path"])
    finally:
        builder.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            builder.wait(PATIENCE)
        builder.kill()
        builder.wait()
        builder.stdout.close()


@functools.cache
def describe_target(compiler: str) -> str:
    """Return all that the compiler defines by itself: its version, and the processor's features, which NATIVE finds.

    Machines with different processors may share a cache folder.
    """
    command = [compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
