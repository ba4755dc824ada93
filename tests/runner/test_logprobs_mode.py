"""logprobs_mode="processed_logprobs": the distribution that tokens were sampled from, as transformers makes it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.rehearsal import rehearse
from helpers.tiny import SMALL, VOCAB_SIZE, draw_prompts, logits_of
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel, Qwen3ForCausalLM
from transformers.generation import logits_process as theirs

from nanovllm import LLM, Output, SamplingParams
from nanovllm.backends import Backend
from nanovllm.engine.plan import ROW_SAMPLING
from nanovllm.runner.processed_logits import process_logits

MODE: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
TOLERANCE = 2e-5
"""Of float32: logits differ from transformers' by some 1e-6, and a temperature of 0.5 doubles that."""
BIAS = {3: 4.0, 7: -2.5}
PARAMS = [
    SamplingParams(0.5, 6, logprobs=0, seed=1),
    SamplingParams(1.0, 6, top_k=5, logprobs=8, seed=2),
    SamplingParams(0.7, 6, top_p=0.8, logprobs=3, seed=3),
    SamplingParams(1.3, 6, min_p=0.05, logprobs=VOCAB_SIZE, seed=4),
    SamplingParams(0.9, 6, top_k=20, top_p=0.9, repetition_penalty=1.3, logit_bias=BIAS, logprobs=4, seed=5),
    SamplingParams(0, 6, repetition_penalty=1.5, logit_bias=BIAS, top_k=2, logprobs=3),
    SamplingParams(0.8, 6, allowed_token_ids=[*range(40)], logprobs=5, seed=6),
    SamplingParams(1.0, 6, logprobs=3, seed=7),
    SamplingParams(0, 6, logprobs=3),
    SamplingParams(1.5, 6, top_p=0.6, seed=8),
]
PROMPTS = draw_prompts([3, 9, 17, 5, 11, 4, 8, 20, 6, 7])


@pytest.fixture(scope="module")
def model(random_model: Path) -> PreTrainedModel:
    return Qwen3ForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()


