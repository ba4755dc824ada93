"""A quantised matrix as the Triton kernels read it, and its product in plain torch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.models.qwen3_moe.ops import Routing, grouped_linear_reference


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
        codes = unpack_codes(self.codes, self.bits)
        zeros = default_zero(self.bits) if self.zeros is None else self._spread(self.zeros)
        return (codes - zeros).float() * self._spread(self.scales)

    def _spread(self, values: Tensor) -> Tensor:
        """Repeat values [..., groups, out] for the elements of each group, [..., out, in]."""
        return values.mT.repeat_interleave(self.group_size, -1).narrow(-1, 0, self.in_size)


def unpack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes as int32, one an element: a packed byte holds the even element below and the odd one above."""
    if bits == 8:
        return codes.int()
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()


def default_zero(bits: int) -> int:
    """Return the code of the weight 0 where a matrix has no zeros of its own."""
    return 8 if bits == 4 else 0


def quantized_linear_reference(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """x [n, in] -> x W^T + bias [n, out], summed in float32, in x's dtype."""
    return F.linear(x.float(), weight.dequantize(), None if bias is None else bias.float()).to(x.dtype)


def grouped_quantized_reference(x: Tensor, weight: CodedWeight, routing: Routing, gather: bool) -> Tensor:
    """Do what `grouped_linear_reference` does with weights [num_experts, out, in], summed in float32."""
    return grouped_linear_reference(x.float(), weight.dequantize(), routing, gather).to(x.dtype)
