"""Quantised matrices on a GPU: the Triton kernels multiply by their codes as they are."""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.backends.gpu.paired_linear import TILES as PAIRED_TILES
from nanovllm.backends.gpu.paired_linear import grouped_paired, is_supported, pair_codes, paired_linear
from nanovllm.backends.gpu.quantized_linear import (
    TILES,
    format_config,
    grouped_quantized,
    make_arrivals,
    quantized_linear,
)
from nanovllm.backends.gpu.round_groups import Rounding
from nanovllm.backends.gpu.rounded_groups import group_config, grouped_rounded_groups, rounded_groups
from nanovllm.backends.gpu.rounded_linear import (
    ROUNDING,
    TOKEN_ROUNDING,
    grouped_rounded,
    limit_rows,
    rounded_linear,
)
from nanovllm.backends.gpu.token_linear import ROW_LIMITS, count_places, token_linear
from nanovllm.features.quantized.codes import Codes
from nanovllm.features.quantized.dynamic import GROUP, MOST_INPUTS
from nanovllm.features.quantized.formats import Format, InputScales
from nanovllm.features.quantized.torch_matrix import MatrixOperators, TorchMatrix
from nanovllm.models.layers.linear import PackedMatrix

if TYPE_CHECKING:
    from nanovllm.backends.gpu.triton_backend import TritonKernels
    from nanovllm.features.families.qwen3_moe.decoder import PackedExperts
    from nanovllm.features.families.qwen3_moe.ops import Routing
    from nanovllm.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

TAKES_PAIRS = False
"""Whether matrices and experts have their codes in pairs where they can. On the GPU that has timed it, 16 to 256 rows
were faster and one row was slower, so benchmarks alone turn it on: see docs/quantised.md."""

KEEPS_COPIES = True
"""Whether matrices get copies of 16 bits where memory allows: see `keep_copies`. Benchmarks turn it off."""


ROUNDINGS: dict[InputScales | None, Rounding | None] = {
    None: None,
    InputScales.GROUP: ROUNDING,
    InputScales.TOKEN: TOKEN_ROUNDING,
}
"""How the kernels round inputs for each kind of their scales."""


