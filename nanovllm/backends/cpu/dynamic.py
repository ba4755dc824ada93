"""Products in whole numbers by the C++ kernels of backends/cpu/dynamic.cpp, a library of its own."""

import functools

import torch
from torch import Tensor

from nanovllm.backends.cpu.huge_pages import huge_pages, return_freed_memory
from nanovllm.backends.cpu.library import PANEL, KernelLibrary, open_library, read_constant
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.quantized.codes import Codes
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


class DynamicCpuMatrix:
    """A matrix [out, in] of int8 codes with one scale a row. It gives single rows, too: a tied embedding needs no copy.

    Args:
        codes: whole numbers from -127 to 127; they are copied.
        dtype: the type of inputs and outputs, torch.bfloat16 or torch.float32.
        scratch: lends memory to the outputs.
    """

    def __init__(self, codes: Codes, dtype: torch.dtype, scratch: Scratch) -> None:
        self._library = dynamic_library()
        self._dtype = dtype
        self._scratch = scratch
        self._sizes = (codes.in_features, codes.out_features)
        in_features, out_features = self._sizes
        columns = ceil_div(out_features, PANEL) * PANEL
        self._packed = huge_pages.empty(columns * ceil_div(in_features, STEP) * STEP)
        self._library.call("pack_dynamic", None, codes.codes.contiguous(), self._packed, out_features, in_features)
        self._scales = torch.zeros(columns, dtype=torch.float32)
        self._scales[:out_features] = codes.scales[:, 0]
        return_freed_memory()

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]."""
        in_features, out_features = self._sizes
        y = self._scratch.empty(len(x), out_features, dtype=x.dtype)
        tensors = (x.contiguous(), self._packed, self._scales, bias, y)
        self._library.call("linear_dynamic", x.dtype, *tensors, len(x), in_features, out_features)
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """Return the weights of the rows [n, in] at indices [n], rounded to the dtype."""
        y = self._scratch.empty(len(indices), self._sizes[0], dtype=self._dtype)
        places = indices.to(torch.int32)
        self._library.call(
            "dynamic_rows", self._dtype, self._packed, self._scales, places, y, len(indices), *self._sizes
        )
        return y
