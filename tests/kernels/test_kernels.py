"""Every Triton kernel against its plain-torch reference: in Triton's interpreter, or on a GPU where there is one."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.cpu_checks import check_codes
from helpers.kernel_cases import (
    CODE_SHAPES,
    DEVICE,
    HALF,
    HEAD_DIMS,
    VARIANTS,
    WIDE_SHAPES,
    assert_attends,
    assert_same_tokens,
    attention_case,
    attention_tolerance,
    check_edges_of_sampling,
    check_step_inputs,
    check_token_logprobs,
    decode_lengths,
    few_shapes,
    mixed_lengths,
    pairwise_shapes,
    poisoned_memory,
    randn,
    sample_case,
    vary_case,
)

pytest.importorskip("triton")

from helpers.kernel_tests import (  # noqa: F401
    check_shares,
    test_every_code_is_the_number_that_it_stands_for,
    test_programs_share_the_keys_equally_and_the_last_of_a_sequence_merges_it,
    test_signed_zeros_tie,
    test_slots_beyond_two_to_the_31_elements_are_reached,
    test_the_filter_is_exact_where_its_bound_is_loose,
    test_tokens_of_no_probability_are_never_drawn,
    test_uniforms_are_the_references_bit_for_bit,
)

from nanovllm.backends.gpu import paged_decode as paged_decode_module
from nanovllm.backends.gpu import paged_prefill as paged_prefill_module
from nanovllm.backends.gpu.gate_and_mul import silu_and_mul
from nanovllm.backends.gpu.norm_rope_store import norm_rope_store
from nanovllm.backends.gpu.paged_decode import decode_metadata, key_tile
from nanovllm.backends.gpu.rms_norm import add_rms_norm, rms_norm
from nanovllm.backends.gpu.sample import sample
from nanovllm.backends.gpu.sample_filter import PART, filter_rows
from nanovllm.backends.gpu.step_inputs import step_inputs
from nanovllm.backends.gpu.token_logprobs import token_logprobs
from nanovllm.backends.gpu.triton_backend import TritonBackend
from nanovllm.backends.torch_backend import TorchBackend
from nanovllm.ops.attention import KVCache
from nanovllm.ops.norm_rope_store import NormRope, norm_rope_store_reference
from nanovllm.ops.rms_norm import add_rms_norm_reference, rms_norm_reference
from nanovllm.ops.sample import CHUNK, Sampled, filter_reference
from nanovllm.ops.silu_and_mul import silu_and_mul_reference

DTYPES = (torch.float32, HALF)


def with_cache(shapes: list[tuple[int, int, int, torch.dtype]]) -> list[tuple[int, int, int, torch.dtype, torch.dtype]]:
    """Shapes with a cache of the model's type, and a few with a cache of codes."""
    return [(*shape, shape[3]) for shape in shapes] + CODE_SHAPES


