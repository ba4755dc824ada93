"""Lines that ask for embeddings get OpenAI's answers, and bad ones stop no others."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.batch_jobs import openai_line, read_answers, write_lines

from nanovllm import LLM, SamplingParams
from nanovllm.apps.jobs.job import Job, Status
from nanovllm.apps.jobs.run import run_job
from nanovllm.config import EngineConfig

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 32, "num_kvcache_blocks": 8}


def ask(custom_id: str, **body: Any) -> dict[str, Any]:
    return openai_line(custom_id, **body) | {"url": "/v1/embeddings"}


def run(model: Path, source: Path, results: Path, **changes: Any) -> Status:
    config = EngineConfig(str(model), **OPTIONS)
    return run_job(Job(str(source), str(results), config, "reciter", **changes))


def test_lines_of_every_form_get_their_vectors(reciter: Path, tmp_path: Path) -> None:
    lines = [
        ask("text", input="abc", model="reciter"),
        ask("ids", input=[97, 98]),
        ask("texts", input=["abc", "", "b"][::2], user="somebody"),
        ask("lists", input=[[97], [98, 99]], encoding_format="float"),
        ask("packed", input="abc", encoding_format="base64"),
        ask("short", input=["abc", "b"], dimensions=3),
        openai_line("beside", prompt="abc", max_tokens=2),
        {"input": "abc"},
        ask("bad", input="abc", encoding_format="int8"),
    ]
    source = write_lines(tmp_path / "in", lines)
    assert run(reciter, source, tmp_path / "out") == Status.LINES_FAILED
    answers = {answer["custom_id"] or "plain": answer for answer in read_answers(tmp_path / "out")}
    assert len(answers) == len(lines)
    bodies = {name: answer["response"]["body"] for name, answer in answers.items()}
    with LLM(reciter, **OPTIONS) as llm:

        def expect(*prompts: Any, **options: Any) -> list[list[float]]:
            return [output.embedding.tolist() for output in llm.embed(list(prompts), use_tqdm=False, **options)]

        def values(name: str) -> list[list[float]]:
            assert bodies[name]["object"] == "list" and bodies[name]["model"] == "reciter"
            assert [entry["index"] for entry in bodies[name]["data"]] == list(range(len(bodies[name]["data"])))
            return [entry["embedding"] for entry in bodies[name]["data"]]

        assert values("text") == values("plain") == expect("abc")
        assert values("ids") == expect([97, 98])
        assert values("texts") == expect("abc", "b")
        assert values("lists") == expect([97], [98, 99])
        assert values("short") == expect("abc", "b", dimensions=3)
        (packed,) = values("packed")
        assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == expect("abc")[0]
    assert bodies["lists"]["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert bodies["beside"]["choices"][0]["text"] == "de"
    assert "encoding_format is 'int8'" in answers["bad"]["error"]["message"]
    assert run(reciter, source, tmp_path / "out") == Status.LINES_FAILED  # finished: nothing is run again


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": ""}, "the prompt is empty"),
        ({"input": []}, "input is []; it must be a string, a list of token ids, or a list of 1 to 2048 of these"),
        ({"input": ["a", 3]}, "input is"),
        ({"input": [["a"]]}, "input is"),
        ({}, "input is None"),
        ({"input": ["a", "b" * 40]}, "input 1: the prompt has 40 tokens"),
        ({"input": ["a"] * 2049}, "a list of 1 to 2048"),
        ({"input": [[-1]]}, "token id -1"),
        ({"input": "a", "dimensions": 10**6}, "dimensions is 1000000; it must be at most"),
        ({"input": "a", "dimensions": 1.5}, "dimensions is 1.5"),
        ({"input": "a", "model": "other"}, "model is 'other'"),
        ({"input": "a", "temperature": 1}, "temperature"),
    ],
)
def test_a_bad_line_is_an_error_for_itself(body: dict[str, Any], message: str, shared_llm: LLM, tmp_path: Path) -> None:
    from nanovllm.apps.jobs.forms import prepare_line
    from nanovllm.apps.jobs.request_lines import LineError, read_request_line
    from nanovllm.apps.jobs.source import Line

    source = write_lines(tmp_path / "in", [ask("a", **body)])
    line = read_request_line(Line(1, source.read_bytes()))
    with pytest.raises(LineError) as raised:
        prepare_line(line, shared_llm, "reciter")
    assert message in str(raised.value) and raised.value.code == "invalid_request"


@pytest.fixture(scope="module")
def shared_llm(reciter: Path) -> Any:
    with LLM(reciter, **OPTIONS) as llm:
        yield llm


def test_rows_of_ray_data_are_embedded(reciter: Path) -> None:
    pytest.importorskip("ray")
    from nanovllm.ray import RayLLM

    llm = RayLLM(str(reciter), SamplingParams(max_tokens=0, embed=True), **OPTIONS)
    batch = {"prompt": ["abc", "", "b"], "name": [1, 2, 3]}
    rows = llm.generate(batch)
    assert rows["name"] == [1, 2, 3] and "generated_text" not in rows
    with LLM(reciter, **OPTIONS) as other:
        expected = [output.embedding.tolist() for output in other.embed(["abc", "b"], use_tqdm=False)]
    assert rows["embedding"] == [expected[0], [], expected[1]]
    assert "the prompt is empty" in rows["error"][1] and rows["num_prompt_tokens"] == [3, 0, 1]
