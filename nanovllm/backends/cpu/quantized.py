"""Quantised matrices that the C++ kernels of backends/cpu/quantized.cpp multiply."""

import functools
import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.backends.cpu.backend import CpuBackend, gather_rows
from nanovllm.backends.cpu.huge_pages import huge_pages, return_freed_memory
from nanovllm.backends.cpu.library import PANEL, KernelLibrary, cpu_library, open_library, read_constant
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.features.quantized.codes import Codes
from nanovllm.features.quantized.formats import Format, InputScales
from nanovllm.features.quantized.torch_matrix import MatrixOperators
from nanovllm.models.layers.linear import PackedMatrix
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from nanovllm.features.families.qwen3_moe.ops import Routing

logger = logging.getLogger(__name__)

CHUNK_BYTES = read_constant("CHUNK", "quantized.h")
"""Bytes of a panel's codes that belong together."""

INT8_CODES, WHOLE_CODES, INT4_CODES = (read_constant(name, "quantized.cpp") for name in ("INT8", "WHOLE_INT8", "INT4"))
"""The formats: 8 bits without the code -128, which is slower; 8 bits with it; 4 bits."""


class QuantizedLibrary(KernelLibrary):
    """The kernels of quantised matrices."""

    source = "quantized.cpp"


@functools.cache
def quantized_library() -> QuantizedLibrary:
    """Return the library, which is compiled when a process first asks for it. See `open_library`."""
    return open_library(QuantizedLibrary, "multiply quantised weights")


class PackedCodes:
    """A matrix [out, in], or experts [num_experts, out, in], in the form that the kernels read.

    Args:
        codes: they are copied.
        dtype: the type of inputs and outputs, torch.bfloat16 or torch.float32. The order of the codes depends on it.
        scratch: lends memory to the outputs.
    """

    def __init__(self, codes: Codes, dtype: torch.dtype, scratch: Scratch) -> None:
        self.library: KernelLibrary = quantized_library()
        self.scratch = scratch
        self.dtype = dtype
        in_features = codes.in_features
        out_features = codes.out_features
        self.order = codes.order
        inputs = CHUNK_BYTES * 8 // (PANEL * codes.bits)  # of a chunk
        group = codes.group_size
        if group < in_features and group % inputs:
            raise ValueError(f"the CPU kernels take groups of a multiple of {inputs} inputs, not {group}")
        self.sizes: tuple[int, ...] = (in_features, out_features, min(group, in_features))
        self.format = INT4_CODES
        if codes.bits == 8:
            self.format = WHOLE_CODES if codes.codes.numel() and codes.codes.min() == -128 else INT8_CODES
        size = ceil_div(out_features, PANEL) * ceil_div(in_features, inputs) * CHUNK_BYTES
        matrices = codes.codes.reshape(-1, *codes.codes.shape[-2:]).contiguous()
        packed = huge_pages.empty(len(matrices) * size).view(len(matrices), size)
        for matrix, target in zip(matrices, packed, strict=True):
            self.call("pack_codes", matrix, target, out_features, in_features)
        zeros = None
        if codes.zeros is not None:
            zeros = _by_panel(codes.zeros.float() - (8 if codes.bits == 4 else 0))
        self.tensors: tuple[Tensor | None, ...] = (packed, _by_panel(codes.scales), zeros)
        return_freed_memory()

    def call(self, name: str, *arguments: Tensor | int | None) -> None:
        """Run the kernel of that name."""
        self.library.call(name, self.dtype, *arguments, self.format)

    def reorder(self, x: Tensor) -> Tensor:
        """Return x [n, in] with its columns in the codes' order."""
        return x.contiguous() if self.order is None else x[:, self.order]


class CpuMatrix(PackedCodes):
    """A quantised matrix [out, in]. It gives single rows, too: a tied embedding needs no copy."""

    product = "linear_codes"
    lookup = "weight_rows"

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]."""
        y = self.scratch.empty(len(x), self.sizes[1], dtype=x.dtype)
        self.call(self.product, self.reorder(x), *self.tensors, bias, y, len(x), *self.sizes)
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """Return the weights of the rows [n, in] at indices [n], rounded to the dtype."""
        y = self.scratch.empty(len(indices), self.sizes[0], dtype=self.dtype)
        self.call(self.lookup, *self.tensors, indices.to(torch.int32), y, len(indices), *self.sizes)
        if self.order is None:
            return y
        in_order = torch.empty_like(y)
        in_order[:, self.order] = y
        return in_order


class CpuExperts(PackedCodes):
    """The quantised matrices of experts, [num_experts, out, in]."""

    product = "grouped_codes"

    def multiply(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        """Multiply pairs by the matrices of their experts. See `grouped_linear_reference`."""
        rows = gather_rows(cpu_library(), x, routing.tokens, self.scratch) if gather else x.contiguous()
        y = self.scratch.empty(len(rows), self.sizes[1], dtype=x.dtype)
        if self.order is not None:
            order = self.order.repeat_interleave(routing.offsets.diff(), 0)  # [pairs, in], without those of padding
            rows = rows[: len(order)].gather(1, order)
        self.call(self.product, rows, *self.tensors, routing.offsets, y, len(routing.offsets) - 1, *self.sizes)
        return y


def _by_panel(values: Tensor) -> Tensor:
    """Reorder values [..., out, groups] to [..., panels, groups, PANEL], padded with zeros."""
    *first, out, groups = values.shape
    panels = ceil_div(out, PANEL)
    padded = values.new_zeros(*first, panels * PANEL, groups)
    padded[..., :out, :] = values
    return huge_pages.copy(padded.view(*first, panels, PANEL, groups).transpose(-1, -2))


class Operators(MatrixOperators):
    """Makes matrices for the C++ kernels."""

    def __init__(self, backend: CpuBackend) -> None:
        self._scratch = backend.scratch

    def make_matrix(self, codes: Codes, dtype: torch.dtype, input_scales: InputScales | None) -> PackedMatrix:
        if input_scales is None:
            return CpuMatrix(codes, dtype, self._scratch)
        from nanovllm.backends.cpu.dynamic import DynamicCpuMatrix

        return DynamicCpuMatrix(codes, dtype, self._scratch)

    def make_experts(self, codes: Codes, dtype: torch.dtype, input_scales: InputScales | None) -> CpuExperts:
        if input_scales is None:
            return CpuExperts(codes, dtype, self._scratch)
        from nanovllm.backends.cpu.dynamic import DynamicCpuExperts

        return DynamicCpuExperts(codes, dtype, self._scratch)

    def why_cannot(self, format: Format) -> str | None:
        if format.has_floats:
            return 'the C++ kernels do not multiply fp8: leave quantization out, or use quantization="int8"'
        if format.input_scales is InputScales.TOKEN:
            instead = 'use "int8-dynamic"' if format.quantizes_head else "leave quantization out"
            return f"the C++ kernels round inputs with a scale for 128 of them, and not for a token: {instead}"
        if format.input_scales is not None and not format.quantizes_head:
            return "the C++ kernels round inputs for weights that are rounded at load alone: leave quantization out"
        return None

    def warn(self, format: Format) -> None:
        from nanovllm.backends.cpu.dynamic import dynamic_library

        if format.input_scales is not None and not dynamic_library().multiplies_bytes:
            logger.warning(
                "this processor has no instruction that multiplies bytes (AVX-512 VNNI, AVX-VNNI or Arm's dot "
                'product): quantization="int8-dynamic" gives the same numbers as with one, more slowly'
            )