@pytest.fixture(autouse=True)
def no_memory_is_zero_by_luck():
    with poisoned_memory():
        yield


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding.

    Kernel and reference round to the dtype at the same places; what is rounded differs by the order of a sum (a few
    units of float32's last place), which can tip the rounding to the neighbour, twice in a row at most.
    """
    eps = torch.finfo(expected.dtype).eps
    rtol = 16 * eps if expected.dtype == torch.float32 else 2 * eps
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)


def scale_rows(x: torch.Tensor) -> torch.Tensor:
    """Make the second row so small that eps = 1e-6 is as large as its squares, and the third one zero."""
    x[1] *= 1e-3
    x[2] = 0
    return x


# ---- small kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 128, 1024, 2560])
def test_rms_norm_is_its_reference(size: int, dtype: torch.dtype) -> None:
    # rows lie apart
    x = scale_rows(randn(5, 2 * size, dtype=dtype)[:, :size])
    rounded = randn(size, dtype=dtype, seed=1)
    for weight in (rounded, rounded.float()):  # a float32 weight scales before the rounding
        assert_close(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 1024, 2560])
def test_add_rms_norm_is_its_reference_and_leaves_its_inputs(size: int, dtype: torch.dtype) -> None:
    x, residual, weight = (scale_rows(randn(3, size, dtype=dtype, seed=i)) for i in range(3))
    before = x.clone(), residual.clone()
    got = add_rms_norm(x, residual, weight[0], 1e-6)
    expected = add_rms_norm_reference(x, residual, weight[0], 1e-6)
    assert_close(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [80, 1024, 3072])
def test_silu_and_mul_is_its_reference(size: int, dtype: torch.dtype) -> None:
    gate_up = 4 * randn(3, 2 * size, dtype=dtype)
    assert_close(silu_and_mul(gate_up), silu_and_mul_reference(gate_up))


def test_small_kernels_take_no_tokens() -> None:
    empty = randn(0, 64)
    weight = randn(64)
    assert rms_norm(empty, weight, 1e-6).shape == (0, 64)
    assert add_rms_norm(empty, empty, weight, 1e-6)[0].shape == (0, 64)
    assert silu_and_mul(empty).shape == (0, 32)


# ---- storing K and V


def caches(
    heads_first: bool, *, blocks: int, block_size: int, heads: int, head_dim: int, kv_dtype: torch.dtype
) -> list[KVCache]:
    """Two equal caches, holding noise that must survive."""
    shape = (blocks, heads, block_size, head_dim) if heads_first else (blocks, block_size, heads, head_dim)
    parts = [(100 * randn(*shape, seed=i)).to(kv_dtype) for i in (7, 8)]
    if kv_dtype.itemsize == 1:
        parts += [randn(*shape[:3], seed=i) for i in (9, 10)]
    return [KVCache(*(part.clone().transpose(1, 2) if heads_first else part.clone() for part in parts)) for _ in "ab"]


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype", "kv_dtype"),
    [shape for shape in with_cache(pairwise_shapes(*DTYPES) + WIDE_SHAPES) if shape[4] != torch.float8_e4m3fn],
)
def test_norm_rope_store_is_its_reference_and_touches_no_other_slot(
    head_dim: int, group: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Keys that differ by a rounding may have the next code."""
    heads_first = head_dim == 64 or kv_dtype.itemsize == 1  # codes have no other layout
    kv_heads = 1 + group % 3
    slots = torch.tensor([block_size, -1, 0, 3 * block_size - 1, 5], device=DEVICE)
    positions = torch.tensor([0, 3, 17, 999, 4], device=DEVICE)
    qkv = randn(5, (group + 2) * kv_heads * head_dim, dtype=dtype)
    q_weight = randn(head_dim, dtype=dtype, seed=1)
    k_weight = randn(head_dim, dtype=dtype, seed=2)
    angle = torch.rand(1000, head_dim // 2, generator=torch.Generator().manual_seed(3)) * 6.28
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1).to(DEVICE)
    shape = {"blocks": 3, "block_size": block_size, "heads": kv_heads, "head_dim": head_dim}
    got_cache, expected_cache = caches(heads_first, **shape, kv_dtype=kv_dtype)
    weights = (q_weight, k_weight) if group % 2 else (None, None)
    if head_dim == 256:
        weights = (q_weight.float(), k_weight.float())
    norms = NormRope(*weights, 1e-6, cos_sin)
    expected = norm_rope_store_reference(qkv, norms, positions, expected_cache, slots)
    got = norm_rope_store(qkv.clone(), norms, positions, got_cache, slots)
    assert_close(got, expected)
    assert torch.equal(got_cache.values, expected_cache.values)
    if got_cache.key_scales is None or expected_cache.key_scales is None:
        assert_close(got_cache.keys, expected_cache.keys)
        return
    keys, expected_keys = (cache.keys.int() for cache in (got_cache, expected_cache))
    has_flipped = keys != expected_keys
    assert has_flipped.float().mean() < 0.01
    assert (keys - expected_keys).abs().max() <= 1
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(got_cache.key_scales, expected_cache.key_scales, rtol=rounding, atol=0)
    assert got_cache.value_scales is not None
    assert torch.equal(got_cache.value_scales, expected_cache.value_scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 128])
