"""Checks of the C++ kernels of families against plain torch, for libraries built for this processor and for others."""

import torch

from helpers.cpu_checks import rounding
from helpers.delta_cases import DeltaLayer, assert_delta_is_the_reference
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.experts import Operators as CpuExpertOperators
from nanovllm.backends.cpu.hybrids import Operators as CpuHybridOperators
from nanovllm.features.families.qwen3_5.ops import sigmoid_and_mul_reference
from nanovllm.features.families.qwen3_moe.decoder import Experts
from nanovllm.features.families.qwen3_moe.ops import (
    SharedOutput,
    combine_reference,
    grouped_linear_reference,
    route_reference,
)
from nanovllm.models.layers.parallel import Parallel


def check_experts(backend: CpuBackend, dtype: torch.dtype) -> None:
    """Routing, the experts' products and the sum of their results equal the references."""
    torch.manual_seed(5)
    tokens = 23
    module = Experts(6, 96, 64, Parallel())
    for weight in (module.gate_up, module.down):
        weight.copy_(0.1 * torch.randn(weight.shape))
    module = module.to(dtype)
    plain = module.gate_up.clone()
    backend.pack_weights([module])
    logits = (4 * torch.randn(tokens, 6)).to(dtype)
    slots = torch.arange(tokens)
    slots[::5] = -1
    operators = CpuExpertOperators(backend)
    routing = operators.route(logits, 2, True, slots)
    expected_routing = route_reference(logits, 2, True, slots)
    torch.testing.assert_close(routing.weights, expected_routing.weights, rtol=rounding(dtype), atol=1e-6)
    for got, expected in zip(routing[1:], expected_routing[1:], strict=True):
        assert torch.equal(got, expected)
    x = torch.randn(tokens, 96).to(dtype)
    real = int(routing.offsets[-1])
    product = operators.grouped_linear(x, module.gate_up, routing, True)[:real]
    expected_product = grouped_linear_reference(x.float(), plain.float(), routing, True)[:real]
    torch.testing.assert_close(product.float(), expected_product, rtol=rounding(dtype), atol=10 * rounding(dtype))
    y = torch.randn(2 * tokens, 96).to(dtype)
    close = {"rtol": rounding(dtype), "atol": rounding(dtype)}
    torch.testing.assert_close(operators.combine(y, routing), combine_reference(y, routing), **close)
    shared = SharedOutput(torch.randn(tokens, 96).to(dtype), (9 * torch.randn(tokens, 7)).to(dtype)[:, 6:])
    got, expected = (combine(y, routing, shared) for combine in (operators.combine, combine_reference))
    torch.testing.assert_close(got, expected, **close)


def check_gates(backend: CpuBackend, dtype: torch.dtype) -> None:
    """Gated outputs of attention equal those of plain torch."""
    torch.manual_seed(1)
    close = {"rtol": rounding(dtype), "atol": rounding(dtype)}
    for size in (64, 1024, 100):
        x = 3 * torch.randn(5, size).to(dtype)
        gate = (30 * torch.randn(5, 2 * size).to(dtype))[:, size:]  # its rows lie apart
        found = CpuHybridOperators(backend).sigmoid_and_mul(x, gate)
        torch.testing.assert_close(found, sigmoid_and_mul_reference(x, gate), **close)


def check_linear_attention(backend: CpuBackend, dtype: torch.dtype) -> None:
    """A convolution, the gated delta rule and its norm equal plain torch, step after step."""
    layer = DeltaLayer(2, 4, 64, 48, 4, dtype)
    steps = ([9, 0, 20], [1, 2, 1], [1, 1, 1])
    assert_delta_is_the_reference(layer, CpuHybridOperators(backend), steps, 4 * rounding(dtype))
