"""The CPU kernels as another processor runs them: cross-compiled, each call a run of an emulator."""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.backends.cpu.dynamic import DynamicLibrary
from nanovllm.backends.cpu.library import _SUFFIXES, FLAGS, SOURCES, CpuLibrary, KernelLibrary

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
THREADS = 2
HAS_EMULATOR = shutil.which(COMPILER) is not None and shutil.which(EMULATOR) is not None


class ForeignLibrary:
    """Stands for a library with kernels for 64-bit Arm, for a processor by the compiler's name.

    A DynamicLibrary has a program of its own, as it is compiled with flags of its own. All others are one program.
    """

    def __init__(self, folder: Path, march: str, kind: type[KernelLibrary] = CpuLibrary) -> None:
        self._program = folder / "kernels"
        self._file = folder / "arguments"
        flags = [flag for flag in FLAGS if flag not in ("-march=native", "-fPIC", "-shared")]
        source = Path(__file__).with_suffix(".cpp")
        flags += [*kind.flags, *(["-DDYNAMIC"] if kind is DynamicLibrary else [])]
        flags += [f"-march={march}", "-static", "-I", str(SOURCES)]
        subprocess.run([COMPILER, *flags, str(source), "-o", str(self._program)], check=True)

    pack = CpuLibrary.pack

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def call(self, name: str, dtype: torch.dtype | None, *arguments: Tensor | float | None) -> None:
        arguments = (THREADS, *arguments)
        contents = [_to_bytes(argument) for argument in arguments]
        self._file.write_bytes(b"".join(struct.pack("<q", len(content)) + content for content in contents))
        command = [EMULATOR, "-cpu", "max", self._program, name + _SUFFIXES[dtype], self._file]
        subprocess.run(command, check=True, timeout=300)
        result = self._file.read_bytes()
        at = 0
        for argument, content in zip(arguments, contents, strict=True):
            if isinstance(argument, Tensor):
                ctypes.memmove(argument.data_ptr(), result[at + 8 : at + 8 + len(content)], len(content))
            at += 8 + len(content)


def _to_bytes(argument: Tensor | float | None) -> bytes:
    """Return a number, or a tensor from its first element to the end of its storage."""
    if argument is None:
        return b""
    if not isinstance(argument, Tensor):
        return struct.pack("<f" if isinstance(argument, float) else "<q", argument)
    storage = argument.untyped_storage()
    return ctypes.string_at(argument.data_ptr(), storage.nbytes() - (argument.data_ptr() - storage.data_ptr()))