def make_processors(params: SamplingParams) -> LogitsProcessorList:
    """Return transformers' processors of these parameters, in the order of `SamplingParams`."""
    made: list[Any] = []
    if params.logit_bias:
        made.append(theirs.SequenceBiasLogitsProcessor({(i,): bias for i, bias in params.logit_bias.items()}))
    if params.allowed_token_ids:
        forbidden = sorted({*range(VOCAB_SIZE)} - {*params.allowed_token_ids})
        made.append(theirs.SuppressTokensLogitsProcessor(forbidden))
    if params.repetition_penalty != 1:
        made.append(theirs.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature > 0:
        made.append(theirs.TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            made.append(theirs.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            made.append(theirs.TopPLogitsWarper(params.top_p))
        if params.min_p:
            made.append(theirs.MinPLogitsWarper(params.min_p))
    return LogitsProcessorList(made)


def expect(model: PreTrainedModel, output: Output, params: SamplingParams) -> Tensor:
    """Return float32 [num_output, vocab]: the log-probabilities by which each token was sampled."""
    tokens = output.prompt_token_ids + output.token_ids
    logits = logits_of(model, tokens)
    processors = make_processors(params)
    rows = []
    for at in range(len(output.prompt_token_ids), len(tokens)):
        scores = processors(torch.tensor([tokens[:at]]), logits[at - 1 : at].clone())
        rows.append(scores.log_softmax(1)[0])
    return torch.stack(rows)


def assert_processed(
    outputs: Sequence[Output], model: PreTrainedModel, asked: Sequence[SamplingParams] = PARAMS
) -> None:
    for output, params in zip(outputs, asked, strict=True):
        if params.logprobs is None:
            assert output.logprobs is None
            continue
        assert output.logprobs is not None and output.cumulative_logprob is not None
        assert math.isfinite(output.cumulative_logprob)
        for token_id, values, row in zip(output.token_ids, output.logprobs, expect(model, output, params), strict=True):
            assert values[token_id] == pytest.approx(row[token_id].item(), abs=TOLERANCE)
            assert values[token_id].rank == 1 + int((row > row[token_id] + TOLERANCE).sum())
            listed = sorted((value for value in values.values()), reverse=True)[: params.logprobs]
            assert listed == pytest.approx(row.topk(params.logprobs).values.tolist(), abs=TOLERANCE)


def run(folder: Path, params: Any = PARAMS, prompts: Any = PROMPTS, **options: Any) -> list[Output]:
    with LLM(folder, **SMALL | {"device": "cpu", "dtype": "float32", "attention_backend": "cpu"} | options) as llm:
        return llm.generate(prompts, params, use_tqdm=False)


def read(output: Output) -> Tensor:
    return torch.tensor([x for row in output.logprobs or [] for x in (*row, *row.values())], dtype=torch.float64)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_they_are_what_transformers_processors_give(
    backend: str, random_model: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several pieces of rows in a step."""
    monkeypatch.setattr("nanovllm.runner.processed_logits.ROWS_AT_A_TIME", 3)
    monkeypatch.setattr("nanovllm.runner.processed_logits.FILTERED_AT_A_TIME", 2)
    outputs = run(random_model, attention_backend=backend, **MODE)
    assert_processed(outputs, model)
    raw = run(random_model, attention_backend=backend)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in raw]
    for i in (7, 8):  # nothing changes their logits
        assert torch.equal(read(outputs[i]), read(raw[i]))
    assert not torch.equal(read(outputs[0]), read(raw[0]))


def test_they_are_what_transformers_processors_give_on_a_card(random_model: Path, model: PreTrainedModel) -> None:
    """Triton's kernels run in its interpreter, at depth 2."""
    options: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": 64, "num_kvcache_blocks": 32}
    options |= {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
    with rehearse(), LLM(random_model, **options, **MODE) as llm:
        config = llm.engine.config
        assert (config.attention_backend, config.depth) == ("triton", 2)
        params = [replace(PARAMS[i], max_tokens=2) for i in (0, 3, 4, 5)]
        assert_processed(llm.generate(PROMPTS[:4], params, use_tqdm=False), model, params)


def test_drafts_have_the_values_of_the_row_that_they_are_drawn_for(random_model: Path, model: PreTrainedModel) -> None:
    plain = run(random_model, **MODE)
    for config in (
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1},
        {"model": str(random_model), "num_speculative_tokens": 3},
    ):
        outputs = run(random_model, speculative_config=config, **MODE)
        assert_processed(outputs, model)
        for output, expected in zip(outputs, plain, strict=True):
            assert torch.equal(read(output), read(expected))


@pytest.mark.parametrize(
    "kind",
    [
        "tensor_parallel_size",
        "pipeline_parallel_size",
        pytest.param("data_parallel_size", marks=pytest.mark.slow),  # replicas are processes
    ],
)
def test_several_ranks_give_the_same(kind: str, random_model: Path, model: PreTrainedModel, local_ranks: None) -> None:
    assert_processed(run(random_model, **MODE, **{kind: 2}), model)


def test_a_request_alone_has_the_same_bits_as_in_company(random_model: Path) -> None:
    together = run(random_model, **MODE)
    for i, output in enumerate(together):
        (alone,) = run(random_model, PARAMS[i], PROMPTS[i], **MODE)
        assert torch.equal(read(alone), read(output))


def test_log_probabilities_of_prompts_stay_the_models(random_model: Path) -> None:
    params = SamplingParams(0.5, 2, top_k=2, logprobs=0, prompt_logprobs=2, seed=1)
    raw, processed = (run(random_model, params, PROMPTS[2], **options)[0] for options in ({}, MODE))
    assert processed.prompt_logprobs == raw.prompt_logprobs and processed.logprobs != raw.logprobs


def test_a_sampled_token_counts_as_kept_and_so_do_all_that_are_as_likely() -> None:
    """A backend's sums may be rounded otherwise, so that it kept one token more."""
    asked = np.zeros(2, ROW_SAMPLING)
    asked["temperature"] = 1
    asked["top_p"] = 1
    asked["top_k"] = 2
    logits = torch.tensor([[3.0, 2.0, 1.0, 1.0, 0.0]] * 2)
    made = process_logits(logits, torch.tensor([0, 3], dtype=torch.int32), asked, Backend())
    assert made.isfinite().tolist() == [[True, True, False, False, False], [True, True, True, True, False]]


@pytest.mark.parametrize("name", ["raw_logits", "processed_logits"])
def test_logits_are_refused_by_name(name: str, random_model: Path) -> None:
    with pytest.raises(ValueError, match=f"logprobs_mode is '{name}'; it must be one of raw_logprobs, processed_logp"):
        LLM(random_model, logprobs_mode=name)
