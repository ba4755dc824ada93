"""No grammar stops, slows or kills the process: a large one costs its own request an error, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers.schemas import SCHEMAS

pytest.importorskip("llguidance")

import nanovllm
from nanovllm.features.edits import trial
from nanovllm.features.edits.grammar_size import MOST, SAFE, is_safe, measure_schema, measure_text
from nanovllm.features.edits.grammars import Grammars
from nanovllm.features.edits.json_schema import read_schema
from nanovllm.text.tokenizer import Tokenizer

VOCAB_SIZE = 664
EOS = 663


@pytest.fixture
def compiler() -> Grammars:
    tokenizer = Tokenizer(Path(nanovllm.__file__).parent / "assets" / "tiny-qwen3")
    return Grammars(tokenizer, VOCAB_SIZE, [EOS])


def chain_references(count: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$defs": definitions | {f"d{count}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def chain_rules(count: int) -> str:
    return "start: r0\n" + "".join(f'r{i}: "a" r{i + 1} | "b"\n' for i in range(count)) + f'r{count}: "z"'


def chain_terminals(count: int) -> str:
    return "start: T0\n" + "".join(f'T{i}: "a" T{i + 1}\n' for i in range(count)) + f'T{count}: "z"'


def object_with(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


PATTERNS = [{"pattern": f"{i}[a-z]*"} for i in range(300)]
HARMFUL: dict[str, tuple[dict[str, Any], str]] = {
    "multipleOf": ({"json": {"type": "integer", "multipleOf": 9999991}}, "multipleOf is 9999991"),
    "multipleOf of many": ({"json": {"type": "integer", "multipleOf": 9973000}}, "more than 0.75 s"),
    "common multiple": ({"json": {"allOf": [{"multipleOf": p} for p in (9967, 9973)], "type": "integer"}}, "0.75 s"),
    "multipleOf in Lark": ({"grammar": 'start: %json {"type": "integer", "multipleOf": 9999991}'}, "more than 0.75 s"),
    "references": ({"json": chain_references(2700)}, "2 MB of stack"),
    "rules": ({"grammar": chain_rules(3000)}, "2 MB of stack"),
    "terminals": ({"grammar": chain_terminals(5750)}, "2 MB of stack"),
    "deep references": ({"json": chain_references(7000)}, "14004 levels deep; at most 10000"),
    "required": ({"json": object_with(required=[f"r{i}" for i in range(100_000)])}, "bytes; at most 524288"),
    "names": ({"json": object_with(required=[f"r{i}" for i in range(6000)])}, "6000 names; at most 5000"),
    "patterns of one string": ({"json": {"type": "string", "allOf": PATTERNS}}, "more than 0.75 s"),
    "pattern properties": ({"json": object_with(patternProperties={f"^p{i:05d}[0-9]*x$": {} for i in range(400)})}, ""),
    "a long expression": ({"regex": "abcdefghij" * 1_000_000}, "10000000 bytes; at most 524288"),
    "a slow expression": ({"regex": "".join(f"[a-{chr(98 + i % 24)}]*" for i in range(6000))}, "more than 0.75 s"),
    "a long constant": ({"json": {"const": "x" * 10_000_000}}, "bytes; at most 524288"),
}
"""Each of these stopped a process for seconds or minutes, filled its memory, or killed it."""


def run_batch(source: Path, results: Path) -> subprocess.Popen[bytes]:
    options = ["-i", str(source), "-o", str(results), "--max-model-len=256", "--num-kvcache-blocks=64"]
    command = [sys.executable, "-m", "nanovllm", "run-batch", "--model=tiny-qwen3", *options]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


@pytest.mark.slow
def test_a_job_answers_all_other_lines_and_is_resumed(tmp_path: Path) -> None:
    """One job with all of them, each between two good lines."""
    from helpers.batch_jobs import openai_line, write_lines

    from nanovllm.apps.jobs.job import Status

    lines = [openai_line("first", prompt="a", max_tokens=3)]
    for name, (asked, _) in HARMFUL.items():
        lines.append(openai_line(name, prompt="a", max_tokens=3, structured_outputs=asked))
        lines.append(openai_line(f"after {name}", prompt="a", max_tokens=3, structured_outputs={"regex": "[a-z]{2}"}))
    source = write_lines(tmp_path / "in", lines)
    results = tmp_path / "out"
    ids = [line["custom_id"] for line in lines]
    assert run_batch(source, results).wait(300) == Status.LINES_FAILED
    check_answers(results, ids)
    kept = b"".join(results.read_bytes().splitlines(keepends=True)[: len(lines) // 2])
    results.write_bytes(kept)  # as if it had been killed half way
    assert run_batch(source, results).wait(300) == Status.LINES_FAILED
    check_answers(results, ids)
    assert results.read_bytes().startswith(kept)


def check_answers(results: Path, ids: list[str]) -> None:
    from helpers.batch_jobs import read_answers

    answers = {answer["custom_id"]: answer for answer in read_answers(results)}
    assert sorted(answers) == sorted(ids)
    for custom_id in ids:
        if custom_id in HARMFUL:
            assert answers[custom_id]["response"]["status_code"] == 400
            assert HARMFUL[custom_id][1] in answers[custom_id]["error"]["message"]
        else:
            assert answers[custom_id]["error"] is None


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_a_job_that_compiles_one_large_grammar_after_the_other(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Each of the 100 lines takes most of a second, so a job that answered them all first would take a minute."""
    from helpers.batch_jobs import openai_line, write_lines

    patterns = [{"type": "string", "allOf": [*PATTERNS, {"pattern": str(i)}]} for i in range(100)]
    hard = [openai_line(str(i), prompt="a", structured_outputs={"json": schema}) for i, schema in enumerate(patterns)]
    source = write_lines(tmp_path / "in", [openai_line("good", prompt="a", max_tokens=3), *hard])
    results = tmp_path / "out"
    job = run_batch(source, results)
    deadline = time.monotonic() + 120
    while not (results.exists() and results.read_bytes().count(b"\n") > 2):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.05)
    sent = time.monotonic()
    job.send_signal(number)
    assert job.wait(60) == 128 + number
    print(f"ended {time.monotonic() - sent:.2f} s after {number.name}")
    assert results.read_bytes().count(b"\n") < 50


