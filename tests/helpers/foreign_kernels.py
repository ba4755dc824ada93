"""The CPU kernels as another processor runs them: cross-compiled, each call a run of an emulator."""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from nanovllm.backends.cpu.dynamic import DynamicLibrary
from nanovllm.backends.cpu.library import (
    _SUFFIXES,
    FLAGS,
    PANEL,
    SOURCES,
    CpuLibrary,
    KernelLibrary,
    Signature,
    _units_per_row,
)
from nanovllm.backends.cpu.quantized import QuantizedLibrary

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
THREADS = 2
SIGNATURES: dict[str, Signature] = {}
for library in (CpuLibrary, QuantizedLibrary, DynamicLibrary):
    SIGNATURES |= {**library.typed, **library.untyped}
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

    def call(self, name: str, dtype: torch.dtype | None, *arguments: Tensor | float | None) -> None:
        if name == "edit_logits":  # of float32 alone
            return self._run(name, "ppppppqq", arguments)
        pointers, integers, _ = SIGNATURES[name]
        kinds = "p" * pointers + "q" * integers + "f" * (len(arguments) - pointers - integers)
        return self._run(name if dtype is None else f"{name}_{_SUFFIXES[dtype]}", kinds, arguments)

    def pack(self, weight: Tensor, in_place: bool = False) -> Tensor:
        out_features, in_features = weight.shape
        packed = torch.empty(-(-out_features // PANEL) * PANEL * in_features, dtype=weight.dtype)
        self._run("pack", "ppqq", (weight, packed, out_features, _units_per_row(weight)))
        return weight.copy_(packed.view_as(weight)).view(-1) if in_place and out_features % PANEL == 0 else packed

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def packed_rows(self, packed: Tensor, indices: Tensor, rows: Tensor) -> None:
        self._run("packed_rows", "pppqq", (packed, indices, rows, len(indices), _units_per_row(rows)))

    def _run(self, name: str, kinds: str, arguments: tuple[Tensor | float | None, ...]) -> None:
        contents = []
        kinds = "q" + kinds
        arguments = (THREADS, *arguments)
        for kind, argument in zip(kinds, arguments, strict=True):
            if kind == "p":
                contents.append(bytes(_memory(argument)) if isinstance(argument, Tensor) else b"")
            else:
                contents.append(struct.pack(f"<{kind}", argument))
        self._file.write_bytes(b"".join(struct.pack("<q", len(content)) + content for content in contents))
        subprocess.run([EMULATOR, "-cpu", "max", self._program, name, self._file], check=True, timeout=300)
        result = self._file.read_bytes()
        at = 0
        for argument, content in zip(arguments, contents, strict=True):
            if isinstance(argument, Tensor):
                ctypes.memmove(argument.data_ptr(), result[at + 8 : at + 8 + len(content)], len(content))
            at += 8 + len(content)


def _memory(tensor: Tensor) -> "ctypes.Array[ctypes.c_char]":
    """From a tensor's first element to the end of its storage."""
    storage = tensor.untyped_storage()
    size = storage.nbytes() - (tensor.data_ptr() - storage.data_ptr())
    return (ctypes.c_char * size).from_address(tensor.data_ptr())
