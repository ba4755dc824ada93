"""Attacks on batch jobs: damaged results, manifests and inputs, and hostile lines.

A job's answers are right, or it says what is wrong and touches nothing. What is drawn is drawn with a seed, so that a
failure can be met again.
"""

import gzip
import io
import json
import logging
import os
import random
import shutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.batch_jobs import InstantLLM, openai_line, read_answers, run, run_job_that_calls, write_lines
from helpers.paths import BOX_MODEL

from nanovllm import LLM
from nanovllm.apps.jobs.answering import Answering
from nanovllm.apps.jobs.compact_sets import LineSet
from nanovllm.apps.jobs.job import OutputError, Status
from nanovllm.apps.jobs.line_adapters import LineAdapters
from nanovllm.apps.jobs.manifest import Manifest
from nanovllm.apps.jobs.provenance import read_provenance
from nanovllm.apps.jobs.request_lines import LineError, list_rendering_arguments, prepare_request, read_request_line
from nanovllm.apps.jobs.result_lines import ResultLine
from nanovllm.apps.jobs.results_file import open_results
from nanovllm.apps.jobs.source import Line, Reading, Source

NUM_LINES = 40


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "nanovllm")
    return caplog


def content_of(path: Path) -> list[tuple[str, str]]:
    """Return the answers in a results file, by their ids, without the time of day."""
    return sorted(
        (a["id"], json.dumps(a["response"]["body"]["choices"] if a["error"] is None else a["error"]))
        for a in read_answers(path)
    )


