"""With attention_backend="cpu" a request's logits are its own: the same bits alone and in any company, in any engine.

Compared with torch.equal, never with a tolerance. What is not promised: other backends, ranks, other processors.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.cpu_checks import PLAIN, VARIANTS, Kind, make_variant
from helpers.kernel_cases import make_inputs
from helpers.tiny import SLIDING, draw_prompts, save_random
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.backends import Backend
from nanovllm.backends.cpu.backend import CpuBackend, NativeMatrix
from nanovllm.backends.cpu.library import cpu_library
from nanovllm.backends.cpu.scratch import Scratch
from nanovllm.ops.attention import AttentionVariant
from nanovllm.ops.norm_rope_store import NormRope
from nanovllm.ops.sample import unpack_sampling
from nanovllm.runner.logprobs import Logprobs

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
BLOCKS_ALONE = 64

if reason := CpuBackend.why_cannot(CPU):
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture
def threads() -> Iterator[None]:
    """A test may change how many there are."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# ---- the kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(1024, 160), (96, 50), (208, 50)])
def test_a_row_of_a_product_has_the_same_bits_among_any_number(
    in_features: int, out_features: int, dtype: torch.dtype, threads: None
) -> None:
    torch.manual_seed(0)
    matrix = NativeMatrix(cpu_library(), torch.randn(out_features, in_features).to(dtype), Scratch())
    x = torch.randn(200, in_features).to(dtype)
    alone = torch.cat([matrix.multiply(row, None) for row in x.split(1)])
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for rows in (*range(1, 34), 64, 65, 96, 97, 200):
            assert torch.equal(matrix.multiply(x[:rows], None), alone[:rows]), rows


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [PLAIN, *VARIANTS], ids=str)
def test_attention_has_the_same_bits_in_blocks_and_chunks_of_any_size(
    kind: Kind, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    """A window that no sequence leaves gives the bits of plain attention."""
    backend = CpuBackend()
    query_lens = [1, 90, 120]
    seq_lens = [150, 90, 200]
    torch.manual_seed(0)
    q = torch.randn(sum(query_lens), 6, 128).to(dtype)
    qkv = torch.randn(sum(seq_lens), 10 * 128).to(dtype)
    norms = NormRope(None, None, 1e-6, torch.ones(sum(seq_lens), 128))
    positions = torch.cat([torch.arange(n) for n in seq_lens])
    variant = make_variant(kind, 6)

    def attend(block_size: int, chunk: int, variant: AttentionVariant | None = variant) -> Tensor:
        """Each sequence's queries in chunks, one call for each; a chunk of 0 stands for one call for all queries."""
        width = 256 // block_size
        tables = torch.randperm(3 * width).int().view(3, width)
        sequences = torch.arange(3).repeat_interleave(torch.tensor(seq_lens))
        slots = tables[sequences, positions // block_size].long() * block_size + positions % block_size
        cache = backend.allocate_cache((3 * width, block_size, 2, 128), kv_dtype or dtype, CPU)
        backend.norm_rope_store(qkv, norms, positions, cache, slots)
        if chunk == 0:
            return backend.attend(q, cache, make_inputs(query_lens, seq_lens, tables), 0.1, variant).clone()
        found = []
        for queries, end, table in zip(q.split(query_lens), seq_lens, tables.split(1), strict=True):
            seq_len = end - len(queries)
            for some in queries.split(chunk):
                seq_len += len(some)
                inputs = make_inputs([len(some)], [seq_len], table)
                found.append(backend.attend(some, cache, inputs, 0.1, variant).clone())
        return torch.cat(found)

    expected = attend(64, 0)
    for block_size, chunk in ((16, 0), (32, 0), (128, 0), (256, 1), (64, 13), (64, 70)):
        assert torch.equal(attend(block_size, chunk), expected), (block_size, chunk)
    if variant is None:
        for window in (200, 2**30):
            assert torch.equal(attend(64, 0, AttentionVariant(window)), expected)
    else:
        assert not torch.equal(attend(64, 0, None), expected)


def test_a_row_has_the_same_log_probabilities_among_any_number(threads: None) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(66, 100_000)).round(decimals=1)
    token_ids = torch.arange(66, dtype=torch.int32)
    counts = np.arange(66, dtype=np.int32) % 4  # of equals, which are many, another may be among more

    def read(rows: slice) -> list[dict[int, float]]:
        ids = token_ids[rows]
        scores = Logprobs([(logits[rows], ids)], counts[rows], Backend()).read_rows()
        return [row.make_dicts([i])[0] for i, row in zip(ids.tolist(), scores, strict=True)]

    torch.set_num_threads(1)
    expected = read(slice(66))
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for rows in (*(slice(i, i + 1) for i in range(66)), slice(5, 8), slice(65), slice(66)):
            assert read(rows) == expected[rows], (num_threads, rows)


# ---- the engine


class Case(NamedTuple):
    """A request, and what it gets when it is alone."""

    prompt: list[int]
    params: SamplingParams
    token_ids: list[int]
    logits: list[Tensor]


def requests() -> list[tuple[list[int], SamplingParams]]:
    """64, each with its own seed: some with a beginning in common, greedy, sampled, filtered."""
    common = draw_prompts([70], seed=1)[0]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.5, "top_p": 0.7, "min_p": 0.01},
    ]
    prompts = draw_prompts([1 + 7 * i % 61 for i in range(64)], seed=2)
    prompts = [common[: 16 * (i % 5)] + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]
    return [(prompt, SamplingParams(seed=i, max_tokens=4 + i % 9, **kinds[i % 4])) for i, prompt in enumerate(prompts)]


