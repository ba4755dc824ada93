"""Speculative decoding with real models: tokens are those that come without, on every axis."""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.fakes_drafts import FREE
from helpers.tiny import BLOCK, SMALL, draw_prompts, save_random
from helpers.variants import REQUESTS, VARIANTS, tokens

from nanovllm import LLM, SamplingParams
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.engine.sequence import Sequence
from nanovllm.features.drafts.draft_model import ModelDrafter

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


class Parrot:
    """Knows what will be said, and drafts it with mistakes."""

    def __init__(self, texts: list[list[int]], share: float) -> None:
        self._texts = texts
        self._share = share
        self._rng = random.Random(0)

    def offer(self, seqs: list[Sequence], most: np.ndarray) -> np.ndarray:
        return most

    def write_drafts(self, batch: ScheduledStep) -> None:
        for seq, share in batch.shares():
            text = self._texts[seq.seq_id % len(self._texts)]
            known = len(seq.token_ids)
            for i in range(1, len(share)):
                share[i] = text[known + i - 1] if self._rng.random() < self._share else self._rng.randrange(500)

    def note_end(self, seq: Sequence) -> None:
        pass


def run(folder: Path, options: dict[str, Any], requests: Any, drafter: Any = None) -> tuple[list[Any], dict[str, int]]:
    """Outputs and statistics; every draft pays, and comes from `drafter`, if one is given."""
    with LLM(folder, **options) as llm:
        if (speculation := llm.engine.scheduler.speculation) is not None:
            speculation.costs = FREE
            speculation.drafter = drafter or speculation.drafter
        prompts, params = zip(*requests, strict=True)
        return llm.generate(prompts, params, use_tqdm=False), llm.stats()


@pytest.fixture(scope="module")
def expected(random_model: Path) -> list[Any]:
    return run(random_model, SMALL | {"max_num_seqs": 1, "enable_prefix_caching": False}, REQUESTS)[0]


def test_a_prompt_whose_scores_are_no_numbers_ends_alone_in_a_step_with_drafts(tmp_path: Path) -> None:
    save_random(tmp_path, tie_word_embeddings=False)
    sound = [([1, 2, 3, 4] * 8, SamplingParams(0, n, True)) for n in (40, 20, 20, 5)]
    broken = [([5, 7, 9, 10, 11], SamplingParams(0, 5, prompt_logprobs=1))] * 12
    with LLM(tmp_path, **SMALL | {"max_num_seqs": 4, "speculative_config": NGRAM}) as llm:
        llm.engine.scheduler.speculation.costs = FREE
        llm.engine.scheduler.speculation.drafter = Parrot([[1] * 200], 1.0)
        with torch.no_grad():
            llm.engine.runner.model.embed_tokens.weight[7] = float("nan")
        outputs = llm.generate(*map(list, zip(*sound, *broken, strict=True)), use_tqdm=False)
        assert [o["finish_reason"] for o in outputs] == ["length"] * 4 + ["error"] * 12
        assert [len(o["token_ids"]) for o in outputs[:4]] == [40, 20, 20, 5]
        assert llm.stats()["num_draft_tokens"] > 0


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_outputs_are_those_without_drafts_however_requests_are_run(
    options: dict[str, Any], random_model: Path, expected: list[Any]
) -> None:
    parrot = Parrot([prompt + o["token_ids"] for (prompt, _), o in zip(REQUESTS, expected, strict=True)], 0.8)
    outputs, stats = run(random_model, SMALL | options | {"speculative_config": NGRAM}, REQUESTS, parrot)
    assert tokens(outputs) == tokens(expected)
    for output, other in zip(outputs, expected, strict=True):
        for found, wanted in zip(output.get("logprobs", []), other.get("logprobs", []), strict=True):
            assert found == pytest.approx(wanted, abs=1e-4)  # float32 logits of order 10
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_generated_tokens"] == sum(map(len, tokens(expected)))
    if options.get("max_num_batched_tokens") == 1:  # no room for drafts
        assert stats["num_draft_tokens"] == 0
    else:
        assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] > 10  # in small steps prompts come first


