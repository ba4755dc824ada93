"""Equal requests are computed once, in a job and from job to job, and nothing else is taken for an answer."""

import json
import logging
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.batch_jobs import InstantLLM, openai_line, read_answers, run, texts_by_id, write_lines
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nanovllm.apps.cli import main
from nanovllm.apps.jobs.compact_sets import DigestMap
from nanovllm.apps.jobs.forms import prepare_line
from nanovllm.apps.jobs.job import Status
from nanovllm.apps.jobs.provenance import digest_checkpoint
from nanovllm.apps.jobs.request_lines import read_request_line
from nanovllm.apps.jobs.reuse import name_request
from nanovllm.apps.jobs.source import Line
from nanovllm.config import EngineConfig
from nanovllm.text.prompts import ChatPrompt

MODEL = Path(__file__).parents[2] / "nanovllm" / "assets" / "tiny-qwen3"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "nanovllm")
    return caplog


def count_copies(stats: Path) -> int:
    return int(json.loads(stats.read_text())["num_copied"])


def name(**body: Any) -> str:
    """The name of the request that a line makes of an engine whose requests are sampled unless they say otherwise."""
    llm: Any = InstantLLM(EngineConfig("some-model", max_model_len=1000))
    line = read_request_line(Line(body.pop("number", 1), json.dumps(body).encode()))
    return name_request(line, prepare_line(line, llm, "some-model"))


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
TURNED = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "string"}}}


def test_requests_have_one_name_if_all_that_decides_their_answers_is_the_same() -> None:
    greedy = {"prompt": "abc", "temperature": 0}
    assert name(**greedy) == name(**greedy, number=2, user="somebody", top_p=1.0, seed=None)
    assert name(prompt="abc", seed=5) == name(prompt=[97, 98, 99], seed=5, number=7)
    assert name(**greedy, seed=5) == name(**greedy, seed=6) == name(**greedy)  # nothing is drawn


@pytest.mark.parametrize(
    "change",
    [
        *({"prompt": "abd"}, {"max_tokens": 3}, {"stop": "a"}, {"logprobs": 1}, {"echo": True}, {"lora": "folder"}),
        *({"logit_bias": {"5": 1.0}}, {"temperature": 0.5, "seed": 1}, {"service_tier": "auto"}),
        {"structured_outputs": {"json": SCHEMA}},
    ],
    ids=str,
)
def test_a_field_that_may_change_an_answer_changes_the_name(change: dict[str, Any]) -> None:
    greedy = {"prompt": "abc", "temperature": 0}
    assert name(**{**greedy, **change}) not in ("", name(**greedy))


def test_the_order_of_properties_is_a_part_of_the_name() -> None:
    """A grammar writes them in this order."""
    first, second = (name(prompt="abc", seed=1, structured_outputs={"json": schema}) for schema in (SCHEMA, TURNED))
    assert first != second


def test_what_the_template_wrote_for_the_answer_is_a_part_of_the_name() -> None:
    """Of equal tokens, a tag that the template wrote begins the thinking, and one in a message does not."""
    llm: Any = InstantLLM(EngineConfig("some-model", max_model_len=1000))
    line = read_request_line(Line(1, json.dumps({"prompt": "say <think>", "temperature": 0}).encode()))
    (request,) = prepare_line(line, llm, "some-model")
    texts = (ChatPrompt("say <think>", opening) for opening in (None, "", "<think>"))
    assert len({name_request(line, [replace(request, prompt=text)]) for text in texts}) == 3


