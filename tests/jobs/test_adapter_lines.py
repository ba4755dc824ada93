"""Lines of a job that name adapters: grouped, resumed, and never answered by an adapter with another content."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from helpers.adapters import save_adapter
from helpers.batch_jobs import read_answers, texts_by_id, write_lines
from helpers.tiny import edit_json
from transformers import AutoModelForCausalLM

from nanovllm.apps.jobs.answering import Answering
from nanovllm.apps.jobs.job import Job, Status
from nanovllm.apps.jobs.line_adapters import LineAdapters
from nanovllm.apps.jobs.run import load_llm, run_job
from nanovllm.apps.jobs.source import Line
from nanovllm.config import EngineConfig
from nanovllm.models.hub import find_model

pytest.importorskip("peft")

OPTIONS: dict[str, Any] = {"max_model_len": 128, "device": "cpu", "dtype": "float32", "max_num_seqs": 2, "seed": 4}
NAMES = ("first", "second")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two adapters of the built-in model, "first" and "second"."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        save_adapter(AutoModelForCausalLM.from_pretrained(find_model("tiny-qwen3")), root / name, seed)
    return root


def make_lines(adapters: Path) -> list[dict[str, Any]]:
    """Twelve lines, of which the first, the fourth, ... have the first adapter, and every third one has none."""
    lines = []
    for i in range(12):
        body: dict[str, Any] = {"prompt": f"what is {i} plus 3?", "max_tokens": 12, "ignore_eos": True}
        if i % 3 < 2:
            body["lora"] = str(adapters / NAMES[i % 3])
        lines.append({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body})
    return lines


def run(source: Path, output: Path, **options: Any) -> Status:
    of_job = {name: options.pop(name) for name in ("accept_changes", "overwrite") if name in options}
    return run_job(
        Job(str(source), str(output), EngineConfig("tiny-qwen3", **OPTIONS | options), "tiny-qwen3", **of_job)
    )


@pytest.fixture(scope="module")
def expected(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of each line by an engine that was loaded with its adapter."""
    folder = tmp_path_factory.mktemp("expected")
    texts: dict[str, str] = {}
    for i, name in enumerate([*NAMES, None]):
        lines = make_lines(adapters)[i::3]
        for line in lines:
            line["body"].pop("lora", None)
        lora = None if name is None else str(adapters / name)
        assert run(write_lines(folder / f"in{i}", lines), folder / f"out{i}", lora=lora) == Status.OK
        texts |= texts_by_id(folder / f"out{i}")
    return texts


