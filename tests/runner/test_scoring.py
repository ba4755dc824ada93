"""Prompts are scored: their log-probabilities are transformers', whatever the batch, the chunks and the cache."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.paths import ROOT
from helpers.tiny import BLOCK, SMALL, draw_prompts, logits_of, save_random
from torch import Tensor
from transformers import Qwen3ForCausalLM

from nanovllm import LLM, EngineConfig, SamplingParams
from nanovllm.backends import Backend
from nanovllm.ops.token_logprobs import TokenLogprobs, token_logprobs_reference
from nanovllm.runner.logprobs import LOGITS_AT_A_TIME, Logprobs
from nanovllm.text.tokenizer import Tokenizer

TOLERANCE = 1e-3  # float32 logits of order 30, summed in another order
LENGTHS = [1, 2, BLOCK, BLOCK + 1, 2 * BLOCK + 1, 100]


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **SMALL | {"max_model_len": 128} | options)


def scoring(k: int = 2, start: int = 0, max_tokens: int = 0, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=k, prompt_logprob_start=start, **fields)


@pytest.fixture(scope="module")
def reference(random_model: Path) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval()


def assert_scores(found: list[Any], model: Qwen3ForCausalLM, prompt: list[int], k: int, start: int = 0) -> None:
    expected = logits_of(model, prompt).log_softmax(-1)
    assert len(found) == len(prompt)
    for position, values in enumerate(found):
        if position < max(start, 1):
            assert values is None
            continue
        logprobs = expected[position - 1]
        wanted = {prompt[position], *logprobs.topk(k).indices.tolist()}
        assert values.keys() == wanted and next(iter(values)) == prompt[position]
        assert list(values.values()) == pytest.approx([logprobs[i].item() for i in values], abs=TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 33, "max_num_seqs": 3}], ids=["whole", "chunked"])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs_are_those_of_transformers(
    options: dict[str, int], max_tokens: int, random_model: Path, reference: Qwen3ForCausalLM
) -> None:
    prompts = draw_prompts(LENGTHS)
    ks = [0, 1, 2, 5, 2, 0]
    params = [scoring(k, max_tokens=max_tokens, logprobs=1 if k else None) for k in ks]
    with engine(random_model, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        plain = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    for prompt, k, output, other in zip(prompts, ks, outputs, plain, strict=True):
        assert_scores(output["prompt_logprobs"], reference, prompt, k)
        assert (output["token_ids"], output["finish_reason"]) == (other["token_ids"][:max_tokens], "length")
        assert len(output["logprobs"] or []) == max_tokens if k else output.logprobs is None


def test_from_a_start_on_whole_cached_blocks_before_it_are_used(
    random_model: Path, reference: Qwen3ForCausalLM
) -> None:
    (prompt,) = draw_prompts([4 * BLOCK + 3])
    with engine(random_model) as llm:
        for start, cached in ((0, 0), (2 * BLOCK + 1, 2), (2 * BLOCK, 1), (BLOCK, 0), (len(prompt) - 1, 4), (1, 0)):
            (output,) = llm.generate(prompt, scoring(start=start), use_tqdm=False)
            assert output["num_cached_tokens"] == cached * BLOCK
            assert_scores(output["prompt_logprobs"], reference, prompt, 2, start)


def test_a_prompt_that_is_only_scored_runs_no_decode_and_may_have_a_token_more(
    random_model: Path, reference: Qwen3ForCausalLM
) -> None:
    prompts = draw_prompts([129, 65, 1])
    with engine(random_model, max_num_batched_tokens=400) as llm:
        outputs = llm.generate(prompts, scoring(1), use_tqdm=False)
        assert llm.stats()["num_steps"] == 1 and llm.stats()["num_generated_tokens"] == 0
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_scores(output["prompt_logprobs"], reference, prompt, 1)
            assert (output["text"], output["token_ids"], output["finish_reason"]) == ("", [], "length")
        with pytest.raises(ValueError, match=r"130 tokens.*at most 129"):
            llm.generate(prompts[0] + [0], scoring(1))
        with pytest.raises(ValueError, match=r"129 tokens.*at most 127"):
            llm.generate(prompts[0], scoring(1, max_tokens=1))
        with pytest.raises(ValueError, match=r"prompt_logprob_start is 65; it must be below .* 65 tokens"):
            llm.generate(prompts[1], scoring(1, start=65))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"max_tokens": 0}, r"max_tokens is 0; .* or 0 with prompt_logprobs"),
        ({"prompt_logprob_start": 3}, "prompt_logprob_start is 3; .* unless prompt_logprobs"),
        ({"prompt_logprobs": 1, "prompt_logprob_start": -1}, "prompt_logprob_start is -1"),
    ],
)
def test_what_cannot_be_scored_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_ranks_score_alike(random_model: Path, local_ranks: None) -> None:
    prompts = draw_prompts([1, 40, 90])
    params = [scoring(3, start=0), scoring(1, start=20), scoring(0, max_tokens=4, logprobs=1)]
    runs = []
    for size in (1, 2):
        with engine(random_model, tensor_parallel_size=size, max_num_batched_tokens=50) as llm:
            runs.append(llm.generate(prompts, params, use_tqdm=False))
    for one, two in zip(*runs, strict=True):
        assert one["token_ids"] == two["token_ids"]
        for a, b in zip(one["prompt_logprobs"], two["prompt_logprobs"], strict=True):
            assert (a is None) == (b is None) and (a is None or a == pytest.approx(b, abs=TOLERANCE))


# ---- LLM.score


def test_score_gives_each_continuation_its_logprobs(random_model: Path, reference: Qwen3ForCausalLM) -> None:
    contexts = draw_prompts([3, 50, 50, 1])
    endings = draw_prompts([4, 1, 7, 128], seed=1)
    contexts[2] = contexts[1]
    with engine(random_model) as llm:
        best = llm.generate(contexts[1], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)[0]["token_ids"]
        scores = llm.score([*contexts, contexts[1]], [*endings, best], use_tqdm=False)
        assert llm.score(contexts[0], endings[0], use_tqdm=False) == scores[:1]
        for bad, message in (([], "pair 1: the continuation has no tokens"), ([500], "pair 1: .* token id 500")):
            with pytest.raises(ValueError, match=message):
                llm.score(contexts[:2], [endings[0], bad])
        with pytest.raises(ValueError, match="3 continuations for 4 prompts"):
            llm.score(contexts, endings[:3])
    for context, ending, score in zip([*contexts, contexts[1]], [*endings, best], scores, strict=True):
        expected = logits_of(reference, context + ending)[len(context) - 1 : -1].log_softmax(-1)
        logprobs = expected[range(len(ending)), ending].tolist()
        assert score["token_ids"] == ending
        assert score["logprobs"] == pytest.approx(logprobs, abs=TOLERANCE)
        assert score["logprob"] == pytest.approx(sum(logprobs), abs=len(ending) * TOLERANCE)
        assert score["is_greedy"] == (expected.argmax(-1).tolist() == ending)
    assert scores[-1]["is_greedy"] and not scores[0]["is_greedy"]


def test_of_equally_likely_tokens_only_the_first_is_greedy(tmp_path: Path) -> None:
    model = save_random(tmp_path, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[100:] = model.lm_head.weight[100]
        model.lm_head.weight[:100] = 0
        model.lm_head.weight[:50] = model.lm_head.weight[100]
    model.save_pretrained(tmp_path)
    with engine(tmp_path) as llm:
        for prompt in draw_prompts([5, 9, 14, 20]):
            (output,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            greedy = output["token_ids"][0]
            assert greedy in (0, 50)
            scores = llm.score([prompt] * 4, [[greedy], [greedy + 1], [greedy + 49], [200]], use_tqdm=False)
            assert [score["is_greedy"] for score in scores] == [True, False, False, False]


def test_strings_are_joined_before_they_are_tokenised_and_spaces_move_over() -> None:
    with LLM("tiny-qwen3", dtype="float32", max_model_len=64) as llm:
        encode = llm.get_tokenizer().encode
        for context, ending in (("What is 2", " plus 2?"), ("What is 2 ", "plus 2?"), ("What is", "2")):
            (score,) = llm.score(context, ending, use_tqdm=False)
            assert score["token_ids"] == encode(context + ending)[len(encode(context.rstrip())) :]
        assert llm.score("What is 2", " plus", use_tqdm=False) == llm.score("What is 2 ", "plus", use_tqdm=False)
        with pytest.raises(ValueError, match="the prompt has no tokens"):
            llm.score(" ", "x")


def test_strings_are_tokenised_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode_batch
    calls = []

    def counted(self: Tokenizer, texts: list[str], *rest: Any) -> list[list[int]]:
        calls.append(len(texts))
        return encode(self, texts, *rest)

    monkeypatch.setattr(Tokenizer, "encode_batch", counted)
    with LLM("tiny-qwen3", dtype="float32", max_model_len=64) as llm:
        assert len(llm.score(["What is 2"] * 9, [" plus"] * 9, use_tqdm=False)) == 9
        assert calls == [9, 9], "the prompts, and each with its continuation: not pair by pair"
        with pytest.raises(ValueError, match="pair 3: the text cannot be tokenised"):
            llm.score(["a"] * 9, ["b", "c", "d", "\ud800", *"fghij"], use_tqdm=False)


def test_a_completion_with_echo_has_the_scores_of_its_prompt(tmp_path: Path) -> None:
    from helpers.batch_jobs import openai_line, read_answers, write_lines

    from nanovllm.apps.jobs.job import Job
    from nanovllm.apps.jobs.run import run_job

    bodies = [
        {"prompt": "What is 2", "echo": True, "logprobs": 2, "max_tokens": 3},
        {"prompt": "What is 2", "echo": True, "logprobs": 0, "max_tokens": 0},
        {"prompt": [40, 41], "echo": True, "max_tokens": 2},
        {"prompt": "What is 2", "max_tokens": 3, "logprobs": 1},
    ]
    lines = [openai_line(str(i), temperature=0, **body) for i, body in enumerate(bodies)]
    config = EngineConfig("tiny-qwen3", dtype="float32", max_model_len=64)
    assert run_job(Job(str(write_lines(tmp_path / "in", lines)), str(tmp_path / "out"), config, "m")) == 0
    answers = {answer["custom_id"]: answer["response"]["body"] for answer in read_answers(tmp_path / "out")}
    both, scored, ids, plain = (answers[str(i)]["choices"][0] for i in range(4))
    with LLM("tiny-qwen3", dtype="float32", max_model_len=64) as llm:
        (output,) = llm.generate("What is 2", scoring(2, max_tokens=3, logprobs=2), use_tqdm=False)
        assert ids["text"].startswith(llm.get_tokenizer().decode([40, 41])) and ids["logprobs"] is None
    prompt = output["prompt_token_ids"]
    generated = output["token_ids"]
    assert both["text"] == "What is 2" + output["text"] == "What is 2" + plain["text"]
    assert scored["text"] == "What is 2" and answers["1"]["usage"]["completion_tokens"] == 0
    found = both["logprobs"]
    assert [len(found[name]) for name in found] == [len(prompt) + len(generated)] * 4
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    expected = [values[i] for i, values in zip(prompt[1:], output["prompt_logprobs"][1:], strict=True)]
    assert found["token_logprobs"][1 : len(prompt)] == pytest.approx(expected, abs=TOLERANCE)
    assert scored["logprobs"]["token_logprobs"] == pytest.approx(found["token_logprobs"][: len(prompt)], abs=TOLERANCE)
    assert scored["logprobs"]["tokens"] == found["tokens"][: len(prompt)]
    assert "".join(found["tokens"]).startswith("What is 2")
    starts = [sum(map(len, found["tokens"][:i])) for i in range(len(found["tokens"]))]
    assert found["text_offset"] == starts


def test_log_probabilities_of_samples_come_from_the_logits_that_were_sampled_from(
    random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CUDA graphs the LM head is multiplied once a step, and edits do not change what is reported."""
    bias = {7: 50.0}
    with engine(random_model) as llm:
        model = llm.engine.runner.model
        compute = model.compute_logits
        calls: list[int] = []
        monkeypatch.setattr(model, "compute_logits", lambda hidden: (calls.append(len(hidden)), compute(hidden))[1])
        params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True, logit_bias=bias)
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    assert calls == [1] * 5
    assert output["token_ids"] == [7] * 5
    expected = logits_of(Qwen3ForCausalLM.from_pretrained(random_model, dtype=torch.float32).eval(), [1, 2, 3, 7, 7])
    for values, logits in zip(output["logprobs"], expected[2:].log_softmax(-1), strict=False):
        assert len(values) == 4
        assert values[7] == pytest.approx(logits[7].item(), abs=TOLERANCE)