def test_a_request_that_is_drawn_without_a_seed_has_no_name() -> None:
    assert name(prompt="abc") == name(prompt="abc", seed=-1) == name(prompt="abc", temperature=0.1) == ""


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, 1, 2])), min_size=1, max_size=40), st.booleans())
def test_a_job_computes_each_request_once_and_answers_each_line(
    tmp_path: Path, lines: list[tuple[int, int | None]], is_cut: bool
) -> None:
    """Also if it ends in between, and is resumed: an answer tells its own prompt and seed."""
    bodies = [{"prompt": "x" * length, "seed": seed} for length, seed in lines]
    source = write_lines(tmp_path / "in", [openai_line(str(i), **body) for i, body in enumerate(bodies)])
    out = tmp_path / "out"
    stats = tmp_path / "stats"
    num_computed = len({line for line in lines if line[1] is not None}) + sum(seed is None for _, seed in lines)
    if is_cut:
        run(source, out, {"dies_after": num_computed // 2}, overwrite=True)
        assert run(source, out, stats=str(stats)) == Status.OK
    else:
        assert run(source, out, overwrite=True, stats=str(stats)) == Status.OK
        assert count_copies(stats) == len(lines) - num_computed
    answers = read_answers(out)
    assert sum("is_copy" not in answer for answer in answers) == num_computed
    found = texts_by_id(out)
    for i, (length, seed) in enumerate(lines):
        assert found[str(i)].startswith(f"{length} tokens, seed " + ("" if seed is None else str(seed)))
    assert {a["response"]["body"]["id"] for a in answers} == {f"cmpl-{i + 1}" for i in range(len(lines))}


def test_lines_beyond_those_that_may_wait_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.apps.jobs.answering.MAX_WAITING", 3)
    source = write_lines(tmp_path / "in", [{"prompt": "x", "seed": 1}] * 30)
    assert run(source, tmp_path / "out", stats=str(tmp_path / "stats"), order="given") == Status.OK
    assert texts_by_id(tmp_path / "out") == dict.fromkeys(map(str, range(1, 31)), "1 tokens, seed 1")
    assert 3 <= count_copies(tmp_path / "stats") < 30


def test_lines_that_wait_for_a_request_get_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InstantLLM, "_answer", lambda llm, token_ids, params: {"error": "the logits are NaN"})
    source = write_lines(tmp_path / "in", [openai_line(str(i), prompt="x", seed=1) for i in range(5)])
    assert run(source, tmp_path / "out") == Status.LINES_FAILED
    answers = read_answers(tmp_path / "out")
    assert {a["error"]["message"] for a in answers} == {f"line {i}: the logits are NaN" for i in range(1, 6)}
    assert {a["custom_id"] for a in answers} == set("01234")


def test_results_in_a_pipe_hold_a_line_for_each_request(
    capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": "x" * (1 + i % 2), "seed": 1} for i in range(50)])
    assert run(source, "-") == Status.OK
    ids = [json.loads(line)["id"] for line in capfdbinary.readouterr().out.splitlines()]
    assert sorted(ids) == sorted(f"batch_req_{i}" for i in range(1, 51))


@given(st.dictionaries(st.text(), st.integers(0, 2**64 - 1)))
def test_a_map_of_digests_finds_what_was_put_in_first(entries: dict[str, int]) -> None:
    found = DigestMap()
    for key, number in entries.items():
        found.add(key, number)
        found.add(key, number ^ 1)
    assert {key: found.get(key) for key in entries} == entries
    assert found.get("another") is None or "another" in entries


# ---- from job to job, with a model


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of the built-in model, and the results of a job over it."""
    folder = tmp_path_factory.mktemp("first")
    shutil.copytree(MODEL, folder / "model")
    write_lines(folder / "in", LINES)
    assert run_command(folder / "model", folder / "in", folder / "out") == 0
    return folder / "model", folder / "out"


LINES = [
    *({"messages": [{"role": "user", "content": f"what is {i} + 5?"}], "temperature": 0} for i in (1, 2, 3, 2)),
    {"prompt": "count from 3 to", "seed": 7, "temperature": 0.8, "max_tokens": 8, "logprobs": 2},
    {"input": ["one", "two"]},
    {"prompt": "drawn anew", "temperature": 1.0, "max_tokens": 4},
]
"""The fourth is equal to the second; the last one has no seed."""


def run_command(model: Path, source: Path, out: Path, *options: str) -> int:
    command = ["run-batch", "-i", str(source), "-o", str(out), "--model", str(model), "--served-model-name", "tiny"]
    return main([*command, "--attention-backend", "cpu", "--max-model-len", "128", "--stats", f"{out}.stats", *options])


def bodies(path: Path) -> dict[str, Any]:
    """{number of a line: what answers it}, without the time and the tokens that the cache had."""
    found = {}
    for answer in read_answers(path):
        body = answer["response"]["body"]
        body.pop("created", None)
        body["usage"].pop("prompt_tokens_details", None)
        found[answer["id"]] = body
    return found


def test_answers_of_another_job_are_copied_and_are_what_this_one_would_compute(
    first: tuple[Path, Path], tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    model, earlier = first
    write_lines(tmp_path / "in", [{"prompt": "new", "temperature": 0, "max_tokens": 3}, *reversed(LINES)])
    assert run_command(model, tmp_path / "in", tmp_path / "copied", "--reuse", str(earlier)) == 0
    assert run_command(model, tmp_path / "in", tmp_path / "computed") == 0
    assert bodies(tmp_path / "copied") == bodies(tmp_path / "computed")
    assert count_copies(Path(f"{tmp_path / 'copied'}.stats")) == 6
    assert count_copies(Path(f"{tmp_path / 'computed'}.stats")) == 1
    assert "6 are copies of the answer of an equal request" in log.text


def perturb(model: Path) -> None:
    """Train a little: a number changes, and neither a size nor a header does."""
    (path,) = model.glob("*.safetensors")
    tensors = load_file(path)
    before = path.read_bytes()
    tensors["model.norm.weight"][0] += 0.25
    save_file(tensors, path, metadata={"format": "pt"})
    assert len(path.read_bytes()) == len(before) and path.read_bytes() != before


def change_template(model: Path) -> None:
    (path,) = model.glob("*.jinja")
    path.write_text(path.read_text() + "{# changed #}")


@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        (perturb, (), "engine.model was"),
        (change_template, (), "engine.model was"),
        (None, ("--kv-cache-dtype", "int8"), "options.kv_cache_dtype was"),
        (None, ("--quantization", "int8"), "engine.quantization was"),
        (None, ("--dtype", "float32"), "engine.dtype was"),
        (None, ("--logprobs-mode", "processed_logprobs"), "options.logprobs_mode was"),
        (None, ("--tool-call-parser", "hermes"), "options.tool_call_parser was"),
    ],
    ids=["weights", "template", "cache", "int8", "dtype", "logprobs", "parser"],
)
def test_another_model_or_option_reuses_nothing_and_says_so_once(
    change: Any, options: tuple[str, ...], named: str, first: tuple[Path, Path], tmp_path: Path, log: Any
) -> None:
    model, earlier = first
    shutil.copytree(model, tmp_path / "model")
    if change is not None:
        change(tmp_path / "model")
    source = write_lines(tmp_path / "in", LINES[:3])
    assert run_command(tmp_path / "model", source, tmp_path / "out", "--reuse", str(earlier), *options) == 0
    assert count_copies(Path(f"{tmp_path / 'out'}.stats")) == 0
    (warning,) = [record.getMessage() for record in log.records if "nothing of it is reused" in record.getMessage()]
    assert named in warning


def test_a_job_is_not_resumed_with_another_training_of_its_model(
    first: tuple[Path, Path], tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    model, _ = first
    shutil.copytree(model, tmp_path / "model")
    source = write_lines(tmp_path / "in", LINES[:2])
    assert run_command(tmp_path / "model", source, tmp_path / "out") == 0
    kept = (tmp_path / "out").read_bytes()
    (tmp_path / "out").write_bytes(kept[: kept.index(b"\n") + 1])
    perturb(tmp_path / "model")
    assert run_command(tmp_path / "model", source, tmp_path / "out") == Status.USAGE
    assert "engine.model was" in log.text


def test_what_cannot_be_honoured_is_refused(first: tuple[Path, Path], tmp_path: Path, log: Any) -> None:
    model, earlier = first
    source = write_lines(tmp_path / "in", LINES[:1])
    bare = shutil.copy(earlier, tmp_path / "bare")
    undigested = shutil.copy(earlier, tmp_path / "undigested")
    manifest = json.loads(Path(f"{earlier}.job.json").read_text())
    del manifest["engine"]["model"]
    Path(f"{undigested}.job.json").write_text(json.dumps(manifest))
    for options, words in (
        (("--reuse", str(tmp_path / "none")), "no manifest"),
        (("--reuse", str(bare)), "no manifest"),
        (("--reuse", str(undigested)), "has no digest of the model"),
        (("--reuse", str(earlier), "--attention-backend", "torch"), "attention_backend is 'torch'"),
        (("--reuse", str(earlier), "--ray"), "left out with --ray"),
    ):
        log.clear()
        assert run_command(model, source, tmp_path / "out", *options) == Status.USAGE
        assert words in log.text
    assert run_command(model, source, tmp_path / "out", "--attention-backend", "torch") == 0
    close = ("--reuse", str(tmp_path / "out"), "--attention-backend", "torch", "--reuse-close")
    assert run_command(model, source, tmp_path / "close", *close) == 0
    assert count_copies(Path(f"{tmp_path / 'close'}.stats")) == 1


def test_a_file_that_changes_meanwhile_gives_no_answer(
    first: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line counts only if its checksum and its request's name are right when it is read again."""
    model, earlier = first
    for path in (earlier, Path(f"{earlier}.job.json")):
        shutil.copy(path, tmp_path / path.name)
    text = (tmp_path / "out").read_text()
    from nanovllm.apps.jobs.run import KnownAnswers

    def damage(known: KnownAnswers, *arguments: Any) -> None:
        add_file(known, *arguments)
        (tmp_path / "out").write_text(text.replace(" = ", " : "))

    add_file = KnownAnswers.add_file
    monkeypatch.setattr(KnownAnswers, "add_file", damage)
    source = write_lines(tmp_path / "in", LINES[:3])
    assert run_command(model, source, tmp_path / "new", "--reuse", str(tmp_path / "out")) == 0
    assert count_copies(Path(f"{tmp_path / 'new'}.stats")) == 0


def test_the_digest_of_a_checkpoint_is_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(random.Random(0).randbytes(1000))

    def stamp() -> Any:
        fact = path.stat()
        return ((path, fact.st_size, fact.st_mtime_ns, fact.st_ino),)

    digest = digest_checkpoint(stamp())
    with monkeypatch.context() as reading:
        reading.setattr("nanovllm.apps.jobs.provenance.digest_contents", lambda files: pytest.fail("read again"))
        assert digest_checkpoint(stamp()) == digest
    path.write_bytes(random.Random(1).randbytes(1000))
    os.utime(path, ns=(1, 1))
    assert digest_checkpoint(stamp()) != digest
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    assert len(digest_checkpoint(stamp())) == 32