@pytest.mark.parametrize(
    ("order", "num_changes"), [("auto", (2, 7)), pytest.param("given", (12, 12), marks=pytest.mark.slow)]
)
def test_lines_get_what_an_engine_with_their_adapter_says(
    order: str,
    num_changes: tuple[int, int],
    adapters: Path,
    expected: dict[str, str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "nanovllm.features.adapters.groups")
    source = write_lines(tmp_path / "in", make_lines(adapters))
    assert run(source, tmp_path / "out", order=order) == Status.OK
    assert texts_by_id(tmp_path / "out") == expected
    changes = [record for record in caplog.records if "MB of the checkpoint read" in record.message]
    fewest, most = num_changes  # how many lines are read when the first one runs depends on time
    assert fewest <= len(changes) <= most


@pytest.mark.slow
def test_a_job_resumes_and_refuses_an_adapter_whose_content_has_changed(
    adapters: Path, expected: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_lines(tmp_path / "in", make_lines(adapters))
    out = tmp_path / "out"
    assert run(source, out) == Status.OK
    manifest = json.loads((tmp_path / "out.job.json").read_text())
    assert manifest["adapters"].keys() == {str(adapters / name) for name in NAMES}
    cut = b"".join(out.read_bytes().splitlines(keepends=True)[:5])
    out.write_bytes(cut)
    assert run(source, out) == Status.OK
    assert texts_by_id(out) == expected
    config = adapters / "second" / "adapter_config.json"
    original = config.read_text()
    config.unlink()
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(line for line in lines if json.loads(line)["custom_id"] != "2"))
    assert run(source, out) == Status.OK, "the line that is left names no adapter"
    assert texts_by_id(out) == expected
    out.write_bytes(cut)
    manifest_before = (tmp_path / "out.job.json").read_bytes()
    caplog.clear()
    assert run(source, out) == Status.USAGE, "a line that is left names the adapter that is missing"
    assert "names the adapter" in caplog.text and "has no adapter_config.json now: bring it back" in caplog.text
    config.write_text(original)
    assert run(source, out, data_parallel_size=2) == Status.USAGE, "replicas have no adapters"
    assert out.read_bytes() == cut and (tmp_path / "out.job.json").read_bytes() == manifest_before
    edit_json(config, lora_alpha=13)
    try:
        assert run(source, out) == Status.USAGE
        assert f"adapters.{adapters / 'second'} was" in caplog.text and out.read_bytes() == cut
        assert run(source, out, accept_changes=True) == Status.OK
    finally:
        config.write_text(original)
    assert "adapters." in json.loads((tmp_path / "out.job.json").read_text())["changes"][0]["differences"][0]


@pytest.mark.slow
def test_an_adapter_that_goes_while_a_resumed_job_runs_stops_the_job(
    adapters: Path, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in", make_lines(adapters))
    out = tmp_path / "out"
    assert run(source, out) == Status.OK
    out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])
    config = adapters / "second" / "adapter_config.json"
    original = config.read_text()
    monkeypatch.setattr("nanovllm.apps.jobs.run.LineAdapters._find", remove_first(config, LineAdapters._find))
    try:
        assert run(source, out) == Status.BROKEN
    finally:
        monkeypatch.undo()
        config.write_text(original)
    assert not any(answer["error"] for answer in read_answers(out))
    assert run(source, out) == Status.OK
    assert texts_by_id(out) == expected


def remove_first(path: Path, function: Any) -> Any:
    """Return a function that removes a file, and then calls another function."""

    def remove_and_call(*args: Any) -> Any:
        path.unlink(missing_ok=True)
        return function(*args)

    return remove_and_call


def test_a_wrong_adapter_is_an_error_of_its_line_alone(
    adapters: Path, expected: dict[str, str], tmp_path: Path
) -> None:
    lines = make_lines(adapters)
    lines[1]["body"]["lora"] = str(tmp_path / "nowhere")
    lines[4]["body"]["lora"] = 7
    lines[7]["body"]["lora"] = ""
    assert run(write_lines(tmp_path / "in", lines), tmp_path / "out") == Status.LINES_FAILED
    errors = {
        answer["custom_id"]: answer["error"]["message"] for answer in read_answers(tmp_path / "out") if answer["error"]
    }
    assert errors.keys() == {"1", "4", "7"}
    assert "nowhere', which has no adapter_config.json; it must be a folder that PEFT saved" in errors["1"]
    assert "lora is 7; it must be a string" in errors["4"]
    assert "which has no adapter_config.json" in errors["7"]
    assert texts_by_id(tmp_path / "out") == {key: text for key, text in expected.items() if key not in errors}


def test_an_engine_of_several_parts_or_with_an_adapter_refuses_lines_that_name_one(
    adapters: Path, tmp_path: Path
) -> None:
    raw = json.dumps({"prompt": "a", "lora": str(adapters / "first")}).encode()
    with load_llm(EngineConfig("tiny-qwen3", **OPTIONS)) as llm:
        results: list[Any] = []
        refusing = LineAdapters(llm, are_allowed=False)
        Answering(llm, results.append, "tiny-qwen3", {}, refusing).answer([Line(1, raw, False)])
        assert b"left out with --ray" in results[0].line
    lines = write_lines(tmp_path / "in", make_lines(adapters)[:1])
    assert run(lines, tmp_path / "out", lora=str(adapters / "second")) == Status.LINES_FAILED
    assert "lora is " in read_answers(tmp_path / "out")[0]["error"]["message"]


def test_embeddings_name_no_adapter(adapters: Path, tmp_path: Path) -> None:
    body = {"input": "a", "lora": str(adapters / "first")}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    assert run(write_lines(tmp_path / "in", [line]), tmp_path / "out") == Status.LINES_FAILED
    assert "'lora'" in read_answers(tmp_path / "out")[0]["error"]["message"]