# ---- memory

PEAK = """
import resource, sys
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", max_model_len=8192, num_kvcache_blocks=128, kvcache_block_size=64)
k = int(sys.argv[2])
params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=None if k < 0 else k)
(output,) = llm.generate([[i % 150_000 for i in range(5_000)]], params, use_tqdm=False)
assert k < 0 or len(output["prompt_logprobs"]) == 5_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_scoring_a_long_prompt_takes_bounded_memory(tmp_path: Path) -> None:
    save_random(tmp_path, vocab_size=151_936, max_position_embeddings=8192)

    def peak(k: int) -> int:
        command = [sys.executable, "-c", PEAK, str(tmp_path), str(k)]
        environment = {**os.environ, "OMP_NUM_THREADS": "2"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    with_scores = peak(5)
    without = peak(-1)
    print(f"peaks: {with_scores / 2**20:.0f} MiB with scores, {without / 2**20:.0f} without")
    # All logits of the prompt at once would take 5,000 x 151,936 x 4 bytes: 2.8 GiB.
    assert with_scores - without < 2 << 30


def test_scores_of_16_k_tokens_take_16_kernels() -> None:
    """One reads each row of logits once. Only the likeliest tokens, if they are asked for, take smaller pieces."""
    calls: list[int] = []

    class Counting(Backend):
        @staticmethod
        def token_logprobs(logits: Tensor, token_ids: Tensor) -> TokenLogprobs:
            calls.append(len(logits))
            return token_logprobs_reference(logits, token_ids)

    logits = torch.zeros(16 << 10, 8)
    pieces = [(logits, torch.zeros(len(logits), dtype=torch.int32))]
    Logprobs(pieces, np.zeros(len(logits), np.int32), Counting())
    assert calls == [LOGITS_AT_A_TIME] * 16
