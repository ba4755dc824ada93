"""Lines of OpenAI's embeddings format: from a line to its requests, and from their outputs to a line of results."""

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.apps.jobs.request_lines import RequestLine, blame_line, read_fields
from nanovllm.apps.jobs.result_lines import ResultLine, make_reading_line
from nanovllm.features.scoring.embedding import EMBEDDING_PARAMS, check_dimensions, read_embedding, refuse_heads
from nanovllm.text.prompts import name_errors
from nanovllm.utils.checks import as_choice, refuse

if TYPE_CHECKING:
    from nanovllm.engine.sequence import Request
    from nanovllm.llm import LLM
    from nanovllm.outputs import Output

MAX_INPUTS = 2048
"""OpenAI's limit of the inputs of a line."""
FORMATS = ("float", "base64")


def prepare_embeddings(line: RequestLine, llm: "LLM", model_name: str) -> "list[Request]":
    """Check every field of a line, and return a request for each of its inputs.

    Args:
        model_name: the only `model` that a body may ask for.

    Raises:
        LineError: a field is wrong, or the engine refuses an input.
    """
    with blame_line(line):
        body = read_fields(line, ("input", "encoding_format", "dimensions"), "an embedding", model_name)
        as_choice(body.get("encoding_format", "float"), "encoding_format", FORMATS)
        refuse_heads(llm.engine.facts.pooling)
        check_dimensions(body.get("dimensions"), llm.engine.facts.embedding_size)
        inputs = list_inputs(body.get("input"))
        requests = []
        for i, prompt in enumerate(inputs):
            with name_errors("input", i, len(inputs)):
                requests.append(llm.prepare(prompt, EMBEDDING_PARAMS))
    return requests


def list_inputs(given: Any) -> list[Any]:
    """Return the inputs of a line: a string, token ids, or a list of strings or of token ids."""
    inputs: Any = [given] if isinstance(given, str) or _are_token_ids(given) else given
    is_good = isinstance(inputs, list) and all(isinstance(one, str) or _are_token_ids(one) for one in inputs)
    if not is_good or not 1 <= len(inputs) <= MAX_INPUTS:
        raise refuse(given, "input", f"a string, a list of token ids, or a list of 1 to {MAX_INPUTS} of these")
    return list(inputs)


def _are_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(i) is int for i in value)


def make_embedding_line(line: RequestLine, outputs: "list[Output]", llm: "LLM", model_name: str) -> ResultLine:
    """Return the result of a line whose requests have all ended, none of them in an error.

    Args:
        outputs: the outputs of its inputs, in their order.
    """
    pooling = llm.engine.facts.pooling
    data = []
    for i, output in enumerate(outputs):
        vector = read_embedding(output, pooling, line.body.get("dimensions")).embedding
        is_packed = line.body.get("encoding_format") == "base64"
        # OpenAI's clients read base64 as float32, the least significant byte first.
        value = base64.b64encode(vector.astype(np.dtype("<f4")).tobytes()).decode() if is_packed else vector.tolist()
        data.append({"object": "embedding", "index": i, "embedding": value})
    return make_reading_line(line, {"object": "list", "data": data}, outputs, model_name)
