"""Checks of the C++ kernels against plain torch, for libraries built for this processor and for others."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.kernel_cases import (
    assert_same_tokens,
    attention_tolerance,
    decode_lengths,
    make_inputs,
    mixed_lengths,
    sample_case,
)
from nanovllm.backends import Backend
from nanovllm.backends.cpu.backend import CpuBackend, NativeMatrix
from nanovllm.backends.cpu.library import PANEL
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.backends.torch_backend import TorchBackend
from nanovllm.ops.attention import AttentionVariant
from nanovllm.ops.norm_rope_store import NormRope

Kind = tuple[int | None, float | None, bool]
PLAIN: Kind = (None, None, False)
VARIANTS: list[Kind] = [
    (1, None, False),
    (33, 2.0, True),
    (70, 50.0, False),
    (None, 2.0, False),
    (200, None, True),
    (None, None, True),
]
"""(window, softcap, whether there are sinks): each alone, and some together. PLAIN is plain attention."""

BF16 = torch.bfloat16
FP32 = torch.float32
CPU = torch.device("cpu")


def rounding(dtype: torch.dtype) -> float:
    """Relative: two roundings to bfloat16, or a few hundred float32 terms summed in another order."""
    return 2**-7 if dtype == BF16 else 4e-6


def check_packed_products(library: Any, dtype: torch.dtype, in_features: int, out_features: int) -> None:
    """Packed products equal torch's in float64 up to rounding, and the packed matrix gives its rows back."""
    torch.manual_seed(0)
    weight = torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype)
    matrix = NativeMatrix(library, weight, Scratch())
    assert torch.equal(matrix.rows(torch.arange(out_features)), weight)
    own = weight.clone()
    assert torch.equal(library.pack(own, in_place=True), packed := library.pack(weight))
    assert out_features % PANEL or torch.equal(own.view(-1), packed)
    matrix.multiply(torch.full((300, in_features), torch.nan, dtype=dtype), None)  # it must leave nothing in paddings
    for rows in (*range(1, 14), 17, 24, 25, 33, 65, 700):
        x = torch.randn(rows, in_features).to(dtype)
        for b in (None, bias):
            expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
            # Sums of in_features products of standard normals: relative to their scale, sqrt(in_features).
            got = matrix.multiply(x, b).double()
            torch.testing.assert_close(got, expected, rtol=rounding(dtype), atol=rounding(dtype) * in_features**0.5)


def check_small_operators(backend: CpuBackend, dtype: torch.dtype) -> None:
    """Norms and activations equal those of plain torch."""
    torch.manual_seed(1)
    reference = TorchBackend()
    close = {"rtol": rounding(dtype), "atol": rounding(dtype)}
    for size in (64, 1024, 100):  # 100 is not a multiple of 16: the reference itself
        x, residual = (3 * torch.randn(5, size).to(dtype) for _ in range(2))
        for row in (x, residual):  # beside eps = 1e-6
            row[1] *= 1e-4
            row[2] = 0
        weight = torch.rand(size).to(dtype)
        torch.testing.assert_close(backend.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), **close)
        got, expected = (b.add_rms_norm(x, residual, weight, 1e-6) for b in (backend, reference))
        torch.testing.assert_close(got[0], expected[0], **close)
        assert torch.equal(got[1], expected[1])
        wide = torch.rand(size)  # it scales before the rounding
        torch.testing.assert_close(backend.rms_norm(x, wide, 1e-6), reference.rms_norm(x, wide, 1e-6), **close)
        gate_up = 30 * torch.randn(5, 2 * size).to(dtype)
        torch.testing.assert_close(backend.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), **close)


def make_variant(kind: Kind, num_heads: int) -> AttentionVariant | None:
    """Return a variant of attention; None for plain attention. The sinks are drawn."""
    if kind == PLAIN:
        return None
    window, softcap, has_sinks = kind
    sinks = 2 * torch.randn(num_heads, generator=torch.Generator().manual_seed(9))
    return AttentionVariant(window, softcap, sinks if has_sinks else None)


