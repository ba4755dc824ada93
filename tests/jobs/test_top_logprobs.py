"""Arrays beside results have what `logprobs` says of each generated token, whatever ends the process, and each once."""

import json
import random
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from helpers.batch_jobs import ask, openai_line, read_answers, write_lines
from helpers.paths import ROOT
from safetensors.numpy import load_file

from nanovllm import LLM, EngineConfig
from nanovllm.apps.jobs.counts import JobCounts
from nanovllm.apps.jobs.forms import prepare_line
from nanovllm.apps.jobs.job import Job, ShardOptions, Status
from nanovllm.apps.jobs.request_lines import read_request_line
from nanovllm.apps.jobs.results_file import ResultsFile
from nanovllm.apps.jobs.run import run_job
from nanovllm.apps.jobs.shards import Shards, read_metadata
from nanovllm.apps.jobs.source import Line

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "cpu",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "kvcache_memory_bytes": 8 << 20,
}
TOP = 5
OF_A_TOKEN = ("token_ids", "token_logprobs", "ids", "logprobs")
LINES = [
    openai_line("greedy", prompt="count from 3 to 9", temperature=0, max_tokens=7),
    openai_line("equal", prompt="count from 3 to 9", temperature=0, max_tokens=7),
    openai_line("drawn", messages=[{"role": "user", "content": "what is 2 + 3?"}], seed=4, max_tokens=9, n=3),
    openai_line("asking", prompt=[5, 6, 7], seed=1, max_tokens=4, logprobs=2),
    openai_line("wrong", prompt="x", temperature=-1),
    ask("/v1/embeddings", "vector", input=["a", "b"]),
    openai_line("scored", prompt="abc", max_tokens=0, echo=True, logprobs=1),
    {"prompt": "plain", "max_tokens": 3},
    openai_line("fields", prompt="y", max_tokens=6, ignore_eos=True, top_k=3, presence_penalty=1),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny-qwen3", **ENGINE) as llm:
        yield llm


def run(source: Path, out: Path, llm: LLM, **given: Any) -> Status:
    """Run a job with an engine. The arrays go into a folder beside the results.

    Args:
        given: options of the shards, `overwrite`, further fields of `job`, and of its `config`.
    """
    config = EngineConfig("tiny-qwen3", **ENGINE, **given.pop("config", {}))
    of_job = {"output": str(out), "overwrite": given.pop("overwrite", False), **given.pop("job", {})}
    shards = ShardOptions(**{"folder": f"{out}.arrays", "top": TOP, "tokens": 12, **given})
    with patch("nanovllm.apps.jobs.run.load_llm", lambda config: llm):
        return run_job(Job(str(source), config=config, model_name="m", shards=shards, **of_job))


@pytest.fixture
def keep_open(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """The engine of this file. A job that ends does not close it."""
    monkeypatch.setattr(llm, "close", lambda: None)
    return llm


def list_arrays(out: Path) -> Iterator[tuple[int, str | None, dict[str, np.ndarray]]]:
    """Yield the line, its id and the arrays of each choice."""
    for path in sorted(Path(str(out) + ".arrays").glob("*.safetensors")):
        arrays = load_file(path)
        spans, prompts = (pairwise(arrays.pop(name).tolist()) for name in ("offsets", "prompt_offsets"))
        numbers = arrays.pop("lines").tolist()
        prompt_ids = arrays.pop("prompt_token_ids")
        custom_ids = read_metadata(path)["custom_ids"]
        for line, custom_id, (start, end), prompt in zip(numbers, custom_ids, spans, prompts, strict=True):
            own = {name: values[start:end] for name, values in arrays.items()}
            yield line, custom_id, {**own, "prompt_token_ids": prompt_ids[slice(*prompt)]}


def collect(out: Path) -> list[tuple[int, list[Any]]]:
    """Return the arrays of each choice, in the order of the lines."""
    return sorted(((n, [v.tolist() for v in arrays.values()]) for n, _, arrays in list_arrays(out)), key=itemgetter(0))


def list_said(out: Path) -> list[tuple[int, Any]]:
    """Return what was said to each line, in their order."""
    found = [(int(a["id"].removeprefix("batch_req_")), a) for a in read_answers(out)]
    return sorted((n, [a["response"]["body"].get("choices"), a["error"], a.get("request_name")]) for n, a in found)


def check_in_step(out: Path) -> None:
    """Each result has its arrays once, in the order of the results, with as many tokens as its usage tells."""
    found: dict[int, list[int]] = {}
    for number, _, arrays in list_arrays(out):
        found.setdefault(number, []).append(len(arrays["token_ids"]))
    assert list(found) == [int(answer["id"].removeprefix("batch_req_")) for answer in read_answers(out)]
    for answer, sizes in zip(read_answers(out), found.values(), strict=True):
        body = answer["response"]["body"]
        assert sum(sizes) == body.get("usage", {}).get("completion_tokens", 0)
        assert len(sizes) == len(body.get("choices", [None]))


def test_arrays_are_the_log_probabilities_of_the_same_requests(keep_open: LLM, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", LINES)
    out = tmp_path / "out"
    assert run(source, out, keep_open, logprobs_dtype="float32") == Status.LINES_FAILED
    check_in_step(out)
    arrays: dict[int, list[dict[str, np.ndarray]]] = {}
    for number, custom_id, choice in list_arrays(out):
        assert custom_id == LINES[number - 1].get("custom_id")
        assert choice["mask"].all()
        arrays.setdefault(number, []).append(choice)
    for number, line in enumerate(LINES, start=1):
        request_line = read_request_line(Line(number, json.dumps(line).encode()))
        if line.get("custom_id") in ("wrong", "vector", "scored"):
            assert [choice["ids"].shape for choice in arrays[number]] == [(0, TOP)]
            continue
        (request,) = prepare_line(request_line, keep_open, "m")
        request = replace(request, params=replace(request.params, logprobs=TOP))
        ((_, output),) = keep_open.run_requests([request])
        for choice, completion in zip(arrays[number], output.outputs, strict=True):
            assert choice["token_ids"].tolist() == completion.token_ids
            assert choice["prompt_token_ids"].tolist() == output.prompt_token_ids
            rows = zip(completion.logprobs, *(choice[name].tolist() for name in OF_A_TOKEN), strict=True)
            for expected, token_id, own, ids, values in rows:
                assert {token_id: own, **dict(zip(ids, values, strict=True))} == expected
                assert values == sorted(values, reverse=True)


def test_results_are_those_of_a_job_without_arrays(keep_open: LLM, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", LINES)
    out = tmp_path / "out"
    assert run(source, out, keep_open) == Status.LINES_FAILED
    job = Job(str(source), str(tmp_path / "plain"), EngineConfig("tiny-qwen3", **ENGINE), "m")
    with patch("nanovllm.apps.jobs.run.load_llm", lambda config: keep_open):
        assert run_job(job) == Status.LINES_FAILED
    assert list_said(out) == list_said(tmp_path / "plain")


def test_the_example_puts_the_prompt_before_the_generated_tokens(keep_open: LLM, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", LINES)
    out = tmp_path / "out"
    assert run(source, out, keep_open) == Status.LINES_FAILED
    read_texts = runpy.run_path(str(ROOT / "examples" / "distil.py"))["read_texts"]
    for text, (_, _, arrays) in zip(read_texts(Path(f"{out}.arrays")), list_arrays(out), strict=True):
        prompt = arrays["prompt_token_ids"].tolist()
        assert text["token_ids"].tolist() == prompt + arrays["token_ids"].tolist()
        assert text["mask"].tolist() == [False] * len(prompt) + [True] * len(arrays["mask"])
        assert text["ids"][len(prompt) :].tolist() == arrays["ids"].tolist()


def test_a_job_that_ends_at_any_moment_is_resumed_in_step(
    keep_open: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are copied at each moment at which they change, also within a line: a kill leaves no others."""
    few = {"max_tokens": 2, "seed": 1}
    lines = [openai_line(i, prompt="1, 2,", **few) for i in "ab"]
    lines += [openai_line("n", prompt=[7], n=2, **few), openai_line("wrong", prompt=""), {"prompt": [8], **few}]
    source = write_lines(tmp_path / "in", lines)
    out = tmp_path / "job" / "out"
    out.parent.mkdir()
    moments: list[Path] = []

    def watch(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            moments.append(Path(shutil.copytree(out.parent, tmp_path / f"moment-{len(moments)}")))
            return method(*args)

        return call

    with monkeypatch.context() as patches:
        patches.setattr(ResultsFile, "append", watch(ResultsFile.append))
        patches.setattr(Shards, "write", watch(Shards.write))
        assert run(source, out, keep_open, tokens=3) == Status.LINES_FAILED
    said = list_said(out)
    arrays = collect(out)
    torn = Path(shutil.copytree(moments[-1], tmp_path / "torn"))
    with open(torn / "out", "ab") as results:
        results.write(b'{"id": "batch_req_')
    for moment in (*moments, torn):
        assert run(source, moment / "out", keep_open, tokens=3) == Status.LINES_FAILED
        check_in_step(moment / "out")
        assert list_said(moment / "out") == said
        assert collect(moment / "out") == arrays
    assert len(moments) == len(lines) + 3, "each line, and each shard"


def test_answers_that_are_held_are_written_when_the_engine_breaks(
    keep_open: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": [i], "max_tokens": 2} for i in range(9)])
    out = tmp_path / "out"
    run_requests = keep_open.run_requests

    def break_after_six(requests: Any, **options: Any) -> Iterator[Any]:
        yield from islice(run_requests(requests, **options), 6)
        raise RuntimeError("it breaks")

    moves: list[int] = []
    with monkeypatch.context() as patches:
        patches.setattr(keep_open, "run_requests", break_after_six)
        patches.setattr(JobCounts, "advance", lambda counts: moves.append(out.stat().st_size))
        assert run(source, out, keep_open, tokens=1000) == Status.BROKEN
    assert len(read_answers(out)) == 6
    assert moves == [0] * 6, "the bar moves when a line ends, and not when it is written"
    check_in_step(out)
    assert run(source, out, keep_open, tokens=1000) == Status.OK
    check_in_step(out)


@pytest.mark.parametrize(("top", "most", "full"), [(TOP, 4000, "/out "), (64, 6000, "/shard-000000")])
def test_a_full_disk_leaves_no_result_without_its_arrays(
    keep_open: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture, top: int, most: int, full: str
) -> None:
    """The disk is full while results are written, or a shard."""
    source = write_lines(tmp_path / "in", [{"prompt": [i], "max_tokens": 9, "ignore_eos": True} for i in range(9)])
    out = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        assert run(source, out, keep_open, top=top) == Status.OUTPUT_FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = [line for line in caplog.messages if "cannot be written: File too large" in line]
    assert full in line
    assert {n for n, *_ in list_arrays(out)} >= {n for n, _ in list_said(out)}
    assert run(source, out, keep_open, top=top) == Status.OK
    check_in_step(out)


def test_arrays_that_cannot_be_are_refused(keep_open: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_lines(tmp_path / "in", LINES[:1])
    out = tmp_path / "out"

    def refuse(expected: str, **options: Any) -> None:
        assert run(source, out, keep_open, **options) == Status.USAGE
        assert expected in caplog.text
        caplog.clear()

    refuse("--top-logprobs-count is 0", top=0)
    refuse("--top-logprobs-count is 10000", top=10_000)
    refuse("--shard-tokens is 0", tokens=0)
    refuse("must be a folder", folder=str(source))
    refuse("--replicas", config={"data_parallel_size": 2})
    refuse("needs files", job={"output": "-"})
    refuse("the manifest of the shards", job={"output": str(tmp_path / "teach")}, folder=str(tmp_path))
    assert run(source, out, keep_open) == Status.OK, "what was refused is no earlier job"
    refuse("options.top_logprobs", top=4)
    refuse("left out with --top-logprobs-file", job={"reuse": [str(out)]})
    shards = Path(f"{out}.arrays").glob("shard-*")
    next(shards).rename(tmp_path / "elsewhere")
    refuse("bring back the files that belong together")
    assert len(read_answers(out)) == 1
    assert run(source, out, keep_open, overwrite=True) == Status.OK
    check_in_step(out)
    refuse("options.results", job={"output": str(tmp_path / "other")})
    check_in_step(out)
    job = Job(str(source), str(out), EngineConfig("tiny-qwen3", **ENGINE), "m")
    assert run_job(job) == Status.USAGE and "options.top_logprobs" in caplog.text


@pytest.mark.slow
def test_kills_leave_results_and_arrays_in_step(keep_open: LLM, tmp_path: Path) -> None:
    """Two kills at any moment. The answers and the arrays are those of an undisturbed run in this process."""
    lines = [{"prompt": [i], "max_tokens": 2 + i % 30, "ignore_eos": True} for i in range(60)]
    source = write_lines(tmp_path / "in", [*lines, b'{"torn'])
    assert run(source, tmp_path / "whole", keep_open, tokens=60) == Status.LINES_FAILED
    out = tmp_path / "results" / "whole"
    out.parent.mkdir()
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    options += [f"--top-logprobs-count={TOP}", "--shard-tokens=60", "--model=tiny-qwen3", "--served-model-name=m"]
    command = [sys.executable, "-m", "nanovllm", "run-batch", *options, "-i", source, "-o", out]
    draw = random.Random(6)
    for _ in range(2):
        before = out.stat().st_size if out.exists() else 0
        process = subprocess.Popen([*command, f"--top-logprobs-file={out}.arrays"], stderr=subprocess.PIPE, text=True)
        while process.poll() is None and (not out.exists() or out.stat().st_size <= before):
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        said = process.communicate()[1]
        assert process.returncode == -signal.SIGKILL, said
    assert 0 < len(read_answers(out)) < len(lines)
    assert run(source, out, keep_open, tokens=60) == Status.LINES_FAILED
    check_in_step(out)
    assert list_said(out) == list_said(tmp_path / "whole")
    assert collect(out) == collect(tmp_path / "whole")
