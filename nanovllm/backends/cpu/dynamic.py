"""Products in whole numbers by the C++ kernels of backends/cpu/dynamic.cpp, a library of its own."""

import functools

import torch

from nanovllm.backends.cpu.huge_pages import huge_pages, return_freed_memory
from nanovllm.backends.cpu.library import PANEL, KernelLibrary, open_library, read_constant
from nanovllm.backends.cpu.quantized import Laid
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


def lay_bytes(codes: Codes) -> Laid:
    """Lay int8 codes with one scale a row out for the kernels of dynamic.cpp. They are from -127 to 127."""
    library = dynamic_library()
    in_features = codes.in_features
    out_features = codes.out_features
    columns = ceil_div(out_features, PANEL) * PANEL
    matrices = codes.codes.contiguous()[None].flatten(0, -3)
    size = columns * ceil_div(in_features, STEP) * STEP
    packed = huge_pages.empty(len(matrices) * size).view(len(matrices), size)
    for matrix, target in zip(matrices, packed, strict=True):
        library.call("pack_dynamic", None, matrix, target, out_features, in_features)
    scales = torch.zeros(len(matrices), columns, dtype=torch.float32)
    scales[:, :out_features] = codes.scales.values[None].flatten(0, -3)[..., 0]
    return_freed_memory()
    sizes = (in_features, out_features)
    return Laid(library, "linear_dynamic", "grouped_dynamic", "dynamic_rows", (packed, scales), sizes)
