"""The addresses that a line may ask: what its requests are, and what answers it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.apps.jobs.embedding_lines import make_embedding_line, prepare_embeddings
from nanovllm.apps.jobs.request_lines import (
    CHAT_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    RequestLine,
    blame_line,
    prepare_request,
)
from nanovllm.apps.jobs.result_lines import ResultLine, make_result_line
from nanovllm.apps.jobs.scoring_lines import (
    make_class_line,
    make_ranking_line,
    make_score_line,
    prepare_classes,
    prepare_ranking,
    prepare_scores,
)
from nanovllm.utils.checks import as_choice

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Request
    from nanovllm.llm import LLM
    from nanovllm.outputs import Output


class Form(NamedTuple):
    """How the lines of one address are read and answered.

    Attributes:
        prepare: (line, llm, model_name) -> the requests of the line. It raises a LineError if a field is wrong.
        answer: (line, the outputs of its requests, llm, model_name) -> the line of the results. No output is an error.
    """

    prepare: "Callable[[RequestLine, LLM, str], list[Request]]"
    answer: "Callable[[RequestLine, list[Output], LLM, str], ResultLine]"


def _prepare_text(line: RequestLine, llm: "LLM", model_name: str) -> "list[Request]":
    return [prepare_request(line, llm, model_name)]


def _answer_text(line: RequestLine, outputs: "list[Output]", llm: "LLM", model_name: str) -> ResultLine:
    (output,) = outputs
    return make_result_line(line, output, model_name, llm.token_text)


TEXT = Form(_prepare_text, _answer_text)
FORMS = {
    CHAT_URL: TEXT,
    COMPLETIONS_URL: TEXT,
    EMBEDDINGS_URL: Form(prepare_embeddings, make_embedding_line),
    "/v1/score": Form(prepare_scores, make_score_line),
    "/v1/rerank": Form(prepare_ranking, make_ranking_line),
    "/v1/classify": Form(prepare_classes, make_class_line),
}


def prepare_line(line: RequestLine, llm: "LLM", model_name: str) -> "list[Request]":
    """Return the requests of a line: several if it has several texts. LineError if the line is wrong."""
    with blame_line(line):
        url = as_choice(line.url, "url", tuple(FORMS))
    return FORMS[url].prepare(line, llm, model_name)