class Finished:
    """A job of NUM_LINES lines that has ended well, to damage copies of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lines = [b"{" if i == 7 else {"prompt": f"p{i}"} for i in range(NUM_LINES)]
        self.source = write_lines(folder / "in.jsonl", lines)
        self.results = folder / "whole.jsonl"
        assert run(self.source, self.results) == Status.LINES_FAILED
        self.lines = self.results.read_bytes().splitlines(keepends=True)
        self.manifest = folder / "whole.jsonl.job.json"
        self.content = content_of(self.results)

    def copy(self, results: bytes, manifest: bytes | None) -> Path:
        """Other results and manifest in a place of their own; None is no manifest."""
        out = self.folder / "copy.jsonl"
        out.write_bytes(results)
        beside = self.folder / "copy.jsonl.job.json"
        beside.unlink(missing_ok=True)
        if manifest is not None:
            beside.write_bytes(manifest)
        return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(tmp_path_factory.mktemp("finished"))


# ---- damage


def with_id(line: bytes, name: str) -> bytes:
    """The answer under another id, with the right checksum: as if an engine of ours had written it."""
    from nanovllm.apps.jobs.result_lines import _CHECKSUM, _hash

    answer = {**json.loads(line), "id": name}
    del answer["checksum"]
    content = json.dumps(answer).encode()[:-1]
    return content + _CHECKSUM + _hash(content) + b'"}\n'


FOREIGN_IDS = (
    *("batch_req_1000", "batch_req_-5", "batch_req_0", "batch_req_99999999999999", "batch_req_1" + "0" * 400),
    *("batch_req_2_1", "batch_req_ 25 ", "batch_req_٢٥", "25", "", "batch_req_025"),
)


def damaged_results(whole: list[bytes], number: int) -> bytes:
    """Results that something has damaged: cut, flipped, filled with zeros or garbage, doubled, of strange ids."""
    draw = random.Random(number)
    half = b"".join(whole[: NUM_LINES // 2])
    kind = number % 6
    if kind == 0:
        return half[: draw.randrange(len(half))] + draw.choice([b"", b"\0" * 512, b"\0\n\0", b"\n\n"])
    if kind in (1, 2):
        flipped = bytearray(half)
        for _ in range(draw.choice([1, 1, 2, 5])):
            flipped[draw.randrange(len(half))] ^= 1 << draw.randrange(8)
        return bytes(flipped)
    if kind == 3:
        at = draw.randrange(NUM_LINES // 2)
        junk = draw.choice([b"\0" * 99 + b"\n", b"[" * 100_000 + b"\n", draw.randbytes(50), b"\r\n", b"{}\n", whole[3]])
        return b"".join(whole[:at]) + junk + b"".join(whole[at:20])
    if kind == 4:
        stranger = with_id(whole[0], draw.choice(FOREIGN_IDS))
        at = draw.choice([0, 5, 20])
        return b"".join(whole[:at]) + stranger + b"".join(whole[at:20])
    return draw.choice(
        [half.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + half, half + whole[3], half.replace(b", ", b",")]
    )


def test_damaged_results_are_mended_or_refused_untouched(finished: Finished, log: pytest.LogCaptureFixture) -> None:
    for number in range(100):
        damaged = damaged_results(finished.lines, number)
        out = finished.copy(damaged, finished.manifest.read_bytes())
        log.clear()
        status = run(finished.source, out)
        if status == Status.USAGE:
            assert out.read_bytes() == damaged, number
        else:
            assert status == Status.LINES_FAILED and content_of(out) == finished.content, number
        assert "Traceback" not in log.text and len(log.text) < 3000, number


def damaged_manifests(manifest: bytes) -> Iterator[tuple[str, bytes | None]]:
    data = json.loads(manifest)
    yield from {
        "gone": None,
        "empty": b"",
        "a list": b"[]",
        "deep": b"[" * 100_000,
        "binary": random.Random(0).randbytes(200),
        "newer": json.dumps({**data, "format": 99}).encode(),
        "older": json.dumps({name: value for name, value in data.items() if name != "format"}).encode(),
        "a format that is none": json.dumps({**data, "format": "new"}).encode(),
        "an option of later": json.dumps({**data, "options": {**data["options"], "future": 1}}).encode(),
        "an input that is none": json.dumps({**data, "input": "x"}).encode(),
        "another input": json.dumps({**data, "input": {**data["input"], "xxh3_128": "0" * 32}}).encode(),
        "another engine": json.dumps({**data, "engine": {**data["engine"], "dtype": "x" * 10_000}}).encode(),
        "an engine that is none": json.dumps({**data, "engine": 5}).encode(),
    }.items()
    for number in range(40):
        flipped = bytearray(manifest)
        flipped[random.Random(number).randrange(len(flipped))] ^= 1 << random.Random(number).randrange(8)
        yield f"flip {number}", bytes(flipped)


def test_a_damaged_manifest_is_refused_or_harmless(finished: Finished, log: pytest.LogCaptureFixture) -> None:
    half = b"".join(finished.lines[:20])
    for name, manifest in damaged_manifests(finished.manifest.read_bytes()):
        out = finished.copy(half, manifest)
        log.clear()
        status = run(finished.source, out)
        if status == Status.USAGE:
            assert out.read_bytes() == half, name
        else:
            assert status == Status.LINES_FAILED and content_of(out) == finished.content, name
        assert "Traceback" not in log.text and len(log.text) < 3000, name
        must_refuse = name in (
            "gone",
            "empty",
            "newer",
            "older",
            "an option of later",
            "another input",
            "another engine",
        )
        assert status == Status.USAGE or not must_refuse, name


@pytest.mark.parametrize("name", FOREIGN_IDS)
def test_an_answer_to_a_line_that_the_input_lacks_does_not_stand_for_one_that_it_has(
    name: str, finished: Finished, log: pytest.LogCaptureFixture
) -> None:
    for lines in (
        [*finished.lines[:-1], with_id(finished.lines[0], name)],
        [with_id(finished.lines[0], name), *finished.lines[:-1]],
    ):
        out = finished.copy(b"".join(lines), finished.manifest.read_bytes())
        if run(finished.source, out) == Status.LINES_FAILED:  # at the end it may be a torn line
            assert content_of(out) == finished.content
        else:
            assert "remove that line" in log.text and out.read_bytes() == b"".join(lines)


def test_a_changed_answer_is_found_by_its_checksum(finished: Finished, log: pytest.LogCaptureFixture) -> None:
    lines = list(finished.lines)
    lines[4] = lines[4].replace(b"tokens, seed", b"tokens; seed")
    out = finished.copy(b"".join(lines), finished.manifest.read_bytes())
    assert run(finished.source, out) == Status.USAGE
    assert "line 5 is damaged" in log.text


@pytest.mark.parametrize("what", ["append", "truncate", "replace", "remove"])
def test_an_input_that_changes_while_it_is_read_never_ends_well(
    what: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": f"p{i} " + "x" * 800} for i in range(400)])

    def change() -> None:
        if what == "append":
            with open(source, "ab") as file:
                file.write(b'{"prompt": "new"}\n' * 5)
        elif what == "truncate":
            os.truncate(source, 50_000)
        elif what == "replace":
            content = source.read_bytes().replace(b"x", b"y")
            with open(source, "r+b") as file:
                file.write(content)
        else:
            source.unlink()

    status = run_job_that_calls(change, source, tmp_path / "out")
    if what == "remove":  # what is open stays readable
        assert status == Status.OK and len(read_answers(tmp_path / "out")) == 400
        return
    assert status == Status.INCOMPLETE and "changed while the job ran" in log.text
    assert len(read_answers(tmp_path / "out")) <= 400
    write_lines(source, [{"prompt": f"p{i} " + "x" * 800} for i in range(400)])
    assert run(source, tmp_path / "out") == Status.USAGE
    assert "cannot be resumed" in log.text
    assert run(source, tmp_path / "out", overwrite=True) == Status.OK


def edit_ahead(lines: list[bytes]) -> None:
    lines[300] = lines[300].replace(b"x", b"y", 1)


def remove_ahead(lines: list[bytes]) -> None:
    del lines[300:320]


def insert_ahead(lines: list[bytes]) -> None:
    lines.insert(300, b'{"prompt": "new"}\n')


def swap_ahead(lines: list[bytes]) -> None:
    lines[300], lines[301] = lines[301], lines[300]


@pytest.mark.parametrize("edit", [edit_ahead, remove_ahead, insert_ahead, swap_ahead])
def test_lines_that_are_edited_before_they_are_read_again_end_the_job_with_status_5(
    edit: Callable[[list[bytes]], None], tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": f"p{i} " + "x" * 800} for i in range(400)])

    def change() -> None:
        lines = source.read_bytes().splitlines(keepends=True)
        edit(lines)
        source.write_bytes(b"".join(lines))  # in place: whoever has it open sees it

    assert run_job_that_calls(change, source, tmp_path / "out") == Status.INCOMPLETE
    assert "changed while the job ran" in log.text
    assert run(source, tmp_path / "out") == Status.USAGE


def test_a_line_that_is_edited_after_it_was_read_twice_is_answered_as_it_was(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Both readings saw the same, so all answers are right; but the results are no longer those of the file."""
    source = write_lines(tmp_path / "in", [{"prompt": f"p{i} " + "x" * 800} for i in range(400)])

    def change() -> None:
        with open(source, "r+b") as file:
            file.write(b'{"prompt": "q')

    assert run_job_that_calls(change, source, tmp_path / "out") == Status.OK
    assert len(read_answers(tmp_path / "out")) == 400
    assert run(source, tmp_path / "out") == Status.USAGE and "is of another job" in log.text


