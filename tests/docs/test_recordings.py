"""The two scripts that prove that a move of code changes nothing: of what the engine computes, and of its interface."""

import json
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from scripts import record_outputs
from scripts.interface import describe, find_names


def test_a_second_run_differs_from_a_recording_in_the_number_that_was_changed_and_in_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recording.json"
    only = ["--only", "torch/float32/int8"]
    assert record_outputs.main(["save", str(path), *only]) == 0
    recording = json.loads(path.read_text())
    (vector,) = [request["embedding"] for request in recording["torch/float32/int8"] if "embedding" in request]
    vector[0] = (float.fromhex(vector[0]) * (1 + 2**-52)).hex()
    path.write_text(json.dumps(recording))
    assert record_outputs.main(["compare", str(path), *only]) == 1
    assert "1 differ; the first: torch/float32/int8, request 1 (): embedding was" in capsys.readouterr().out
    assert record_outputs.find_differences(recording, recording) == []


def test_each_way_to_compute_gets_as_many_requests_as_the_script_says() -> None:
    for kind in record_outputs.KINDS.values():
        assert sum(engine.num_requests for engine in kind.engines.values()) in (20, 300)


def test_the_interface_names_what_a_script_uses() -> None:
    names = find_names()
    assert {("nanovllm", "LLM"), ("nanovllm.outputs", "Score"), ("nanovllm.ray", "RayLLM")} <= {*names}
    assert any(line.startswith("    .generate(self, prompts: ") for line in describe(LLM))
    assert "    max_tokens: int | None = 64" in describe(SamplingParams)
