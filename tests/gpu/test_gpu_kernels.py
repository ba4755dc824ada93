"""The kernels on a real GPU: every shape and type, CUDA graphs, and no hidden synchronisation.

`python -m pytest -m gpu -n 12 tests/gpu/test_gpu_kernels.py`: nearly all of the time is compiling, on one core each.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from helpers.delta_cases import DeltaLayer, assert_delta_is_the_reference
from helpers.edit_cases import edit_case
from helpers.kernel_cases import (
    CODE_SHAPES,
    DEVICE,
    GROUPS,
    VARIANTS,
    WIDE_SHAPES,
    AttentionCase,
    assert_attends,
    assert_same_tokens,
    attention_case,
    attention_tolerance,
    decode_lengths,
    mixed_lengths,
    pack_values,
    pairwise_shapes,
    poisoned_memory,
    sample_case,
    vary_case,
)

# Once more here, where atomics, addresses and exponentials are the device's.
from helpers.kernel_tests import (  # noqa: F401
    test_every_code_is_the_number_that_it_stands_for,
    test_programs_share_the_keys_equally_and_the_last_of_a_sequence_merges_it,
    test_signed_zeros_tie,
    test_slots_beyond_two_to_the_31_elements_are_reached,
    test_the_filter_is_exact_where_its_bound_is_loose,
    test_tokens_of_no_probability_are_never_drawn,
    test_uniforms_are_the_references_bit_for_bit,
)
from helpers.quantized_cases import FORMATS, make_codes

from nanovllm.backends import Backend, make_backend
from nanovllm.backends.gpu.edit_logits import edit_logits
from nanovllm.backends.gpu.few_rows import MAX_ROWS, FewRowsMatrix
from nanovllm.backends.gpu.gate_and_mul import silu_and_mul
from nanovllm.backends.gpu.hybrids import Operators as TritonHybridOperators
from nanovllm.backends.gpu.norm_rope_store import norm_rope_store
from nanovllm.backends.gpu.product import CODES_TILES
from nanovllm.backends.gpu.quantized import TritonMatrix
from nanovllm.backends.gpu.rms_norm import add_rms_norm, rms_norm
from nanovllm.backends.gpu.route import route
from nanovllm.backends.gpu.sample import sample
from nanovllm.backends.gpu.triton_backend import TritonKernels
from nanovllm.features.edits.edit_logits import MaskAndPenalties, edit_logits_reference
from nanovllm.features.families.qwen3_moe.ops import grouped_linear_reference, route_reference
from nanovllm.features.quantized.codes import Codes, InputScales
from nanovllm.features.quantized.torch_matrix import TorchMatrix
from nanovllm.ops.norm_rope_store import NormRope, norm_rope_store_reference
from nanovllm.ops.rms_norm import add_rms_norm_reference, rms_norm_reference
from nanovllm.ops.sample import uniform_reference
from nanovllm.ops.silu_and_mul import silu_and_mul_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none here"),
]
CUDA = torch.device("cuda")
BF16 = torch.bfloat16
DTYPES = (torch.float32, torch.float16, BF16)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def backend_called(name: str) -> Backend:
    if name == "flash_attn":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    return make_backend(name, CUDA)


# ---- attention


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype"), [*pairwise_shapes(*DTYPES), *WIDE_SHAPES, (256, 4, 64, BF16)]
)
def test_triton_attention_is_the_reference_for_every_pair_of_values(
    head_dim: int, group: int, block_size: int, dtype: torch.dtype
) -> None:
    lengths = decode_lengths(block_size)
    for query_lens, seq_lens in (([1] * len(lengths), lengths), mixed_lengths(block_size)):
        case = attention_case(query_lens, seq_lens, head_dim, group, block_size, dtype)
        assert_attends(case, backend_called("triton"), attention_tolerance(dtype))


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype", "kv_dtype"),
    [*CODE_SHAPES, (128, 2, 256, BF16, torch.int8), (128, 2, 256, BF16, torch.float8_e4m3fn)],
)
def test_attention_over_codes_is_the_reference(
    head_dim: int, group: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    lengths = decode_lengths(block_size)
    for query_lens, seq_lens in (([1] * len(lengths), lengths), mixed_lengths(block_size)):
        case = attention_case(query_lens, seq_lens, head_dim, group, block_size, dtype, kv_dtype=kv_dtype)
        assert_attends(case, backend_called("triton"), attention_tolerance(dtype))


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype", "kv_dtype", "window", "softcap", "has_sinks"),
    [
        *VARIANTS,
        (256, 2, 64, BF16, BF16, 512, 50.0, False),
        (64, 8, 64, BF16, BF16, 128, None, True),
        (128, 4, 64, BF16, torch.int8, 1000, 30.0, True),
    ],
)
def test_windows_caps_and_sinks_are_the_references(
    head_dim: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    lengths = decode_lengths(block_size)
    for query_lens, seq_lens in (([1] * len(lengths), lengths), mixed_lengths(block_size), ([700], [3000])):
        case = attention_case(query_lens, seq_lens, head_dim, group, block_size, dtype, kv_dtype=kv_dtype)
        case = vary_case(case, window, softcap, has_sinks)
        assert_attends(case, backend_called("triton"), attention_tolerance(dtype))


@pytest.mark.parametrize(("window", "softcap"), [(100, None), (None, 2.0), (700, 30.0)])
def test_windows_and_caps_on_flash_attn_are_the_references(window: int | None, softcap: float | None) -> None:
    backend = backend_called("flash_attn")
    for query_lens, seq_lens in (([1] * 6, decode_lengths(256)), mixed_lengths(256), ([700], [3000])):
        case = attention_case(query_lens, seq_lens, 128, 4, 256, BF16, backend=backend)
        assert_attends(vary_case(case, window, softcap, has_sinks=False), backend, attention_tolerance(BF16))


@pytest.mark.parametrize(("group", "dtype"), list(product(GROUPS, (torch.float16, BF16))))
def test_flash_attn_is_the_reference(group: int, dtype: torch.dtype) -> None:
    backend = backend_called("flash_attn")
    for query_lens, seq_lens in (([1] * 6, decode_lengths(256)), mixed_lengths(256)):
        case = attention_case(query_lens, seq_lens, 128, group, 256, dtype, backend=backend)
        assert_attends(case, backend, attention_tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_prompts_and_prefixes_are_the_reference(dtype: torch.dtype) -> None:
    for query_lens, seq_lens in (([4096], [4096]), ([700, 300], [5000, 300]), ([1, 1], [20_000, 3])):
        case = attention_case(query_lens, seq_lens, 128, 4, 64, dtype)
        assert_attends(case, backend_called("triton"), attention_tolerance(dtype))


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_a_captured_decode_replays_for_any_lengths_and_tables(name: str) -> None:
    backend = backend_called(name)
    longest = 3000
    static = attention_case([1] * 8, [longest] * 8, 128, 2, 256, BF16, num_kv_heads=8, backend=backend)
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        static.attend(backend)
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs = backend.prepare_attention(static.inputs, static.cache, static.q.shape[1])
        out = backend.attend(static.q, static.cache, inputs, static.scale)
    for lengths in ([longest] * 8, [1, 2, 256, 257, 0, 0, 2999, 128], [0] * 7 + [77], [40] * 8):
        case = attention_case([1] * 8, lengths, 128, 2, 256, BF16, num_kv_heads=8, backend=backend, seed=sum(lengths))
        copy_into(static, case)
        graph.replay()
        got = out.float()
        expected = case.expected()
        real = ~expected.isnan()
        torch.testing.assert_close(got[real], expected[real], atol=attention_tolerance(BF16), rtol=0)
        assert torch.isfinite(got).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(16, 16, 128, 128), (16, 32, 128, 128), (2, 6, 48, 40)], ids=str)
def test_linear_attention_is_the_reference(heads: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    layer = DeltaLayer(*heads, width=4, dtype=dtype, device=DEVICE)
    # Sums of up to 128 terms in another order, and a rounding to the dtype's neighbour.
    tolerance = 2e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert_delta_is_the_reference(
        layer, TritonHybridOperators(TritonKernels(CUDA)), ([70, 0, 5], [1, 40, 1], [1, 1, 1]), tolerance
    )


def copy_into(static: AttentionCase, case: AttentionCase) -> None:
    """Write new contents to the same addresses, as a runner does before a replay."""
    static.q.copy_(case.q)
    static.inputs.seq_lens.copy_(case.inputs.seq_lens)
    width = case.inputs.block_tables.shape[1]
    static.inputs.block_tables[:, :width] = case.inputs.block_tables
    for side, new in zip(static.cache[:2], case.cache[:2], strict=True):
        side.fill_(float("nan"))
        side[: new.shape[0]] = new


@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_attention_and_sampling_never_wait_for_the_device(name: str) -> None:
    backend = backend_called(name)
    query_lens, seq_lens = mixed_lengths(256)
    case = attention_case(query_lens, seq_lens, 128, 2, 256, BF16, backend=backend)
    tokens = sample_case(151_936, BF16)
    for guard in (nothing, no_synchronisation):  # the first round compiles
        with guard():
            inputs = backend.prepare_attention(case.inputs, case.cache, case.q.shape[1])
            backend.attend(case.q, case.cache, inputs, case.scale)
            sample(*tokens.arguments())


@contextmanager
def nothing() -> Iterator[None]:
    yield


# ---- small kernels


def assert_rounds_alike(got: torch.Tensor, expected: torch.Tensor) -> None:
    """As in test_kernels.py; rsqrt and exp are approximate here (2 units of float32's last place)."""
    eps = torch.finfo(expected.dtype).eps
    rtol = 32 * eps if expected.dtype == torch.float32 else 2 * eps
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("dtype", "size"), list(product(DTYPES, (1024, 2560, 5120))))
def test_small_kernels_are_their_references(dtype: torch.dtype, size: int) -> None:
    x, residual, weight = (torch.randn(300, size, device=CUDA, dtype=dtype) for _ in range(3))
    assert_rounds_alike(rms_norm(x, weight[0], 1e-6), rms_norm_reference(x, weight[0], 1e-6))
    got = add_rms_norm(x, residual, weight[0], 1e-6)
    expected = add_rms_norm_reference(x, residual, weight[0], 1e-6)
    assert_rounds_alike(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert_rounds_alike(silu_and_mul(x), silu_and_mul_reference(x))


@pytest.mark.parametrize(("head_dim", "group", "block_size", "dtype"), pairwise_shapes(*DTYPES))
def test_norm_rope_store_is_its_reference(head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_tokens = 500
    kv_heads = 4
    shape = (768 // block_size, block_size, kv_heads, head_dim)
    got_cache, expected_cache = (backend_called("triton").allocate_cache(shape, dtype, CUDA) for _ in range(2))
    slots = torch.randperm(768, device=CUDA)[:num_tokens]
    slots[::7] = -1
    qkv = torch.randn(num_tokens, (group + 2) * kv_heads * head_dim, device=CUDA, dtype=dtype)
    weights = torch.randn(2, head_dim, device=CUDA, dtype=dtype)
    angle = torch.rand(1000, head_dim // 2, device=CUDA) * 6.28
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1)
    positions = torch.randint(1000, (num_tokens,), device=CUDA, dtype=torch.int32)
    norms = NormRope(weights[0], weights[1], 1e-6, cos_sin)
    expected = norm_rope_store_reference(qkv, norms, positions, expected_cache, slots)
    got = norm_rope_store(qkv.clone(), norms, positions, got_cache, slots)
    # A sum in another order may round a normed element to its neighbour, and a rotation cancel all but the difference.
    eps = torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 2)
    for ours, theirs in ((got, expected), (got_cache[0], expected_cache[0])):
        torch.testing.assert_close(ours, theirs, rtol=eps, atol=eps * float(theirs.abs().max()))
    assert torch.equal(got_cache[1], expected_cache[1])


# ---- experts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 8, 2), (40, 60, 4), (512, 128, 8)])
def test_routing_is_its_reference_with_broken_logits_too(
    tokens: int, experts: int, k: int, normalize: bool, dtype: torch.dtype
) -> None:
    """Tokens with a NaN or an infinity have k different experts: else pairs would share a place."""
    torch.manual_seed(0)
    logits = torch.randn(tokens, experts, device=CUDA).to(dtype)
    logits[::5, experts // 2] = float("nan")
    logits[1::5, 3] = float("inf")
    logits[2::5] = float("-inf")
    slots = torch.arange(tokens, device=CUDA)
    slots[3::7] = -1
    with poisoned_memory():
        got = route(logits, k, normalize, slots)
    expected = route_reference(logits.cpu(), k, normalize, slots.cpu())
    rtol = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.weights.cpu(), expected.weights, rtol=rtol, atol=0, equal_nan=True)
    for name in ("places", "tokens", "offsets"):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name


# ---- the sampler


@pytest.mark.parametrize(("vocab_size", "dtype", "ties"), list(product((1, 700, 8193, 151_936), DTYPES, (False, True))))
def test_sampled_tokens_are_the_references(vocab_size: int, dtype: torch.dtype, ties: bool) -> None:
    for seed in range(3):
        case = sample_case(vocab_size, dtype, ties, seed=seed)
        assert_same_tokens(case, sample(*case.arguments()))


@pytest.mark.parametrize("vocab_size", [37, 8193, 151_936])
def test_edited_logits_are_the_references(vocab_size: int) -> None:
    """But for a product and a difference that are fused."""
    logits, edits = edit_case(vocab_size)
    expected = logits.clone()
    given = logits.to(DEVICE)
    edit_logits_reference(expected, edits)
    edit_logits(given, MaskAndPenalties(*(x.to(DEVICE) for x in edits if x is not None)))
    assert torch.allclose(given.cpu(), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_samples_follow_the_distribution() -> None:
    """Chi-squared, 200,000 draws from 8 tokens: with 7 degrees of freedom it exceeds 40 about once in 800,000 times."""
    n = 200_000
    logits = torch.linspace(0, 2, 8, device=CUDA).repeat(n, 1)
    rows = torch.arange(n, dtype=torch.int32, device=CUDA)
    assert len(uniform_reference(rows.long(), torch.zeros_like(rows).long()).unique()) > 0.98 * n
    tokens = sample(logits, pack_values(n, rows.cpu()).to(CUDA), rows, torch.zeros_like(rows)).token_ids
    expected = logits[0].softmax(0) * n
    counts = torch.bincount(tokens, minlength=8)
    assert float(((counts - expected) ** 2 / expected).sum()) < 40


@pytest.mark.parametrize("num_rows", [1, 17, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group_size", "has_zeros"), FORMATS)
def test_products_with_codes_are_those_of_the_dequantised_matrix_eager_and_replayed(
    bits: int, group_size: int, has_zeros: bool, dtype: torch.dtype, num_rows: int
) -> None:
    check_products(make_codes((200, 512), bits, group_size, has_zeros), dtype, num_rows)


@pytest.mark.parametrize("num_rows", [1, 17, 65, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("type_name", ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_products_with_blocks_of_gguf_are_those_of_the_dequantised_matrix(
    type_name: str, dtype: torch.dtype, num_rows: int
) -> None:
    pytest.importorskip("gguf")
    from helpers.gguf_models import draw_matrix

    from nanovllm.features.gguf.blocks import read_codes

    data = draw_matrix(type_name, np.zeros((200, 512), np.float32), np.random.default_rng(0), size=0.5)
    check_products(read_codes(torch.from_numpy(data).to(CUDA), type_name, 200), dtype, num_rows)


def check_products(codes: Codes, dtype: torch.dtype, num_rows: int) -> None:
    """Compare products with codes [200, 512], eager and replayed, with those of the weights.

    Sums of 512 products of about one are in float32, so they differ by their order; then they are rounded once. For
    many rows the weights are rounded, too.
    """
    matrix = TritonMatrix(codes, dtype)
    x = torch.randn(num_rows, 512, device=CUDA).to(dtype)
    eps = torch.finfo(dtype).eps
    graph = torch.cuda.CUDAGraph()
    matrix.multiply(x, None)  # compiles
    with torch.cuda.graph(graph):
        y = matrix.multiply(x, None)
    x.copy_(torch.randn(num_rows, 512, device=CUDA))
    graph.replay()
    weight = codes.dequantize()
    if num_rows > CODES_TILES[-1][0]:
        weight = weight.to(dtype)
    expected = x.double() @ weight.double().T
    for got in (matrix.multiply(x, None), y):
        torch.testing.assert_close(got.double(), expected, rtol=2 * eps, atol=1e-3)


@pytest.mark.parametrize("num_tokens", [1, 40, 300, 600])
@pytest.mark.parametrize("form", [(8, 0, False), (8, 128, False), (4, 0, False), (4, 128, True)], ids=str)
def test_experts_by_codes_are_those_of_the_dequantised_matrices(form: tuple[int, int, bool], num_tokens: int) -> None:
    codes = make_codes((5, 200, 384), *form)
    x = torch.randn(num_tokens, 384, device=CUDA).to(torch.bfloat16)
    slots = torch.arange(num_tokens, device=CUDA)
    slots[num_tokens // 2 :: 7] = -1
    routing = route_reference(torch.randn(num_tokens, 5, device=CUDA), 2, True, slots)
    count = int(routing.offsets[-1])
    found = TritonMatrix(codes, x.dtype).multiply_pairs(x, routing, True)[:count]
    expected = grouped_linear_reference(x.double(), codes.dequantize().double(), routing, True)[:count]
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=2 * eps, atol=1e-3)


def rounding_codes(*shape: int) -> Codes:
    """Codes by which rounded inputs are multiplied."""
    return replace(make_codes(shape, 8, 0, False), input_scales=InputScales.TOKEN)


@pytest.mark.parametrize("num_rows", [1, 17, 65, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_products_have_the_bits_of_the_reference_eager_and_replayed(dtype: torch.dtype, num_rows: int) -> None:
    """The 70 columns are in two tiles, and the 300 rows in three. All sums of the reference are whole numbers.

    Those of 1,100 inputs are in two parts.

    Triton 3.6 fuses operations on GPUs of compute capability 10.0 and more, though it is told not to.
    """
    codes = rounding_codes(70, 1100)
    matrix = TritonMatrix(codes, dtype)
    x = torch.randn(num_rows, 1100, device=CUDA).to(dtype)
    graph = torch.cuda.CUDAGraph()
    matrix.multiply(x, None)  # compiles
    with torch.cuda.graph(graph):
        y = matrix.multiply(x, None)
    x.copy_(torch.randn(num_rows, 1100, device=CUDA))
    graph.replay()
    expected = TorchMatrix(codes, dtype).multiply(x, None)
    for got in (matrix.multiply(x, None), y):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("num_rows", [1, 33, 128])
def test_rounded_sums_in_many_parts_are_exact_one_right_after_another(num_rows: int) -> None:
    """Captured as in a step: a product may start while the one before it runs, which has the same counters."""
    codes = rounding_codes(1024, 4096)
    matrix = TritonMatrix(codes, BF16)
    inputs = torch.randn(20, num_rows, 4096, device=CUDA).to(BF16)
    matrix.multiply(inputs[0], None)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [matrix.multiply(x, None) for x in inputs]
    for _ in range(10):
        graph.replay()
    expected = TorchMatrix(codes, BF16).multiply(inputs.flatten(0, 1), None)
    assert torch.equal(torch.cat(found), expected)
    assert matrix._laid.arrivals is not None and not matrix._laid.arrivals.any()


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize(("out_size", "in_size"), [(6144, 1024), (1024, 3072), (24576, 4096), (4096, 12288), (200, 64)])
def test_products_of_few_rows_are_torch_s_and_the_same_in_any_batch(
    out_size: int, in_size: int, dtype: torch.dtype
) -> None:
    """Captured one after another, as in a step, where each may start while the one before still runs.

    A row has the same bits alone, at another place, and among others.
    """
    matrix = FewRowsMatrix((torch.randn(out_size, in_size, device=CUDA) * in_size**-0.5).to(dtype))
    x = torch.randn(MAX_ROWS, in_size, device=CUDA).to(dtype)
    residual = torch.randn(MAX_ROWS, out_size, device=CUDA).to(dtype)
    product = torch.nn.functional.linear(x.float(), matrix.weight.float())
    eps = torch.finfo(dtype).eps

    def step() -> list[torch.Tensor]:
        return [matrix.multiply(x, None, residual), matrix.multiply_gated(x), matrix.multiply(x)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        added, gated, plain = step()
    for _ in range(3):
        graph.replay()
    expected = [product + residual.float(), silu_and_mul_reference(product), product]
    for found, wanted in zip([added, gated, plain], expected, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=4 * eps, atol=4 * eps)
    for num_rows in (1, 7, 16):
        assert torch.equal(matrix.multiply(x[-num_rows:]), plain[-num_rows:])
        assert torch.equal(matrix.multiply_gated(x[-num_rows:]), gated[-num_rows:])
