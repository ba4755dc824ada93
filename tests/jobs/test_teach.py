"""Shards have what `score_arrays` says of each line, whatever ends the process, and each line once."""

import random
import resource
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.batch_jobs import openai_line, write_lines
from helpers.paths import ROOT
from safetensors.numpy import load_file

from nanovllm import LLM, EngineConfig
from nanovllm.apps.jobs.job import Status
from nanovllm.apps.jobs.shards import Shards, read_metadata
from nanovllm.apps.teach.run import TeachJob, run_teach_job

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "cpu",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "kvcache_memory_bytes": 8 << 20,
}
TALK = [
    {"role": "user", "content": "what is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "ok"},
]
LINES = [
    {"messages": TALK},
    {"prompt": "The number 3 comes before 4."},
    openai_line("a", prompt=[5, 6, 7, 8]),
    b'{"torn',
    {"text": [9]},
    openai_line("a", prompt="twice"),
    {"prompt": "x", "temperature": 0},
    openai_line("b", messages=TALK[:2]),
    *({"prompt": [10 + i] * (1 + 7 * i % 23)} for i in range(12)),
    {"prompt": "a", "text": "b"},
    openai_line("c", prompt="a", text="b"),
    {"prompt": [1] * 66},
]
WRONG = {4: "Unterminated", 6: "seen before", 7: "temperature", len(LINES): "66 tokens"}
WRONG |= {len(LINES) - 2: '"prompt" and "text"', len(LINES) - 1: "one of the two"}
TOP = 5


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", LINES)


def run(source: Path, output: Path, **options: Any) -> Status:
    given: dict[str, Any] = {"top": TOP, "shard_tokens": 40, **options}
    return run_teach_job(TeachJob(str(source), str(output), EngineConfig("tiny-qwen3", **ENGINE), "m", **given))


def read_shards(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.glob("shard-*")}


def list_texts(output: Path) -> Iterator[tuple[int, str | None, dict[str, np.ndarray]]]:
    """Yield the number, the id and the arrays of each line."""
    for path in sorted(output.glob("*.safetensors")):
        arrays = load_file(path)
        custom_ids = read_metadata(path)["custom_ids"]
        offsets = arrays.pop("offsets").tolist()
        lines = arrays.pop("lines").tolist()
        for line, custom_id, (start, end) in zip(lines, custom_ids, pairwise(offsets), strict=True):
            yield line, custom_id, {name: values[start:end] for name, values in arrays.items()}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-qwen3", **ENGINE) as llm:
        yield llm


def test_shards_hold_the_arrays_of_every_line_in_order(source: Path, tmp_path: Path, llm: LLM) -> None:
    assert run(source, tmp_path / "out", logprobs_dtype="float32") == Status.LINES_FAILED
    texts = list(list_texts(tmp_path / "out"))
    assert [number for number, *_ in texts] == list(range(1, len(LINES) + 1))
    assert len(read_shards(tmp_path / "out")) > 2
    for (number, custom_id, found), line in zip(texts, LINES, strict=True):
        if number in WRONG:
            assert not found["token_ids"].size
            continue
        assert custom_id == line.get("custom_id")
        body = line.get("body", line)
        prompt = (
            body.get("prompt")
            or body.get("text")
            or llm.render_chat(body["messages"], {"add_generation_prompt": False})
        )
        (expected,) = llm.score_arrays(prompt, TOP, use_tqdm=False)
        for name, values in expected._asdict().items():
            np.testing.assert_array_equal(found[name], values)
        assert found["mask"].tolist() == [False] + [True] * (len(expected.token_ids) - 1)
    errors: dict[str, str] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        errors |= read_metadata(path)["errors"]
    assert errors.keys() == {str(number) for number in WRONG}
    assert all(text in errors[str(number)] for number, text in WRONG.items())


def test_parquet_has_a_row_for_each_line(source: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert run(source, tmp_path / "out") == run(source, tmp_path / "table", format="parquet") == Status.LINES_FAILED
    rows = [
        row for path in sorted((tmp_path / "table").glob("*.parquet")) for row in parquet.read_table(path).to_pylist()
    ]
    for (number, custom_id, arrays), row in zip(list_texts(tmp_path / "out"), rows, strict=True):
        assert (row.pop("line"), row.pop("custom_id")) == (number, custom_id)
        assert row.keys() == arrays.keys()
        for name, values in arrays.items():
            np.testing.assert_array_equal(np.array(row[name], values.dtype).reshape(values.shape), values)


def test_of_a_conversation_only_what_the_assistant_says_counts(tmp_path: Path, llm: LLM) -> None:
    source = write_lines(tmp_path / "in", [{"messages": TALK}, {"prompt": [3, 4]}, {"messages": TALK[:1]}])
    assert run(source, tmp_path / "out", only_assistant=True) == Status.LINES_FAILED
    (_, _, talk), (_, _, text), (_, _, nobody) = list_texts(tmp_path / "out")
    said = llm.get_tokenizer().decode(talk["token_ids"][talk["mask"]])
    assert said == "5<|im_end|>\nok<|im_end|>\n"
    assert np.isfinite(talk["logprobs"][talk["mask"]]).all()
    assert text["mask"].tolist() == [False, True] and not nobody["mask"].size


def test_a_template_that_writes_beginnings_otherwise_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.apps.teach.texts import mask_assistant

    template = "{% for m in messages %}{{ loop.length }}{{ m.role }}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", template)
    prompt: Any = llm.render_chat(TALK, {"add_generation_prompt": False})
    with pytest.raises(ValueError, match="up to message 1 otherwise"):
        mask_assistant(TALK, prompt["prompt_token_ids"], llm, {})


def test_a_job_goes_on_after_its_last_shard(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(source, tmp_path / "whole") == Status.LINES_FAILED
    whole = read_shards(tmp_path / "whole")
    out = tmp_path / "out"
    write = Shards.write

    def break_after_one(self: Shards, texts: Any, progress: Any) -> None:
        if self.num_shards == 1:
            raise RuntimeError("it breaks")
        write(self, texts, progress)

    monkeypatch.setattr(Shards, "write", break_after_one)
    assert run(source, out) == Status.BROKEN
    assert len(read_shards(out)) == 1
    monkeypatch.setattr(Shards, "write", write)
    assert run(source, out, top=4) == Status.USAGE
    assert run(source, out) == Status.LINES_FAILED
    assert read_shards(out) == whole
    assert run(source, out) == Status.LINES_FAILED, "nothing is left, and no model is loaded"
    (out / "shard-000001.safetensors").unlink()
    assert run(source, out) == Status.USAGE
    assert run(source, out, overwrite=True) == Status.LINES_FAILED
    assert read_shards(out) == whole


def test_a_full_disk_is_told_and_leaves_whole_shards(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(source, tmp_path / "whole", shard_tokens=90) == Status.LINES_FAILED
    whole = read_shards(tmp_path / "whole")
    out = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (min(map(len, whole.values())) + 1, before[1]))
    try:
        assert run(source, out, shard_tokens=90) == Status.OUTPUT_FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written: File too large" in caplog.text
    assert read_shards(out).items() <= whole.items() and not list(out.glob(".*"))
    assert run(source, out, shard_tokens=90) == Status.LINES_FAILED
    assert read_shards(out) == whole


def test_what_cannot_be_taught_is_refused(source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("pyarrow")
    assert run(source, source) == Status.USAGE and "must be a folder" in caplog.text
    assert run(source.parent, tmp_path / "out") == Status.USAGE and "lies in the input" in caplog.text
    assert run(Path("-"), tmp_path / "out") == Status.USAGE and "is a pipe" in caplog.text
    assert run(source, tmp_path / "out", top=0) == Status.USAGE and "--top is 0" in caplog.text
    assert run(source, tmp_path / "out", top=10_000) == Status.USAGE and "top is 10000" in caplog.text
    assert run(source, tmp_path / "out") == Status.LINES_FAILED, "what was refused is no earlier job"
    assert run(source, tmp_path / "out", format="parquet") == Status.USAGE and "options.format" in caplog.text
    assert run(source, tmp_path / "out", format="parquet", overwrite=True) == Status.LINES_FAILED
    assert {path.suffix for path in (tmp_path / "out").glob("shard-*")} == {".parquet"}


def test_a_smaller_model_learns_from_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example is run for 16 steps. Its loss is the mean of eight texts."""
    texts = [
        [{"role": "user", "content": f"what is {n} + 1?"}, {"role": "assistant", "content": "2"}] for n in range(9)
    ]
    source = write_lines(tmp_path / "in", [{"messages": text} for text in texts])
    assert run(source, tmp_path / "shards") == Status.OK
    monkeypatch.setattr(sys, "argv", ["distil.py", str(tmp_path / "shards"), "--steps=16"])
    runpy.run_path(str(ROOT / "examples" / "distil.py"), run_name="__main__")
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 3 and losses[-1] < losses[0] / 2


def start(source: Path, output: Path) -> "subprocess.Popen[str]":
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    command = [
        sys.executable,
        "-m",
        "nanovllm",
        "teach",
        "--model=tiny-qwen3",
        "--top=5",
        "--shard-tokens=40",
        *options,
    ]
    return subprocess.Popen([*command, "-i", source, "-o", output], stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_twelve_kills_lose_no_token_and_repeat_none(tmp_path: Path) -> None:
    """The shards are those of an undisturbed run, byte by byte. The command tells tokens a second."""
    source = write_lines(tmp_path / "in", LINES * 40)
    process = start(source, tmp_path / "whole")
    said = process.communicate(timeout=300)[1]
    assert process.returncode == Status.LINES_FAILED and "tok/s" in said and "Traceback" not in said, said
    whole = read_shards(tmp_path / "whole")
    out = tmp_path / "out"
    draw = random.Random(6)
    for _ in range(12):
        process = start(source, out)
        goal = len(read_shards(out)) + draw.randint(0, 12)
        while len(read_shards(out)) < goal and process.poll() is None:
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.02))
        assert process.poll() is None, "it ended before it was killed"
        process.kill()
        process.communicate()
        assert read_shards(out).items() <= whole.items()
    assert len(read_shards(out)) < len(whole)
    process = start(source, out)
    said = process.communicate(timeout=300)[1]
    assert process.returncode == Status.LINES_FAILED, said
    assert read_shards(out) == whole
    assert sorted(path.name for path in out.iterdir()) == [*sorted(whole), "teach.job.json"]
