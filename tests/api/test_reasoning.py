"""Thinking is split from the answer, grammars hold for the answer, and nothing else changes."""

import itertools
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT
from helpers.tiny import END, save_reciter

from nanovllm import LLM, EngineConfig, SamplingParams
from nanovllm.features.parsing.thinking import ThinkingTokens
from nanovllm.text.tokenizer import Tokenizer

SAID = "<think>bc</think>\nde"
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says SAID after "a", and goes on from wherever a prompt ends; 1 2 tab 1 2 ... never ends."""
    folder = tmp_path_factory.mktemp("thinker")
    said = ["a", "<think>", "b", "c", "</think>", "Ċ", "d", "e", END]
    calls = ["Ġ", "q", "<tool_call>", "r", END]
    cycles = [["]", "<think>"], said, calls, ["ĉ", "1", "2"]]  # the template of chats ends with "]"
    save_reciter(folder, cycles=cycles, more_tokens=["<think>", "</think>", "<tool_call>"])
    return folder


@pytest.fixture(scope="module", params=["plain", "drafts"])
def llm(thinker: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    options: dict[str, Any] = {"speculative_config": drafts} if request.param == "drafts" else {}
    with LLM(thinker, max_model_len=64, reasoning_parser="qwen3", **options) as llm:
        yield llm


def answer(llm: LLM, prompt: str, **fields: Any) -> tuple[str | None, str, str]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, **fields})
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.reasoning == output["reasoning"] == output.outputs[0].reasoning
    assert output.outputs[0].text == output.text
    return output["reasoning"], output["text"], output["finish_reason"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("bc", "de", "stop")),
        ("a<think>", ("bc", "de", "stop")),  # the template opened it
        ("a<think>\n\n</think>", (None, "\nde", "stop")),  # the template closed it
        ("<think>b", (None, "c</think>\nde", "stop")),  # without a template only the very end counts
        ("x", (None, "x" * 12, "length")),  # no thinking
        ("<think>\t", ("12\t12\t12\t12\t", "", "length")),  # the thinking was cut
        ("<think>b<|turn|>a", ("bc", "de", "stop")),  # what an earlier message holds does not count
        ("<think>b<|turn|>x", (None, "x" * 12, "length")),
        ("b</think><|turn|>a", ("bc", "de", "stop")),
        ("is <think> a tag? Or </think>? a", ("bc", "de", "stop")),
        ("is </think> a tag? Or <think>? x", (None, "x" * 12, "length")),
        ("<think> ", ("q", "<tool_call>r", "stop")),  # as Qwen3.5 may write
        (" ", (None, "q<tool_call>r", "stop")),
    ],
)
def test_thinking_is_what_the_prompt_or_the_output_opened(
    prompt: str, expected: tuple[str | None, str, str], llm: LLM
) -> None:
    assert answer(llm, prompt) == expected


def test_a_call_of_a_tool_ends_thinking_that_nothing_else_ends(thinker: Path) -> None:
    tokenizer = Tokenizer(thinker)
    thinking = ThinkingTokens(tokenizer)

    def split(said: str, **options: Any) -> list[str] | None:
        output = tokenizer.encode_batch([said])[0]
        place = thinking.find_answer([], output, **options)
        if place is None:
            return None
        start, end, answer = place
        return [tokenizer.decode(ids, False) for ids in (output[start:end], output[answer:])]

    assert split("<think>q<tool_call>r") == ["q", "<tool_call>r"]
    assert split("<think><tool_call>") == ["", "<tool_call>"]
    assert split("<think>q<tool_call>r</think>s<tool_call>") == ["q<tool_call>r", "s<tool_call>"]
    assert split("<think>q<tool_call>r", ends_with_call=False) == ["q<tool_call>r", ""]
    assert split("q<tool_call>r") is None


def test_a_stop_ends_either_part(llm: LLM) -> None:
    assert answer(llm, "a", stop="e") == ("bc", "d", "stop")
    assert answer(llm, "a", stop="c") == ("b", "", "stop")
    assert answer(llm, "a", stop="c</think>") == ("b", "", "stop")  # a stop may reach from one part into the other
    assert answer(llm, "a", stop="bc</think>\nd") == ("", "", "stop")
    assert answer(llm, "a", stop="c</think>\nd", include_stop_str_in_output=True) == ("bc", "d", "stop")
    assert answer(llm, "a", max_tokens=4) == ("bc", "", "length")  # the last token is </think>
    assert answer(llm, "a", detokenize=False) == (None, "", "stop")


def test_every_completion_is_split(llm: LLM) -> None:
    params = SamplingParams(temperature=1, top_k=1, n=2, max_tokens=12)
    (output,) = llm.generate("a", params, use_tqdm=False)
    assert [(one.reasoning, one.text) for one in output.outputs] == [("bc", "de")] * 2


def test_a_stream_of_tokens_gives_everything(llm: LLM) -> None:
    assert "".join(llm.stream_tokens("a", GREEDY)) == SAID


def test_tokens_are_those_of_an_engine_without_the_option(llm: LLM, thinker: Path) -> None:
    prompts = ["a", "a<think>", "x", "<think>\t"]
    with LLM(thinker, max_model_len=64) as plain:
        expected = plain.generate(prompts, GREEDY, use_tqdm=False)
    found = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert expected[0].text == SAID and expected[0].reasoning is None and "reasoning" not in expected[0]


@pytest.mark.parametrize(
    ("prompt", "form", "expected"),
    [
        ("a", {"choice": ["de", "xy"]}, ("bc", "de")),
        ("a<think>", {"choice": ["de", "xy"]}, ("bc", "de")),
        ("a<think>", {"choice": ["xy"]}, ("bc", "xy")),
        ("a</think>", {"choice": ["de", "xy"]}, (None, "de")),
        ("x", {"choice": ["de", "xy"]}, (None, "xy")),  # it could have thought, and did not
        ("<think>\t", {"choice": ["de"]}, ("12\t12\t12\t12\t", "")),
        ("<think> ", {"choice": ["de"]}, ("q<tool_call>r", "")),  # the grammar has not begun
        ("abc</think>\nde<|turn|>a", {"regex": "[0-9]{3}"}, ("bc", None)),  # drafts know what follows
    ],
)
def test_a_grammar_holds_for_what_follows_the_thinking(
    prompt: str, form: dict[str, Any], expected: tuple[str | None, str | None], llm: LLM
) -> None:
    pytest.importorskip("llguidance")
    reasoning, text, _ = answer(llm, prompt, structured_outputs=form)
    assert reasoning == expected[0]
    assert text == expected[1] if expected[1] is not None else text.isdecimal() and len(text) == 3


def test_a_chat_template_opens_or_closes_the_thinking(llm: LLM) -> None:
    template = "{{ messages[0].content }}<think>{% if enable_thinking is false %}</think>{% endif %}"
    chat = [{"role": "user", "content": "a"}]
    (open_,) = llm.chat(chat, GREEDY, use_tqdm=False, chat_template=template)
    (closed,) = llm.chat(
        chat, GREEDY, use_tqdm=False, chat_template=template, chat_template_kwargs={"enable_thinking": False}
    )
    assert (open_.reasoning, open_.text) == ("bc", "de") and (closed.reasoning, closed.text) == (None, "\nde")


MESSAGES = ("hello", "is <think> a tag?", "is </think> a tag?", "<think>x</think>", "</think>\n", "say <think>")
ENDINGS = {
    "[assistant]": None,
    "[assistant]<think>\n": True,
    "[assistant]<think>\nWell, ": True,
    "[assistant]<think>\n\n</think>\n\n": False,
    "[assistant]<think></think>Well, ": False,
}
"""{text that a template writes for the answer: whether it opens the thinking, closes it, or neither}"""


def write_template(ending: str) -> str:
    """Return a chat template whose marks of roles are plain text, as in the distillates of DeepSeek-R1."""
    loop = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    return loop + "{% if add_generation_prompt %}" + ending + "{% endif %}"


def is_opened(tokenizer: Tokenizer, messages: list[dict[str, str]], **options: Any) -> bool | None:
    from nanovllm.features.conversations import render_conversations

    (text,) = render_conversations([messages], tokenizer, options)
    token_ids = tokenizer.encode_batch([text], add_special_tokens=False)[0]
    found = ThinkingTokens(tokenizer).is_opened_by(token_ids, text)
    assert ThinkingTokens(tokenizer).is_opened_by(token_ids, pickle.loads(pickle.dumps(text))) is found
    return found


@pytest.mark.parametrize("ending", ENDINGS)
def test_only_what_the_template_writes_for_the_answer_opens_or_closes_it(ending: str, thinker: Path) -> None:
    tokenizer = Tokenizer(thinker)
    template = write_template(ending)
    for system, user, tool in itertools.product(MESSAGES, repeat=3):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        messages.append({"role": "tool", "content": tool})
        assert is_opened(tokenizer, messages, chat_template=template) is ENDINGS[ending], messages
        assert is_opened(tokenizer, messages, chat_template=template, add_generation_prompt=False) is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("<think>\nLet me", True),
        ("<think>x</think>It is", False),
        ("</think>It is", False),
        ("It is", None),
        ("is <think> a tag?", True),
    ],
)
@pytest.mark.parametrize("mark", ["[{{ m.role }}]", ""])
@pytest.mark.parametrize("ending", ["", "<think>", "[assistant]<think>\n", "<think>\n\n</think>\n\n"])
def test_the_tags_of_a_message_that_is_continued_count(
    content: str, expected: bool | None, mark: str, ending: str, thinker: Path
) -> None:
    """They alone count, also if the template ignores add_generation_prompt and ends in a tag of its own."""
    tokenizer = Tokenizer(thinker)
    template = f"{{% for m in messages %}}{mark}{{{{ m.content }}}}{{% endfor %}}{ending}"
    options = {"add_generation_prompt": False, "continue_final_message": True, "chat_template": template}
    for said in MESSAGES:
        messages = [{"role": "user", "content": said}, {"role": "assistant", "content": content}]
        assert is_opened(tokenizer, messages, **options) is expected
    assert is_opened(tokenizer, messages[1:], **options) is expected


def test_thinking_that_the_template_writes_for_a_continued_message_counts(thinker: Path) -> None:
    tokenizer = Tokenizer(thinker)
    loop = "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}"
    template = f"{loop}</think>{{% endif %}}{{{{ m.content }}}}{{% endfor %}}<think>"
    messages = [{"role": "user", "content": "say <think>"}]
    messages.append({"role": "assistant", "content": "It is", "reasoning_content": "hm"})
    for field, expected in ((True, False), ("reasoning_content", True)):
        options = {"add_generation_prompt": False, "continue_final_message": field, "chat_template": template}
        assert is_opened(tokenizer, messages, **options) is expected


def test_a_template_that_always_opens_the_answer_counts_at_the_very_end(thinker: Path) -> None:
    tokenizer = Tokenizer(thinker)
    for said in MESSAGES:
        for end, expected in (("[assistant]", None), ("<think>\n", True), ("<think>\n\n</think>\n\n", False)):
            template = "{{ messages[0].content }}" + end
            for adds in (True, False):
                options = {"chat_template": template, "add_generation_prompt": adds}
                assert is_opened(tokenizer, [{"role": "user", "content": said}], **options) is expected


def test_token_ids_that_a_caller_has_changed_count_for_themselves(thinker: Path) -> None:
    from nanovllm.features.conversations import render_conversations

    tokenizer = Tokenizer(thinker)
    thinking = ThinkingTokens(tokenizer)
    options = {"chat_template": write_template("<think>")}
    (text,) = render_conversations([[{"role": "user", "content": "a"}]], tokenizer, options)
    token_ids = tokenizer.encode_batch([text], add_special_tokens=False)[0]
    assert thinking.is_opened_by(token_ids, text) is True
    assert thinking.is_opened_by([*token_ids, *b"bc", thinking.close], text) is False
    assert thinking.is_opened_by(token_ids[:-1], text) is None


@pytest.mark.parametrize("content", ["is <think> a tag?", "is </think> a tag?"])
def test_tags_in_messages_change_no_answer(content: str, llm: LLM) -> None:
    chat = [{"role": "user", "content": content}]
    prompt = llm.render_chat(chat)
    found = [*llm.chat(chat, GREEDY, use_tqdm=False), *llm.generate(prompt, GREEDY, use_tqdm=False)]
    found += [output for _, output in llm.stream([(prompt, GREEDY)])]
    found.append(llm.submit(prompt, GREEDY).result(timeout=60))
    assert {(output.reasoning, output.text) for output in found} == {("bc", "de")}
    assert {type(output.prompt) for output in found} == {str}


def test_tags_in_messages_move_no_grammar(llm: LLM) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(temperature=0, max_tokens=12, structured_outputs={"choice": ["xy"]}, bad_words=["<think>"])
    chats = [[{"role": "user", "content": content}] for content in MESSAGES]
    outputs = llm.chat(chats, params, use_tqdm=False)
    assert {(output.reasoning, output.text) for output in outputs} == {(None, "xy")}


def test_a_model_without_the_tokens_is_refused(reciter: Path) -> None:
    with pytest.raises(ValueError, match="reasoning_parser needs a tokenizer with the tokens <think> and </think>"):
        LLM(reciter, reasoning_parser="qwen3")
    with pytest.raises(ValueError, match="reasoning_parser is 'qwen'; it must be one of qwen3, deepseek_r1"):
        LLM(reciter, reasoning_parser="qwen")


def test_the_answers_of_a_job_have_the_reasoning(thinker: Path, tmp_path: Path) -> None:
    from helpers.batch_jobs import openai_line, read_answers, write_lines

    from nanovllm.apps.jobs.job import Job
    from nanovllm.apps.jobs.run import run_job

    bodies: dict[str, Any] = {
        "one": {"messages": [{"role": "user", "content": "a"}]},
        "two": {"prompt": "x"},
        "three": {"prompt": "a"},
        "four": {"messages": [{"role": "user", "content": "is <think> a tag?"}]},
    }
    lines = [openai_line(name, **body, max_tokens=12, temperature=0) for name, body in bodies.items()]
    config = EngineConfig(str(thinker), max_model_len=64, reasoning_parser="qwen3")
    source = write_lines(tmp_path / "in", lines)
    assert run_job(Job(str(source), str(tmp_path / "out"), config, "m")) == 0
    found = {a["custom_id"]: a["response"]["body"]["choices"][0] for a in read_answers(tmp_path / "out")}
    for name in ("one", "four"):
        assert found[name]["message"] == {"role": "assistant", "content": "de", "reasoning": "bc"}
    assert (found["two"]["text"], found["two"]["reasoning"]) == ("x" * 12, None)
    assert (found["three"]["text"], found["three"]["reasoning"]) == ("de", "bc")


def test_the_page_runs_as_it_is_written(thinker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "answers.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        code = block.replace("Qwen/Qwen3-0.6B", str(thinker))
        exec(code.replace('="hermes")', '="hermes", max_model_len=200)'), names)
    names["llm"].close()
    assert capsys.readouterr().out.startswith("bc\nde\n") and len(blocks) == 4
