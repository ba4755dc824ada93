"""Logits that are no distribution (NaN, +inf, nothing finite) end a request with an error, and nothing else."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fakes import FakeRunner, expected_tokens, make_engine, run_all
from helpers.integrity import check_scheduler
from helpers.kernel_cases import sample_case
from helpers.tiny import draw_prompts, save_random

from nanovllm import LLM, SamplingParams
from nanovllm.backends import Backend, find_backend, make_backend

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # NumPy's, of the interpreter

CPU = torch.device("cpu")
NAN = float("nan")
INF = float("inf")


@pytest.fixture(params=["torch", "cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each that samples by its own code."""
    if reason := find_backend(request.param, CPU).why_cannot(CPU):
        pytest.skip(reason)
    return make_backend(request.param)


# ---- the sampler


@pytest.mark.parametrize("vocab_size", [5, 4100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_sampler_flags_broken_rows_and_no_others(backend: Backend, dtype: torch.dtype, vocab_size: int) -> None:
    """Whatever their temperature and filters are; and every token is one of the vocabulary."""
    if dtype not in backend.dtypes:
        pytest.skip(f"{backend.name} has no {dtype}")
    everywhere = slice(None)
    breaks: list[tuple[int | slice, float]] = [
        (0, NAN),
        (vocab_size - 1, NAN),
        (vocab_size // 2, INF),
        (everywhere, NAN),
        (everywhere, -INF),
        (everywhere, INF),
    ]
    first = int(dtype == torch.float32)  # so that every kind of request is broken once, and once not
    case = sample_case(vocab_size, dtype, device=CPU)
    clean = backend.sample(*case.arguments())
    assert torch.equal(clean.checked, clean.token_ids)
    is_broken = torch.arange(len(case.logits)) % 2 == first
    for i, row in enumerate(is_broken.nonzero().flatten().tolist()):
        where, value = breaks[i % len(breaks)]
        case.logits[row, where] = value
    token_ids, checked = backend.sample(*case.arguments())
    assert ((token_ids >= 0) & (token_ids < vocab_size)).all()
    assert (checked[is_broken] == -1).all()
    assert torch.equal(checked[~is_broken], clean.token_ids[~is_broken])
    assert torch.equal(token_ids[~is_broken], clean.token_ids[~is_broken])


def test_impossible_tokens_break_nothing(backend: Backend) -> None:
    case = sample_case(5000, torch.float32, device=CPU)
    case.logits[:, 1:] = -INF  # as a mask would
    token_ids, checked = backend.sample(*case.arguments())
    assert not token_ids.any() and not checked.any()


# ---- the engine


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    """An embedding that can be poisoned without the LM head."""
    save_random(tmp_path, tie_word_embeddings=False)
    return tmp_path


PROMPTS = draw_prompts([20, 33, 1, 17, 40])
PARAMS = [SamplingParams(temperature=i % 2, seed=i, max_tokens=9 - i, logprobs=2) for i in range(len(PROMPTS))]


def open_llm(folder: Path, backend: Backend, **options: Any) -> LLM:
    options = {"kvcache_block_size": 16, "num_kvcache_blocks": 30, "max_model_len": 64} | options
    return LLM(folder, device="cpu", dtype="float32", attention_backend=backend.name, **options)


def poison(llm: LLM, token_id: int, value: float) -> torch.Tensor:
    """Break what follows a token; returns what was there."""
    row = llm.engine.runner.model.embed_tokens.weight[token_id]
    before = row.clone()
    row.copy_(torch.full_like(row, value))
    return before


@pytest.mark.parametrize(
    ("backend", "depth"),
    [("torch", 1), ("torch", 2), ("cpu", 1), ("cpu", 2), pytest.param("triton", 2, marks=pytest.mark.slow)],
    indirect=["backend"],
)
def test_a_broken_request_ends_with_its_tokens_so_far_and_the_others_go_on(
    untied: Path, backend: Backend, depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The token that a request samples third is poisoned: what follows it has NaN for logits."""
    with open_llm(untied, backend, max_num_batched_tokens=50) as llm:
        llm.engine.depth = depth
        clean = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        token_id = clean[0]["token_ids"][2]
        row = llm.engine.runner.model.embed_tokens.weight[token_id]
        before = row.clone()
        row[:] = NAN
        llm.engine.scheduler.block_manager.forget_all()
        with caplog.at_level(logging.WARNING):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        errors = 0
        for prompt, expected, output in zip(PROMPTS, clean, outputs, strict=True):
            answer = expected["token_ids"]
            if token_id in prompt + answer[:-1]:
                kept = 0 if token_id in prompt else answer.index(token_id) + 1
                assert output.finish_reason == "error" and output.token_ids == answer[:kept]
                assert len(output["logprobs"]) == kept
                assert "sequence" in output.error and "step" in output.error and "NaN" in output.error
                errors += 1
            else:
                assert output.token_ids == answer and output.error is None and "error" not in output
        assert 0 < errors < len(PROMPTS)
        said = [record.getMessage() for record in caplog.records if "ended with an error" in record.getMessage()]
        assert len(said) == 1 and f"{errors} of {len(PROMPTS)}" in said[0] and outputs[0].error in said[0]
        check_scheduler(llm.engine.scheduler)

        row[:] = before  # the engine goes on, and has forgotten what the poison has left in its cache
        again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [o["token_ids"] for o in again] == [o["token_ids"] for o in clean]
        ended = sum(len(o["token_ids"]) for outputs in (clean, outputs, again) for o in outputs)
        assert llm.stats()["num_generated_tokens"] == ended


def test_the_prefix_of_a_broken_request_is_not_reused(untied: Path) -> None:
    """A fault of memory, say: the cache is poisoned once, and the same prompt meets it once."""
    prompt = PROMPTS[4]
    params = SamplingParams(temperature=0, max_tokens=3)
    with open_llm(untied, make_backend("torch")) as llm:
        clean = llm.generate([prompt], params, use_tqdm=False)[0]
        for cache in llm.engine.runner.caches:
            cache.values.fill_(NAN)
        first, second = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
        assert first["num_cached_tokens"] == 32 and first["finish_reason"] == "error"
        assert second["num_cached_tokens"] == 0 and second["token_ids"] == clean["token_ids"]


def test_a_score_of_broken_logits_raises_and_the_engine_goes_on(untied: Path) -> None:
    with open_llm(untied, make_backend("torch")) as llm:
        clean = llm.score(PROMPTS, [[1, 2]] * len(PROMPTS), use_tqdm=False)
        token_id = PROMPTS[1][-1]
        before = poison(llm, token_id, NAN)
        llm.engine.scheduler.block_manager.forget_all()
        with pytest.raises(RuntimeError, match=r"sequence.*step.*NaN"):
            llm.score(PROMPTS, [[1, 2]] * len(PROMPTS), use_tqdm=False)
        output = llm.generate([PROMPTS[1]], SamplingParams(max_tokens=3, prompt_logprobs=0), use_tqdm=False)[0]
        assert output.finish_reason == "error" and output.token_ids == []
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) < len(PROMPTS[1])
        llm.engine.runner.model.embed_tokens.weight[token_id] = before
        assert llm.score(PROMPTS, [[1, 2]] * len(PROMPTS), use_tqdm=False) == clean
        check_scheduler(llm.engine.scheduler)


class Breaking(FakeRunner):
    """Finds the logits of one request broken, once and for all, from its n-th sampled token on."""

    seed = 0
    left = 3

    def launch(self, plan: Any, *edits: Any) -> Any:
        handle = super().launch(plan, *edits)
        seeds = [self.seeds[row] for row in plan.rows[plan.num_sampled > 0].tolist()]
        if self.seed in seeds:
            if self.left <= 0:
                handle._token_ids[seeds.index(self.seed)] = -1
            self.left -= 1
        return handle


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [8, 24])
def test_a_broken_row_among_preempted_ones_and_steps_in_flight(depth: int, num_blocks: int) -> None:
    engine = make_engine(num_blocks=num_blocks, depth=depth)
    engine.runner.__class__ = Breaking
    params = [SamplingParams(seed=i, max_tokens=20, temperature=1) for i in range(4)]
    prompts = [[i + 1] * 3 for i in range(4)]
    requests = [engine.prepare(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    ended = run_all(engine, requests)
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        tokens, reason = expected_tokens(prompt, own, i, frozenset(), 32)
        if i == 0:
            tokens = tokens[:3]
            reason = "error"
        assert (ended[i].output_token_ids, ended[i].finish_reason) == (tokens, reason)
    assert ended[0].error is not None and engine.stats()["num_generated_tokens"] == 3 + 3 * 20
    assert (engine.stats()["num_preemptions"] > 0) == (num_blocks == 8)
    check_scheduler(engine.scheduler)


def test_a_job_writes_an_error_line_and_goes_on(untied: Path, tmp_path: Path) -> None:
    from helpers.batch_jobs import openai_line

    from nanovllm.apps.jobs.answering import Answering
    from nanovllm.apps.jobs.line_adapters import LineAdapters
    from nanovllm.apps.jobs.result_lines import ResultLine, read_result_line
    from nanovllm.apps.jobs.source import Line

    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 4}
    bodies = [body, body, {"prompt": [token_id for token_id in PROMPTS[1] if token_id != PROMPTS[0][5]]}]
    lines = [openai_line(name, **one) for name, one in zip("abc", bodies, strict=True)]
    answers: list[ResultLine] = []
    with open_llm(untied, make_backend("torch")) as llm:
        poison(llm, PROMPTS[0][5], INF)
        numbered = [Line(number, json.dumps(line).encode()) for number, line in enumerate(lines, start=7)]
        Answering(llm, answers.append, "m", {}, LineAdapters(llm)).answer(numbered)
    *failed, good = sorted(answers, key=lambda answer: answer.number)
    assert good.number == 9 and good.usage is not None
    for number, custom_id, answer in zip((7, 8), "ab", failed, strict=True):
        said = json.loads(answer.line)
        assert said["response"]["status_code"] == 500 and said["custom_id"] == custom_id and answer.usage is None
        assert said["error"]["code"] == "engine_error" and "NaN" in said["error"]["message"]
        assert read_result_line(answer.line) == (number, True, "")