def test_ordinary_grammars_are_compiled_at_once(compiler: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "try_in_child", None)
    fields = {f"field{i}": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,6}$", "maxLength": 9} for i in range(40)}
    models = {f"m{i}": object_with(properties={"next": {"$ref": f"#/$defs/m{(i + 1) % 60}"}}) for i in range(60)}
    prices = {f"price{i}": {"type": "number", "multipleOf": 0.01, "minimum": 0} for i in range(100)}
    wanted: list[dict[str, Any]] = [{"json": schema} for schema in SCHEMAS.values()]
    wanted += [{"json": object_with(properties=fields)}, {"json": object_with(properties=prices)}]
    wanted += [{"json": {"$defs": models, "$ref": "#/$defs/m0"}}, {"json": {"type": "integer", "multipleOf": 1000}}]
    wanted += [{"choice": [f"city number {i}" for i in range(1000)]}, {"grammar": chain_rules(100)}]
    for asked in wanted:
        compiler.compile(asked)


LARGE: list[dict[str, Any]] = [
    {"choice": [f"value {i}" for i in range(5000)]},
    {"json": {"type": "integer", "multipleOf": 1_000_000}},
    {"json": chain_references(300)},
    {"grammar": 'start: <|im_start|> %json {"type": "boolean"}'},
    {"regex": "|".join(f"word{i}" for i in range(3000))},
]


