"""Quantised matrices that the C++ kernels of backends/cpu/quantized.cpp multiply."""

import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.backends.cpu.backend import CpuBackend, NativeMatrix, gather_rows, packs_in_place
from nanovllm.backends.cpu.huge_pages import huge_pages, return_freed_memory
from nanovllm.backends.cpu.library import PANEL, KernelLibrary, cpu_library, open_library, read_constant
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.features.quantized.codes import FROM_ZERO, IQ4_NUMBERS, Codes, InputScales
from nanovllm.features.quantized.formats import Format
from nanovllm.features.quantized.torch_matrix import MatrixOperators, SideBySide
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from nanovllm.features.families.qwen3_moe.ops import Routing

logger = logging.getLogger(__name__)

INT8, WHOLE_INT8, INT6, INT4, INT4_FROM_ZERO, INT4_IQ = (
    read_constant(name, "quantized.cpp") for name in ("INT8", "WHOLE_INT8", "INT6", "INT4", "INT4_FROM_ZERO", "INT4_IQ")
)
"""The formats: 8 bits without the code -128, which is slower; 8 bits with it; 6 bits; and 4 bits, by three tables."""

TABLES = {None: INT4, FROM_ZERO: INT4_FROM_ZERO, IQ4_NUMBERS: INT4_IQ}
"""{what 4 bits mean: the format}. See `Codes.numbers`."""


class QuantizedLibrary(KernelLibrary):
    """The kernels of quantised matrices."""

    source = "quantized.cpp"


@functools.cache
def quantized_library() -> QuantizedLibrary:
    """Return the library, which is compiled when a process first asks for it. See `open_library`."""
    return open_library(QuantizedLibrary, "multiply quantised weights")


class Laid(NamedTuple):
    """A matrix [out, in], or experts [num_experts, out, in], as the kernels of a library read them.

    Attributes:
        product, grouped_product, lookup: the names of the kernels.
        tensors: what each of them takes first of the matrix.
        sizes: what each of them takes last: the length of a row, the number of rows, and what else there is.
    """

    library: KernelLibrary
    product: str
    grouped_product: str
    lookup: str
    tensors: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]


