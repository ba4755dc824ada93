"""n completions of a prompt, and the parameters that shape the text."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import SMALL, draw_prompts, make_tokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.engine.sequence import derive_seed

LONG, SHORT = draw_prompts([70, 5])


@pytest.mark.parametrize("seed", [3, -2, 2**64 - 1])
def test_the_first_completion_has_the_seed_and_each_other_one_of_its_own(seed: int, llm: LLM) -> None:
    (output,) = llm.generate(LONG, SamplingParams(1.5, 12, n=3, seed=seed), use_tqdm=False)
    seeds = [seed, *(derive_seed(seed, i) for i in (1, 2))]
    alone = llm.generate([LONG] * 3, [SamplingParams(1.5, 12, seed=s) for s in seeds], use_tqdm=False)
    assert [one.token_ids for one in output.outputs] == [one["token_ids"] for one in alone]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert output["outputs"] is output.outputs
    assert output["token_ids"] == output.outputs[0]["token_ids"]


def test_without_a_seed_prompts_draw_what_they_would_with_one_completion_each(random_model: Path) -> None:
    """The request counter advances once a prompt."""
    found = []
    for n in (1, 4):
        with LLM(random_model, **SMALL) as llm:
            outputs = llm.generate([LONG, SHORT, LONG], SamplingParams(1.5, 8, n=n), use_tqdm=False)
            found.append([output["token_ids"] for output in outputs])
            assert ("outputs" in outputs[0]) == (n > 1)
            assert len(outputs[0].outputs) == n
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}, {"max_num_seqs": 2}], ids=str)
def test_the_full_blocks_of_a_prompt_are_computed_once_and_the_prompt_counts_once(
    options: dict[str, Any], random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(random_model, **SMALL | options) as llm:
        launch = llm.engine.runner.launch
        computed = []

        def watch(plan: Any, *edits: Any) -> Any:
            computed.append(plan.num_tokens)
            return launch(plan, *edits)

        monkeypatch.setattr(llm.engine.runner, "launch", watch)
        (output,) = llm.generate(LONG, SamplingParams(1.0, 9, n=5, seed=1), use_tqdm=False)
        stats = llm.stats()
    tail = len(LONG) % 16
    decodes = sum(len(one.token_ids) - 1 for one in output.outputs)
    assert sum(computed) == len(LONG) - tail + 5 * tail + decodes
    assert (stats["num_prompt_tokens"], stats["num_cached_tokens"]) == (len(LONG), 0)
    assert stats["num_generated_tokens"] == decodes + 5
    assert stats["num_free_blocks"] == stats["num_blocks"]


def test_a_stream_yields_a_prompt_when_its_last_completion_has_ended(llm: LLM) -> None:
    params = [SamplingParams(1.5, 20, n=n, seed=2, stop_token_ids=list(range(0, 500, 9))) for n in (4, 1, 3)]
    seen = dict(llm.stream([(prompt, p) for prompt, p in zip([LONG, SHORT, SHORT], params, strict=True)]))
    assert sorted(seen) == [0, 1, 2]
    assert [len(seen[i].outputs) for i in range(3)] == [4, 1, 3]
    assert all(one.finish_reason in ("stop", "length") for output in seen.values() for one in output.outputs)
    assert len({len(one.token_ids) for one in seen[0].outputs}) > 1, "they end at different times"


def test_left_early_a_stream_leaves_no_completion_behind(llm: LLM) -> None:
    for _ in llm.stream([(SHORT, SamplingParams(1.0, 3, n=2)), (LONG, SamplingParams(1.0, 30, n=3))]):
        break
    assert not llm.engine.has_work
    assert llm.stats()["num_free_blocks"] == llm.stats()["num_blocks"]


def test_the_loop_of_steps_returns_one_completion_and_refuses_to_lose_others(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"n is 3; .* one completion"):
        llm.add_request(SHORT, SamplingParams(1.0, 4, n=3, seed=1))
    assert llm.is_finished()


@pytest.mark.slow
def test_few_completions_wait_beyond_those_that_run(llm: LLM) -> None:
    """A prompt is taken in while fewer than twice max_num_seqs sequences wait, however many its own are."""
    most = 2 * llm.engine.config.max_num_seqs
    waiting = llm.engine.scheduler.waiting
    for _ in llm.stream((SHORT, SamplingParams(1.0, 2, n=7)) for _ in range(most)):
        assert len(waiting) < most + 7


def test_prompt_logprobs_are_computed_once_and_logprobs_are_each_one_s(llm: LLM) -> None:
    params = SamplingParams(1.0, 4, n=2, seed=4, logprobs=1, prompt_logprobs=0)
    (output,) = llm.generate(LONG, params, use_tqdm=False)
    assert len(output["prompt_logprobs"]) == len(LONG)
    for one in output.outputs:
        assert one.cumulative_logprob == pytest.approx(
            sum(v[i] for v, i in zip(one.logprobs, one.token_ids, strict=True))
        )
        assert one["cumulative_logprob"] == one.cumulative_logprob


def test_the_choices_of_a_line_come_in_order_and_count_together(reciter: Path) -> None:
    from helpers.batch_jobs import openai_line

    from nanovllm.apps.jobs.request_lines import prepare_request, read_request_line
    from nanovllm.apps.jobs.result_lines import make_result_line
    from nanovllm.apps.jobs.source import Line

    wanted = {"n": 3, "temperature": 5.0, "seed": 1, "max_tokens": 6}
    chat = openai_line("a", messages=[{"role": "user", "content": "a"}], **wanted)
    text = openai_line("b", prompt="a", echo=True, logprobs=0, **wanted)
    with LLM(reciter, max_model_len=64) as llm:
        for line in (chat, text):
            envelope = read_request_line(Line(1, json.dumps(line).encode(), 0))
            ((_, output),) = llm.stream([prepare_request(envelope, llm, "some-model")])
            answer = json.loads(make_result_line(envelope, output, "some-model", llm.token_text).line)
            body = answer["response"]["body"]
            choices = body["choices"]
            assert [choice["index"] for choice in choices] == [0, 1, 2]
            texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
            assert texts == [("a" if line is text else "") + one.text for one in output.outputs]
            assert len(set(texts)) == 3
            assert body["usage"]["completion_tokens"] == sum(len(one.token_ids) for one in output.outputs)
    given = [len(choice["logprobs"]["tokens"]) - body["usage"]["prompt_tokens"] for choice in choices]
    assert given == [len(one.token_ids) for one in output.outputs]


# ---- the text

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def reciting(reciter: Path) -> LLM:
    return LLM(reciter, max_model_len=64)


def answer(llm: LLM, prompt: str = "a", **params: Any) -> Any:
    return llm.generate([prompt], SamplingParams(0, 30, **params), use_tqdm=False)[0]


def test_what_ended_the_text_is_included_if_asked(reciting: LLM) -> None:
    assert answer(reciting, stop="de")["text"] == "bc"
    included = answer(reciting, stop="de", include_stop_str_in_output=True)
    assert (included["text"], included["stop_reason"]) == ("bcde", "de")
    d = TOKENIZER.token_to_id("d")
    assert answer(reciting, stop_token_ids=[d])["text"] == "bc"
    assert answer(reciting, stop_token_ids=[d], include_stop_str_in_output=True)["text"] == "bcd"
    # "xyz" is one token, of which the stop string is the first two thirds
    assert answer(reciting, "v", stop="xy", include_stop_str_in_output=True)["text"] == "wxy"
    whole = answer(reciting, "v", include_stop_str_in_output=True, skip_special_tokens=False)["text"]
    assert whole == "wxyz<|end|>"


def test_a_stop_string_before_min_tokens_is_part_of_the_text(reciting: LLM) -> None:
    assert answer(reciting, stop=["c", "gh", "j"], min_tokens=2)["text"] == "bcdef"
    assert answer(reciting, stop=["c", "gh", "j"], min_tokens=8)["text"] == "bcdefghi"
    assert answer(reciting, stop=["gh"], min_tokens=6)["text"] == "bcdef", "a match may begin before"
    assert answer(reciting, stop=["c"], min_tokens=1)["text"] == "b"


def test_text_that_nobody_wants_is_not_made(reciting: LLM) -> None:
    output = answer(reciting, detokenize=False)
    assert (output["text"], output["token_ids"]) == ("", answer(reciting)["token_ids"])
    with pytest.raises(ValueError, match=r"detokenize is False; it must be True if there are stop strings"):
        SamplingParams(stop="a", detokenize=False)
    for params in ({"detokenize": False}, {"n": 2, "temperature": 1.0}):
        with pytest.raises(ValueError, match="a stream gives the text of one completion"):
            list(reciting.stream_tokens("a", SamplingParams(**params)))


def test_a_stream_of_text_ends_with_what_is_included(reciting: LLM) -> None:
    params = SamplingParams(0, 30, stop="de", include_stop_str_in_output=True)
    assert "".join(reciting.stream_tokens("a", params)) == "bcde"