@pytest.mark.parametrize("asked", LARGE, ids=[next(iter(asked)) for asked in LARGE])
def test_a_large_grammar_that_is_good_is_tried_in_a_child_and_accepted(
    asked: dict[str, Any], compiler: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def count(*request: Any) -> str:
        tried.append(trial_in_child(*request))
        return tried[-1]

    trial_in_child = trial.try_in_child
    monkeypatch.setattr(trial, "try_in_child", count)
    for _ in range(2):
        assert not compiler.compile(asked).is_error()
    assert tried == [""], "the second request finds it compiled"


def test_a_bad_schema_that_is_large_is_refused_with_its_place(compiler: Grammars) -> None:
    bad = object_with(properties={f"p{i}": {"type": "string"} for i in range(1500)} | {"x": {"uniqueItems": True}})
    with pytest.raises(ValueError, match=r"^structured_outputs\.json: at #.*uniqueItems"):
        compiler.compile({"json": bad})


def test_children_run_beside_each_other_and_import_no_torch(compiler: Grammars) -> None:
    wanted = [json.dumps({"enum": [f"{name}{i}" for i in range(4000)]}) for name in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda text: trial.try_in_child("json", text, {}, VOCAB_SIZE, EOS), wanted):
            assert found == ""
    script = (
        "import nanovllm.features.edits.trial, sys; print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_child_that_cannot_start_refuses_the_grammar(compiler: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ValueError, match=r"none can be started: .*No such file"):
        compiler.compile(LARGE[0])


def test_a_grammar_that_nobody_waits_for_any_more_ends_its_child_and_is_not_taken_for_bad(
    compiler: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = []

    class Child(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            children.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Child)
        patch.setattr(trial, "is_unwanted", lambda: True)
        with pytest.raises(CancelledError):
            compiler.compile(LARGE[0])
    assert [child.returncode for child in children] == [-signal.SIGKILL]
    assert not compiler.compile(LARGE[0]).is_error()


def test_a_panic_is_one_sentence(compiler: Grammars, capfd: pytest.CaptureFixture[str]) -> None:
    panics = 'start: a b\na[lazy]: /.*/\nb: "x"'
    with pytest.raises(
        ValueError, match=r"^structured_outputs\.grammar: llguidance gave up \(assertion failed: [^\n]*\)$"
    ):
        compiler.compile({"grammar": panics})
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("schema", "name", "size"),
    [
        ({"multipleOf": 0.25}, "multiples", 25),
        ({"items": {"multipleOf": 300}, "multipleOf": 7}, "multiples", 2100),
        ({"items": {"multipleOf": 300}, "multipleOf": 7}, "multiple", 7),
        ({"multipleOf": 1e300}, "multiple", 1),
        ({"multipleOf": True}, "multiples", 1),
        ({"properties": {"a": {"required": ["b", "c"]}}, "patternProperties": {"^x": {}}}, "names", 4),
        ({"properties": {"a": {"items": {"$ref": "#"}}}}, "depth", 6),
        ({"properties": {"a/b": {"$ref": "#"}, "c": {"$ref": "#"}}}, "depth", 4),
        ({"pattern": "abc", "format": "date"}, "patterns", 128 + 3 + 128 + 4),
        ({"pattern": ["a"]}, "patterns", 128 + 5),
    ],
)
def test_the_size_of_a_schema(schema: dict[str, Any], name: str, size: int) -> None:
    text = json.dumps(schema)
    measured = measure_schema(read_schema(text), len(text))
    assert getattr(measured, name) == size and measured.bytes == len(text)


def test_sizes_are_counted_in_bytes_and_beyond_each_bound_a_grammar_is_no_longer_safe() -> None:
    assert measure_text("regex", "é").bytes == 2
    assert measure_text("grammar", "start: (a [b])\n// c\na: b").depth == 4
    assert measure_text("grammar", 'start: %json {"type": "integer"}').schemas
    assert is_safe(SAFE) and not is_safe(MOST)
    for name, bound in SAFE._asdict().items():
        assert not is_safe(SAFE._replace(**{name: bound + 1}))
    for name in ("bytes", "names", "depth", "multiple"):
        bound = getattr(MOST, name)
        with pytest.raises(ValueError, match=f"{bound + 1}.*at most {bound}"):
            is_safe(MOST._replace(**{name: bound + 1}))


@pytest.mark.slow
def test_memory_and_descriptors_stay_flat_over_two_thousand_grammars(compiler: Grammars) -> None:
    """The memory that the first half takes is the cache's; the second half may take 25 MB more."""

    def read_resources() -> tuple[int, int]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))

    found = []
    for i in range(2000):
        properties = {
            f"p{i}_{j}": {"type": "string", "maxLength": i + 10, "pattern": f"^[a-z]{{{j + 1}}}"} for j in range(10)
        }
        compiler.compile({"json": object_with(properties=properties, required=[*properties])})
        if i % 100 == 0:
            compiler.compile({"choice": [f"{i}-{j}" for j in range(4000)]})
        if i in (1000, 1999):
            found.append(read_resources())
    (memory, descriptors), (memory_after, descriptors_after) = found
    print(f"{memory >> 20} MB after 1000 grammars, {memory_after >> 20} MB after 2000")
    assert memory_after - memory < 25 << 20
    assert descriptors_after == descriptors
