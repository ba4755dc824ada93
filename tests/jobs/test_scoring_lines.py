"""Lines for scores, rankings and classes get what LLM.rerank and LLM.classify say, and bad ones stop no others."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.batch_jobs import ask, read_answers, write_lines
from helpers.tiny import save_text_classifier

from nanovllm import LLM
from nanovllm.apps.cli import main
from nanovllm.apps.jobs.forms import prepare_line
from nanovllm.apps.jobs.job import Job, Status
from nanovllm.apps.jobs.request_lines import LineError, read_request_line
from nanovllm.apps.jobs.reuse import name_request
from nanovllm.apps.jobs.run import run_job
from nanovllm.apps.jobs.source import Line
from nanovllm.config import EngineConfig

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 96, "num_kvcache_blocks": 64}
SCORE = "/v1/score"
RERANK = "/v1/rerank"
CLASSIFY = "/v1/classify"
QUERY = "what is 12 + 5?"
DOCUMENTS = ["12 + 5 = 17", "apples", "17 and 4", "count"]
CHAT = [{"role": "user", "content": "what is 3 + 4?"}, {"role": "assistant", "content": "3 + 4 = 7"}]
RANKED = [
    *(ask(SCORE, f"score {i}", text_1=QUERY, text_2=text) for i, text in enumerate(DOCUMENTS)),
    ask(SCORE, "one for all", queries=[QUERY], documents=DOCUMENTS, user="somebody"),
    ask(SCORE, "one each", data_1=DOCUMENTS, data_2=DOCUMENTS[::-1]),
    ask(SCORE, "items", queries=QUERY, items=DOCUMENTS, model="tiny"),
    ask(RERANK, "all", query=QUERY, documents=DOCUMENTS),
    ask(RERANK, "two", query=QUERY, documents=[{"text": text} for text in DOCUMENTS], top_n=2),
    ask(RERANK, "bare", query=QUERY, documents=DOCUMENTS, top_n=0, return_documents=False),
    ask(RERANK, "more", query=QUERY, documents=DOCUMENTS, top_n=99, return_documents=None),
    ask(RERANK, "bad", query=QUERY, documents=[]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """{number of labels: the folder of a model with a head}."""
    found = {}
    for num_labels in (1, 3):
        found[num_labels] = tmp_path_factory.mktemp("head")
        save_text_classifier(found[num_labels], num_labels)
    return found


def run(model: Path | str, lines: list[Any], folder: Path, **changes: Any) -> dict[str, Any]:
    """{custom_id: the body of the answer} of a job; the last line is a bad one."""
    source = write_lines(folder / "in", lines)
    job = Job(str(source), str(folder / "out"), EngineConfig(str(model), **OPTIONS | changes), "tiny")
    assert run_job(job) == Status.LINES_FAILED
    answers = read_answers(folder / "out")
    assert len(answers) == len(lines) and [a["custom_id"] for a in answers if a["error"]] == ["bad"]
    assert run_job(job) == Status.LINES_FAILED and read_answers(folder / "out") == answers  # nothing is run again
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in answers if answer["error"] is None}
    for body in bodies.values():
        assert body["model"] == "tiny" and body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] > 0
    return bodies


def read_scores(body: dict[str, Any]) -> list[float]:
    assert body["object"] == "list" and body["id"].startswith("score-")
    assert [(one["index"], one["object"]) for one in body["data"]] == [(i, "score") for i in range(len(body["data"]))]
    return [one["score"] for one in body["data"]]


@pytest.mark.parametrize("kind", ["a head", "yes or no"])
def test_pairs_get_the_scores_of_rerank(kind: str, folders: dict[int, Path], tmp_path: Path) -> None:
    model: Path | str = folders[1] if kind == "a head" else "tiny-qwen3"
    options = {"attention_backend": "cpu", "max_model_len": 256}
    bodies = run(model, RANKED, tmp_path, **options)
    with LLM(model, **OPTIONS | options) as llm:
        ranked = llm.rerank(QUERY, DOCUMENTS)
        each = [llm.rerank(a, [b])[0].relevance_score for a, b in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    scores = [one.relevance_score for one in sorted(ranked, key=lambda one: one.index)]
    assert [read_scores(bodies[f"score {i}"])[0] for i in range(len(DOCUMENTS))] == scores
    assert read_scores(bodies["one for all"]) == read_scores(bodies["items"]) == scores
    assert read_scores(bodies["one each"]) == each
    found = [
        {"index": one.index, "relevance_score": one.relevance_score, "document": {"text": one.document}}
        for one in ranked
    ]
    assert bodies["all"]["results"] == bodies["more"]["results"] == found and bodies["all"]["id"] == "rerank-8"
    assert bodies["two"]["results"] == found[:2]
    for one in found:
        del one["document"]
    assert bodies["bare"]["results"] == found


@pytest.mark.parametrize("num_labels", [1, 3])
def test_texts_and_conversations_get_the_classes_of_classify(
    num_labels: int, folders: dict[int, Path], tmp_path: Path
) -> None:
    lines = [
        ask(CLASSIFY, "text", input=QUERY),
        ask(CLASSIFY, "texts", input=[QUERY, *DOCUMENTS], user="somebody"),
        ask(CLASSIFY, "ids", input=[[5, 6], [7]]),
        ask(CLASSIFY, "raw", input=DOCUMENTS, use_activation=False),
        ask(CLASSIFY, "chat", messages=CHAT),
        ask(CLASSIFY, "bad", input=""),
    ]
    bodies = run(folders[num_labels], lines, tmp_path, attention_backend="cpu")
    with LLM(folders[num_labels], **OPTIONS, attention_backend="cpu") as llm:
        text = llm.get_tokenizer().apply_chat_template(CHAT, tokenize=False)  # it opens no further answer
        given = {"text": [QUERY], "texts": [QUERY, *DOCUMENTS], "ids": [[5, 6], [7]], "raw": DOCUMENTS, "chat": [text]}
        for name, prompts in given.items():
            found = llm.classify(prompts, use_tqdm=False)
            assert bodies[name]["object"] == "list" and bodies[name]["id"].startswith("classify-")
            assert bodies[name]["data"] == [
                {
                    "index": i,
                    "label": one.label,
                    "probs": (one.scores if name == "raw" else one.probs).tolist(),
                    "num_classes": num_labels,
                }
                for i, one in enumerate(found)
            ]
            assert bodies[name]["usage"]["prompt_tokens"] == sum(len(one.prompt_token_ids) for one in found)


def test_a_score_before_its_activation_is_the_difference_of_the_logits(
    folders: dict[int, Path], tmp_path: Path
) -> None:
    from math import exp

    for model in (folders[1], "tiny-qwen3"):
        asked = {"query": QUERY, "documents": DOCUMENTS, "return_documents": False}
        lines = [ask(RERANK, "made", **asked), ask(RERANK, "raw", **asked, use_activation=False), RANKED[-1]]
        where = tmp_path / Path(model).name
        where.mkdir()
        bodies = run(model, lines, where, max_model_len=256)
        made, raw = ([one["relevance_score"] for one in bodies[name]["results"]] for name in ("made", "raw"))
        assert made == pytest.approx([1 / (1 + exp(-score)) for score in raw], rel=1e-5)


WRONG = [
    (SCORE, {}, "it must be text_1 and text_2, or queries and documents"),
    (SCORE, {"text_1": "a"}, "is ['text_1']"),
    (SCORE, {"text_1": "a", "documents": "b"}, "is ['text_1', 'documents']"),
    (SCORE, {"text_1": "a", "text_2": "b", "queries": "a"}, "it must be text_1 and text_2"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "text_1 has 2 texts, and text_2 3"),
    (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_1 has 2 texts, and text_2 1"),
    (SCORE, {"text_1": [5, 6], "text_2": "c"}, "text_1 is [5, 6]; it must be a string"),
    (SCORE, {"text_1": "a", "text_2": {"content": []}}, "text_2 is {'content': []}"),
    (SCORE, {"text_1": "a", "text_2": [["b"]]}, "text_2 is [['b']]"),
    (SCORE, {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5}, "no option 'truncate_prompt_tokens'"),
    (SCORE, {"text_1": "a", "text_2": "b", "use_activation": "no"}, "use_activation is 'no'"),
    (SCORE, {"text_1": "a", "text_2": "b", "instruction": 5}, "instruction is 5"),
    (SCORE, {"text_1": "a", "text_2": "b", "model": "other"}, "model is 'other'"),
    (SCORE, {"text_1": "a", "text_2": "b", "temperature": 0}, "no option 'temperature'"),
    (SCORE, {"text_1": "a", "text_2": "\ud800"}, "half of a surrogate pair"),
    (RERANK, {"documents": ["a"]}, "query is None"),
    (RERANK, {"query": ["a"], "documents": ["a"]}, "query is ['a']"),
    (RERANK, {"query": "a"}, "documents is None"),
    (RERANK, {"query": "a", "documents": []}, "documents is []; it must be a string, or a list of 1 to 2048 strings"),
    (RERANK, {"query": "a", "documents": ["a"] * 2049}, "1 to 2048"),
    (RERANK, {"query": "a", "documents": ["a", None]}, "documents is ['a', None]"),
    (RERANK, {"query": "a", "documents": [{"text": "a", "image": "b"}]}, "documents is"),
    (RERANK, {"query": "a", "documents": ["a"], "top_n": -1}, "top_n is -1"),
    (RERANK, {"query": "a", "documents": ["a"], "top_n": 1.5}, "top_n is 1.5"),
    (RERANK, {"query": "a", "documents": ["a"], "return_documents": 1}, "return_documents is 1"),
    (RERANK, {"query": "a", "documents": ["a"], "max_chunks_per_doc": 3}, "no option 'max_chunks_per_doc'"),
    (RERANK, {"query": "a", "documents": ["b", "count " * 200]}, "pair 1: the prompt has"),
    (RERANK, {"query": "a", "documents": ["b", "c" * 10**6]}, "characters; with max_model_len=96"),
    (CLASSIFY, {}, "input is None"),
    (CLASSIFY, {"input": []}, "input is []"),
    (CLASSIFY, {"input": ["a", ""]}, "input 1: the prompt is empty"),
    (CLASSIFY, {"input": [[661]]}, "the prompt has no token but 661"),
    (CLASSIFY, {"input": "count " * 200}, "the prompt has"),
    (CLASSIFY, {"input": "a", "messages": CHAT}, "no option 'input'"),
    (CLASSIFY, {"input": "a", "chat_template_kwargs": {}}, "no option 'chat_template_kwargs'"),
    (CLASSIFY, {"messages": []}, "messages"),
    (CLASSIFY, {"messages": CHAT, "chat_template_kwargs": "a"}, "chat_template_kwargs is 'a'"),
    (CLASSIFY, {"messages": CHAT, "chat_template_kwargs": {"chat_template": "a"}}, "not for a line to choose"),
    (CLASSIFY, {"messages": CHAT, "add_generation_prompt": True}, "no option 'add_generation_prompt'"),
]


@pytest.fixture(scope="module")
def engines(folders: dict[int, Path]) -> Any:
    """{name: an engine}: with heads of one and of three labels, and one that is no reranker."""
    with (
        LLM(folders[1], **OPTIONS) as one,
        LLM(folders[3], **OPTIONS) as three,
        LLM("tiny-qwen3", **OPTIONS | {"max_model_len": 256}) as text,
    ):
        yield {1: one, 3: three, 0: text}


def find_error(llm: LLM, url: str, body: dict[str, Any]) -> str:
    line = read_request_line(Line(1, json.dumps(ask(url, "a", **body)).encode()))
    with pytest.raises(LineError) as raised:
        prepare_line(line, llm, "tiny")
    assert raised.value.code == "invalid_request" and raised.value.custom_id == "a"
    return str(raised.value)


@pytest.mark.parametrize(("url", "body", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_field_is_an_error_for_its_line(url: str, body: dict[str, Any], message: str, engines: Any) -> None:
    assert message in find_error(engines[1], url, body)


def test_a_model_that_does_not_score_says_so(engines: Any) -> None:
    pair = {"text_1": "a", "text_2": "b"}
    assert "3 labels; a reranker's has one" in find_error(engines[3], SCORE, pair)
    assert "no head that scores texts" in find_error(engines[0], CLASSIFY, {"input": "a"})
    assert "makes no vectors: use classify" in find_error(engines[1], "/v1/embeddings", {"input": "a"})
    assert "url is '/v1/scores'; it must be one of" in find_error(engines[1], "/v1/scores", pair)
    assert "pair 1: the prompt has" in find_error(engines[0], SCORE, {"text_1": "a", "text_2": ["b", "count " * 200]})


def test_equal_pairs_are_scored_once_and_each_ranking_has_its_own_documents(
    folders: dict[int, Path], tmp_path: Path
) -> None:
    """Also from job to job. A ranking shows its documents, and other forms of it are other lines."""
    asked = {"query": QUERY, "documents": DOCUMENTS}
    lines = [ask(RERANK, str(i), **asked) for i in range(3)]
    lines += [
        ask(RERANK, str(3 + i), **asked, **form) for i, form in enumerate([{"top_n": 2}, {"use_activation": False}])
    ]
    lines += [ask(SCORE, str(5 + i), text_1=QUERY, text_2=DOCUMENTS) for i in range(2)]
    lines += [ask(CLASSIFY, str(7 + i), input=text) for i, text in enumerate([QUERY, QUERY, "count"])]
    source = write_lines(tmp_path / "in", lines)
    command = ["run-batch", "-i", str(source), "--model", str(folders[1]), "--attention-backend", "cpu"]
    assert main([*command, "-o", str(tmp_path / "out")]) == 0
    answers = {answer["custom_id"]: answer for answer in read_answers(tmp_path / "out")}
    assert sum("is_copy" in answer for answer in answers.values()) == 4
    assert answers["2"]["response"]["body"]["results"] == answers["0"]["response"]["body"]["results"]
    assert answers["2"]["response"]["body"]["id"] == "rerank-3"
    assert main([*command, "-o", str(tmp_path / "again"), "--reuse", str(tmp_path / "out")]) == 0
    again = {answer["custom_id"]: answer for answer in read_answers(tmp_path / "again")}
    assert all("is_copy" in answer for answer in again.values())
    for name, answer in again.items():
        shown = [
            one["response"]["body"].get("results", one["response"]["body"].get("data"))
            for one in (answer, answers[name])
        ]
        assert shown[0] == shown[1]


def test_a_ranking_of_other_texts_with_the_same_tokens_is_another_request(engines: Any) -> None:
    lines = [json.dumps(ask(RERANK, "a", query="a", documents=[text])).encode() for text in ("caf\u00e9", "cafe\u0301")]
    first, second = (read_request_line(Line(1, line)) for line in lines)
    requests = prepare_line(first, engines[1], "tiny")
    assert name_request(first, requests) != name_request(second, requests) != ""


def test_an_estimate_counts_the_lines_that_a_head_answers(
    folders: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [ask(RERANK, "a", query=QUERY, documents=DOCUMENTS), ask(CLASSIFY, "b", input=[[5] * 100, [6] * 11])]
    source = write_lines(tmp_path / "in", lines)
    assert main(["estimate", str(folders[1]), "--machine", "h200", "--input", str(source)]) == 0
    assert "6 requests" in capsys.readouterr().out
