"""Quantised matrices in plain torch: dequantise some rows, multiply, go on. It is slow, and runs everywhere."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.models.qwen3_moe.ops import Routing
from nanovllm.quantized.codes import CHUNK, Codes


class TorchMatrix:
    """A `PackedMatrix` that keeps the codes as they are. Other forms are compared with it."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        """dtype is that of the activations, which the weights are rounded to."""
        self._codes = codes
        self._dtype = dtype
        self._height = max(1, CHUNK // codes.in_features)
        """Rows that are dequantised at a time, so that float32 copies stay small."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.empty(x.shape[0], self._codes.out_features, dtype=x.dtype, device=x.device)
        for start in range(0, self._codes.out_features, self._height):
            rows = slice(start, start + self._height)
            weights = self._codes.take_rows(rows).dequantize().to(self._dtype)
            y[:, rows] = F.linear(x, weights, None if bias is None else bias[rows])
        return y

    def rows(self, indices: Tensor) -> Tensor:
        return self._codes.take_rows(indices.long()).dequantize().to(self._dtype)


class TorchExperts:
    """`PackedExperts` that keep the codes as they are."""

    def __init__(self, codes: Codes, dtype: torch.dtype) -> None:
        self._codes = codes
        self._matrices = [TorchMatrix(codes.take_expert(i), dtype) for i in range(len(codes.codes))]

    def multiply(self, x: Tensor, routing: Routing, gather: bool) -> Tensor:
        rows = x[routing.tokens.long()] if gather else x
        y = rows.new_zeros(len(rows), self._codes.out_features)
        for matrix, (begin, end) in zip(self._matrices, pairwise(routing.offsets.tolist()), strict=True):
            if begin < end:
                y[begin:end] = matrix.multiply(rows[begin:end], None)
        return y
