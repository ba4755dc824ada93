"""The script that proves that a move of code changes neither what the engine computes nor its interface."""

import pytest

from scripts.record_outputs import ENGINES, KINDS, describe, find_differences, find_names, record_engine


@pytest.mark.slow
def test_a_second_run_differs_from_a_recording_in_the_number_that_was_changed_and_in_no_other() -> None:
    name = "torch/float32/int8"
    before = {name: record_engine("int8", KINDS["torch"], "float32")}
    after = {name: record_engine("int8", KINDS["torch"], "float32")}
    assert find_differences(before, after) == []
    (vector,) = [request for request in after[name] if "embedding" in request]
    first = vector["embedding"].strip("[]").split(", ")[0]
    vector["embedding"] = vector["embedding"].replace(first, repr(float(first) * (1 + 2**-52)))
    (difference,) = find_differences(before, after)
    assert difference.startswith(f"{name}, request 1 (): embedding was [{first}, ")


def test_a_request_that_is_no_more_differs() -> None:
    assert find_differences({"text": [{"tokens": "[1]"}]}, {"text": []}) == [
        "text, request 0 (): tokens was [1] and is None"
    ]


def test_each_way_to_compute_gets_as_many_requests_as_the_script_says() -> None:
    for kind in KINDS.values():
        assert sum(min(ENGINES[name].num_requests, kind.most_requests) for name in kind.engines) in (20, 300)


def test_the_interface_names_what_a_script_uses() -> None:
    assert {("nanovllm", "LLM"), ("nanovllm.outputs", "Score"), ("nanovllm.ray", "RayLLM")} <= {*find_names()}
    assert "\n |  generate(self, prompts: " in describe("nanovllm", "LLM")
    assert "max_tokens: int | None = 64, " in describe("nanovllm", "SamplingParams")