class Company:
    """Runs requests together, in engines of any options, and sees the logits of each."""

    def __init__(self, folder: Path, dtype: torch.dtype, **options: Any) -> None:
        self._folder = folder
        self._dtype = dtype
        self._options = options
        alone = {"num_kvcache_blocks": BLOCKS_ALONE, "kvcache_block_size": 16, "enable_prefix_caching": False}
        answers, logits, _ = self._run(requests(), one_by_one=True, **alone)
        self.cases = [
            Case(prompt, params, answer, logits[params.seed])
            for (prompt, params), answer in zip(requests(), answers, strict=True)
        ]

    def _run(
        self, given: list[tuple[list[int], SamplingParams]], one_by_one: bool = False, **options: Any
    ) -> tuple[list[list[int]], dict[int, list[Tensor]], dict[str, int]]:
        """(token ids of each, logits of each sampled token by seed, statistics)."""
        seen: dict[tuple[int, int], Tensor] = {}
        dtype = str(self._dtype).removeprefix("torch.")
        options |= {"device": "cpu", "dtype": dtype, "attention_backend": "cpu", "max_model_len": 160}
        with LLM(self._folder, **options, **self._options) as llm:
            backend = llm.engine.runner.backend
            sample = backend.sample

            def spy(logits: Tensor, table: Tensor, rows: Tensor, positions: Tensor) -> Any:
                seeds = unpack_sampling(table[rows]).seeds
                for row, seed, position in zip(logits, seeds.tolist(), positions.tolist(), strict=True):
                    seen[seed, position] = row.clone()
                return sample(logits, table, rows, positions)

            backend.sample = spy
            groups = [[request] for request in given] if one_by_one else [given]
            outputs = []
            for group in groups:
                outputs += llm.generate([p for p, _ in group], [params for _, params in group], use_tqdm=False)
            stats = llm.stats()
        logits = {
            params.seed: [seen[params.seed, len(prompt) + i] for i in range(len(output["token_ids"]))]
            for (prompt, params), output in zip(given, outputs, strict=True)
        }
        return [o["token_ids"] for o in outputs], logits, stats

    def check(self, chosen: list[int], **options: Any) -> dict[str, int]:
        """Assert that the chosen requests get together what each got alone; returns the statistics."""
        cases = [self.cases[i] for i in chosen]
        answers, logits, stats = self._run([(case.prompt, case.params) for case in cases], **options)
        for i, case, answer in zip(chosen, cases, answers, strict=True):
            assert answer == case.token_ids, i
            for n, (got, expected) in enumerate(zip(logits[case.params.seed], case.logits, strict=True)):
                assert torch.equal(got, expected), (i, n)
        return stats


@pytest.mark.parametrize("quantization", ["int8", "int8-dynamic"])
def test_quantised_weights_leave_a_request_its_bits(quantization: str, tmp_path: Path) -> None:
    save_random(tmp_path)
    company = Company(tmp_path, torch.bfloat16, quantization=quantization)
    company.check(list(range(64)), num_kvcache_blocks=1000, kvcache_block_size=16)
    stats = company.check(list(range(64)), num_kvcache_blocks=11, max_num_batched_tokens=40, kvcache_block_size=16)
    assert stats["num_preemptions"] > 0


@pytest.fixture(scope="module", params=[(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "int8")])
def company(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Company:
    dtype, kv_cache_dtype = request.param
    folder = tmp_path_factory.mktemp("model")
    save_random(folder, **SLIDING)
    return Company(folder, dtype, kv_cache_dtype=kv_cache_dtype)


def test_sixty_four_together_get_what_each_got_alone(company: Company) -> None:
    stats = company.check(list(range(64)), num_kvcache_blocks=1000, kvcache_block_size=16)
    assert stats["num_cached_tokens"] > 0
    stats = company.check(list(range(64)), num_kvcache_blocks=11, max_num_batched_tokens=40, kvcache_block_size=16)
    assert stats["num_preemptions"] > 0


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chosen=st.lists(st.integers(0, 63), min_size=1, max_size=24, unique=True),
    block_size=st.sampled_from([16, 32, 64, 256]),
    spare_blocks=st.integers(0, 40),
    max_num_seqs=st.integers(1, 30),
    max_num_batched_tokens=st.integers(30, 300),
    prefix_caching=st.booleans(),
    num_threads=st.integers(1, 3),
)
def test_any_company_in_any_engine_leaves_a_request_its_bits(
    company: Company,
    threads: None,
    chosen: list[int],
    block_size: int,
    spare_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_caching: bool,
    num_threads: int,
) -> None:
    torch.set_num_threads(num_threads)
    company.check(
        chosen,
        kvcache_block_size=block_size,
        num_kvcache_blocks=-(-160 // block_size) + spare_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching,
    )


def test_the_comparison_notices_another_order_of_the_same_sum(
    company: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of one or two rows are summed in two halves, each rounded, whatever the processor sums at once."""
    multiply = NativeMatrix.multiply

    def in_halves(matrix: NativeMatrix, x: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) > 2:
            return multiply(matrix, x, bias)
        weight = matrix.rows(torch.arange(matrix._out))
        half = x.shape[1] // 2
        parts = (slice(None, half), slice(half, None))
        matrices = [NativeMatrix(cpu_library(), weight[:, part].contiguous(), Scratch()) for part in parts]
        first = multiply(matrices[0], x[:, parts[0]].contiguous(), bias)
        return first + multiply(matrices[1], x[:, parts[1]].contiguous(), None)

    monkeypatch.setattr(NativeMatrix, "multiply", in_halves)
    with pytest.raises(AssertionError):
        company.check([0, 1, 2, 3], num_kvcache_blocks=1000, max_num_seqs=2)
