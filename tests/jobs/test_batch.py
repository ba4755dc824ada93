"""Batch jobs without a model: formats, bad lines, and what is left after whatever ends a job."""

import bz2
import gzip
import io
import json
import logging
import lzma
import re
import shutil
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.batch_jobs import InstantLLM, openai_line, read_answers, run, texts_by_id, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.apps.cli import main
from nanovllm.apps.jobs.compact_sets import DigestSet, LineSet
from nanovllm.apps.jobs.job import Status
from nanovllm.apps.jobs.request_lines import LineError, prepare_request, read_num_logprobs, read_request_line
from nanovllm.apps.jobs.source import Line
from nanovllm.config import EngineConfig
from nanovllm.engine.sequence import derive_seed
from nanovllm.sampling_params import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]
LINES = [openai_line(f"id-{i}", prompt="x" * (i + 1)) for i in range(30)]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "nanovllm")
    return caplog


# ---- formats


def test_a_chat_is_answered_in_openais_format(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [openai_line("a", messages=HELLO, model="some-model", logprobs=None, n=1)])
    assert run(source, tmp_path / "out") == Status.OK
    (answer,) = read_answers(tmp_path / "out")
    assert answer["id"] == "batch_req_1" and answer["custom_id"] == "a" and answer["error"] is None
    assert answer["response"]["status_code"] == 200
    body = answer["response"]["body"]
    (choice,) = body["choices"]
    text = choice["message"]["content"]
    assert text.startswith("11 tokens, seed ")
    assert body["object"] == "chat.completion" and body["model"] == "some-model"
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "stop" and choice["index"] == 0
    assert body["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": len(text),
        "total_tokens": 11 + len(text),
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_completion_is_answered_in_openais_format(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [openai_line("a", prompt="abc", seed=5), openai_line("b", prompt=[1, 2])])
    assert run(source, tmp_path / "out") == Status.OK
    answers = {answer["custom_id"]: answer["response"]["body"] for answer in read_answers(tmp_path / "out")}
    assert answers["a"]["object"] == "text_completion"
    assert answers["a"]["choices"][0]["text"] == "3 tokens, seed 5"
    assert answers["b"]["usage"]["prompt_tokens"] == 2


def test_plain_lines_are_known_by_their_number_and_blank_ones_are_passed_over(tmp_path: Path) -> None:
    lines = [{"prompt": "ab", "seed": 1}, b"", b"  ", {"messages": HELLO, "seed": 2}, b'\t{"prompt":"x","seed":3}\r']
    assert run(write_lines(tmp_path / "in", lines), tmp_path / "out") == Status.OK
    assert texts_by_id(tmp_path / "out") == {"1": "2 tokens, seed 1", "4": "11 tokens, seed 2", "5": "1 tokens, seed 3"}
    assert all(answer["custom_id"] is None for answer in read_answers(tmp_path / "out"))


def test_a_byte_order_mark_and_a_last_line_without_newline_are_read(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}')
    assert run(tmp_path / "in", tmp_path / "out") == Status.OK
    assert len(read_answers(tmp_path / "out")) == 2


def test_packed_input_gives_the_same_results(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", LINES)
    (tmp_path / "in.gz").write_bytes(gzip.compress(source.read_bytes()))
    assert run(source, tmp_path / "out") == run(tmp_path / "in.gz", tmp_path / "out-gz") == Status.OK
    assert texts_by_id(tmp_path / "out") == texts_by_id(tmp_path / "out-gz")


def request_of(line: dict[str, Any]) -> Any:
    llm: Any = InstantLLM(EngineConfig("some-model", max_model_len=1000))
    request = prepare_request(read_request_line(Line(7, json.dumps(line).encode())), llm, "some-model")
    return request.prompt_token_ids.tolist(), request.params


def test_every_sampling_field_reaches_the_engine() -> None:
    fields = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "max_tokens": 9, "seed": 4, "stop": ["a"]}
    fields |= {"stop_token_ids": [1], "ignore_eos": True, "skip_special_tokens": False, "n": 3, "min_tokens": 2}
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "logit_bias": {"7": -100}}
    fields |= {"include_stop_str_in_output": True, "allowed_token_ids": [3, 4], "bad_words": ["b"]}
    for line in ({"prompt": "x", **fields}, openai_line("a", messages=HELLO, **fields)):
        _, params = request_of(line)
        lists = {"stop": ("a",), "stop_token_ids": (1,), "allowed_token_ids": (3, 4), "bad_words": ("b",)}
        expected = {**fields, **lists, "logit_bias": {7: -100.0}}
        assert {name: getattr(params, name) for name in fields} == expected