class CopiedMatrix(TorchMatrix):
    """A quantised matrix [out, in] that may have a copy in the model's type, for products of many rows.

    Attributes:
        row_limits: the numbers of rows up to which each variant of the kernel is taken. At start-up each is compiled.
            With more rows than the last of them the copy is multiplied, if there is one.
        copy: [out, in], or None.
    """

    row_limits: tuple[int, ...]
    copy: Tensor | None = None

    def __init__(self, laid: Codes, codes: Codes, dtype: torch.dtype) -> None:
        """
        Args:
            laid: the codes as the kernel reads them.
            codes: the same codes as the checkpoint has them.
            dtype: the type of the model.
        """
        super().__init__(laid, dtype)
        self._in_features = codes.in_features
        self._order = codes.order
        self._arrivals = make_arrivals(codes)

    def count_copy_bytes(self) -> int:
        """Return how many bytes a copy takes."""
        return self._codes.out_features * self._in_features * self._dtype.itemsize

    def keep_copy(self) -> None:
        """Make the copy, or write new weights into the memory of the old one."""
        out_features = self._codes.out_features
        device = self._codes.codes.device
        if self.copy is None:
            self.copy = torch.empty(out_features, self._in_features, dtype=self._dtype, device=device)
        for start in range(0, out_features, self._height):
            indices = torch.arange(start, min(start + self._height, out_features), device=device)
            self.copy[start : start + self._height] = self.rows(indices)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]. The codes' columns may have another order than those of x."""
        if self.copy is not None and len(x) > self.row_limits[-1]:
            return F.linear(x, self.copy, bias)
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        return self._multiply_codes(x, bias)

    def _multiply_codes(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Do what `multiply` does for x that is contiguous, and whose columns are in the order of the codes'."""
        raise NotImplementedError


class TritonMatrix(CopiedMatrix):
    """A quantised matrix [out, in] that the kernel multiplies. It implements `PackedMatrix`."""

    row_limits = tuple(most for most, *_ in TILES)

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """
        Args:
            dtype: the type of the model, which rows of an embedding have.

        Raises:
            ValueError: the kernel cannot take groups of this size.
        """
        super().__init__(transpose_scales(codes), codes, dtype)

    def _multiply_codes(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return quantized_linear(x, self._codes, bias, self._arrivals)


class PairedTritonMatrix(CopiedMatrix):
    """A matrix [out, in] that `is_supported` by the kernel that takes codes in pairs."""

    row_limits = tuple(most for most, *_ in PAIRED_TILES)

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """dtype is the type of the model, which rows of an embedding have."""
        super().__init__(lay_values(pair_codes(codes)), codes, dtype)

    def _multiply_codes(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return paired_linear(x, self._codes, bias, self._arrivals)

    def rows(self, indices: Tensor) -> Tensor:
        return super().rows(indices)[:, : self._in_features].contiguous()


class RoundedTritonMatrix(TorchMatrix):
    """A matrix [out, in] of int8 codes with one scale a row, which the kernel multiplies in whole numbers.

    Attributes:
        row_limits: as those of `TritonMatrix`.
    """

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """dtype is the type of the model, which rows of an embedding have."""
        super().__init__(pad_rows(codes), dtype)
        self._in_features = codes.in_features
        self.row_limits = limit_rows(codes.out_features, codes.codes.device)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]."""
        return rounded_linear(x, self._codes, bias, self.row_limits)

    def rows(self, indices: Tensor) -> Tensor:
        return super().rows(indices)[:, : self._in_features].contiguous()


class TokenTritonMatrix(RoundedTritonMatrix):
    """A matrix [out, in] of int8 codes with one scale a row, whose inputs have one scale a token."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """
        Raises:
            ValueError: a sum would not be exact.
        """
        super().__init__(codes, dtype)
        refuse_long_rows(codes)
        self.row_limits = ROW_LIMITS
        device = codes.codes.device
        self._arrivals = torch.zeros(count_places(device), dtype=torch.int32, device=device)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]."""
        return token_linear(x, self._codes, bias, self._arrivals)


class GroupedTritonMatrix(RoundedTritonMatrix):
    """A matrix [out, in] of int8 codes with scales for groups, which the kernel multiplies in whole numbers."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """
        Raises:
            ValueError: the kernel cannot take groups of this size.
        """
        super().__init__(codes, dtype)
        self._codes = lay_groups(codes)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, in] -> x W^T + bias [n, out]. The codes' columns may have another order than those of x."""
        order = self._codes.order
        x = x.contiguous() if order is None else x.index_select(1, order)
        return rounded_groups(x, self._codes, self._in_features, bias, self.row_limits)

    def rows(self, indices: Tensor) -> Tensor:
        whole = replace(self._codes, codes=self._codes.codes[:, : self._in_features])
        return whole.take_rows(indices.long()).dequantize().to(self._dtype)


class TritonExperts:
    """The quantised matrices [num_experts, out, in] of one projection of all experts."""

    def __init__(self, codes: Codes) -> None:
        """
        Raises:
            ValueError: the kernel cannot take groups of this size, or columns that were sorted by their group.
        """
        refuse_order(codes)
        self._codes = transpose_scales(codes)

    def multiply(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        """Do what `grouped_linear_reference` does."""
        return grouped_quantized(x, self._codes, routing, gather)


class PairedTritonExperts:
    """The matrices [num_experts, out, in] of one projection of all experts, whose codes are in pairs."""

    def __init__(self, codes: Codes) -> None:
        """
        Raises:
            ValueError: the kernel cannot take columns that were sorted by their group.
        """
        refuse_order(codes)
        self._codes = lay_values(pair_codes(codes))

    def multiply(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        """Do what `grouped_linear_reference` does."""
        return grouped_paired(x.contiguous(), self._codes, routing, gather)


class RoundedTritonExperts:
    """Matrices [num_experts, out, in] of int8 codes, which the kernel multiplies in whole numbers."""

    def __init__(self, codes: Codes, rounding: Rounding) -> None:
        """
        Args:
            rounding: how their inputs are rounded.

        Raises:
            ValueError: a sum would not be exact.
        """
        if rounding.by_token:
            refuse_long_rows(codes)
        self._codes = pad_rows(codes)
        self._rounding = rounding

    def multiply(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        """Do what `DynamicExperts.multiply` does, or that of `TokenExperts`."""
        return grouped_rounded(x, self._codes, routing, gather, self._rounding)


class GroupedTritonExperts:
    """Matrices [num_experts, out, in] of int8 codes with scales for groups, which the kernel multiplies so, too."""

    def __init__(self, codes: Codes) -> None:
        """
        Raises:
            ValueError: the kernel cannot take groups of this size, or columns that were sorted by their group.
        """
        refuse_order(codes)
        self._in_features = codes.in_features
        self._codes = lay_groups(codes)

    def multiply(self, x: Tensor, routing: "Routing", gather: bool) -> Tensor:
        """Do what `DynamicExperts.multiply` does."""
        return grouped_rounded_groups(x, self._codes, self._in_features, routing, gather)


def refuse_order(codes: Codes) -> None:
    """Raise a ValueError if the columns of experts were sorted by their group."""
    if codes.order is not None:
        raise ValueError(
            "these experts' columns are sorted by their group (desc_act), which the grouped Triton kernel does not "
            "take: use a checkpoint that was made with desc_act=False"
        )


def refuse_long_rows(codes: Codes) -> None:
    """Raise a ValueError if int32 may not hold the sum of all products of codes."""
    if codes.in_features > MOST_INPUTS:
        raise ValueError(
            f"a matrix has {codes.in_features} inputs, and int32 adds the products of at most {MOST_INPUTS} codes "
            'exactly: use quantization="int8-dynamic"'
        )


def pad_rows(codes: Codes) -> Codes:
    """Return the same int8 matrix, with zeros at the ends of its rows to a multiple of GROUP."""
    lacking = -codes.in_features % GROUP
    if not lacking:
        return codes
    return replace(codes, codes=F.pad(codes.codes, (0, lacking)), group_size=codes.in_features + lacking)


def lay_groups(codes: Codes) -> Codes:
    """Return the same matrix with padded rows, and with the scales of one group together in memory.

    Raises:
        ValueError: the kernel cannot take groups of this size.
    """
    padded = pad_rows(codes)
    group_size = padded.in_features if codes.scales.shape[-1] == 1 else codes.group_size
    group_config(group_size)
    return replace(padded, scales=_lay_by_column(codes.scales), group_size=group_size)


def transpose_scales(codes: Codes) -> Codes:
    """Return the same matrix as the kernel reads it: see `lay_values`.

    Raises:
        ValueError: the kernel cannot take groups of this size.
    """
    format_config(codes.bits, codes.in_features, codes.group_size, codes.zeros is not None)
    return lay_values(replace(codes, codes=codes.codes.contiguous()))


def lay_values(codes: Codes) -> Codes:
    """Return the same matrix with the scales and zeros of one group together in memory. Zeros become int32.

    So neighbours belong to neighbouring columns of a product.
    """
    zeros = None if codes.zeros is None else _lay_by_column(codes.zeros.to(torch.int32))
    return replace(codes, scales=_lay_by_column(codes.scales), zeros=zeros)


def _lay_by_column(values: Tensor) -> Tensor:
    """Return a copy of the values [..., m, n] in which the elements of a column are neighbours in memory."""
    return values.mT.clone(memory_format=torch.contiguous_format).mT


def find_copied(modules: Iterable[nn.Module]) -> list[CopiedMatrix]:
    """Return the matrices of modules that may have copies. One that two modules share is there once."""
    packed = {id(matrix): matrix for module in modules if (matrix := getattr(module, "packed", None)) is not None}
    return [matrix for matrix in packed.values() if isinstance(matrix, CopiedMatrix)]


def keep_copies(runner: "ModelRunner", left: int) -> int:
    """Make copies of a model's matrices, all or none. Return the bytes that they take.

    They come out of what is left above a KV cache that holds all rows. So they cost no sequence of `max_model_len` its
    place. If the user gives none, they cost no sequence of the usual length its place.

    Args:
        left: these bytes. There are no copies if they take more.
    """
    matrices = find_copied(runner.model.modules())
    num_bytes = sum(matrix.count_copy_bytes() for matrix in matrices)
    if not matrices:
        return 0
    fits = num_bytes <= left
    how = "once" if fits else "not made (a lower max_num_seqs or max_model_len leaves more)"
    logger.info(
        "Copies of quantised weights in %s, %s: %.2f GiB, and %.2f GiB are left above a KV cache for all rows",
        *(runner.config.dtype, how, num_bytes / 2**30, left / 2**30),
    )
    if not fits:
        return 0
    for matrix in matrices:
        matrix.keep_copy()
    return num_bytes


class Operators(MatrixOperators):
    """Makes matrices for the Triton kernels.

    All matrices of a model round their inputs, or none does. If they do, the backend's norms and SiLU round what they
    write, so that no kernel must do it later.
    """

    def __init__(self, backend: "TritonKernels") -> None:
        self._backend = backend

    def make_matrix(self, codes: Codes, dtype: torch.dtype, input_scales: InputScales | None) -> PackedMatrix:
        self._backend.rounding = ROUNDINGS[input_scales]
        if input_scales is None:
            takes_pairs = TAKES_PAIRS and is_supported(codes, dtype)
            return (PairedTritonMatrix if takes_pairs else TritonMatrix)(codes, dtype)
        if codes.has_floats:
            return GroupedTritonMatrix(codes, dtype)
        codes = codes.widen()
        if input_scales is InputScales.TOKEN:
            return TokenTritonMatrix(codes, dtype)
        return (RoundedTritonMatrix if codes.scales.shape[-1] == 1 else GroupedTritonMatrix)(codes, dtype)

    def make_experts(self, codes: Codes, dtype: torch.dtype, input_scales: InputScales | None) -> "PackedExperts":
        rounding = ROUNDINGS[input_scales]
        self._backend.rounding = rounding
        if rounding is None:
            takes_pairs = TAKES_PAIRS and is_supported(codes, dtype)
            return (PairedTritonExperts if takes_pairs else TritonExperts)(codes)
        if codes.has_floats:
            return GroupedTritonExperts(codes)
        codes = codes.widen()
        is_by_row = codes.scales.shape[-1] == 1
        return RoundedTritonExperts(codes, rounding) if is_by_row else GroupedTritonExperts(codes)

    def keep_place(self, old: Any, new: Any) -> Any:
        """Write new codes into the memory of the old ones, which CUDA graphs read. They have the same shapes."""
        if old is None:
            return new
        old._codes.codes.copy_(new._codes.codes)
        old._codes.scales.copy_(new._codes.scales)  # zeros and orders are a checkpoint's, which is never replaced
        if getattr(old, "copy", None) is not None:
            old.keep_copy()
        return old

    def warn(self, format: Format) -> None:
        pass