class CpuMatrix:
    """A quantised matrix [out, in], or the matrices [num_experts, out, in] of one projection of all experts.

    It implements `PackedMatrix` and `PackedExperts`. It gives single rows, too: a tied embedding needs no copy.
    """

    def __init__(self, codes: Codes, dtype: torch.dtype, scratch: Scratch) -> None:
        """
        Args:
            codes: they are copied.
            dtype: the type of inputs and outputs, torch.bfloat16 or torch.float32. The order of codes depends on it.
            scratch: lends memory to the outputs.
        """
        self._order = codes.order
        self._dtype = dtype
        self._scratch = scratch
        if codes.input_scales is None:
            self._laid = lay_codes(codes, dtype)
        else:
            from nanovllm.backends.cpu.dynamic import lay_bytes

            self._laid = lay_bytes(codes)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]."""
        y = self._scratch.empty(len(x), self._laid.sizes[1], dtype=x.dtype)
        self.multiply_into(y, x, bias)
        return y

    def multiply_into(self, y: Tensor, x: Tensor, bias: Tensor | None) -> None:
        """Write the product to y [n, out], whose rows are as far apart as `lay_codes` was told."""
        laid = self._laid
        x = x.contiguous() if self._order is None else x[:, self._order]
        laid.library.call(laid.product, self._dtype, x, *laid.tensors, bias, y, len(x), *laid.sizes)

    def multiply_pairs(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        """Multiply pairs by the matrices of their experts. See `grouped_linear_reference`."""
        rows = gather_rows(cpu_library(), x, routing.tokens, self._scratch) if gather else x.contiguous()
        y = self._scratch.empty(len(rows), self._laid.sizes[1], dtype=x.dtype)
        self.multiply_pairs_into(y, rows, routing)
        return y

    def multiply_pairs_into(self, y: Tensor, rows: Tensor, routing: "Routing") -> None:
        """Do for sorted pairs [pairs, in] what `multiply_into` does."""
        laid = self._laid
        if self._order is not None:
            order = self._order.repeat_interleave(routing.offsets.diff(), 0)  # [pairs, in], without those of padding
            rows = rows[: len(order)].gather(1, order)
        sizes = (len(routing.offsets) - 1, *laid.sizes)
        laid.library.call(laid.grouped_product, self._dtype, rows, *laid.tensors, routing.offsets, y, *sizes)

    def widen_rows(self, out: int) -> None:
        """From now on results have rows of `out` elements, of which this matrix gives some: see `CpuSideBySide`."""
        *first, _, form = self._laid.sizes  # see `lay_codes`
        self._laid = self._laid._replace(sizes=(*first, out, form))

    def rows(self, indices: Tensor) -> Tensor:
        """Return the weights of the rows [n, in] at indices [n], rounded to the dtype."""
        laid = self._laid
        y = self._scratch.empty(len(indices), laid.sizes[0], dtype=self._dtype)
        sizes = (len(indices), *laid.sizes)
        laid.library.call(laid.lookup, self._dtype, *laid.tensors, indices.to(torch.int32), y, *sizes)
        if self._order is None:
            return y
        in_order = torch.empty_like(y)
        in_order[:, self._order] = y
        return in_order


class CpuSideBySide(SideBySide):
    """The same for matrices of codes. Each writes its columns of one result, so a step can still be recorded."""

    def __init__(self, parts: Sequence[CpuMatrix], sizes: Sequence[int], scratch: Scratch) -> None:
        """
        Args:
            parts, sizes: see `SideBySide`.
            scratch: lends memory to the results.
        """
        super().__init__(parts, sizes)
        self._out = sum(sizes)
        self._scratch = scratch
        for part in parts:
            part.widen_rows(self._out)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = self._scratch.empty(len(x), self._out, dtype=x.dtype)
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            columns = slice(start, start + size)
            part.multiply_into(y[:, columns], x, None if bias is None else bias[columns])
            start += size
        return y

    def multiply_pairs(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        rows = gather_rows(cpu_library(), x, routing.tokens, self._scratch) if gather else x.contiguous()
        y = self._scratch.empty(len(rows), self._out, dtype=x.dtype)
        start = 0
        for part, size in zip(self.parts, self.sizes, strict=True):
            part.multiply_pairs_into(y[:, start : start + size], rows, routing)
            start += size
        return y


def lay_codes(codes: Codes, dtype: torch.dtype) -> Laid:
    """Lay codes out for the kernels of quantized.cpp, whose order depends on the type of their inputs.

    Raises:
        ValueError: the kernels cannot take groups of this size.
    """
    library = quantized_library()
    in_features = codes.in_features
    out_features = codes.out_features
    form = choose_form(codes)
    chunk = torch.zeros(2, dtype=torch.int64)
    library.call("chunk_sizes", dtype, chunk, form)
    chunk_bytes, inputs = chunk.tolist()
    group = codes.group_size
    if group < in_features and group % inputs:
        raise ValueError(f"the CPU kernels take groups of a multiple of {inputs} inputs, not {group}")
    size = ceil_div(out_features, PANEL) * ceil_div(in_features, inputs) * chunk_bytes
    matrices = codes.codes.reshape(-1, *codes.codes.shape[-2:]).contiguous()
    packed = huge_pages.empty(len(matrices) * size).view(len(matrices), size)
    for matrix, target in zip(matrices, packed, strict=True):
        library.call("pack_codes", dtype, matrix, target, out_features, in_features, form)
    zeros = None
    if codes.zeros is not None:
        zeros = _by_panel(codes.zeros.float() - (8 if codes.bits == 4 else 0))
    scales = codes.scales.map(_by_panel)
    tensors = [packed, scales.values, scales.factors, None, None, zeros]  # None: there are no minima
    if codes.minima is not None:
        minima = codes.minima.map(_by_panel)
        tensors[3:5] = minima.values, minima.factors
    return_freed_memory()
    halves = scales.values.dtype == torch.float16
    # The last size is the distance of the result's rows, which `widen_rows` changes.
    sizes = (in_features, out_features, min(group, in_features), codes.scales.groups_per_value, halves, out_features)
    return Laid(library, "linear_codes", "grouped_codes", "weight_rows", tuple(tensors), (*sizes, form))


def choose_form(codes: Codes) -> int:
    """Return the number of the format that the kernels have for codes. ValueError if there is none."""
    if codes.bits == 4:
        table = None if codes.numbers is None else tuple(codes.numbers.tolist())
        if table not in TABLES:
            raise ValueError(f"the CPU kernels have no table of the numbers {table}")
        return TABLES[table]
    if codes.bits == 6 and codes.zeros is None:
        return INT6
    return WHOLE_INT8 if codes.codes.numel() and codes.codes.min() == -128 else INT8


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
        super().__init__(backend)
        self._scratch = backend.scratch

    def lay(self, codes: Codes, dtype: torch.dtype) -> CpuMatrix:
        return CpuMatrix(codes, dtype, self._scratch)

    def lay_floats(self, weight: Tensor) -> Any:
        if weight.dim() == 2 and weight.shape[1] % 2 == 0:
            return NativeMatrix(cpu_library(), weight, self._scratch, in_place=True)
        if packs_in_place(weight):
            for matrix in weight:
                cpu_library().pack(matrix, in_place=True)
        return super().lay_floats(weight)

    def put_beside(self, laid: Sequence[Any], sizes: Sequence[int]) -> Any:
        if all(isinstance(part, CpuMatrix) for part in laid):
            return CpuSideBySide(laid, sizes, self._scratch)
        return super().put_beside(laid, sizes)

    def why_cannot(self, format: Format) -> str | None:
        if format.input_scales is InputScales.TOKEN:
            instead = 'use "int8-dynamic"' if format.rounds else "leave quantization out"
            return f"the C++ kernels round inputs with a scale for 128 of them, and not for a token: {instead}"
        return None

    def warn(self, format: Format) -> None:
        from nanovllm.backends.cpu.dynamic import dynamic_library

        if format.input_scales is not None and not dynamic_library().multiplies_bytes:
            logger.warning(
                "this processor has no instruction that multiplies bytes (AVX-512 VNNI, AVX-VNNI or Arm's dot "
                'product): quantization="int8-dynamic" gives the same numbers as with one, more slowly'
            )
