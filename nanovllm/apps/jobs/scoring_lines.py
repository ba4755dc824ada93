"""Lines that ask a head, or a reranker, for scores: in the form of vLLM's server, and for rankings of Jina's."""

import time
from typing import TYPE_CHECKING, Any

from nanovllm.apps.jobs.embedding_lines import MAX_INPUTS, list_inputs
from nanovllm.apps.jobs.request_lines import RequestLine, blame_line, read_fields, render_messages
from nanovllm.apps.jobs.result_lines import ResultLine, make_reading_line
from nanovllm.features.scoring.heads import find_head, prepare_texts, read_classification
from nanovllm.features.scoring.rerank import prepare_pairs, rank_documents, read_relevances
from nanovllm.utils.checks import as_bool, as_integer, refuse

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Request
    from nanovllm.llm import LLM
    from nanovllm.outputs import Output

PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""The names that vLLM has for the two texts of a score."""
NAMES = tuple(dict.fromkeys(name for pair in PAIRS for name in pair))
ASKED = ("instruction", "use_activation")
"""How a pair is asked for, and whether its score is made a probability."""


def prepare_scores(line: RequestLine, llm: "LLM", model_name: str) -> "list[Request]":
    """Return the requests for the score of each pair. LineError if a field is wrong."""
    with blame_line(line):
        body = read_fields(line, (*NAMES, *ASKED), "a score", model_name)
        given = [name for name in NAMES if name in body]
        if tuple(given) not in PAIRS:
            raise refuse(given, "what a score compares", "text_1 and text_2, or queries and documents")
        queries, documents = (_list_texts(body[name], name) for name in given)
        if len(queries) not in (1, len(documents)):
            raise ValueError(
                f"{given[0]} has {len(queries)} texts, and {given[1]} {len(documents)}: give one for all, or one each"
            )
        if len(queries) == 1:
            queries *= len(documents)
        return _prepare(body, llm, queries, documents)


def prepare_ranking(line: RequestLine, llm: "LLM", model_name: str) -> "list[Request]":
    """Return the requests for the score of each document. LineError if a field is wrong."""
    with blame_line(line):
        names = ("query", "documents", "top_n", "return_documents", *ASKED)
        body = read_fields(line, names, "a ranking", model_name)
        if not isinstance(body.get("query"), str):
            raise refuse(body.get("query"), "query", "a string")
        as_integer(body.get("top_n", 0), "top_n", 0)
        as_bool(body.get("return_documents", True), "return_documents")
        documents = _list_texts(body.get("documents"), "documents")
        return _prepare(body, llm, [body["query"]] * len(documents), documents)


def prepare_classes(line: RequestLine, llm: "LLM", model_name: str) -> "list[Request]":
    """Return the requests for the classes of each text. LineError if a field is wrong."""
    with blame_line(line):
        is_chat = line.body.get("messages") is not None
        names = ("messages", "chat_template_kwargs") if is_chat else ("input",)
        body = read_fields(line, (*names, "use_activation"), "a classification", model_name)
        as_bool(body.get("use_activation", True), "use_activation")
        # What is judged is the conversation. No answer is opened after it.
        closed = {"add_generation_prompt": False}
        inputs = [render_messages(llm, body, closed)] if is_chat else list_inputs(body.get("input"))
        return prepare_texts(llm, inputs, kind="input")


def _prepare(body: dict[str, Any], llm: "LLM", queries: list[str], documents: list[str]) -> "list[Request]":
    as_bool(body.get("use_activation", True), "use_activation")
    return prepare_pairs(llm, queries, documents, body.get("instruction"))


def _list_texts(given: Any, name: str) -> list[str]:
    """Return one text or several as a list. Jina's clients write a text as {"text": ...}, too."""
    several = given if isinstance(given, list) else [given]
    texts = [one["text"] if isinstance(one, dict) and one.keys() == {"text"} else one for one in several]
    if not 1 <= len(texts) <= MAX_INPUTS or not all(isinstance(text, str) for text in texts):
        raise refuse(given, name, f"a string, or a list of 1 to {MAX_INPUTS} strings")
    return texts


def make_score_line(line: RequestLine, outputs: "list[Output]", llm: "LLM", model_name: str) -> ResultLine:
    """Return the result of a line of `prepare_scores` from the outputs of its requests."""
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(_read_scores(line, outputs, llm))]
    return make_reading_line(line, _make_list(line, "score", data), outputs, model_name)


def make_ranking_line(line: RequestLine, outputs: "list[Output]", llm: "LLM", model_name: str) -> ResultLine:
    """Return the result of a line of `prepare_ranking` from the outputs of its requests."""
    documents = _list_texts(line.body["documents"], "documents")
    ranked = rank_documents(_read_scores(line, outputs, llm), documents)
    results: list[dict[str, Any]] = []
    for one in ranked[: line.body.get("top_n") or None]:
        result: dict[str, Any] = {"index": one.index, "relevance_score": one.relevance_score}
        if line.body.get("return_documents") is not False:
            result["document"] = {"text": one.document}
        results.append(result)
    body = {"id": f"rerank-{line.number}", "results": results}
    return make_reading_line(line, body, outputs, model_name)


def make_class_line(line: RequestLine, outputs: "list[Output]", llm: "LLM", model_name: str) -> ResultLine:
    """Return the result of a line of `prepare_classes` from the outputs of its requests."""
    head = find_head(llm)
    data = []
    for i, output in enumerate(outputs):
        found = read_classification(output, head)
        values = found.scores if line.body.get("use_activation") is False else found.probs
        data.append({"index": i, "label": found.label, "probs": values.tolist(), "num_classes": len(values)})
    return make_reading_line(line, _make_list(line, "classify", data), outputs, model_name)


def _read_scores(line: RequestLine, outputs: "list[Output]", llm: "LLM") -> list[float]:
    is_raw = line.body.get("use_activation") is False
    return read_relevances(llm, outputs, is_raw)


def _make_list(line: RequestLine, kind: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": f"{kind}-{line.number}", "object": "list", "created": int(time.time()), "data": data}