def attend_after_storing(
    backend: Backend,
    query_lens: list[int],
    seq_lens: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    variant: AttentionVariant | None = None,
) -> Tensor:
    """Store whole sequences through norm_rope_store, in shuffled order, into a cache full of NaN; then attend.

    If the cache holds codes, they are 77 before, and their scales are NaN.
    """
    head_dim, group, block_size = shape
    num_kv_heads = 2
    torch.manual_seed(2)
    needed = [-(-n // block_size) for n in seq_lens]
    order = torch.randperm(sum(needed) + 1).int()
    tables = torch.full((len(seq_lens), max(needed) + 1), int(order[-1]), dtype=torch.int32)
    for i, count in enumerate(needed):
        tables[i, :count] = order[sum(needed[:i]) :][:count]
    cache = backend.allocate_cache((len(order), block_size, num_kv_heads, head_dim), kv_dtype, CPU)
    for part in cache:
        if part is not None:
            part.fill_(77 if part.dtype == torch.int8 else float("nan"))
    positions = torch.cat([torch.arange(n) for n in seq_lens])
    blocks = torch.cat([tables[i, torch.arange(n) // block_size] for i, n in enumerate(seq_lens)])
    slots = blocks.long() * block_size + positions % block_size
    tokens = len(positions)
    qkv = torch.randn(tokens + 1, (group + 2) * num_kv_heads * head_dim).to(dtype)
    q_weight, k_weight = (torch.rand(head_dim).to(dtype) + 0.5 for _ in range(2))
    angles = torch.outer(torch.arange(tokens), torch.rand(head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    # One padding token, whose slot is -1. A prompt that comes in pieces may be split inside a unit of V: at 7.
    slots = torch.cat((slots, torch.tensor([-1])))
    positions = torch.cat((positions, torch.tensor([0])))
    norms = NormRope(q_weight, k_weight, 1e-6, cos_sin) if group % 2 else NormRope(None, None, 1e-6, cos_sin)
    if group % 4 == 3:
        norms = norms._replace(q_weight=q_weight.float(), k_weight=k_weight.float())
    pieces = [
        backend.norm_rope_store(qkv[part], norms, positions[part], cache, slots[part].contiguous())
        for part in (slice(0, 7), slice(7, None))
    ]
    q = torch.cat(pieces)
    ends = torch.tensor(seq_lens).cumsum(0)
    rows = torch.cat([torch.arange(int(e) - n, int(e)) for e, n in zip(ends, query_lens, strict=True)])
    inputs = make_inputs(query_lens, seq_lens, tables)
    return backend.attend(q[rows], cache, inputs, head_dim**-0.5, variant).float()


def assert_attends_alike(
    backend: CpuBackend,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
    variant: AttentionVariant | None = None,
) -> None:
    """The kernels attend as the references do. kv_dtype is the type of the cache; None: dtype."""
    block_size = shape[2]
    decodes = [n for n in decode_lengths(block_size, longest=600) if n]  # some tiles of keys
    how = (shape, dtype, kv_dtype or dtype, variant)
    for query_lens, seq_lens in (mixed_lengths(block_size), ([1] * len(decodes), decodes)):
        got = attend_after_storing(backend, query_lens, seq_lens, *how)
        expected = attend_after_storing(TorchBackend(), query_lens, seq_lens, *how)
        torch.testing.assert_close(got, expected, atol=alike_tolerance(dtype, kv_dtype), rtol=0)


def alike_tolerance(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> float:
    """How far a kernel may be from the reference if each of them has stored the keys and values, too."""
    # In bfloat16 q and k differ by a rounding here and there, and both sides round weights and outputs.
    tolerance = attention_tolerance(dtype) * (2 if dtype == BF16 else 1)
    if kv_dtype == torch.int8:  # where a rounding differs, a code may be the next one
        tolerance = max(tolerance, 5e-3)
    return tolerance


def check_codes(backend: Backend, dim: int, dtype: torch.dtype) -> None:
    """The codes and scales that a kernel stores of heads without norms and rotation are the reference's."""
    torch.manual_seed(3)
    heads = torch.randn(40, 6, dim) * 10.0 ** torch.linspace(-35, 37, 40)[:, None, None]
    heads[3, 2] = 0
    heads[5, 3, dim // 2] = float("inf")
    heads[6, 4, 1] = float("nan")
    heads[7, 5, 0] = -float("inf")
    heads[13, 4:] *= 1e-44 / heads[13, 4:].abs().amax()  # keys so small are zeros when they have been rotated
    heads[8:12] = (8 * heads[8:12] / heads[8:12].abs().amax(-1, keepdim=True)).round() / 2  # ties
    qkv = heads.to(dtype).flatten(1)
    norms = NormRope(None, None, 1e-6, torch.cat((torch.ones(40, dim // 2), torch.zeros(40, dim // 2)), dim=1))
    positions = torch.arange(40)
    caches = []
    for side in (backend, TorchBackend()):
        cache = side.allocate_cache((3, 16, 2, dim), torch.int8, CPU)
        side.norm_rope_store(qkv.clone(), norms, positions, cache, positions)
        caches.append(cache)
    got, expected = caches
    assert got.key_scales is not None and got.value_scales is not None
    torch.testing.assert_close(got.key_scales, expected.key_scales, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got.value_scales, expected.value_scales, rtol=0, atol=0, equal_nan=True)
    assert got.value_scales[0, 7, 1].isnan() and not got.key_scales[0, 7, 0].isnan()
    keys = got.keys
    if backend.name == "cpu":
        tiles = keys.transpose(1, 2).reshape(3, 2, dim, 16)  # 16 keys of a tile lie side by side
        keys = tiles.permute(0, 3, 1, 2)
    assert torch.equal(keys, expected.keys)
    assert torch.equal(got.values, expected.values)


def check_sampled_tokens(backend: CpuBackend, vocab_size: int, dtype: torch.dtype) -> None:
    """Sampled tokens are those of the reference, with and without ties."""
    for seed, ties in itertools.product(range(4 if vocab_size < 100_000 else 1), (False, True)):
        case = sample_case(vocab_size, dtype, ties=ties, device=CPU, seed=seed)
        # Sums run in another order: a draw within 1e-6 of a boundary could fall on its other side; none of these does.
        assert_same_tokens(case, backend.sample(*case.arguments()))