def repetitive() -> list[tuple[list[int], SamplingParams]]:
    """Texts that repeat themselves and each other, greedy and sampled."""
    motifs = draw_prompts([6, 9, 13], seed=3)
    kinds = ({"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.0, "top_k": 20, "top_p": 0.95})
    return [
        (motifs[i % 3] * 4 + motifs[i % 2][:i], SamplingParams(seed=i, max_tokens=40, logprobs=1, **kinds[i % 3]))
        for i in range(9)
    ]


@pytest.mark.skipif(bool(CpuBackend.why_cannot(torch.device("cpu"))), reason="the CPU kernels do not run here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_the_cpu_kernels_tokens_and_logprobs_have_the_same_bits_with_drafts(dtype: str, tmp_path: Path) -> None:
    save_random(tmp_path)
    options = {"dtype": dtype, "attention_backend": "cpu", "max_model_len": 160, "num_kvcache_blocks": 40}
    alone, _ = run(tmp_path, options, repetitive())
    parrot = Parrot([prompt + o["token_ids"] for (prompt, _), o in zip(repetitive(), alone, strict=True)], 0.7)
    for drafter in (None, parrot):
        outputs, stats = run(tmp_path, options | {"speculative_config": NGRAM}, repetitive(), drafter)
        assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] > 10
        for output, wanted in zip(outputs, alone, strict=True):
            assert output["token_ids"] == wanted["token_ids"]
            assert output["logprobs"] == wanted["logprobs"]


@pytest.mark.skipif(bool(CpuBackend.why_cannot(torch.device("cpu"))), reason="the CPU kernels do not run here")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_model_that_drafts_for_itself_is_always_right_greedy_and_sampled(dtype: str) -> None:
    """Among others, in chunks, preempted and from the prefix cache: the same bits make the same draws."""
    questions = ["what is the capital of Japan?", "count from 3 to 9", "what is the capital of Spain?"] * 4
    requests = [
        (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" * (1 + i % 3), params)
        for i, question in enumerate(questions)
        for params in [SamplingParams(temperature=i % 2, seed=i, max_tokens=40, ignore_eos=True)]
    ]
    options = {"dtype": dtype, "attention_backend": "cpu", "max_model_len": 128}
    small = {"num_kvcache_blocks": 24, "max_num_seqs": 8, "max_num_batched_tokens": 24, "kvcache_block_size": 16}
    alone, _ = run(Path("tiny-qwen3"), options | {"max_num_seqs": 1}, requests)
    config = {"speculative_config": {"model": "tiny-qwen3", "num_speculative_tokens": 4}}
    for more in ({}, small):
        outputs, stats = run(Path("tiny-qwen3"), options | config | more, requests)
        assert tokens(outputs) == tokens(alone)
        assert stats["num_accepted_tokens"] == stats["num_draft_tokens"] > 200
    assert stats["num_preemptions"] > 0 and stats["num_cached_tokens"] > 0


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model, of more layers and fewer ids."""
    folder = tmp_path_factory.mktemp("other")
    save_random(folder, seed=1, vocab_size=470, num_hidden_layers=3)
    return folder


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_whatever_a_draft_model_says_tokens_are_the_model_s(
    ranks: int, random_model: Path, other_model: Path, expected: list[Any]
) -> None:
    config = {"speculative_config": {"model": str(other_model), "num_speculative_tokens": 3}}
    options = SMALL | {"num_kvcache_blocks": 12, "max_num_batched_tokens": 40, "tensor_parallel_size": ranks}
    outputs, stats = run(random_model, options | config, REQUESTS)
    assert tokens(outputs) == tokens(expected)
    assert stats["num_draft_tokens"] > stats["num_accepted_tokens"] and stats["num_preemptions"] > 0


def test_ids_beyond_the_smaller_vocabulary_are_never_drafted(random_model: Path, other_model: Path) -> None:
    drafts = []

    class Spy(ModelDrafter):
        def write_drafts(self, batch: ScheduledStep) -> None:
            super().write_drafts(batch)
            drafts.extend(token for _, share in batch.shares() for token in share[1:].tolist())

    config = {"speculative_config": {"model": str(random_model), "num_speculative_tokens": 3}}
    with LLM(other_model, **SMALL | config) as llm:
        speculation = llm.engine.scheduler.speculation
        speculation.costs = FREE
        speculation.drafter = Spy(llm.engine.runner.draft, llm.engine.config.max_num_seqs, 470, 500)
        params = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True)
        llm.generate([[i, 7] for i in range(8)], params, use_tqdm=False)
    assert len(drafts) > 100 and max(drafts) < 470


def test_the_pool_counts_both_models(random_model: Path, other_model: Path) -> None:
    def count(**config: Any) -> int:
        options = SMALL | {"num_kvcache_blocks": None, "kvcache_memory_bytes": 1 << 20}
        with LLM(random_model, **options, **config) as llm:
            return llm.stats()["num_blocks"]

    drafted = count(speculative_config={"model": str(other_model), "num_speculative_tokens": 2})
    assert drafted == count() * 2 // (2 + 3)  # layers


def test_a_pool_smaller_than_both_models_positions_bounds_both(random_model: Path, other_model: Path) -> None:
    config = {"speculative_config": {"model": str(other_model), "num_speculative_tokens": 2}}
    options = SMALL | {"max_model_len": None, "num_kvcache_blocks": 2}
    with LLM(random_model, **options | config) as llm:
        runner = llm.engine.runner
        assert llm.max_model_len == len(runner.model.cos_sin) == len(runner.draft.model.cos_sin) == 2 * BLOCK


def test_a_draft_model_that_cannot_draft_is_refused_by_name(random_model: Path, reciter: Path, tmp_path: Path) -> None:
    def refused(model: Any, draft: Any) -> str:
        with pytest.raises(ValueError, match=f"{Path(draft).name}.* cannot draft for") as error:
            LLM(model, max_model_len=100, speculative_config={"model": str(draft), "num_speculative_tokens": 2})
        return str(error.value)

    assert "their tokenizers differ in" in refused("tiny-qwen3", reciter)
    assert "one of them has a tokenizer" in refused(random_model, reciter)
    assert "missing" in refused(random_model, tmp_path / "missing")
    save_random(tmp_path / "short", max_position_embeddings=64)
    assert "set that to at most 64" in refused(random_model, tmp_path / "short")


def test_a_draft_model_must_have_the_ids_of_the_tokenizer_that_is_used(
    random_model: Path, reciter: Path, tmp_path: Path
) -> None:
    """With the option `tokenizer` that is not the model's own."""
    draft = {"model": str(reciter), "num_speculative_tokens": 2}
    shutil.copytree(reciter, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    params = SamplingParams(temperature=0, max_tokens=9)
    with LLM(tmp_path / "bare", tokenizer=reciter, speculative_config=draft, **SMALL) as llm:
        drafted = llm.generate(["a"], params, use_tqdm=False)[0]["text"]
    with LLM(reciter, **SMALL) as llm:
        assert drafted == llm.generate(["a"], params, use_tqdm=False)[0]["text"] != ""
    with pytest.raises(ValueError, match="their tokenizers differ in"):
        LLM(reciter, tokenizer="tiny-qwen3", speculative_config=draft, **SMALL)


def test_what_ends_a_request_inside_accepted_drafts_ends_it_there(reciter: Path) -> None:
    requests = [
        ("a", SamplingParams(temperature=0, max_tokens=60)),  # the tokenizer's end, after the alphabet
        ("A", SamplingParams(temperature=0, max_tokens=60)),  # a special token of the model's
        ("a", SamplingParams(temperature=0, max_tokens=60, stop="pq")),
        ("a", SamplingParams(temperature=0, max_tokens=60, stop="rst", ignore_eos=True)),
        ("a", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)),
        *(("a", SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[token])) for token in (8, 10, 13, 17)),
    ]
    requests = [(prompt, replace(params, logprobs=1)) for prompt, params in requests]
    without, _ = run(reciter, {"max_num_seqs": 1, "max_model_len": 128}, requests * 2)
    config = {"speculative_config": NGRAM | {"num_speculative_tokens": 7}}
    outputs, stats = run(reciter, {"max_num_seqs": 1, "max_model_len": 128} | config, requests * 2)
    names = ("text", "token_ids", "finish_reason", "stop_reason")
    assert [[o[name] for name in names] for o in outputs] == [[o[name] for name in names] for o in without]
    assert stats["num_accepted_tokens"] > 60
    for output in outputs:
        assert len(output.logprobs) == len(output.token_ids), "none of tokens behind the end"
        assert all(token in told for token, told in zip(output.token_ids, output.logprobs, strict=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "ngram", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 1}, "draft_tensor_parallel"),
        ({"method": "eagle", "num_speculative_tokens": 4}, "eagle.*ngram, draft_model"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min is 3"),
        ({"method": "draft_model", "num_speculative_tokens": 4}, "model is None"),
        ("ngram", "must be a dict"),
    ],
)
def test_what_is_wrong_with_the_option_is_named(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("tiny-qwen3", speculative_config=given)


def test_bounds_default_as_vllm_s_and_the_number_of_drafts_to_four() -> None:
    from nanovllm.features.drafts.options import read_speculative_config

    def bounds(**given: int) -> tuple[int, int]:
        config = read_speculative_config({"num_speculative_tokens": 4, **given})
        return config["prompt_lookup_min"], config["prompt_lookup_max"]

    assert read_speculative_config({"model": "a"})["num_speculative_tokens"] == 4
    assert bounds() == (5, 5)
    assert bounds(prompt_lookup_max=3) == (3, 3)
    assert bounds(prompt_lookup_min=2) == (2, 2)
    assert bounds(prompt_lookup_min=2, prompt_lookup_max=4) == (2, 4)
