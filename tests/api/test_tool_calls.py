"""Calls of tools: in conversations, in answers, and in batch jobs."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, EngineConfig, SamplingParams
from nanovllm.features.parsing.tool_calls import MOST_CALLS, split_tool_calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": "é"}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"x": 1, "y": "é"}}'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def ask(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]


# ---- in conversations


@pytest.mark.parametrize("arguments", ['{"x": [1, "2"]}', {"x": [1, "2"]}])
def test_a_template_sees_arguments_as_an_object(arguments: Any) -> None:
    from nanovllm.features.conversations import read_conversation

    messages = ask(arguments)
    read = read_conversation(messages)
    assert read[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": [1, "2"]}}
    assert messages == ask(arguments), "the caller's are as they were"
    assert read[2]["tool_call_id"] == "call_1"


@pytest.mark.parametrize("arguments", ["", None])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    from nanovllm.features.conversations import read_conversation

    assert read_conversation(ask(arguments))[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("calls", [[], (), None])
def test_a_template_sees_no_calls_where_there_are_none(calls: Any) -> None:
    from nanovllm.features.conversations import read_conversation

    """Some templates ask whether the key is there."""
    messages = ask("{}")
    messages[1] |= {"content": "x", "tool_calls": calls}
    assert read_conversation(messages)[1] == {"role": "assistant", "content": "x"}


def test_a_template_sees_no_field_that_is_null() -> None:
    """openai's objects have every field, and so have other clients' messages. A content may be null."""
    from nanovllm.features.conversations import read_conversation

    nulls = dict.fromkeys(("name", "refusal", "audio", "function_call", "tool_calls", "reasoning", "tool_call_id"))
    for message in ({"role": "assistant", "content": None}, {"role": "tool", "content": "3"}):
        assert read_conversation([{**message, **nulls}]) == [message]


@pytest.mark.parametrize("arguments", ["5", "null", '"x"', "[1]", 7, [1]])
def test_arguments_that_are_no_object_are_an_error_that_names_the_message(arguments: Any) -> None:
    from nanovllm.features.conversations import read_conversation

    with pytest.raises(ValueError, match=r"message 1 calls a tool with the arguments .* must be an object"):
        read_conversation(ask(arguments))


@pytest.mark.parametrize("calls", ["add", [3], [{"function": "add"}], [{"function": {"arguments": "{"}}]])
def test_a_bad_call_is_an_error_that_names_the_message(calls: Any) -> None:
    from nanovllm.features.conversations import read_conversation

    messages = ask("{}")
    messages[1]["tool_calls"] = calls
    with pytest.raises(ValueError, match="message 1 "):
        read_conversation(messages)


# ---- in answers


def read_calls(parser: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    content, calls = split_tool_calls(parser, text)
    assert len({call["id"] for call in calls}) == len(calls) and all(call["type"] == "function" for call in calls)
    return content, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


ADD = ("add", {"x": 1, "y": "é"})


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("hermes", CALL, ("", [ADD])),
        ("hermes", f"I add.\n{CALL}\n{CALL}\n", ("I add.", [ADD, ADD])),
        ("hermes", "none", ("none", [])),
        ("hermes", CALL[:-9], (CALL[:-9], [])),  # cut
        ("hermes", CALL + " and more", (CALL + " and more", [])),
        ("hermes", "<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", [])),
        ("llama3_json", LLAMA, ("", [ADD])),
        ("llama3_json", f"<|python_tag|>{LLAMA}; {LLAMA}", ("", [ADD, ADD])),
        ("llama3_json", LLAMA + " done", (LLAMA + " done", [])),
        ("llama3_json", "a sum", ("a sum", [])),
        ("llama3_json", '{"name": "now", "parameters": {}}', ("", [("now", {})])),
        ("llama3_json", '{"name": "Ada", "age": 36}', ('{"name": "Ada", "age": 36}', [])),  # data, and no call
        ("llama3_json", '{"x": 1}', ('{"x": 1}', [])),
        ("llama3_json", "", ("", [])),
    ],
)
def test_calls_are_read_from_an_answer_or_all_of_it_is_text(
    parser: str, text: str, expected: tuple[str, list[Any]]
) -> None:
    assert read_calls(parser, text) == expected


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"', '{"\\udfff": 1}', '["\\udc00\\ud800"]'])
def test_a_call_with_a_value_that_json_does_not_have_is_text(value: str) -> None:
    for text in (f'{{"name": "f", "arguments": {{"x": {value}}}}}', '{"name": "\\ud800", "arguments": {}}'):
        assert split_tool_calls("llama3_json", text) == (text, [])
    assert read_calls("llama3_json", r'{"name": "f", "arguments": {"x": "\ud83d\ude00"}}') == ("", [("f", {"x": "😀"})])


@pytest.mark.parametrize("within", ["<tool_call>", "</tool_call>", "; "])
@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
def test_the_marks_of_calls_may_stand_in_their_strings(parser: str, within: str) -> None:
    call = json.dumps({"name": "f", "arguments": {"x": within}})
    text = f"<tool_call>{call}</tool_call>" if parser == "hermes" else call
    assert read_calls(parser, text) == ("", [("f", {"x": within})])


HERMES_CALL = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
LLAMA_CALL = '{"name":"f","parameters":{}};'


def test_calls_beyond_the_bound_are_text() -> None:
    for parser, one in (("hermes", HERMES_CALL), ("llama3_json", LLAMA_CALL)):
        assert len(split_tool_calls(parser, one * MOST_CALLS)[1]) == MOST_CALLS
        assert split_tool_calls(parser, one * (MOST_CALLS + 1)) == (one * (MOST_CALLS + 1), [])


@pytest.mark.parametrize("one", ["<tool_call>", HERMES_CALL, LLAMA_CALL, "<tool_call>{", '{"name":', " ;"])
def test_reading_calls_takes_no_time_that_grows_with_the_square_of_the_text(one: str) -> None:
    """500,000 characters take 20 ms, where the square would take half a minute or more."""
    start = time.process_time()
    for parser in ("hermes", "llama3_json"):
        split_tool_calls(parser, one * (500_000 // len(one)))
    assert time.process_time() - start < 2


@pytest.fixture(scope="module")
def llm(reciter: Path) -> Iterator[LLM]:
    with LLM(reciter, max_model_len=256, tool_call_parser="hermes") as llm:
        yield llm


def test_an_output_has_its_calls_and_they_can_go_back_into_the_conversation(llm: LLM) -> None:
    from nanovllm.features.conversations import read_conversation

    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=0, max_tokens=100, structured_outputs={"choice": [CALL]})
    (output,) = llm.generate("a", params, use_tqdm=False)
    assert output.text == output["text"] == "" and output.tool_calls == output.outputs[0].tool_calls
    (call,) = output["tool_calls"]
    message = {"role": "assistant", "content": output.text, "tool_calls": output.tool_calls}
    assert read_conversation([message])[0]["tool_calls"][0]["function"]["arguments"] == ADD[1]
    (again,) = llm.generate("a", params, use_tqdm=False)
    assert again["tool_calls"] == [call], "with the same id"
    (plain,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert plain.tool_calls == [] and plain.text == "bcd"


def test_an_engine_without_the_option_leaves_calls_in_the_text(reciter: Path) -> None:
    with LLM(reciter, max_model_len=64) as llm:
        (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert "tool_calls" not in output and output.tool_calls == []
    with pytest.raises(ValueError, match="tool_call_parser is 'qwen'; it must be one of hermes, llama3_json"):
        LLM(reciter, tool_call_parser="qwen")


# ---- in batch jobs


def test_a_job_describes_tools_and_returns_calls(reciter: Path, tmp_path: Path) -> None:
    from helpers.batch_jobs import openai_line, read_answers, write_lines

    from nanovllm.apps.jobs.job import Job
    from nanovllm.apps.jobs.run import run_job

    pytest.importorskip("llguidance")
    folder = tmp_path / "model"
    folder.mkdir()
    for path in reciter.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    common = {"temperature": 0, "max_tokens": 100, "messages": ask('{"x": 1}')}
    lines = [
        openai_line("call", **common, tools=[TOOL], structured_outputs={"choice": [CALL]}),
        openai_line("none", **common, tools=[TOOL], tool_choice="none", structured_outputs={"choice": ["no"]}),
        openai_line("forced", **common, tools=[TOOL], tool_choice="required"),
        openai_line("bad", **common, tools=[{"type": "function"}]),
        openai_line("id", **{**common, "messages": [{"role": "tool", "content": "3", "tool_call_id": 3}]}),
    ]
    engine = EngineConfig(str(folder), max_model_len=256, tool_call_parser="hermes")
    run_job(Job(str(write_lines(tmp_path / "in", lines)), str(tmp_path / "out"), engine, "m"))
    answers = {answer["custom_id"]: answer for answer in read_answers(tmp_path / "out")}
    choice = answers["call"]["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == ADD[1]
    none = answers["none"]["response"]["body"]["choices"][0]
    assert none["message"] == {"role": "assistant", "content": "no"} and none["finish_reason"] == "stop"
    tokens = {name: answers[name]["response"]["body"]["usage"]["prompt_tokens"] for name in ("call", "none")}
    assert tokens["call"] == tokens["none"] + len("add;"), "the template saw the tools"
    errors = {name: answers[name]["error"]["message"] for name in ("forced", "bad", "id")}
    assert "tool_choice is 'required'" in errors["forced"] and "tools is" in errors["bad"]
    assert "tool_call_id 3" in errors["id"]
