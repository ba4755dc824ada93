"""Tests of Triton kernels that run in the interpreter and once more on a GPU.

On a GPU atomics, addresses and exponentials are the device's own.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from helpers.kernel_cases import (
    DEVICE,
    HALF,
    assert_same_tokens,
    attention_case,
    attention_tolerance,
    randn,
    sample_case,
)

pytest.importorskip("triton")

from nanovllm.backends.gpu import paged_decode as paged_decode_module
from nanovllm.backends.gpu.norm_rope_store import norm_rope_store
from nanovllm.backends.gpu.paged_decode import MIN_SHARE, DecodeMetadata, decode_metadata, key_tile, paged_decode
from nanovllm.backends.gpu.sample import draw_uniform, sample
from nanovllm.backends.gpu.triton_backend import TritonBackend
from nanovllm.backends.gpu.triton_shim import tl, triton
from nanovllm.ops.attention import KVCache
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.ops.sample import CHUNK, uniform_reference


def test_slots_beyond_two_to_the_31_elements_are_reached() -> None:
    block_size = 256
    head_dim = 128
    blocks = 2**31 // (block_size * head_dim) + 2
    # 8 GiB of address space, of which only what is written takes memory
    torch.use_deterministic_algorithms(False)  # else it would be filled
    shape = (blocks, block_size, 1, head_dim)
    cache = KVCache(*(torch.empty(shape, dtype=HALF, device=DEVICE) for _ in range(2)))
    key = randn(1, 1, head_dim, dtype=HALF)
    slot = torch.tensor([blocks * block_size - block_size], device=DEVICE)
    qkv = key.repeat(1, 3, 1).view(1, -1)
    weight = torch.ones(head_dim, dtype=HALF, device=DEVICE)
    cos_sin = torch.cat((torch.ones(1, head_dim // 2), torch.zeros(1, head_dim // 2)), dim=1).to(DEVICE)
    norms = NormRope(weight, weight, 1e-6, cos_sin)
    position = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for offset in (0, 255):
        norm_rope_store(qkv, norms, position, cache, slot + offset)
        assert torch.equal(cache.values[-1, offset], key[0]) and cache.keys[-1, offset].any()
    case = attention_case([1], [1], head_dim, 1, block_size, HALF, num_kv_heads=1)
    case.inputs.block_tables[0, 0] = blocks - 1
    out = replace(case, cache=cache).attend(TritonBackend())
    assert torch.equal(out[0], key[0])  # the softmax over one key is 1


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_code_is_the_number_that_it_stands_for(kv_dtype: torch.dtype) -> None:
    """The softmax over one key is 1, so what a head attends is its value: 256 codes in two heads of 128."""
    if kv_dtype == torch.float8_e4m3fn and DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else HALF
    case = attention_case([1], [1], 128, 2, 16, dtype, kv_dtype=kv_dtype)
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(kv_dtype)
    numbers = codes.float()
    numbers[numbers.isnan()] = 0
    block = int(case.inputs.block_tables[0, 0])
    case.cache.values[block, 0] = numbers.to(kv_dtype).view(2, 128)
    assert case.cache.value_scales is not None
    case.cache.value_scales[block, 0] = 1
    out = case.attend(TritonBackend()).float()
    assert torch.equal(out, numbers.view(2, 1, 128).expand(2, 2, 128).reshape(1, 4, 128))


def check_shares(made: DecodeMetadata, seq_lens: list[int], tile: int) -> list[int]:
    """Assert that every key is in one chunk and that shares are equal. Return the number of chunks of each program.

    A sequence counts as its tiles and one more.
    """
    items = made.items.tolist()
    begins = made.share_begins.tolist()
    first_item = made.first_item.tolist()
    for i, (length, (first, end)) in enumerate(zip(seq_lens, pairwise(first_item), strict=True)):
        chunks = items[first:end]
        assert [chunk[0] for chunk in chunks] == [i] * len(chunks)
        assert [chunk[3] for chunk in chunks] == [len(chunks)] * len(chunks)
        assert [chunk[1] for chunk in chunks] == [0, *(chunk[2] for chunk in chunks[:-1])]
        assert chunks[-1][2] == length
        assert all(begin < end for _, begin, end, _ in chunks[1:]), "only the first of several may be empty"
    assert begins[0] == 0 and begins[-1] == first_item[-1]
    total = sum(-(-length // tile) + 1 for length in seq_lens)
    share = max(-(-total // (len(begins) - 1)), MIN_SHARE // tile)
    for first, end in pairwise(begins):
        units = sum(-(-(end - begin) // tile) + (begin == 0) for _, begin, end, _ in items[first:end])
        # A sequence's first chunk that is cut behind its first unit is empty; the next one then begins at 0, too.
        assert units <= share + 1
    return [end - first for first, end in pairwise(begins)]


@pytest.mark.parametrize(("multiprocessors", "num_programs", "num_busy"), [(2, 3, 3), (20, 30, 12)])
def test_programs_share_the_keys_equally_and_the_last_of_a_sequence_merges_it(
    multiprocessors: int, num_programs: int, num_busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each multiprocessor runs three programs, for two heads. Of those of 20, most have no chunk."""
    monkeypatch.setattr(paged_decode_module, "num_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(paged_decode_module, "shared_memory_kib", lambda device: 227)
    lengths = [130] * 4 + [700]
    case = attention_case([1] * 5, lengths, 32, 2, 64, torch.float32)
    made = decode_metadata(case.inputs.seq_lens, case.cache, num_heads=4)
    counts = check_shares(made, lengths, key_tile(64, 64, 4))
    assert len(counts) == num_programs
    assert min(counts[:num_busy]) > 0 and not any(counts[num_busy:])
    for _ in range(2):  # the layers share the metadata, so each must leave it as it was
        out = torch.empty_like(case.q, memory_format=torch.contiguous_format)
        paged_decode(case.q, case.cache, case.inputs.block_tables, made, case.scale, out)
        torch.testing.assert_close(out, case.expected(), atol=attention_tolerance(torch.float32), rtol=0)
        assert not made.arrivals.any()


@triton.jit
def _uniform_kernel(seeds_ptr, positions_ptr, out_ptr, words_ptr):
    row = tl.program_id(0)
    seed = tl.load(seeds_ptr + row)
    position = tl.load(positions_ptr + row)
    tl.store(out_ptr + row, draw_uniform(seed, position))
    word, _, _, _ = tl.randint4x(seed, position.to(tl.int32))
    tl.store(words_ptr + row, word.to(tl.int64) & 0xFFFFFFFF)


def test_uniforms_are_the_references_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator).to(DEVICE)
    seeds[:3] = torch.tensor([0, -1, 1 << 40])
    positions = torch.randint(0, 2**31 - 1, (64,), generator=generator).to(DEVICE)
    out = torch.empty(64, device=DEVICE)
    words = torch.empty(64, dtype=torch.int64, device=DEVICE)
    _uniform_kernel[(64,)](seeds, positions, out, words)
    assert torch.equal(out, uniform_reference(seeds, positions))
    # and Triton's own entry point gives the same word: the counter and the key are where it has them
    assert torch.equal(((words >> 9).float() + 0.5) * 2.0**-23, out)