def test_codes_and_scales_are_the_references_to_the_last_bit(head_dim: int, dtype: torch.dtype) -> None:
    """Heads of all magnitudes, zeros, the smallest numbers, infinities and NaN. Nothing is normed or rotated."""
    check_codes(TritonBackend(DEVICE), head_dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_codes_of_fp8_are_stored_as_they_are(dtype: torch.dtype) -> None:
    """Times a power of two, which is their scale. Triton's interpreter rounds other numbers to fp8 in its own way."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    codes = every[torch.randint(len(every), (16, 3, 64), generator=torch.Generator().manual_seed(0))]
    codes[:, :, 5] = -448
    powers = 2.0 ** (torch.arange(48).view(16, 3) % 16 - 10)
    powers[3, 2] = 0
    codes[3, 2] = 0
    qkv = (codes * powers[..., None]).to(DEVICE, dtype).flatten(1)
    positions = torch.arange(16, device=DEVICE)
    norms = NormRope(None, None, 1e-6, torch.cat((torch.ones(16, 32), torch.zeros(16, 32)), dim=1).to(DEVICE))
    cache = TritonBackend(DEVICE).allocate_cache((1, 16, 1, 64), torch.float8_e4m3fn, DEVICE)
    norm_rope_store(qkv, norms, positions, cache, positions)
    assert cache.key_scales is not None and cache.value_scales is not None
    for i, side, scales in ((1, cache.keys, cache.key_scales), (2, cache.values, cache.value_scales)):
        assert torch.equal(side[0, :, 0].float().cpu(), codes[:, i])
        assert torch.equal(scales[0, :, 0].cpu(), powers[:, i])


# ---- attention


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype", "kv_dtype"), with_cache(few_shapes(*DTYPES) + WIDE_SHAPES)
)
def test_decode_is_the_reference(
    head_dim: int, group: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    lengths = decode_lengths(block_size, longest=600)
    case = attention_case([1] * len(lengths), lengths, head_dim, group, block_size, dtype, kv_dtype=kv_dtype)
    assert_attends(case, TritonBackend(), attention_tolerance(dtype))


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype", "kv_dtype"), with_cache(few_shapes(*DTYPES) + WIDE_SHAPES)
)
def test_mixed_step_is_the_reference(
    head_dim: int, group: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    query_lens, seq_lens = mixed_lengths(block_size, longest=17)
    case = attention_case(query_lens, seq_lens, head_dim, group, block_size, dtype, kv_dtype=kv_dtype)
    assert_attends(case, TritonBackend(), attention_tolerance(dtype))


@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype", "kv_dtype", "window", "softcap", "has_sinks"), VARIANTS
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
    """Decodes alone, the longest of them split, and decodes beside prompts and their chunks."""
    lengths = [1, block_size - 1, 0, block_size + 1, 400]
    for query_lens, seq_lens in (([1] * len(lengths), lengths), mixed_lengths(block_size, longest=17)):
        case = attention_case(query_lens, seq_lens, head_dim, group, block_size, dtype, kv_dtype=kv_dtype)
        case = vary_case(case, window, softcap, has_sinks)
        assert_attends(case, TritonBackend(), attention_tolerance(dtype))


@pytest.mark.parametrize(("softcap", "kv_dtype"), [(300.0, None), (1e4, torch.int8), (3e38, None)])
def test_a_cap_above_the_scores_loses_no_precision(softcap: float, kv_dtype: torch.dtype | None) -> None:
    """Scores are a few units, so larger caps change ever less. torch's own tanh is the oracle."""
    for query_lens, seq_lens in (([1, 1], [40, 7]), ([1, 20], [9, 40])):
        case = attention_case(query_lens, seq_lens, 32, 2, 16, torch.float32, kv_dtype=kv_dtype or torch.float32)
        assert_attends(vary_case(case, None, softcap, False), TritonBackend(), attention_tolerance(torch.float32))


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "kv_dtype", "num_tiles"),
    [
        # Tiles of 32 keys. 100 of 710 keys lie in four, and 100 of 300, too.
        ([1, 1], [710, 300], torch.float32, 4 + 4),
        ([1, 1], [710, 300], torch.int8, 3 + 2),  # of 64 keys
        # Tiles of 16 keys. The first 16 queries, after 1,480 keys, begin in tile 86 and end in 93; the others are 4.
        ([20], [1500], torch.float32, 8 + 7),
    ],
)
def test_tiles_before_a_window_are_skipped(
    query_lens: list[int],
    seq_lens: list[int],
    kv_dtype: torch.dtype,
    num_tiles: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where each program has a share of the keys, and most of the shares lie before the window."""
    counts: list[int] = []
    for module in (paged_decode_module, paged_prefill_module):
        update = module.update_softmax
        monkeypatch.setattr(
            module, "update_softmax", lambda *args, update=update, **named: counts.append(1) or update(*args, **named)
        )
    monkeypatch.setattr(paged_decode_module, "num_multiprocessors", lambda device: 4)
    case = attention_case(query_lens, seq_lens, 32, 2, 64, torch.float32, num_kv_heads=1, kv_dtype=kv_dtype)
    case = vary_case(case, 100, None, False)
    assert_attends(case, TritonBackend(), attention_tolerance(torch.float32))
    assert len(counts) == num_tiles


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "group", "block_size", "dtype", "kv_dtype"),
    [(*shape, (shape[3], torch.int8)[i % 2]) for i, shape in enumerate(pairwise_shapes(torch.float32, HALF))],
)
def test_attention_is_the_reference_for_every_pair_of_values(
    head_dim: int, group: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """A mixed step has decodes, too."""
    test_mixed_step_is_the_reference(head_dim, group, block_size, dtype, kv_dtype)


@pytest.mark.parametrize("block_size", [16, 64])
def test_prefill_of_many_tiles_is_the_reference(block_size: int) -> None:
    """Ten tiles of 16 queries and of 16 keys."""
    case = attention_case([150], [150], 64, 2, block_size, torch.float32)
    assert_attends(case, TritonBackend(), attention_tolerance(torch.float32))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_after_a_long_prefix_is_the_reference(head_dim: int) -> None:
    case = attention_case([20], [500], head_dim, 2, 64, torch.float32)
    assert_attends(case, TritonBackend(), attention_tolerance(torch.float32))


def test_many_short_prefills_each_find_their_sequence() -> None:
    query_lens = [2 + i % 3 for i in range(130)]  # more than one search block of sequences
    case = attention_case(query_lens, [n + i % 5 for i, n in enumerate(query_lens)], 32, 1, 16, torch.float32, 1)
    assert_attends(case, TritonBackend(), attention_tolerance(torch.float32))


def test_keys_of_equal_scores_are_averaged_across_splits() -> None:
    """With q = 0 the output is the mean of V whatever the split: a chunk counted twice or left out would show."""
    case = attention_case([1, 1], [1999, 300], 32, 2, 64, torch.float32)
    case.q.zero_()
    assert_attends(case, TritonBackend(), attention_tolerance(torch.float32))


@pytest.mark.parametrize(
    ("num_seqs", "length", "before", "idle"),
    [
        (256, 1024, 5216, 0),
        (64, 1024, 3680, 8),
        (16, 1024, 3296, 24),
        (8, 1024, 2048, 24),
        (1, 1024, 3176, 320),
    ],
)
def test_the_split_launches_no_more_programs_than_an_h200_runs_at_once(
    num_seqs: int, length: int, before: int, idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Qwen3-0.6B's attention: all programs start at once, so those without work (idle) take nobody's place.

    There were `before` programs, of which three of five had no work at 256 sequences, and 98 % at one.
    """
    monkeypatch.setattr(paged_decode_module, "num_multiprocessors", lambda device: 132)
    heads = 16
    kv_heads = 8
    block_size = 64
    cache = KVCache(*(torch.empty(1, block_size, kv_heads, 128, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"))
    seq_lens = torch.full((num_seqs,), length, dtype=torch.int32, device=DEVICE)
    made = decode_metadata(seq_lens, cache, heads)
    counts = check_shares(made, [length] * num_seqs, key_tile(128, block_size, 2))
    assert len(counts) * kv_heads == 392 <= min(3 * 132, before)
    assert counts.count(0) * kv_heads == idle


@pytest.mark.parametrize("seed", range(3))
def test_shares_are_equal_whatever_the_lengths(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_decode_module, "num_multiprocessors", lambda device: 20)
    generator = torch.Generator().manual_seed(seed)
    seq_lens = torch.randint(0, 3000, (300,), generator=generator, dtype=torch.int32)
    seq_lens[torch.rand(300, generator=generator) < 0.5] = seed  # padding, or one or two tokens
    cache = KVCache(*(torch.empty(1, 64, 2, 64, dtype=torch.float16, device=DEVICE) for _ in range(2)))
    made = decode_metadata(seq_lens.to(DEVICE), cache, 4)
    assert min(check_shares(made, seq_lens.tolist(), key_tile(128, 64, 2))) > 0


def test_large_scores_do_not_overflow() -> None:
    case = attention_case([1, 3], [700, 90], 32, 2, 64, torch.float32)
    case.q.mul_(300)  # scores of some hundreds: exp would overflow without the running maximum
    # A score of 1,000 is rounded to 6e-5, and so, relatively, is its weight.
    assert_attends(case, TritonBackend(), 1e-3)


def test_rows_of_length_zero_decode_to_zeros() -> None:
    case = attention_case([1, 1, 1], [0, 5, 0], 32, 2, 16, torch.float32)
    out = case.attend(TritonBackend())
    assert not out[0].any() and not out[2].any() and out[1].any()


# ---- the sampler


@pytest.mark.parametrize(
    ("vocab_size", "ties", "dtype"),
    [
        (1, False, torch.float32),
        (CHUNK + 1, False, torch.bfloat16),
        (CHUNK + 1, True, torch.float32),
        (CHUNK + 1, True, torch.float16),
    ],
)
def test_sampled_tokens_are_the_references(vocab_size: int, ties: bool, dtype: torch.dtype) -> None:
    case = sample_case(vocab_size, dtype, ties)
    assert_same_tokens(case, sample(*case.arguments()))


@pytest.mark.parametrize(
    ("ties", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.float16), (False, torch.bfloat16)]
)
def test_kept_tokens_and_their_weights_are_the_references(ties: bool, dtype: torch.dtype) -> None:
    """Not by what is drawn: token for token, where the reference sorts and the kernel searches.

    Tokens that top-p keeps by a rounding of the summed mass could differ; with these seeds none is that near.
    """
    vocab_size = CHUNK + 500
    num_chunks = 2
    case = sample_case(vocab_size, dtype, ties)
    logits = case.logits.float()
    rows = len(logits)
    padded = torch.nn.functional.pad(logits, (0, num_chunks * CHUNK - vocab_size), value=-torch.inf)
    parts = padded.view(rows, -1, PART)
    part_max = parts.amax(2)
    origin = part_max.clamp(min=-1e30).unsqueeze(2)  # not -inf - -inf
    part_weight = ((parts - origin) / case.values.temperature.clamp(min=1e-9).view(-1, 1, 1)).exp().sum(2)
    chunk_weight = torch.full((rows, num_chunks), -1.0, device=DEVICE)
    threshold = torch.full((rows,), -1.0, device=DEVICE)
    filter_rows(case.logits, case.table, case.rows, (part_max.to(dtype), part_weight), chunk_weight, threshold)

    filtered = case.values.has_filter(vocab_size) & (case.values.temperature > 0)
    assert (chunk_weight[~filtered] == -1).all() and (threshold[~filtered] == -1).all(), "rows without a filter leave"
    z = (logits - logits.amax(1, keepdim=True)) / case.values.temperature.clamp(min=1e-9).unsqueeze(1)
    z = z[filtered]
    min_p = case.values.min_p[filtered]
    kept = filter_reference(z, case.values.select(filtered))
    weights = z.exp()
    assert torch.equal((z >= threshold[filtered].unsqueeze(1)) & (weights >= min_p.unsqueeze(1)), kept)
    weights = torch.nn.functional.pad(weights * kept, (0, num_chunks * CHUNK - vocab_size))
    # float32 sums of up to 4,596 positive terms in another order: a few units in the last place
    expected = weights.view(-1, num_chunks, CHUNK).sum(2)
    torch.testing.assert_close(chunk_weight[filtered], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("draw", "num_rows"), [(sample, 9), (TorchBackend().sample, 36)], ids=["triton, which takes long", "torch"]
)
def test_tokens_at_the_edges_of_the_rules_are_those_of_a_plain_search(
    draw: Callable[..., Sampled], num_rows: int
) -> None:
    check_edges_of_sampling(draw, num_rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_sampled_tokens_are_the_references_for_qwen3s_vocabulary(dtype: torch.dtype) -> None:
    case = sample_case(151_936, dtype).select(2, 6, 12)  # no filter, top_k 50, all filters
    assert_same_tokens(case, sample(*case.arguments()))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_sampled_tokens_are_the_references_for_many_seeds(seed: int) -> None:
    case = sample_case(6000, torch.float32, ties=seed % 2 == 1, seed=seed)
    assert_same_tokens(case, sample(*case.arguments()))


# ---- log-probabilities


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 700, 9001])
def test_log_probabilities_are_the_references(vocab_size: int, dtype: torch.dtype) -> None:
    check_token_logprobs(token_logprobs, vocab_size, dtype)


def test_log_probabilities_of_no_rows_are_none() -> None:
    assert token_logprobs(randn(0, 50), torch.empty(0, dtype=torch.int32, device=DEVICE)).values.shape == (0,)


# ---- a step's inputs


@pytest.mark.parametrize("scheduled", [[1] * 5, [1, 1, 1, 300, 7], [600]])
def test_step_inputs_are_the_references(scheduled: list[int]) -> None:
    check_step_inputs(step_inputs, scheduled)


# ---- together


def test_triton_and_torch_backends_do_the_same_step() -> None:
    """Store, attend, over both storage orders: what one layer does in a step, from the same qkv."""
    query_lens, seq_lens = mixed_lengths(16)
    outputs = []
    for backend in (TorchBackend(), TritonBackend()):
        case = attention_case(query_lens, seq_lens, 32, 2, 16, torch.float32, backend=backend)
        rows = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
        ends = torch.tensor(seq_lens)[rows] - torch.tensor([*torch.tensor(query_lens).cumsum(0)])[rows]
        positions = (ends + torch.arange(len(rows))).to(DEVICE)
        blocks = case.inputs.block_tables[rows.to(DEVICE), positions // 16].long()
        angle = torch.linspace(0, 3, 400 * 16).view(400, 16)
        cos_sin = torch.cat((angle.cos(), angle.sin()), dim=1).to(DEVICE)
        weight = randn(32, seed=4)
        qkv = randn(len(rows), (2 + 2) * 2 * 32, seed=5)
        slots = blocks * 16 + positions % 16
        q = backend.norm_rope_store(qkv, NormRope(weight, weight, 1e-6, cos_sin), positions, case.cache, slots)
        outputs.append(replace(case, q=q).attend(backend))
    torch.testing.assert_close(outputs[1], outputs[0], atol=2e-5, rtol=0)  # as attention's, after a norm of some units
