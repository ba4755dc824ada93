"""Products in whole numbers by the C++ kernels of backends/cpu/dynamic.cpp, a library of its own."""

import functools

import torch
from torch import Tensor

from nanovllm.backends.cpu.huge_pages import huge_pages, return_freed_memory
from nanovllm.backends.cpu.library import PANEL, KernelLibrary, open_library, read_constant
from nanovllm.backends.cpu.quantized import CpuExperts, CpuMatrix, PackedCodes
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.features.quantized.codes import Codes
from nanovllm.utils.integers import ceil_div

STEP = read_constant("STEP", "dynamic.h")
"""Inputs that an instruction multiplies together."""


class DynamicLibrary(KernelLibrary):
    """The kernels that multiply in whole numbers."""

    source = "dynamic.cpp"
    # A product and a sum that are contracted are rounded once: not every processor can do that.
    flags = ("-ffp-contract=off",)

    @property
    def multiplies_bytes(self) -> bool:
        """Whether the processor has an instruction for them (VNNI, or Arm's dot product)."""
        return bool(self.library.multiplies_bytes())


@functools.cache
def dynamic_library() -> DynamicLibrary:
    """Return the library, which is compiled when a process first asks for it. See `open_library`."""
    return open_library(DynamicLibrary, "multiply in int8")


class DynamicCodes(PackedCodes):
    """A matrix [out, in], or experts [num_experts, out, in], of int8 codes with one scale a row.

    Args:
        codes: whole numbers from -127 to 127; they are copied.
        dtype: the type of inputs and outputs, torch.bfloat16 or torch.float32.
        scratch: lends memory to the outputs.
    """

    def __init__(self, codes: Codes, dtype: torch.dtype, scratch: Scratch) -> None:
        self.library = dynamic_library()
        self.scratch = scratch
        self.dtype = dtype
        self.order = None
        self.sizes = (codes.in_features, codes.out_features)
        in_features, out_features = self.sizes
        columns = ceil_div(out_features, PANEL) * PANEL
        matrices = codes.codes.contiguous()[None].flatten(0, -3)
        size = columns * ceil_div(in_features, STEP) * STEP
        packed = huge_pages.empty(len(matrices) * size).view(len(matrices), size)
        for matrix, target in zip(matrices, packed, strict=True):
            self.library.call("pack_dynamic", None, matrix, target, out_features, in_features)
        scales = torch.zeros(len(matrices), columns, dtype=torch.float32)
        scales[:, :out_features] = codes.scales[None].flatten(0, -3)[..., 0]
        self.tensors = (packed, scales)
        return_freed_memory()

    def call(self, name: str, *arguments: Tensor | int | None) -> None:
        self.library.call(name, self.dtype, *arguments)


class DynamicCpuMatrix(DynamicCodes, CpuMatrix):
    """A matrix that is multiplied in whole numbers. It gives single rows, too."""

    product = "linear_dynamic"
    lookup = "dynamic_rows"


class DynamicCpuExperts(DynamicCodes, CpuExperts):
    """The matrices of experts, which are multiplied in whole numbers."""

    product = "grouped_dynamic"
