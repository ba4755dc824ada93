"""The interface of a format of quantised weights, and the format that is made at load."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from nanovllm.features.quantized.codes import Codes, InputScales, Scales, pack_int4, quantize_int8
from nanovllm.ops.kv_codes import divide_by_scales
from nanovllm.utils.integers import ceil_div

if TYPE_CHECKING:
    from nanovllm.features.quantized.unpack import Floats4, ScaledFloats


RawTensors = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]
"""{suffix of a name, such as "qweight": shape and possible number formats}, of all tensors that make one matrix."""


@dataclass(frozen=True)
class Format:
    """How a model's matrices are quantised.

    Attributes:
        name: the value of the option `quantization` that means it.
        bits: the bits of a code; 16 if the weights are dequantised while they are read.
        group_size: elements of a row that share a scale; None: the whole row.
        has_zeros: whether codes may have other zeros than the middle of their range.
        rounds: whether a checkpoint's numbers are rounded to codes while they are read. Then all matrices are.
        quantizes_head: whether the LM head is quantised, too, and an embedding that is tied to it. For formats that do
            not say so, a checkpoint's own tensors may have a quantised head, but no quantised embedding.
        input_scales: None if activations keep their type. Else they are rounded, too, while they are multiplied.
    """

    name: str
    bits: int
    group_size: int | None = None
    has_zeros: bool = False
    rounds: bool = False
    quantizes_head: bool = False
    input_scales: InputScales | None = None

    joint: ClassVar[str] = "."
    """The characters between a matrix's name and a suffix."""
    stored_bits: ClassVar[int] = 8
    """The bits of a weight in the checkpoint, of a format whose weights are dequantised while they are read."""

    @property
    def is_made_at_load(self) -> bool:
        """Whether the checkpoint has no tensors of the format: it is made of numbers of 16 or 32 bits."""
        return self in MADE_AT_LOAD.values()

    def find_tensors(self, prefix: str, names: Collection[str], *shape: int) -> RawTensors:
        """Return the tensors that make the matrix called `prefix` in a checkpoint; {} if it is not quantised there.

        Args:
            names: the names of all tensors of the checkpoint.
            shape: the shape that the checkpoint's tensor would have if it were not quantised.
        """
        return {}

    def convert(self, tensors: Mapping[str, Tensor], out: int, size: int) -> "Codes | ScaledFloats | Floats4":
        """Convert the tensors of one matrix, in the shapes of `find_tensors`. ValueError if they contradict them.

        Returns:
            The codes; or the weights that the tensors mean, for a format whose weights are kept in 16 bits.
        """
        raise NotImplementedError

    def count_groups(self, size: int) -> int:
        """Return how many scales a row of `size` elements has."""
        return 1 if self.group_size is None else ceil_div(size, self.group_size)

    def count_row_bytes(self, size: int, itemsize: int, name: str) -> int:
        """Return the memory of a row of a matrix, with scales and zeros.

        Args:
            size: its elements.
            itemsize: the bytes of an element of a matrix that is not quantised.
            name: the matrix's in a checkpoint.
        """
        return size * self.bits // 8 + self.count_groups(size) * (4 + 2 * self.has_zeros)

    def describe(self, dtype: str) -> str:
        """Return how the weights are stored, for a table: "int8", "4 bits (awq, groups of 128)", "bfloat16, from fp8".

        Args:
            dtype: the dtype of what is not quantised.
        """
        if self.bits == 16:
            return f"{dtype}, from {self.name} with {self.stored_bits} bits"
        if self.rounds:
            return self.name
        groups = "rows" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.bits} bits ({self.name}, {groups}), embeddings in {dtype}"

    def describe_cost(self, dtype: str) -> str:
        """Return what a user should know of matrices that take more memory here than in the checkpoint; "" if none do.

        Args:
            dtype: the dtype of what is not quantised.
        """
        return ""

    def round(self, weight: Tensor) -> Codes:
        """Quantise weights [..., out, in] by rounding. Dummy weights get their codes in this way."""
        if self.group_size is None and self.bits == 8:
            return quantize_int8(weight)
        most = 2 ** (self.bits - 1) - 1
        size = weight.shape[-1]
        group_size = min(self.group_size or size, size)
        groups = torch.nn.functional.pad(weight.float(), (0, -size % group_size))
        quotients, scales = divide_by_scales(groups.view(*weight.shape[:-1], -1, group_size), most)
        codes = quotients.flatten(-2)[..., :size].round_().clamp_(-most, most).to(torch.int8)
        return Codes(self.bits, codes if self.bits == 8 else pack_int4(codes + 8), Scales(scales), None, group_size)


INT8 = Format("int8", bits=8, rounds=True, quantizes_head=True)
"""Made at load: see `quantize_int8`."""

INT8_DYNAMIC = replace(INT8, name="int8-dynamic", input_scales=InputScales.GROUP)
"""The same codes, by which rounded inputs are multiplied: the form of CPUs."""

W8A8 = replace(INT8, name="w8a8", input_scales=InputScales.TOKEN)
"""The same with one scale for all inputs of a token: the form of GPUs."""

MADE_AT_LOAD = {format.name: format for format in (INT8, INT8_DYNAMIC, W8A8)}