def test_an_engine_that_forgets_a_request_leaves_the_job_incomplete(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = InstantLLM.run_requests
    monkeypatch.setattr(InstantLLM, "run_requests", lambda *a: (x for x in real(*a) if x[0] not in (3, 5)))
    source = write_lines(tmp_path / "in", [{"prompt": "x"}] * 9)
    assert run(source, tmp_path / "out") == Status.INCOMPLETE
    assert "2 lines have no answer: 4, 6" in log.text
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(source.read_bytes())))
    assert run("-", tmp_path / "other") == Status.INCOMPLETE
    monkeypatch.undo()
    assert run(source, tmp_path / "out") == Status.OK


def test_a_damaged_packed_input_is_refused_or_read_rightly(finished: Finished, log: pytest.LogCaptureFixture) -> None:
    packed = gzip.compress(finished.source.read_bytes())
    damaged = [
        packed[:-20],
        packed[: len(packed) // 2],
        packed + b"garbage",
        packed + bytes(100),
        b"\x1f\x8b",
        packed * 2,
    ]
    for number in range(60):
        flipped = bytearray(packed)
        flipped[random.Random(number).randrange(2, len(packed))] ^= 1 << random.Random(number).randrange(8)
        damaged.append(bytes(flipped))
    source = finished.folder / "damaged"
    out = finished.folder / "from-damaged"
    for number, content in enumerate(damaged):
        source.write_bytes(content)
        status = run(source, out, overwrite=True)
        if status == Status.USAGE:
            assert not out.exists()
        elif content != packed * 2:  # which is a file of twice the lines
            assert status == Status.LINES_FAILED and content_of(out) == finished.content, number
        out.unlink(missing_ok=True)
    assert "Traceback" not in log.text


# ---- what is written where


def test_a_folder_as_input_is_listed_once_and_nothing_is_written_into_it(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    write_lines(folder / "a.jsonl", [{"prompt": "x"}] * 3)
    (tmp_path / "link").symlink_to(folder)
    for inside in (folder / "out.jsonl", folder / ".hidden", tmp_path / "link" / "out.jsonl"):
        assert run(folder, inside) == Status.USAGE
        assert run(folder, tmp_path / "out", stats=str(inside)) == Status.USAGE
        assert run(folder, tmp_path / "out", trace=str(inside)) == Status.USAGE
    assert log.text.count("all read as requests") == 9
    assert sorted(path.name for path in folder.iterdir()) == ["a.jsonl"]

    def feed() -> None:
        shutil.copy(folder / "a.jsonl", folder / "b.jsonl")

    write_lines(folder / "a.jsonl", [{"prompt": "x"}] * 30)
    assert run_job_that_calls(feed, folder, tmp_path / "out") == Status.OK
    assert len(read_answers(tmp_path / "out")) == 30


def test_no_file_is_read_and_written_or_written_twice(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": "x"}])
    os.link(source, tmp_path / "hard")
    (tmp_path / "soft").symlink_to(source)
    out = str(tmp_path / "out")
    before = source.read_bytes()
    for options in (
        *({"stats": path} for path in (out, f"{out}.job.json", str(source), str(tmp_path / "hard"))),
        *({"trace": path} for path in (out, f"{out}.job.json", str(source), str(tmp_path / "soft"))),
        {"stats": str(tmp_path / "x"), "trace": str(tmp_path / "x")},
    ):
        assert run(source, out, **options) == Status.USAGE, options
        assert not Path(out).exists() and source.read_bytes() == before
    assert log.text.count("choose another file") == 9
    assert run(source, tmp_path / "hard") == run(source, tmp_path / "soft") == Status.USAGE
    assert source.read_bytes() == before


def test_what_is_no_file_is_never_replaced_by_one(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": "x"}])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (str(pipe), "/dev/null", "-"):
        assert run(source, tmp_path / "out", stats=place) == Status.USAGE
    assert log.text.count("is no file, and cannot become one") == 3
    assert pipe.is_fifo() and not (tmp_path / "out").exists()


def test_a_pipe_whose_reader_died_ends_the_job(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    journal, _ = open_results(str(tmp_path / "pipe"), Manifest(tmp_path / "pipe", None), LineSet(), False)
    journal.append(b"{}\n")
    os.close(reader)
    with pytest.raises(OutputError, match="pipe cannot be written"):
        journal.append(b"{}\n")


@pytest.mark.parametrize("name", ["a" * 300, "b" * 250, "\0", "no/such/place", "loop", "\ud800", "."])
def test_names_that_no_file_can_have_are_usage_errors(name: str, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    (tmp_path / "loop").symlink_to("loop")
    source = write_lines(tmp_path / "in", [{"prompt": "x"}])
    place = f"{tmp_path}/{name}"
    assert run(source, place) == Status.USAGE
    if name[0] != "b" and name != ".":
        if name != "loop":  # of which --stats takes the place
            assert run(source, tmp_path / "out", stats=place) == Status.USAGE
        assert run(place, tmp_path / "out") == Status.USAGE
    assert run(source, tmp_path / "out", stats=str(tmp_path)) == Status.USAGE
    assert "Traceback" not in log.text and len(log.text) < 3000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "loop"]


def test_new_files_have_names_that_nobody_can_foresee_and_stale_ones_go(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": "x"}] * 3)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("out.job.json.new", "stats.new"):
        (tmp_path / name).symlink_to(victim)
    seen: set[str] = set()
    real = os.replace

    def replace(new: Path, path: Path) -> None:
        seen.add(Path(new).name)
        real(new, path)
        if len(seen) == 1:
            raise KeyboardInterrupt  # a kill right after it would leave the like of this:

    stale = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace)
        run(source, tmp_path / "out", stats=str(tmp_path / "stats"))
    assert len(seen) == 2 and not (seen & {path.name for path in tmp_path.iterdir()})
    stale = [tmp_path / (name[: name.rindex("-") + 1] + "0123456789abcdef.new") for name in seen]
    for path in stale:  # as after a kill
        path.write_text("half")
    assert run(source, tmp_path / "out", stats=str(tmp_path / "stats")) == Status.OK
    assert victim.read_text() == "mine" and not any(path.exists() for path in stale)


def test_a_bar_that_cannot_be_drawn_stops_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": "x"}] * 30)
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert run(source, tmp_path / "out") == Status.OK
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    assert len(read_answers(tmp_path / "out")) == 30


# ---- the engine that gave the answers


def test_another_model_or_version_is_refused_or_accepted_and_recorded(
    finished: Finished, log: pytest.LogCaptureFixture
) -> None:
    half = b"".join(finished.lines[:20])
    out = finished.copy(half, finished.manifest.read_bytes())
    other = {"origin": "another digest"}
    assert run(finished.source, out, other) == Status.USAGE
    assert "engine.model was 'a digest' and is 'another digest'" in log.text and "--accept-changes" in log.text
    assert out.read_bytes() == half
    assert run(finished.source, out, other, accept_changes=True) == Status.LINES_FAILED
    assert "accepted: engine.model was 'a digest' and is 'another digest'" in log.text
    assert content_of(out) == finished.content
    manifest = json.loads(out.with_name(out.name + ".job.json").read_text())
    (change,) = manifest["changes"]
    assert change["after_bytes"] == len(half) and "another digest" in change["differences"][0]
    assert manifest["engine"]["model"] == "another digest"


def test_options_may_be_changed_on_purpose_but_never_the_input(
    finished: Finished, log: pytest.LogCaptureFixture
) -> None:
    out = finished.copy(b"".join(finished.lines[:20]), finished.manifest.read_bytes())
    for change in ({"seed": 5}, {"model_name": "other"}, {"dtype": "float32"}):
        assert run(finished.source, out, **change) == Status.USAGE
    assert run(finished.source, out, seed=5, accept_changes=True) == Status.LINES_FAILED
    assert run(finished.source, out, seed=5) == Status.LINES_FAILED
    other = write_lines(finished.folder / "other", [{"prompt": "x"}] * NUM_LINES)
    assert run(other, out, seed=5, accept_changes=True) == Status.USAGE
    assert "input.xxh3_128 was" in log.text


def test_the_model_in_the_box_is_known_by_its_content(tiny_copy: Path) -> None:
    def provenance() -> dict[str, str]:
        with LLM(str(tiny_copy), max_model_len=64, kvcache_memory_bytes=8 << 20) as llm:
            return read_provenance(llm.engine)

    first = provenance()
    assert first["device"] == "cpu" and first["attention_backend"] == "torch" and first["torch"]
    config = json.loads((tiny_copy / "config.json").read_text())
    (tiny_copy / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    assert provenance()["model"] != first["model"]


@pytest.fixture
def tiny_copy(tmp_path: Path) -> Path:

    return shutil.copytree(BOX_MODEL, tmp_path / "model")


# ---- lines


def body_of(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 2, **fields}).encode()


def chat_of(**kwargs: Any) -> bytes:
    return body_of(messages=[{"role": "user", "content": "x"}], chat_template_kwargs=kwargs)


def hostile_lines() -> Iterator[bytes]:
    """Lines that somebody has thought hard about."""
    long_id = json.dumps(openai_line("i" * (1 << 20), prompt="x", max_tokens=2)).encode()
    yield from (long_id, long_id)
    for name in ("é", "e\u0301", "a\0b", "6"):
        yield json.dumps(openai_line(name, prompt="x\0y", max_tokens=2)).encode()
    for name in ("seed", "max_tokens", "top_k", "logprobs", "temperature", "top_p", "min_p"):
        for value in ("1" + "0" * 400, "-1" + "0" * 400, "1" + "0" * 5000, '"1"', "[1]", "1e400", "true", "{}"):
            yield f'{{"prompt": "x", "{name}": {value}}}'.encode()
    for prompt in (f"[1{'0' * 400}]", "[-1]", "[true]", "[1.0]", "[]", "[[1]]", '"\\ud800"', "{}", "5"):
        yield f'{{"prompt": {prompt}, "max_tokens": 2}}'.encode()
    for field in ('"stop": "\\ud800"', '"\\ud800": 1', '"model": "\\ud800"', '"stop": ""', '"model": {}'):
        yield f'{{"prompt": "x", {field}, "max_tokens": 2}}'.encode()
    yield body_of(prompt="x", stop=[f"z{i}" for i in range(20_000)])
    yield from (b"[]", b"5", b"null", b"\0\0\0", b'{"prompt":"\xe9"}', b'{"prompt":"x"} {}', '{"a":1}'.encode("utf-16"))
    for message in (
        "null",
        '{"role": ["user"], "content": "x"}',
        '{"role": {}, "content": "x"}',
        '{"content": "\\udfff"}',
    ):
        yield f'{{"messages": [{message}]}}'.encode()
    for name, value in {**{name: [{}] for name in RENDERING}, "self": 1, "bos_token": 5, "a": [[]] * 9}.items():
        yield chat_of(**{name: value})
    for template in (
        "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**9 }}",
    ):
        yield chat_of(chat_template=template)
    for depth in (500, 950, 990, 1000, 5000, 100_000):
        for where in (
            "n",
            "prompt",
            "stop",
            "model",
            "logit_bias",
            "messages",
            "chat_template_kwargs",
            "response_format",
        ):
            yield f'{{"prompt": "x", "{where}": {"[" * depth}{"]" * depth}}}'.encode()
        yield f'{{"prompt": "x", "structured_outputs": {{"json": {{"x": {"[" * depth}{"]" * depth}}}}}}}'.encode()
        schema: dict[str, Any] = {"type": "array", "items": {}}
        for _ in range(min(depth, 900)):
            schema = {"items": schema}
        yield body_of(prompt="x", structured_outputs={"json": schema})
    for schema in (
        {"$ref": "#"},
        {"type": "string", "pattern": "(a{1000}){1000}"},
        {"type": "string", "maxLength": 10**9},
        {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
        {"allOf": [{"anyOf": [{"minLength": 7 * i + j} for j in range(6)]} for i in range(9)]},
        {"properties": {f"p{i}": {"not": {}} for i in range(500)}},
    ):
        yield body_of(prompt="x", structured_outputs={"json": schema})
    for regex in ("((a|b)*c){500}x{1,1000}", "(x+x+)+y", "(" * 5000, "a" * 100_000):
        yield body_of(prompt="x", structured_outputs={"regex": regex})
    yield body_of(prompt="x", structured_outputs={"grammar": "start: a\na: a a a | start"})


def test_every_hostile_line_gets_one_short_answer_and_the_others_run() -> None:
    good = body_of(prompt="the cat", temperature=0)
    lines = [good, *hostile_lines(), good]
    answers: list[ResultLine] = []
    with LLM("tiny-qwen3", dtype="float32", max_model_len=128, max_num_seqs=8, kvcache_memory_bytes=32 << 20) as llm:
        numbered = (Line(number, raw) for number, raw in enumerate(lines, start=1))
        Answering(llm, answers.append, "tiny-qwen3", {}, LineAdapters(llm)).answer(numbered)
    assert sorted(answer.number for answer in answers) == list(range(1, len(lines) + 1))
    for answer in answers:
        said = json.loads(answer.line)
        if said["error"] is not None:
            assert len(said["error"]["message"]) < 1000
        else:
            assert answer.usage is not None and (answer.is_copy or answer.usage.num_generated_tokens > 0)
    assert answers_by_number(answers)[1].usage is not None and answers_by_number(answers)[len(lines)].usage is not None


def answers_by_number(answers: list[ResultLine]) -> dict[int, ResultLine]:
    return {answer.number: answer for answer in answers}


RENDERING = ("chat_template", "tools", "documents", "add_generation_prompt", "tokenize", "return_dict", "messages")


def test_a_line_may_name_no_argument_of_the_rendering_itself() -> None:
    with LLM("tiny-qwen3", max_model_len=64, kvcache_memory_bytes=8 << 20) as llm:
        assert set(RENDERING) <= list_rendering_arguments()
        for name in list_rendering_arguments():
            with pytest.raises(LineError, match=f"'{name}', which is not for a line"):
                prepare_request(read_request_line(Line(1, chat_of(**{name: 1}))), llm, "tiny-qwen3")


def test_a_line_that_is_too_long_is_an_error_and_is_never_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nanovllm.apps.jobs.source.MAX_LINE_BYTES", 1000)
    packed = tmp_path / "in.gz"
    with gzip.open(packed, "wb", compresslevel=1) as file:
        file.write(body_of(prompt="first" * 20) + b"\n")  # zeros at the very beginning are no lines at all
        for _ in range(64):
            file.write(bytes(1 << 20))
        file.write(b"\n" + body_of(prompt="x" * 900) + b"\n" + body_of(prompt="last"))
    tracemalloc.start()
    try:
        status = run(packed, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert status == Status.LINES_FAILED and peak < 8 << 20, f"{peak >> 20} MiB"
    answers = {answer["id"]: answer for answer in read_answers(tmp_path / "out")}
    assert "1000 bytes" in answers["batch_req_2"]["error"]["message"]
    assert all(answers[f"batch_req_{number}"]["error"] is None for number in (1, 3, 4))


def test_the_longest_line_allowed_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.apps.jobs.source.MAX_LINE_BYTES", 10)
    lines = [b"x" * 10, b"x" * 11, b"x" * 9, b" " * 10, b"x" * 10]
    path = tmp_path / "in"
    path.write_bytes(b"\n".join(lines))
    read = list(Reading(Source(str(path))))
    assert [(line.number, line.is_cut) for line in read] == [(1, False), (2, True), (3, False), (5, False)]


def test_a_prompt_of_too_many_characters_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM("tiny-qwen3", max_model_len=64, kvcache_memory_bytes=8 << 20) as llm:
        backend = llm.engine.tokenizer._backend  # type: ignore[union-attr]
        longest = max(map(len, backend.get_vocab()))
        without = SimpleNamespace(get_vocab=backend.get_vocab)
        monkeypatch.setattr(llm.engine.tokenizer, "_backend", without)
        text = "the cat sat. " * 400_000
        for ask in (lambda: llm.prepare(text), lambda: llm.render_chat([{"role": "user", "content": text}])):
            with pytest.raises(ValueError, match=rf"characters; with max_model_len=64.*at most {4 * 64 * longest}"):
                ask()
        monkeypatch.setattr(llm.engine.tokenizer, "_backend", backend)
        with pytest.raises(ValueError, match="tokens"):
            llm.prepare("a b " * (64 * longest - 1))
