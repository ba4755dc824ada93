"""Tokens are drawn from the distribution that SamplingParams describes, and from no other."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.distributions import LEAST_P, Floats, chi_square_p, exact
from helpers.kernel_cases import pack_values
from helpers.tiny import draw_prompts, logits_of, save_random
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.ops.sample import CHUNK, sample_reference, uniform_reference


def draw(
    logits: Floats | Tensor,
    count: int = 1,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """`count` tokens from the same logits, by default with the seeds 0, 1, 2 ..."""
    same_logits = torch.as_tensor(logits, dtype=torch.float32).expand(count, -1)
    seeds = torch.arange(count) if seeds is None else seeds
    table = pack_values(count, seeds, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    positions = torch.full((count,), 17) if positions is None else positions
    some = torch.arange(count).split(100)
    return torch.cat([sample_reference(same_logits[i], table, i, positions[i]).token_ids for i in some])


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top-k": {"top_k": 7},
    "top-k 1": {"top_k": 1},
    "top-k beyond the vocabulary": {"top_k": 1000},
    "top-p": {"top_p": 0.7},
    "top-p below the first token": {"top_p": 1e-6},
    "top-p that leaves out little": {"top_p": 0.999},
    "min-p": {"min_p": 0.1},
    "min-p 1": {"min_p": 1.0},
    "temperature before top-p": {"temperature": 2.0, "top_p": 0.6},
    "temperature before min-p": {"temperature": 2.0, "min_p": 0.3},
    "top-p on what top-k left": {"top_k": 5, "top_p": 0.8},
    "min-p cuts deeper than top-p": {"top_p": 0.95, "min_p": 0.2},
    "all together": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}
NUM_DRAWS = 6_000


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("values", CASES.values(), ids=CASES.keys())
def test_frequencies_follow_the_exact_distribution(values: dict[str, Any], vary: str) -> None:
    """Over the seeds of requests, and over the positions of one request: both must look like independent draws."""
    logits = np.random.default_rng(1).normal(0, 2, 60).astype(np.float32).astype(np.float64)
    numbers = torch.arange(NUM_DRAWS)
    fixed = torch.full((NUM_DRAWS,), 5)
    seeds, positions = (numbers, fixed) if vary == "seed" else (fixed, numbers)
    tokens = draw(logits, NUM_DRAWS, **values, seeds=seeds, positions=positions)
    counts = np.bincount(tokens.numpy(), minlength=len(logits)).astype(np.float64)
    assert chi_square_p(counts, exact(logits, **values)) > LEAST_P


def test_the_frequencies_test_notices_a_distribution_that_is_a_little_off() -> None:
    logits = np.random.default_rng(1).normal(0, 2, 60)
    counts = np.bincount(draw(logits, NUM_DRAWS, temperature=1.15).numpy(), minlength=60).astype(np.float64)
    assert chi_square_p(counts, exact(logits)) < LEAST_P


@pytest.mark.parametrize("values", [{}, {"top_k": 3000}, {"top_p": 0.9}], ids=["plain", "top-k", "top-p"])
def test_frequencies_are_right_in_a_vocabulary_of_several_chunks(values: dict[str, Any]) -> None:
    """The inverse is found in two levels, chunks of 4096 and tokens inside one: compared in bins of 256 tokens."""
    size = 2 * CHUNK + 1000
    logits = np.random.default_rng(2).normal(0, 1, size).astype(np.float32).astype(np.float64)
    tokens = draw(logits, 1500, **values)
    bins = np.arange(0, size, 256)
    counts = np.bincount(tokens.numpy(), minlength=size).astype(np.float64)
    probabilities = exact(logits, **values)
    assert not counts[probabilities == 0].any()
    assert chi_square_p(np.add.reduceat(counts, bins), np.add.reduceat(probabilities, bins)) > LEAST_P


def test_rows_of_a_batch_each_follow_their_own_values() -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(3)) * 2
    cases = list(CASES.values()) * 4
    temperature = np.array([c.get("temperature", 1.0) for c in cases])
    temperature[::5] = 0
    table = pack_values(
        64,
        torch.arange(64) * 12345,
        temperature=temperature,
        top_k=[c.get("top_k", 0) for c in cases],
        top_p=[c.get("top_p", 1.0) for c in cases],
        min_p=[c.get("min_p", 0.0) for c in cases],
    )
    rows = torch.arange(64)
    together = sample_reference(logits, table, rows, rows + 3).token_ids
    for i in range(64):
        row = rows[i : i + 1]
        alone = sample_reference(logits[row], table, row, row + 3).token_ids
        assert alone.item() == together[i]


def test_random_numbers_are_uniform_never_0_or_1_and_independent() -> None:
    """Neighbouring seeds and positions are what an engine uses, so they are what must not be alike."""
    n = 1 << 16
    zero = torch.zeros(n, dtype=torch.int64)
    count = torch.arange(n)
    wide = count * 0x9E3779B97F4A7C15  # wraps: seeds of all 64 bits, negative as int64 among them
    streams = [
        uniform_reference(count, zero),
        uniform_reference(zero, count),
        uniform_reference(wide, zero),
        uniform_reference(wide, zero + 1),
        uniform_reference(count << 32, zero),
    ]
    for u in streams:
        assert u.dtype == torch.float32
        assert 0 < float(u.min()) < float(u.max()) < 1
        counts = np.histogram(u.numpy(), 64, (0, 1))[0].astype(np.float64)
        assert chi_square_p(counts, np.full(64, 1 / 64)) > LEAST_P
        neighbours = torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]
        assert abs(float(neighbours)) < 4 / math.sqrt(n), "four standard deviations of a correlation by chance"
    correlations = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert float(correlations.abs().max()) < 4 / math.sqrt(n)


def test_temperature_0_takes_the_likeliest_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 3.0, 2.0])
    assert draw(logits, 50, temperature=0, top_k=2, top_p=0.1).unique().tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_a_temperature_near_0_takes_the_likeliest(temperature: float) -> None:
    logits = np.random.default_rng(4).normal(0, 2, 200)
    assert draw(logits, 200, temperature=temperature, top_p=0.9).unique().tolist() == [int(logits.argmax())]


@pytest.mark.parametrize("temperature", [1e6, 1e30, 1e38])
def test_an_enormous_temperature_draws_evenly(temperature: float) -> None:
    counts = np.bincount(draw(np.linspace(-9, 9, 32), NUM_DRAWS, temperature=temperature).numpy(), minlength=32)
    assert chi_square_p(counts.astype(np.float64), np.full(32, 1 / 32)) > LEAST_P


def test_ties_at_the_edge_of_top_k_and_top_p_are_kept() -> None:
    logits = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, -1.0])
    assert draw(logits, 500, top_k=3).unique().tolist() == [0, 1, 2, 3, 4]
    assert draw(logits, 500, top_k=1).unique().tolist() == [0, 2]
    # e/(2e + 3 + 1/e) = 0.31 each for tokens 0 and 2, 0.11 each for the zeros: 0.65 is crossed by the first of them
    assert draw(logits, 500, top_p=0.65).unique().tolist() == [0, 1, 2, 3, 4]
    assert draw(logits, 500, top_p=0.2).unique().tolist() == [0, 2]


def test_the_token_that_crosses_p_is_kept() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert draw(logits, 500, top_p=0.45).unique().tolist() == [0]
    assert draw(logits, 500, top_p=0.55).unique().tolist() == [0, 1]
    assert draw(logits, 500, top_p=0.81).unique().tolist() == [0, 1, 2]


def test_a_token_of_probability_0_is_never_drawn() -> None:
    logits = torch.full((5000,), -math.inf)
    logits[[17, 4095, 4096, 4990]] = torch.tensor([0.0, 1.0, -1.0, 0.5])
    drawn = draw(logits, 3000).unique().tolist()
    assert drawn == [17, 4095, 4096, 4990]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_16_bits_are_drawn_from_in_float32(dtype: torch.dtype) -> None:
    """bfloat16 sums would stop growing after 256 equal tokens."""
    n = 2000
    rows = torch.arange(n)
    table = pack_values(n, rows)
    tokens = sample_reference(torch.zeros(n, 1000, dtype=dtype), table, rows, torch.zeros(n)).token_ids
    counts = np.histogram(tokens.numpy(), 20, (0, 1000))[0].astype(np.float64)
    assert chi_square_p(counts, np.full(20, 1 / 20)) > LEAST_P


# ---- through the engine


@pytest.fixture(scope="module")
def llm(open_llm: Callable[..., LLM]) -> LLM:
    return open_llm(num_kvcache_blocks=512)


def test_a_generated_token_follows_the_models_distribution(tmp_path: Path) -> None:
    """The whole way: many requests without a seed, one token each; and the second token, given the first."""
    model = save_random(tmp_path)
    (prompt,) = draw_prompts([20])
    with LLM(tmp_path, dtype="float32", max_model_len=32, num_kvcache_blocks=600, kvcache_block_size=16) as llm:
        params = SamplingParams(temperature=1.2, top_k=30, max_tokens=2)
        outputs = llm.generate([prompt] * 4000, params, use_tqdm=False)
    firsts = np.array([o["token_ids"][0] for o in outputs])
    likeliest = int(np.bincount(firsts).argmax())
    seconds = np.array([o["token_ids"][1] for o in outputs if o["token_ids"][0] == likeliest])
    for drawn, text in ((firsts, prompt), (seconds, [*prompt, likeliest])):
        logits = logits_of(model, text)[-1].double().numpy()
        counts = np.bincount(drawn, minlength=len(logits)).astype(np.float64)
        assert chi_square_p(counts, exact(logits, temperature=1.2, top_k=30)) > LEAST_P


@pytest.mark.parametrize("seed", [0, -2, 2**63, 2**64 + 5, -(10**30)])
def test_any_integer_is_a_seed(seed: int, llm: LLM) -> None:
    params = SamplingParams(seed=seed, max_tokens=8)
    first, second = llm.generate([[5, 6], [5, 6]], params, use_tqdm=False)
    assert first["token_ids"] == second["token_ids"]


def test_minus_one_is_no_seed(llm: LLM) -> None:
    params = SamplingParams(seed=-1, temperature=5.0, max_tokens=8)
    outputs = llm.generate([[5, 6]] * 4, params, use_tqdm=False)
    assert len({tuple(o["token_ids"]) for o in outputs}) == 4


def test_seeds_that_differ_in_any_32_bits_draw_differently(llm: LLM) -> None:
    seeds = [1, 2, 1 << 32, 1 << 33, (1 << 63) + 1]
    params = [SamplingParams(seed=seed, temperature=5.0, max_tokens=8) for seed in seeds]
    outputs = llm.generate([[5, 6]] * len(seeds), params, use_tqdm=False)
    assert len({tuple(o["token_ids"]) for o in outputs}) == len(seeds)


@pytest.mark.parametrize(
    "values", [{"temperature": 1e300}, {"temperature": 1e-300}, {"top_k": 10**12}, {"top_p": 1e-300}]
)
@pytest.mark.filterwarnings("error")
def test_values_beyond_32_bits_are_as_good_as_their_limit(values: dict[str, Any], llm: LLM) -> None:
    limits = {"temperature": {1e300: 1e30, 1e-300: 0}, "top_k": {10**12: 0}, "top_p": {1e-300: 1e-30}}
    limit = {name: limits[name][value] for name, value in values.items()}
    pair = [SamplingParams(**chosen, seed=1, max_tokens=8) for chosen in (values, limit)]
    extreme, plain = llm.generate([[3, 4]] * 2, pair, use_tqdm=False)
    assert extreme["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize("k", [0, 1, 5, 500, 10**12])
def test_logprobs_are_of_the_raw_distribution(k: int, tmp_path: Path) -> None:
    """Whatever temperature and top-k make of it. Tolerance: float32 logits of size 10, computed in another order."""
    model = save_random(tmp_path)
    prompts = draw_prompts([1, 9, 30])
    params = SamplingParams(temperature=3.0, top_k=50, seed=4, max_tokens=6, logprobs=k)
    with LLM(tmp_path, dtype="float32", max_model_len=64, kvcache_block_size=16, num_kvcache_blocks=64) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    sampled_beyond_k = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        raw = logits_of(model, prompt + output["token_ids"]).log_softmax(-1)[len(prompt) - 1 : -1]
        assert len(output["logprobs"]) == len(output["token_ids"])
        for token, given, row in zip(output["token_ids"], output["logprobs"], raw, strict=True):
            likeliest = row.topk(min(k, len(row))).indices.tolist()
            assert set(given) == {token, *likeliest}
            sampled_beyond_k += token not in likeliest
            ids = list(given)
            assert [type(i) for i in ids] == [int] * len(ids)
            assert torch.allclose(torch.tensor([given[i] for i in ids]), row[ids], atol=1e-4)
            assert all(given[a] >= given[b] for a, b in pairwise(i for i in ids if i != token))
    assert (sampled_beyond_k > 0) == (k < 50)


def test_only_requests_that_ask_for_logprobs_get_them(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=n, logprobs=k) for n, k in ((3, None), (5, 2), (4, 0), (2, None))
    ]
    outputs = llm.generate(draw_prompts([4, 4, 4, 4]), params, use_tqdm=False)
    assert ["logprobs" in o for o in outputs] == [False, True, True, False]
    assert [len(likely) for likely in outputs[1]["logprobs"]] == [2] * 5
    assert [list(likely) for likely in outputs[2]["logprobs"]] == [[i] for i in outputs[2]["token_ids"]]
