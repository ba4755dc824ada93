"""A quantised matrix as the Triton kernels read it, and its product in plain torch."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from nanovllm.models.qwen3_moe.ops import Routing, grouped_linear_reference
from nanovllm.quantized.codes import unpack_int4


class CodedWeight(NamedTuple):
    """A matrix [out, in]: weight[o, i] = (code[o, i] - zero[g, o]) * scale[g, o], where g = i // group_size.

    For experts each tensor has a leading dimension [num_experts]. All are contiguous.

    Attributes:
        codes: 8 bits: int8 [out, in]. 4 bits: uint8 [out, in / 2], where element 2j is the low half of byte j.
        scales: float32 [groups, out], so that neighbours in memory belong to neighbouring columns of a product.
        zeros: int32 [groups, out], in terms of the codes. None: 0 for 8 bits, 8 for 4 bits.
        bits: 8 or 4.
        in_size: elements of a row.
        group_size: elements of a row that share a scale; in_size for one scale a row.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    in_size: int
    group_size: int

    def dequantize(self) -> Tensor:
        """Return the weights, float32 [..., out, in]."""
        codes = self.codes if self.bits == 8 else unpack_int4(self.codes)
        middle = 0 if self.bits == 8 else 8
        zeros = middle if self.zeros is None else self._spread(self.zeros)
        return (codes.int() - zeros).float() * self._spread(self.scales)

    def _spread(self, values: Tensor) -> Tensor:
        """Repeat values [..., groups, out] for the elements of each group, [..., out, in]."""
        return values.mT.repeat_interleave(self.group_size, -1).narrow(-1, 0, self.in_size)


def quantized_linear_reference(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """x [n, in] -> x W^T + bias [n, out], summed in float32, in x's dtype."""
    return F.linear(x.float(), weight.dequantize(), None if bias is None else bias.float()).to(x.dtype)


def grouped_quantized_reference(x: Tensor, weight: CodedWeight, routing: Routing, gather: bool) -> Tensor:
    """Do what `grouped_linear_reference` does with weights [num_experts, out, in], summed in float32."""
    return grouped_linear_reference(x.float(), weight.dequantize(), routing, gather).to(x.dtype)