@pytest.mark.parametrize("shape", ["flat", "clustered"])
def test_the_filter_is_exact_where_its_bound_is_loose(shape: str) -> None:
    """The bound comes from the maxima of parts of 64 tokens: it says least where all are alike, or all in one place."""
    case = sample_case(CHUNK + 500, torch.float32).select(6, 7, 10, 12, 14)
    if shape == "flat":
        case.logits.mul_(1e-3)
    else:
        case.logits[:, 70:200] += 20
    assert_same_tokens(case, sample(*case.arguments()))


def test_tokens_of_no_probability_are_never_drawn() -> None:
    case = sample_case(3 * CHUNK, torch.float32).select(0, 2, 7, 12)
    case.logits[:, : 2 * CHUNK + 5] = -float("inf")  # whole chunks, and the beginning of one
    case.logits[:, -7:] = -float("inf")
    sampled = sample(*case.arguments())
    assert_same_tokens(case, sampled)
    tokens = sampled.token_ids
    assert ((tokens >= 2 * CHUNK + 5) & (tokens < 3 * CHUNK - 7)).all()


def test_signed_zeros_tie() -> None:
    case = sample_case(300, torch.float32, ties=True).select(0, 2, 5, 7, 9, 13)
    case.logits.clamp_(max=0)
    case.logits[:, ::2] *= -1.0  # every other zero, the maximum, becomes -0.0 or stays so
    case.logits.clamp_(max=0)
    assert_same_tokens(case, sample(*case.arguments()))
