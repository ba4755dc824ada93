"""The operators of linear attention: C++ and Triton beside their plain-torch references, and bits in any company."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from helpers.cpu_checks import BF16, FP32, rounding
from helpers.delta_cases import DeltaLayer, assert_delta_is_the_reference, run_in_chunks
from helpers.kernel_cases import DEVICE, HALF, make_inputs, poisoned_memory

from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.backends.cpu.hybrids import Operators as CpuHybridOperators
from nanovllm.backends.gpu.hybrids import Operators as TritonHybridOperators
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.features.families.qwen3_5.ops import HybridOperators

TRITON = TritonHybridOperators(TritonKernels(DEVICE))
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

STEPS = ([5, 0, 40, 1], [1, 3, 1, 1], [1, 1, 1, 1], [2, 70, 1, 0], [1, 1, 1, 1])
"""Tokens of each of four sequences in each step: prompts in pieces shorter than the convolution, and decodes."""

SHORT_STEPS = {FP32: ([5, 0, 20], [1, 2, 1], [0, 1, 17]), HALF: ([5, 0, 70], [1, 2, 1], [0, 1, 66])}
"""The same for Triton: one token, chunks of 16 or 64 tokens, parts of one, and a chunk that begins with a state."""


@pytest.fixture
def operators() -> CpuHybridOperators:
    return CpuHybridOperators(CpuBackend())


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim", "width"),
    [(2, 4, 32, 32, 4), (1, 1, 128, 128, 4), (2, 2, 16, 48, 2), (1, 3, 48, 16, 8), (1, 2, 8, 24, 4), (2, 2, 32, 32, 1)],
)
def test_the_cpu_kernels_are_the_references(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    width: int,
    dtype: torch.dtype,
    operators: CpuHybridOperators,
) -> None:
    layer = DeltaLayer(key_heads, value_heads, key_dim, value_dim, width, dtype)
    assert_delta_is_the_reference(layer, operators, STEPS, 4 * rounding(dtype))


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_sequence_has_the_same_bits_in_any_batch_chunks_and_threads(
    dtype: torch.dtype, operators: CpuHybridOperators
) -> None:
    layer = DeltaLayer(2, 4, 128, 64, 4, dtype)
    prompts = [layer.inputs(tokens, seed=i) for i, tokens in enumerate((65, 1, 130, 20, 3))]
    torch.set_num_threads(1)
    expected = run_in_chunks(layer, operators, prompts, 1000, together=False)
    assert not any(out.isnan().any() for out in expected)
    for chunk, together, num_threads in ((1, True, 2), (7, True, 3), (64, True, 2), (1000, True, 2), (7, False, 3)):
        torch.set_num_threads(num_threads)
        found = run_in_chunks(layer, operators, prompts, chunk, together)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), (chunk, together, num_threads)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_gate_is_the_reference(dtype: torch.dtype, operators: CpuHybridOperators) -> None:
    x, gate = (20 * torch.randn(7, 3 * 64, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    gate[3, 70] = float("nan")
    apart = gate[:, 64:128]
    found = operators.sigmoid_and_mul(x[:, :64].contiguous(), apart)
    expected = x[:, :64] * torch.sigmoid(apart)
    torch.testing.assert_close(found, expected, rtol=2 * rounding(dtype), atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("gate", [-300.0, 300.0])
def test_extreme_gates_keep_or_forget(gate: float, operators: CpuHybridOperators) -> None:
    """With b = -300 a token changes nothing; with a = 300 it forgets all that was before it. Nothing overflows."""
    layer = DeltaLayer(1, 1, 32, 32, 4, FP32)
    inputs = layer.inputs(30)
    inputs[:, -2:] = gate
    (out,) = run_in_chunks(layer, operators, [inputs], 7, together=True)
    assert torch.isfinite(out).all()


# ---- Triton, in its interpreter or on a GPU


@needs_triton
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim", "width", "dtype"),
    [
        (2, 4, 32, 32, 4, FP32),
        pytest.param(1, 2, 128, 128, 4, HALF, marks=pytest.mark.slow),
        (1, 3, 24, 40, 2, FP32),
        (1, 1, 16, 16, 1, HALF),
    ],
)
def test_tritons_kernels_are_the_references(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, width: int, dtype: torch.dtype
) -> None:
    layer = DeltaLayer(key_heads, value_heads, key_dim, value_dim, width, dtype, DEVICE)
    with poisoned_memory():
        # Sums of up to 128 terms in another order, and one rounding to the dtype and its neighbour.
        tolerance = 2e-5 if dtype == FP32 else 4 * torch.finfo(HALF).eps
        assert_delta_is_the_reference(layer, TRITON, SHORT_STEPS[dtype], tolerance)


@needs_triton
@pytest.mark.parametrize("gate", [-300.0, 300.0])
def test_extreme_gates_in_chunks(gate: float) -> None:
    """As on a CPU. Equal keys, none of which fades, are the hardest chunk to solve."""
    layer = DeltaLayer(1, 1, 16, 16, 1, HALF, DEVICE)
    inputs = layer.inputs(70)
    inputs[:, 16:32] = 1.0
    inputs[:, -1] = gate
    inputs[:, -2] = -gate
    outs = [
        run_in_chunks(layer, operators, [inputs], 100, together=True)[0]
        for operators in (HybridOperators(None), TRITON)
    ]
    torch.testing.assert_close(outs[1], outs[0], rtol=4e-3, atol=4e-3)


@needs_triton
def test_nan_stays_in_its_sequence() -> None:
    layer = DeltaLayer(1, 1, 16, 16, 1, HALF, DEVICE)
    results = []
    for value in (0.0, float("nan")):
        state = layer.new_state(4)
        inputs = layer.inputs(80)
        inputs[70:75] = value
        step = make_inputs([70, 5, 5], [70, 5, 5], rows=[0, 1, 2], device=DEVICE)
        out = layer.run(TRITON, inputs, state, step)[1]
        results.append((out[:70], out[75:], state.recurrent[[0, 2]]))
    assert out[70:75].isnan().all()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) and torch.isfinite(one).all()


@needs_triton
@pytest.mark.slow
def test_chunks_are_found_among_many_sequences() -> None:
    """Of 300, more than are counted at a time, a few have several tokens."""
    layer = DeltaLayer(1, 1, 16, 16, 1, FP32, DEVICE)
    several = {3: 20, 255: 2, 256: 33, 299: 3}
    lens = [several.get(i, 1) for i in range(300)]
    assert_delta_is_the_reference(layer, TRITON, [lens], 2e-5)


@needs_triton
def test_padding_of_a_graph_shares_the_last_row_and_touches_no_other() -> None:
    """A decode of three sequences, padded to five as a graph's: of length 1 in the last row, without tokens before."""
    layer = DeltaLayer(1, 2, 32, 32, 4, FP32, DEVICE)
    results = []
    for padding in (0, 2):
        state = layer.new_state(6)
        layer.run(
            TRITON,
            layer.inputs(9),
            state,
            make_inputs([3] * 3, [3] * 3, device=DEVICE),
        )
        rows = [0, 1, 2] + [5] * padding
        step = make_inputs([1] * (3 + padding), [4] * 3 + [1] * padding, rows=rows, device=DEVICE)
        inputs = torch.cat((layer.inputs(3, seed=1), layer.inputs(padding, seed=2)))
        *_, out = layer.run(TRITON, inputs, state, step)
        assert torch.isfinite(out).all()
        results.append((out[:3], state.conv[:5], state.recurrent[:5]))
    for alone, padded in zip(*results, strict=True):
        assert torch.equal(alone.nan_to_num(7.0), padded.nan_to_num(7.0))


@needs_triton
def test_tritons_gate_is_the_reference() -> None:
    x, gate = (20 * torch.randn(5, 3 * 80, generator=torch.Generator().manual_seed(i)).to(DEVICE, HALF) for i in (1, 2))
    apart = gate[:, 80:160]
    found = TRITON.sigmoid_and_mul(x[:, :80].contiguous(), apart)
    torch.testing.assert_close(found, x[:, :80] * torch.sigmoid(apart), rtol=2e-3, atol=1e-6)