def test_the_defaults_are_openais_for_its_lines_and_the_librarys_for_plain_ones() -> None:
    assert request_of(openai_line("a", messages=HELLO))[1].max_tokens == 1000  # to the end of the model's length
    assert request_of(openai_line("a", prompt="x"))[1].max_tokens == 16
    assert request_of({"prompt": "x"})[1].max_tokens == 64
    assert request_of(openai_line("a", messages=HELLO, max_completion_tokens=5))[1].max_tokens == 5
    for line in ({"prompt": "x", "seed": None}, {"prompt": "x", "seed": -1}):
        assert request_of(line)[1].seed == derive_seed(0, "7")
    assert request_of(openai_line("a", prompt="x", seed=-1))[1].seed == derive_seed(0, "a")
    assert request_of({"prompt": "x"})[1].temperature == 1.0  # the model's generation_config


def test_a_line_may_ask_for_fewer_tokens_than_the_models_defaults_do(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = SamplingParams(min_tokens=20, bad_words=[[5], [6, 7]])
    monkeypatch.setattr(InstantLLM, "get_default_sampling_params", lambda llm: defaults)
    for body, min_tokens in (({}, 20), ({"max_tokens": 3}, 3), ({"min_tokens": 0}, 0), ({"max_tokens": None}, 20)):
        _, params = request_of({"prompt": "x", **body})
        assert (params.min_tokens, params.bad_words) == (min_tokens, ((5,), (6, 7)))
    assert request_of({"prompt": "x", "bad_words": ["a", [8]]})[1].bad_words == ("a", (8,))


def test_defaults_that_cannot_be_had_stop_a_job_before_its_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """They are no error of each line: an error is a result, and stays."""

    def refuse(llm: InstantLLM) -> SamplingParams:
        raise ValueError("this engine does not have num_beams (4)")

    source = write_lines(tmp_path / "in", LINES)
    with monkeypatch.context() as patch:
        patch.setattr(InstantLLM, "get_default_sampling_params", refuse)
        assert run(source, tmp_path / "out") == Status.USAGE
    assert "does not have num_beams (4)" in log.text and "Traceback" not in log.text
    assert not (tmp_path / "out").read_bytes()
    assert run(source, tmp_path / "out") == Status.OK


def test_a_resumed_job_has_the_tokenizer_of_its_option_or_is_refused(
    reciter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tmp_path / "tokenizer"
    model = tmp_path / "model"
    shutil.copytree(reciter, tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(reciter, model, ignore=shutil.ignore_patterns("tokenizer*"))
    source = write_lines(tmp_path / "in", [{"prompt": "a", "max_tokens": 3, "temperature": 0}] * 2)
    out = tmp_path / "out"
    engine = ["--model", str(model), "--device", "cpu", "--attention-backend", "torch"]
    command = ["run-batch", "-i", str(source), "-o", str(out), *engine, "--tokenizer", str(tokenizer)]
    assert main(command) == Status.OK
    assert texts_by_id(out) == {"1": "bcd", "2": "bcd"}
    for _ in range(2):
        out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])  # as if it had been killed
        assert main(command) == Status.OK
    out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])
    (tokenizer / "chat_template.jinja").write_text("another")
    assert main(command) == Status.USAGE
    assert "engine.tokenizer was" in caplog.text
    assert main([*command, "--accept-changes"]) == Status.OK
    for name in ("tokenizer.json", "chat_template.jinja"):  # the model's own, which are not read
        out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])
        (model / name).write_text("another")
        assert main(command) == Status.OK
    out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates" / "tool_use.jinja").write_text("a template with a name")
    assert main(command) == Status.USAGE


def test_a_jobs_values_are_those_of_lines_that_have_none_and_they_belong_to_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        openai_line("a", prompt="a"),
        openai_line("b", messages=HELLO, temperature=None, max_completion_tokens=9),
        {"prompt": "abc", "temperature": 0.5, "max_tokens": 3},
    ]
    made: list[InstantLLM] = []
    monkeypatch.setattr("nanovllm.apps.jobs.run.load_llm", lambda config: made.append(InstantLLM(config)) or made[0])
    source = write_lines(tmp_path / "in", lines)
    command = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--model", "m", "--max-model-len", "100"]
    assert main([*command, "--temperature", "0", "--max-tokens", "7", "--stop", '["x", "y"]']) == Status.OK
    params = {len(token_ids): params for token_ids, params in made[0].requests}
    assert [(p.temperature, p.max_tokens, p.stop) for _, p in sorted(params.items())] == [
        (0, 7, ("x", "y")),
        (0.5, 3, ("x", "y")),
        (0, 9, ("x", "y")),
    ]
    assert main(command) == Status.USAGE, "results of another job"
    assert main([*command, "--overwrite", "--temperature", "-1"]) == Status.USAGE and len(made) == 1


