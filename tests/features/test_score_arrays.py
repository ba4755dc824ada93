"""Scores as arrays are transformers' and those of `prompt_logprobs`, whatever computes them and in which pieces."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paths import BOX_MODEL
from helpers.tiny import BLOCK, SMALL, draw_prompts
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams

K = 64
LENGTHS = [1, 2, BLOCK + 1, 100]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""Of float32: log-probabilities of order 10 have steps of 1e-6."""


def open_model(folder: Path = BOX_MODEL, **options: Any) -> LLM:
    return LLM(folder, **SMALL | {"max_model_len": 128} | options)


@pytest.fixture(scope="module")
def expected() -> tuple[list[list[int]], list[Any]]:
    """Return prompts, and transformers' log-probabilities of all tokens after each of their tokens, in float64."""
    model = AutoModelForCausalLM.from_pretrained(BOX_MODEL, dtype=torch.float64).eval()
    prompts = draw_prompts(LENGTHS)
    with torch.inference_mode():
        return prompts, [model(torch.tensor([prompt])).logits[0].log_softmax(-1).numpy() for prompt in prompts]


@pytest.mark.parametrize("attention_backend", ["torch", "cpu"])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 33, "max_num_seqs": 3}], ids=["whole", "chunked"])
def test_arrays_are_those_of_transformers(expected: Any, attention_backend: str, options: dict[str, int]) -> None:
    with open_model(attention_backend=attention_backend, **options) as llm:
        found = llm.score_arrays(expected[0], top=K, use_tqdm=False)
    for prompt, logprobs, arrays in zip(*expected, found, strict=True):
        n = len(prompt)
        assert arrays.token_ids.tolist() == prompt
        assert (arrays.token_ids.dtype, arrays.ids.dtype, arrays.logprobs.dtype) == (np.int32, np.int32, np.float32)
        assert arrays.ids.shape == arrays.logprobs.shape == (n, K)
        assert arrays.token_logprobs[0] == 0 and not arrays.ids[0].any() and (arrays.logprobs[0] == -np.inf).all()
        before = logprobs[:-1]
        np.testing.assert_allclose(arrays.token_logprobs[1:], before[range(n - 1), prompt[1:]], **CLOSE)
        np.testing.assert_allclose(arrays.logprobs[1:], np.take_along_axis(before, arrays.ids[1:], 1), **CLOSE)
        np.testing.assert_allclose(arrays.logprobs[1:], -np.sort(-before)[:, :K], **CLOSE)
        assert all(len({*row}) == K for row in arrays.ids[1:].tolist())


@pytest.mark.parametrize("k", [1, 5, 300])
def test_arrays_are_the_dicts_of_prompt_logprobs(random_model: Path, k: int) -> None:
    """Requests of both kinds may share steps; a text's numbers stay the same bits."""
    prompts = draw_prompts(LENGTHS)
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=k)
    with open_model(random_model, attention_backend="cpu", max_num_batched_tokens=33) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found = llm.score_arrays(prompts, k, use_tqdm=False)
    for output, arrays in zip(outputs, found, strict=True):
        for i, values in enumerate(output["prompt_logprobs"][1:], 1):
            own = output["prompt_token_ids"][i]
            assert values == {
                own: arrays.token_logprobs[i],
                **dict(zip(arrays.ids[i], arrays.logprobs[i], strict=True)),
            }


def test_scores_may_begin_after_the_first_chunk(random_model: Path) -> None:
    """No step before that one has arrays whose width could be taken. So it is with a single token."""
    (prompt,) = draw_prompts([100])
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=3, prompt_logprob_start=90)
    with open_model(random_model, attention_backend="cpu", max_num_batched_tokens=33) as llm:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        (whole,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3), use_tqdm=False)
        (alone,) = llm.score_arrays([[7]], 3, use_tqdm=False)
    assert output["prompt_logprobs"] == [None] * 90 + whole["prompt_logprobs"][90:]
    assert alone.ids.shape == (1, 3)


def test_ranks_give_the_same_arrays(random_model: Path, local_ranks: None) -> None:
    runs = []
    for size in (1, 2):
        with open_model(random_model, tensor_parallel_size=size, max_num_batched_tokens=50) as llm:
            runs.append(llm.score_arrays(draw_prompts([1, 40, 90]), 9, use_tqdm=False))
    for one, two in zip(*runs, strict=True):
        np.testing.assert_array_equal(one.ids, two.ids)
        np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-3)  # logits of order 30
        np.testing.assert_allclose(one.token_logprobs, two.token_logprobs, atol=1e-3)


def test_what_cannot_be_scored_is_refused(random_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_model(random_model) as llm:
        for top in (0, llm.engine.config.vocab_size + 1):
            with pytest.raises(ValueError, match=f"top is {top}"):
                llm.score_arrays([[1, 2]], top)
        with pytest.raises(ValueError, match=r"130 tokens.*at most 129"):
            llm.score_arrays([[1] * 130])
        with monkeypatch.context() as changed:
            changed.setattr(llm.engine, "config", replace(llm.engine.config, data_parallel_size=2))
            with pytest.raises(ValueError, match="data_parallel_size is 2"):
                llm.score_arrays([[1, 2]])
        assert llm.score_arrays([]) == []
        assert len(llm.score_arrays([[1, 2]], use_tqdm=False)) == 1
        with torch.no_grad():
            llm.engine.runner.model.norm.fill_(torch.nan)
        with pytest.raises(RuntimeError, match="NaN"):
            llm.score_arrays([[3, 4, 5]], use_tqdm=False)