@pytest.mark.parametrize(("most", "listed"), [(20, 4), (2, 3)])
def test_the_summary_tells_each_kind_of_error_with_the_first_and_the_file_of_counts_more(
    most: int, listed: int, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanovllm.apps.jobs.counts.MAX_KINDS", most)
    bad = [{"prompt": "x", "top_p": 7}, {"prompt": "x", "top_p": 8}, b"[1]", {"prompt": ""}, {"x": 1}]
    stats = tmp_path / "stats"
    assert run(write_lines(tmp_path / "in", [LINES[0], *bad]), tmp_path / "out", stats=str(stats)) == 1
    counts = json.loads(stats.read_text())
    assert sum(error["count"] for error in counts["errors"]) == 5 and len(counts["errors"]) == listed
    for error in counts["errors"]:
        assert f"{error['count']} x {error['code']}, the first: {error['first']}" in log.text
    assert counts["tokens_per_hour"] == pytest.approx(3600 * counts["tokens_per_second"], rel=1e-3)
    assert counts["load_seconds"] < 600 and counts["peak_memory_bytes"] > 10 << 20


def test_the_counts_of_tokens_are_the_sums_of_the_results(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    stats = tmp_path / "stats"
    run(write_lines(tmp_path / "in", [*LINES[:5], {"prompt": ""}]), tmp_path / "out", stats=str(stats))
    usages = [answer["response"]["body"]["usage"] for answer in read_answers(tmp_path / "out") if not answer["error"]]
    counts = json.loads(stats.read_text())
    assert counts["num_prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages) == 1 + 2 + 3 + 4 + 5
    assert counts["num_generated_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert counts["num_cached_tokens"] == len(usages)  # this engine finds one token of each prompt
    assert counts["cache_hit_rate"] == round(5 / 15, 4)
    assert "15 prompt tokens, 33.3% of them from the prefix cache; " in log.text


def test_the_chat_template_gets_its_arguments_and_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    line = {"messages": [{"role": "user", "content": parts}], "chat_template_kwargs": {"think": 0}}
    assert "".join(map(chr, request_of(line)[0])) == "<user>a\nb{'think': 0}"


def test_logprobs_come_in_the_form_of_the_url(tmp_path: Path) -> None:
    lines = [openai_line("a", messages=HELLO, logprobs=True, top_logprobs=2), openai_line("b", prompt="x", logprobs=2)]
    lines += [openai_line("c", messages=HELLO, logprobs=True), openai_line("d", messages=HELLO, logprobs=False)]
    lines += [openai_line("e", messages=HELLO, logprobs=False, top_logprobs=0)]
    assert run(write_lines(tmp_path / "in", lines), tmp_path / "out") == Status.OK
    by_id = {a["custom_id"]: a["response"]["body"]["choices"][0] for a in read_answers(tmp_path / "out")}
    first = by_id["a"]["logprobs"]["content"][0]
    assert first["token"] == "1" and first["bytes"] == [ord("1")] and first["logprob"] == -0.5
    assert [top["token"] for top in first["top_logprobs"]] == ["3", "1"]
    of_b = by_id["b"]["logprobs"]
    assert of_b["tokens"] == list(by_id["b"]["text"]) and of_b["text_offset"] == list(range(len(of_b["tokens"])))
    assert of_b["token_logprobs"][0] == -0.5 and of_b["top_logprobs"][0] == {"3": -0.1, "1": -0.5}
    assert by_id["c"]["logprobs"]["content"][0]["top_logprobs"] == []
    assert by_id["d"]["logprobs"] is by_id["e"]["logprobs"] is None


def test_what_is_next_to_impossible_is_written_as_openai_does(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [openai_line("a", prompt="x", logprobs=3)])
    assert run(source, tmp_path / "out") == Status.OK
    body = read_answers(tmp_path / "out")[0]["response"]["body"]
    assert body["choices"][0]["logprobs"]["top_logprobs"][0] == {"3": -0.1, "1": -0.5, "2": -9999.0}


# ---- bad lines

CHAT_LINE = openai_line("bad", messages=HELLO)


def with_body(**fields: Any) -> dict[str, Any]:
    return openai_line("bad", prompt="x", **fields)


def with_chat(**fields: Any) -> dict[str, Any]:
    return {**CHAT_LINE, "body": {**CHAT_LINE["body"], **fields}}


BAD_LINES = {
    "torn": (b'{"prompt": "a', "invalid_json", "Unterminated string"),
    "not an object": (b"[1]", "invalid_json", "not an object"),
    "not utf-8": (b'{"prompt": "\xff"}', "invalid_json", "utf-8"),
    "not a number": (b'{"prompt": "a", "temperature": NaN}', "invalid_json", "NaN"),
    "a field twice": (b'{"prompt": "a", "seed": 1, "seed": 2}', "invalid_json", "twice"),
    "too deep": (b'{"prompt":' + b"[" * 200000, "invalid_json", "recursion"),
    "neither": ({"text": "a"}, "invalid_request", '"prompt", "messages" and "input"'),
    "both": ({"prompt": "a", "messages": HELLO}, "invalid_request", '"prompt", "messages" and "input"'),
    "id of a wrong kind": ({**CHAT_LINE, "custom_id": 5}, "invalid_request", "custom_id is 5"),
    "empty id": ({**CHAT_LINE, "custom_id": ""}, "invalid_request", "custom_id is ''"),
    "unprintable id": ({**CHAT_LINE, "custom_id": "\ud800"}, "invalid_request", "surrogates"),
    "no url": ({"custom_id": "bad", "method": "POST", "body": {}}, "invalid_request", "url is None"),
    "another url": ({**CHAT_LINE, "url": "/v1/responses"}, "invalid_request", "/v1/responses"),
    "another method": ({**CHAT_LINE, "method": "GET"}, "invalid_request", "GET"),
    "a field beside the body": ({**CHAT_LINE, "priority": 1}, "invalid_request", "'priority'"),
    "unknown field": (with_body(tempereture=1), "invalid_request", "did you mean 'temperature'"),
    "unknown field, null": (with_body(tempereture=None), "invalid_request", "'tempereture'"),
    "a completion's field": (with_chat(prompt="x"), "invalid_request", "'prompt'"),
    "a chat's field": (with_body(top_logprobs=2), "invalid_request", "'top_logprobs'"),
    "several answers, all the same": (
        with_body(n=2, temperature=0),
        "invalid_request",
        "n is 2; it must be 1 at temperature 0",
    ),
    "too many answers": (with_body(n=129), "invalid_request", "n is 129; it must be from 1 to 128"),
    "true for one": (with_body(n=True), "invalid_request", "n is True"),
    "a bias": (with_chat(logit_bias={"5": "a"}), "invalid_request", "logit_bias"),
    "a bias of no token": (with_chat(logit_bias={"a": 1}), "invalid_request", "a token id of logit_bias is 'a'"),
    "bad words": (with_chat(bad_words="a"), "invalid_request", "bad_words is 'a'"),
    "a stream": (with_chat(stream=True), "invalid_request", "stream is True"),
    "echo": (with_chat(echo=True), "invalid_request", "echo is True"),
    "a penalty": (with_chat(presence_penalty=2.5), "invalid_request", "presence_penalty is 2.5"),
    "tools": (with_chat(tools=[{"type": "function"}]), "invalid_request", "tools is"),
    "a user that is none": (with_chat(user=5), "invalid_request", "user is 5"),
    "parallel calls of tools": (
        with_chat(parallel_tool_calls=True, tools=[{"type": "function"}]),
        "invalid_request",
        "tools is",
    ),
    "another model": (with_chat(model="gpt-4o"), "invalid_request", "--served-model-name"),
    "temperature": (with_chat(temperature=-1), "invalid_request", "temperature is -1"),
    "temperature, a string": (with_chat(temperature="hot"), "invalid_request", "temperature is 'hot'"),
    "temperature, beyond floats": (with_chat(temperature=10**400), "invalid_request", "temperature is 1000"),
    "no tokens": (with_chat(max_tokens=0), "invalid_request", "max_tokens is 0"),
    "two limits": (with_chat(max_tokens=5, max_completion_tokens=5), "invalid_request", "give one"),
    "stop": (with_chat(stop={"a": 1}), "invalid_request", "stop is"),
    "stop tokens": (with_chat(stop_token_ids=5), "invalid_request", "stop_token_ids is 5"),
    "a word for a flag": (with_chat(ignore_eos="no"), "invalid_request", "ignore_eos is 'no'"),
    "template": (with_chat(chat_template_kwargs=[]), "invalid_request", "chat_template_kwargs is []"),
    "chat logprobs as a number": (with_chat(logprobs=3), "invalid_request", "logprobs is 3"),
    "top_logprobs alone": (with_chat(top_logprobs=3), "invalid_request", "it needs logprobs"),
    "top_logprobs of none": (
        with_chat(logprobs=False, top_logprobs=5),
        "invalid_request",
        "5; it needs logprobs: true",
    ),
    "too many logprobs": (with_chat(logprobs=True, top_logprobs=21), "invalid_request", "from 0 to 20"),
    "completion logprobs as a flag": (with_body(logprobs=True), "invalid_request", "logprobs is True"),
    "several prompts": (openai_line("bad", prompt=["a", "b"]), "invalid_request", "one prompt a line"),
    "no prompt": (openai_line("bad"), "invalid_request", "prompt is None"),
    "an empty prompt": (openai_line("bad", prompt=""), "invalid_request", "0 tokens"),
    "too long": (openai_line("bad", prompt="x" * 1000), "invalid_request", "1000 tokens"),
    "no messages": (openai_line("bad", messages=[]), "invalid_request", "messages is []"),
    "a message's field": (with_chat(messages=[{**HELLO[0], "mood": "x"}]), "invalid_request", "the field 'mood'"),
    "an assistant's field": (with_chat(messages=[{**HELLO[0], "reasoning": "x"}]), "invalid_request", "'reasoning'"),
    "reasoning of a wrong kind": (
        with_chat(messages=[{"role": "assistant", "content": "x", "reasoning": ["y"]}]),
        "invalid_request",
        "the reasoning ['y']; it must be a string",
    ),
    "a message's name": (with_chat(messages=[{**HELLO[0], "name": 5}]), "invalid_request", "the name 5"),
    "a role": (with_chat(messages=[{"role": "wizard", "content": "x"}]), "invalid_request", "'wizard'"),
    "a picture": (
        with_chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        "invalid_request",
        "text",
    ),
    "no content": (with_chat(messages=[{"role": "user", "content": None}]), "invalid_request", "message 0"),
    "calls that are no list": (
        with_chat(messages=[{"role": "assistant", "tool_calls": "a"}]),
        "invalid_request",
        "message 0 has the tool_calls 'a'",
    ),
    "a call of nothing": (
        with_chat(messages=[HELLO[0], {"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]}]),
        "invalid_request",
        "message 1 has the tool_calls",
    ),
}


@pytest.mark.parametrize(("line", "code", "words"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_an_error_with_its_number_and_the_run_goes_on(
    line: Any, code: str, words: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    source = write_lines(tmp_path / "in", [LINES[0], line, LINES[1]])
    assert run(source, tmp_path / "out") == Status.LINES_FAILED
    answers = {answer["id"]: answer for answer in read_answers(tmp_path / "out")}
    assert sorted(answers) == ["batch_req_1", "batch_req_2", "batch_req_3"]
    error = answers["batch_req_2"]["error"]
    assert error["code"] == code and error["line"] == 2
    response = answers["batch_req_2"]["response"]
    assert response["status_code"] == 400 and response["request_id"] == "req_2"
    assert response["body"]["error"]["message"] == error["message"] and response["body"]["error"]["code"] == code
    assert error["message"].startswith("line 2: ") and words in error["message"]
    assert answers["batch_req_1"]["error"] is answers["batch_req_3"]["error"] is None
    assert "2 results, 1 errors" in log.text


def test_fields_that_ask_for_nothing_are_taken() -> None:
    neutral = {
        "n": 1,
        "stream": False,
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "logit_bias": {},
        "tools": None,
        "functions": [],
        "function_call": "none",
        "modalities": ["text"],
        "suffix": "",
    }
    for form in ({"type": "text"}, {"type": "text", "json_schema": None}):
        request_of(openai_line("a", messages=HELLO, **neutral, response_format=form, stop=None))
    for name, value in {"function_call": "auto", "functions": [{"name": "f"}], "modalities": ["text", "audio"]}.items():
        with pytest.raises(LineError, match=f"{name} is .* not supported, other than as"):
            request_of(openai_line("a", messages=HELLO, **{name: value}))


OPENAI_FIELDS = (
    *("audio", "best_of", "echo", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs"),
    *("max_completion_tokens", "max_tokens", "metadata", "modalities", "moderation", "n", "parallel_tool_calls"),
    *("prediction", "presence_penalty", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier", "stop", "store", "stream"),
    *("stream_options", "suffix"),
    *("temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity", "web_search_options"),
)


def test_openais_fields_may_be_null_and_are_refused_with_a_value_that_is_not_supported() -> None:
    chat_alone = {"max_completion_tokens", "top_logprobs"}
    nulls = dict.fromkeys(OPENAI_FIELDS)
    plain = dict.fromkeys(set(OPENAI_FIELDS) - chat_alone)
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": None, "tool_calls": None}
    assert request_of(openai_line("a", messages=[*HELLO, answer], **nulls))
    assert request_of(openai_line("a", prompt="x", **plain))
    for name, value in {"audio": "x", "moderation": {"model": "m"}, "stream_options": {}}.items():
        with pytest.raises(LineError, match=f"{name} is .* not supported, other than as null"):
            request_of(openai_line("a", prompt="x", **{name: value}))
    with pytest.raises(LineError, match="message 0 has the field 'refusal', which is 'no'"):
        request_of(openai_line("a", messages=[{**answer, "refusal": "no"}]))


def test_fields_for_a_service_are_taken_and_echoed_where_openai_does(tmp_path: Path) -> None:
    service = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    }
    lines = [
        openai_line("a", messages=HELLO, **service),
        openai_line("b", prompt="x", **service),
        openai_line("c", prompt="x"),
    ]
    assert run(write_lines(tmp_path / "in", lines), tmp_path / "out") == Status.OK
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in read_answers(tmp_path / "out")}
    assert bodies["a"]["service_tier"] == bodies["b"]["service_tier"] == "default" and "service_tier" not in bodies["c"]


def read_messages(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a line as the chat template gets them."""
    from nanovllm.features.conversations import read_conversation

    llm: Any = InstantLLM(EngineConfig("some-model", max_model_len=1000))
    seen: list[Any] = []
    llm.render_chat = lambda messages, kwargs: seen.extend(read_conversation(messages)) or "x"
    prepare_request(read_request_line(Line(1, json.dumps({"messages": messages}).encode())), llm, "some-model")
    return seen


def test_a_developer_is_the_system_and_a_name_reaches_the_template() -> None:
    messages = ({"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi", "name": "Ann"})
    assert read_messages(*messages) == [{"role": "system", "content": "be brief"}, messages[1]]


SAID = {"role": "assistant", "content": "x"}
THOUGHT = {**SAID, "reasoning": "y", "reasoning_content": "y"}
CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}, SAID),
        ({"refusal": "", "annotations": None, "audio": {}, "function_call": {}, "tool_calls": []}, SAID),
        ({"reasoning": None, "tool_calls": []}, SAID),
        ({"content": None, "reasoning": None, "tool_calls": []}, {**SAID, "content": ""}),
        ({"reasoning": "", "reasoning_content": ""}, SAID),
        ({"reasoning": "y"}, THOUGHT),
        ({"reasoning_content": "y", "reasoning": None, "tool_calls": []}, THOUGHT),
        ({"reasoning": "y", "reasoning_content": "z"}, {**THOUGHT, "reasoning_content": "z"}),
        ({"reasoning": "y", "content": None}, {**THOUGHT, "content": ""}),  # the thinking was cut
        ({"content": None, "tool_calls": CALLS, "annotations": []}, {**SAID, "content": "", "tool_calls": CALLS}),
    ],
)
def test_the_message_of_a_result_may_be_said_again(message: dict[str, Any], expected: dict[str, Any]) -> None:
    """The forms are those of our results, of openai's `model_dump()`, and of vLLM's server."""
    assert read_messages(HELLO[0], {**SAID, **message}, HELLO[0]) == [HELLO[0], expected, HELLO[0]]


# ---- what concerns all lines


def test_a_job_whose_every_line_names_another_model_ends_before_one_is_loaded(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    lines = [openai_line(f"id-{i}", messages=HELLO, model="gpt-4o mini") for i in range(5)]
    source = write_lines(tmp_path / "in", [b"{", *lines])
    assert run(source, tmp_path / "out", {"no such option": 1}) == Status.USAGE
    assert "--served-model-name 'gpt-4o mini'" in log.text and not (tmp_path / "out").exists()
    assert run(source, tmp_path / "out", model_name="gpt-4o mini") == Status.LINES_FAILED
    for other in (openai_line("x", prompt="x"), openai_line("x", prompt="x", model="gpt-5"), {"prompt": "x"}):
        assert (
            run(write_lines(tmp_path / "in", [*lines, other]), tmp_path / "out", overwrite=True) == Status.LINES_FAILED
        )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a"}\n'.encode("utf-16"), "is UTF-16"),
        ('{"prompt": "a"}\n'.encode("utf-16-be"), "is UTF-16"),
        (json.dumps([{"prompt": "a"}] * 3, indent=1).encode(), "is one JSON array"),
        (gzip.compress(b'[{"prompt": "a"}]'), "is one JSON array"),
        (b'\xef\xbb\xbf[{"prompt": "a"}]', "is one JSON array"),
        (b'\r\n  [{"prompt": "a"}]', "is one JSON array"),
        (b"PAR1\x15\x04", "pandas.read_parquet("),
        (bz2.compress(b'{"prompt": "a"}\n'), "bzcat "),
        (gzip.compress(bz2.compress(b'{"prompt": "a"}\n')), "bzcat "),
        (lzma.compress(b'{"prompt": "a"}\n'), "xzcat "),
        (b"\x28\xb5\x2f\xfd\x04\x58\x81\x00\x00", "zstdcat "),
        (b"\x04\x22\x4d\x18\x64\x40\xa7", "lz4cat "),
        (b"PK\x03\x04\x14\x00\x00", "unzip -p "),
        (b"7z\xbc\xaf\x27\x1c\x00\x04", "7z e -so "),
        (gzip.compress(b"in.jsonl".ljust(512, b"\0") + b'{"prompt": "a"}\n'), "UTF-16 or binary"),
    ],
    ids=[
        "UTF-16",
        "UTF-16 without a mark",
        "array",
        "packed array",
        "array after a mark",
        "array after blanks",
        "parquet",
        "bzip2",
        "bzip2 in gzip",
        "xz",
        "Zstandard",
        "LZ4",
        "zip",
        "7-Zip",
        "tar in gzip",
    ],
)
def test_an_input_of_another_kind_is_named_once_for_all_lines(
    content: bytes, words: str, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").write_bytes(content)
    assert run(tmp_path / "in", tmp_path / "out") == Status.USAGE
    assert log.text.count(words) == 1 and "Traceback" not in log.text and not (tmp_path / "out").exists()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert run("-", tmp_path / "out") == Status.BROKEN
    assert log.text.count(words) == 2 and "Traceback" not in log.text


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_is_refused_with_the_line_that_converts_it(
    kind: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("pyarrow")
    table = pytest.importorskip("pandas").DataFrame({"prompt": ["a", "b"]})
    source = tmp_path / f"requests.{kind}"
    table.to_csv(source, index=False) if kind == "csv" else table.to_parquet(source)
    assert run(source, tmp_path / "out") == Status.USAGE
    (advice,) = re.findall(r'python -c "(.*)" converts it', log.text)
    exec(advice, {})
    assert run(f"{source}.jsonl", tmp_path / "out") == Status.OK
    assert len(read_answers(tmp_path / "out")) == 2


def test_gzip_is_known_by_its_content_and_an_empty_input_is_worth_a_warning(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = gzip.compress(write_lines(tmp_path / "plain.gz", LINES).read_bytes())
    (tmp_path / "packed").write_bytes(packed)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(packed)))
    for number, source in enumerate((tmp_path / "plain.gz", tmp_path / "packed", "-")):
        assert run(source, tmp_path / f"out-{number}") == Status.OK
        assert len(texts_by_id(tmp_path / f"out-{number}")) == len(LINES)
    assert "no requests" not in log.text
    for content in (b"", b"\n \n"):
        (tmp_path / "empty").write_bytes(content)
        assert run(tmp_path / "empty", tmp_path / "none", overwrite=True) == Status.OK
    assert log.text.count("has no requests") == 2


def test_results_are_not_packed(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    assert run(write_lines(tmp_path / "in", LINES), tmp_path / "out.jsonl.gz") == Status.USAGE
    assert "compress them afterwards" in log.text and not (tmp_path / "out.jsonl.gz").exists()


HELLO_WORLD = {"role": "user", "content": "Hello world!"}
SAMPLES = {
    "OpenAI": ("gpt-3.5-turbo-0125", "max_tokens"),
    "vLLM": ("meta-llama/Meta-Llama-3-8B-Instruct", "max_completion_tokens"),
}
"""The model and the limit in the sample file of each documentation; all else is alike."""


@pytest.mark.parametrize(("model", "limit"), SAMPLES.values(), ids=SAMPLES)
def test_the_sample_files_of_openai_and_vllm_run(model: str, limit: str, tmp_path: Path) -> None:
    lines = [
        openai_line(
            f"request-{number}",
            model=model,
            messages=[{"role": "system", "content": f"You are {kind} assistant."}, HELLO_WORLD],
            **{limit: 1000},
        )
        for number, kind in ((1, "a helpful"), (2, "an unhelpful"))
    ]
    source = write_lines(tmp_path / "in", lines)
    command = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--model", "tiny-qwen3"]
    command += ["--max-model-len", "128", "--kvcache-memory-bytes", str(8 << 20)]
    assert main(command) == Status.USAGE
    assert main([*command, "--served-model-name", model]) == Status.OK
    for answer in read_answers(tmp_path / "out"):
        body = answer["response"]["body"]
        assert body["model"] == model and body["choices"][0]["message"]["content"] and body["usage"]["total_tokens"]


def test_an_id_seen_before_is_an_error_whatever_became_of_the_line_before(tmp_path: Path) -> None:
    lines = [openai_line("a", prompt=""), openai_line("a", prompt="x"), {"prompt": "x"}, openai_line("3", prompt="x")]
    lines += [{**openai_line("b", prompt="x"), "url": "?"}, openai_line("b", prompt="x")]
    assert run(write_lines(tmp_path / "in", lines), tmp_path / "out") == Status.LINES_FAILED
    found = {a["id"][10:]: (a["custom_id"], a["error"] and a["error"]["code"]) for a in read_answers(tmp_path / "out")}
    assert found == {
        "1": ("a", "invalid_request"),
        "2": (None, "duplicate_id"),
        "3": (None, None),
        "4": ("3", None),
        "5": ("b", "invalid_request"),
        "6": (None, "duplicate_id"),
    }


@settings(max_examples=100)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=4,
    ),
    st.sampled_from(
        ["custom_id", "url", "prompt", "messages", "temperature", "stop", "seed", "top_k", "logprobs", "n"]
    ),
    st.booleans(),
)
def test_no_value_of_any_field_gets_past_line_error(value: Any, name: str, is_plain: bool) -> None:
    line = {"prompt": "x"} if is_plain else openai_line("a", messages=HELLO)
    (line if is_plain or name in line else line["body"])[name] = value
    try:
        envelope = read_request_line(Line(1, json.dumps(line).encode()))
        request_of(line)
        read_num_logprobs(envelope)
    except LineError as error:
        assert str(error)


# ---- memory


def test_ids_and_finished_lines_take_at_most_16_bytes_each_at_any_time() -> None:
    count = 100_000
    tracemalloc.start()
    ids = DigestSet()
    done = LineSet()
    for number in range(count):
        assert ids.add(f"request-{number}")
        done.add(number)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * count
    assert len(done) == count and 99_999 in done and 100_000 not in done
    assert not any(ids.add(f"request-{number}") for number in range(0, count, 97))


def test_lines_are_read_as_they_are_needed(tmp_path: Path) -> None:
    """Of an input that never ends, a job takes only what the engine has asked for, and some to tokenise meanwhile."""
    from nanovllm.apps.jobs.answering import LINES_PREPARED, Answering
    from nanovllm.apps.jobs.line_adapters import LineAdapters

    def endless() -> Iterator[Line]:
        nonlocal taken
        while True:
            taken += 1
            yield Line(taken, b'{"prompt": "x"}')

    taken = 0
    llm: Any = InstantLLM(EngineConfig("some-model"), dies_after=50)
    answers: list[Any] = []
    with pytest.raises(RuntimeError, match="died"):
        Answering(llm, answers.append, "some-model", {}, LineAdapters(llm)).answer(endless())
    assert len(answers) == 50 and taken <= 50 + 8 + LINES_PREPARED


def test_the_bar_of_a_job_moves_while_its_first_line_runs(
    tmp_path: Path, reciter: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanovllm.apps.jobs.job import Job
    from nanovllm.apps.jobs.run import run_job
    from nanovllm.utils.progress import ProgressBar

    def restless(*given: Any, **options: Any) -> ProgressBar:
        return ProgressBar(*given, **options | {"mininterval": 0})

    monkeypatch.setattr("nanovllm.apps.jobs.counts.ProgressBar", restless)
    source = write_lines(tmp_path / "in", [{"prompt": "a", "max_tokens": 20, "temperature": 0}])
    config = EngineConfig(str(reciter), max_model_len=64)
    assert run_job(Job(str(source), str(tmp_path / "out"), config, "m")) == Status.OK
    drawn = {part for part in capfd.readouterr().err.split("\r") if "0/1" in part}
    assert len(drawn) > 10 and any("1 running, none has ended yet" in part for part in drawn)
