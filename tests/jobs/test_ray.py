"""Engines on Ray. What needs a cluster is marked slow; the rest starts none."""

import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
from helpers.batch_jobs import ask, openai_line, write_lines
from helpers.paths import ROOT
from helpers.processes import is_alive, wait_for

pytest.importorskip("ray.data")

import pyarrow
import ray
from ray.data.block import BlockAccessor

from nanovllm import LLM, SamplingParams
from nanovllm.apps.cli import main
from nanovllm.apps.jobs.job import Job, Status
from nanovllm.apps.jobs.result_lines import ResultLine
from nanovllm.apps.jobs.run import run_job
from nanovllm.apps.jobs.source import Line, Reading, Source
from nanovllm.apps.ray import guard as ray_guard
from nanovllm.apps.ray.cluster import check_room, lines_per_part, parts_in_flight, read_parts, run_on_ray
from nanovllm.config import EngineConfig
from nanovllm.engine.sequence import Request
from nanovllm.ray import RayLLM, actors

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kvcache_memory_bytes": 32 << 20,
    "seed": 7,
}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

# ---- an engine that many threads share


def test_batches_of_several_threads_run_in_the_same_steps(reciter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step waits until each thread has submitted all its requests."""
    from nanovllm.features.sharing import EngineThread

    llm = LLM(str(reciter), **OPTIONS)
    engine = EngineThread(llm.engine)

    step = llm.engine.step
    submitted = Event()

    def step_late() -> Any:
        assert submitted.wait(60)
        return step()

    def give_two(barrier: Barrier) -> Iterator[Request]:
        yield llm.prepare("a", GREEDY)
        yield llm.prepare("a", GREEDY)
        barrier.wait(60)

    def run(barrier: Barrier) -> set[int]:
        return {index for index, _ in engine.stream(give_two(barrier))}

    monkeypatch.setattr(llm.engine, "step", step_late)
    run(Barrier(1, submitted.set))
    alone = llm.stats()["num_steps"]
    submitted.clear()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, [Barrier(2, submitted.set)] * 2)) == [{0, 1}, {0, 1}]
    assert llm.stats()["num_steps"] - alone < 1.7 * alone


def test_a_broken_engine_leaves_nobody_waiting(reciter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.features.sharing import EngineThread

    llm = LLM(str(reciter), **OPTIONS)
    engine = EngineThread(llm.engine)

    def break_down() -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(llm.engine, "step", break_down)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room"):
            list(engine.stream([llm.prepare("a", GREEDY)] * 3))


def test_rows_keep_their_columns_and_bad_ones_stop_no_others(reciter: Path) -> None:
    llm = RayLLM(str(reciter), GREEDY, **OPTIONS)
    batch = {
        "prompt": np.array(["a", None, "", "b", "c"], dtype=object),
        "messages": np.array([None, np.array([{"role": "user", "content": "a"}]), None, None, None], dtype=object),
        "sampling_params": np.array([{"max_tokens": 2, "seed": None}, None, None, {"size": 1}, {"logprobs": 1}]),
        "mine": np.arange(5),
    }
    result = llm.generate(batch)
    assert result["mine"] is batch["mine"]
    assert result["generated_text"][0] == "bc" and result["num_prompt_tokens"][0] == 1
    assert len(result["generated_token_ids"][1]) == 20
    assert result["error"][:2] == ["", ""]
    assert "empty" in result["error"][2] and "size" in result["error"][3] and "logprobs" in result["error"][4]
    asked: list[dict[str, Any]] = [
        {"logit_bias": {"5": 50.0, "6": None}},  # the other row's token, as Arrow has it
        {"logit_bias": {"5": None, "6": 50.0}, "n": None},
        {"n": 2, "temperature": 1.0},
        {"structured_outputs": {"json": {"type": "object", "items": None}, "regex": None}},
    ]
    result = llm.generate({"prompt": np.array(["a"] * 4, dtype=object), "sampling_params": np.array(asked)})
    assert result["error"][:2] == ["", ""] and [ids[0] for ids in result["generated_token_ids"][:2]] == [5, 6]
    assert "n above 1" in result["error"][2] and "json is an object; give it as text" in result["error"][3]
    odd: list[Any] = [{"prompt_logprobs": 1}, "greedy", {"allowed_token_ids": [5]}]
    odd.append({"allowed_token_ids": [5], "bad_words": [llm._llm.token_text(5)]})
    result = llm.generate({"prompt": ["a"] * 4, "sampling_params": odd})
    assert "prompt_logprobs" in result["error"][0] and "greedy" in result["error"][1] and result["error"][2] == ""
    assert result["finish_reason"][3] == "error" and "allow no token" in result["error"][3]
    for params in (SamplingParams(logprobs=1), SamplingParams(prompt_logprobs=1), SamplingParams(n=2)):
        with pytest.raises(ValueError, match="no column"):
            RayLLM(str(reciter), params)


def through_arrow(**columns: list[Any]) -> Any:
    """Return a batch as Ray makes it of rows that went through Arrow."""
    return BlockAccessor.for_block(pyarrow.table(columns)).to_batch_format("numpy")


def test_rows_with_other_parameters_keep_their_integers(reciter: Path) -> None:
    exact = 2**60 + 1
    own = [{"max_tokens": 3, "stop_token_ids": [9]}, {"temperature": 0.5, "seed": 2**53 - 1}, {"seed": exact}, None]
    llm = RayLLM(str(reciter), GREEDY, **OPTIONS)
    result = llm.generate(through_arrow(prompt=["a"] * 4, sampling_params=own))
    assert [len(ids) for ids in result["generated_token_ids"]] == [3, 20, 0, 20]
    assert result["error"][:2] == ["", ""] and "seed is 1.15" in result["error"][2] and "2**53" in result["error"][2]
    alone = through_arrow(prompt=["a"], sampling_params=[{"seed": exact}])
    assert llm._prepare({name: column[0] for name, column in alone.items()}).params.seed == exact


def test_messages_of_tools_and_parts_are_rendered_as_in_python(reciter: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": [1, 2]}'}}
    conversations: list[Any] = [
        [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
        [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3", "name": "add"}],
    ]
    template = "{% for message in messages %}{{ message | tojson }}{% endfor %}"
    llm = RayLLM(str(reciter), GREEDY, **OPTIONS)
    llm._llm.tokenizer.chat_template = template
    for conversation in conversations:
        batch = through_arrow(messages=[conversation])
        request = llm._prepare({"messages": batch["messages"][0]})
        assert request.prompt == llm._llm.render_chat(conversation, None)["prompt"]
    call["function"]["arguments"] = {"a": 1}  # type: ignore[index]
    assert "arguments is an object" in llm.generate(through_arrow(messages=conversations[1:]))["error"][0]


# ---- parts


def test_an_id_seen_in_another_part_is_an_error_and_only_lines_that_are_known_and_not_done_run(tmp_path: Path) -> None:
    lines = [openai_line(f"id-{i % 7}", prompt="x") for i in range(10)] + [b"{", {"prompt": "came later"}]
    source = Source(str(write_lines(tmp_path / "in", lines)))
    *parts, end = read_parts(source, 4, {1, 2, 3, 6}, range(12))
    assert [[line.number for line in part.lines] for part in parts] == [[4, 5, 7, 8], [9, 10, 11]]
    errors = [[line for line in part.lines if isinstance(line, ResultLine)] for part in parts]
    codes = [[json.loads(error.line)["error"]["code"] for error in some] for some in errors]
    assert codes == [["duplicate_id"], ["duplicate_id", "duplicate_id", "invalid_json"]]
    assert [line.raw for part in parts for line in part.lines if isinstance(line, Line)] == [
        json.dumps(x).encode() + b"\n" for x in (lines[3], lines[4], lines[6])
    ]
    reading = Reading(source)
    list(reading)
    assert not end.lines and end.digest == reading.digest
    assert not any(part.digest for part in parts)


def test_a_folder_is_read_as_one_file(tmp_path: Path) -> None:
    write_lines(tmp_path / "b.jsonl", [b"third"])
    (tmp_path / "a.jsonl").write_bytes(b"first\n\nsecond")
    (tmp_path / ".hidden").write_bytes(b"x")
    lines = [(line.number, line.raw.strip()) for line in Reading(Source(str(tmp_path)))]
    assert lines == [(1, b"first"), (3, b"second"), (4, b"third")]


def test_parts_are_small_and_engines_hold_enough_of_them_but_no_more_than_their_share() -> None:
    assert [lines_per_part(n) for n in (0, 5000, 100_000, 10**7)] == [16, 16, 100, 1000]
    assert parts_in_flight(1000, 10_000, 8, 512) == 2
    assert parts_in_flight(100, 1000, 8, 512) == 11
    assert parts_in_flight(16, 10, 4, 512) == 3
    assert parts_in_flight(16, 1, 4, 512) == 1


def test_engines_that_do_not_fit_are_refused_with_what_to_change() -> None:
    check_room([{"CPU": 1}, {"CPU": 1.5}], "CPU", 2, 1)
    with pytest.raises(ValueError, match=r"has 2 CPUs; 3 actors of 1 CPUs need 3.*--replicas 2.*--num-cpus"):
        check_room([{"CPU": 2}], "CPU", 3, 1)
    with pytest.raises(ValueError, match=r"has 1 \+ 1 \+ 0 GPUs; 1 actors of 2 GPUs need 2"):
        check_room([{"GPU": 1}, {"GPU": 1}, {}], "GPU", 1, 2)
    with pytest.raises(ValueError, match=r"has 9 \+ 4 GPUs; 4 actors of 4 GPUs need 16.*--ray 3 --replicas 6,"):
        check_room([{"GPU": 9}, {"GPU": 4}], "GPU", 4, 4, 2)


def test_wrong_commands_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(write_lines(tmp_path / "in", [{"prompt": "x"}]))
    command = ["run-batch", "-i", source, "-o", str(tmp_path / "out"), "--model", "m"]
    assert main([*command, "--ray", "--replicas", "0"]) == Status.USAGE
    assert "at least 1" in capsys.readouterr().err
    assert main([*command, "--ray", "2", "--replicas", "3"]) == Status.USAGE
    assert "ray is 2; it must be a divisor of replicas, which is 3" in capsys.readouterr().err
    assert main([*command, "--ray", "--trace", "t.json"]) == Status.USAGE
    assert "one engine" in capsys.readouterr().err
    assert main(["run-batch", "-i", "/dev/null", *command[3:], "--ray"]) == Status.USAGE
    assert "pipe" in capsys.readouterr().err
    (tmp_path / "folder").mkdir()
    assert main([*command[:4], str(tmp_path / "folder"), "--model", "m", "--ray"]) == Status.USAGE
    assert "is a folder; it must be a file" in capsys.readouterr().err
    for name in ("nanovllm.apps.ray.cluster", "nanovllm.ray"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray.data", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main([*command, "--ray"]) == Status.USAGE
    assert "pip install 'ray[data]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("exit 1", Status.BROKEN),  # as Ray does when the machine's raylet has died
        ("exit 0", Status.BROKEN),
        ("exit 2", Status.USAGE),
        ("exit 64", Status.OK),
        ("exit 65", Status.LINES_FAILED),
        ("kill -KILL $$", 128 + signal.SIGKILL),
        ("trap 'exit 194' INT; sleep 1; kill -INT $PPID; for i in {1..300}; do sleep 0.1; done", Status.INTERRUPTED),
    ],
)
def test_a_process_that_ray_ends_is_no_job_that_has_answered_every_line(
    script: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert ray_guard.run_in_child([]) == status
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_the_process_that_works_ends_with_the_command(tmp_path: Path) -> None:
    child = "from nanovllm.apps.ray.guard import *; enter_child(); print(os.getpid(), flush=True); signal.pause()"
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{child}'\n")
    (tmp_path / "python").chmod(0o755)
    parent = f"import sys; sys.executable = {str(tmp_path / 'python')!r}; from nanovllm.apps.ray.guard import *"
    with subprocess.Popen([sys.executable, "-c", f"{parent}; run_in_child([])"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
    wait_for(lambda: not is_alive(pid))


# ---- with a cluster

NUM_LINES = 128


def make_line(number: int) -> Any:
    """Greedy, with a seed of its own, with one from its id; in each part a bad one and a ranking; an id twice."""
    if number % 16 == 15:
        return b'{"custom_id": "torn'
    if number % 16 == 14:
        return ask("/v1/rerank", f"id-{number}", query="3 + 4?", documents=[f"{number}", "3 + 4 = 7", "apples"])
    custom_id = "id-3" if number == 100 else f"id-{number}"
    sampling = [{"temperature": 0}, {"seed": number}, {}][number % 3]
    return openai_line(custom_id, prompt=f"Question {number}:", max_tokens=12, ignore_eos=True, **sampling)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster with two CPUs, both of which the engines take: reading must do without."""
    context = ray.init("local", num_cpus=2, log_to_driver=False, logging_level=logging.WARNING)
    yield context.address_info["address"]
    ray.shutdown()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two files."""
    folder = tmp_path_factory.mktemp("in")
    lines = [make_line(number) for number in range(NUM_LINES)]
    write_lines(folder / "a.jsonl", lines[:90])
    write_lines(folder / "b.jsonl", lines[90:])
    return folder


@pytest.fixture(scope="module")
def expected(source: Path) -> dict[str, Any]:
    """The results of one process."""
    results = source.with_name("one-process.jsonl")
    assert run_job(make_job(source, results)) == Status.LINES_FAILED
    return read_answers(results)


def make_job(source: Path, output: Path, **options: Any) -> Job:
    return Job(str(source), str(output), EngineConfig("tiny-qwen3", **OPTIONS | options), "tiny-qwen3")


def read_answers(path: Path) -> dict[str, Any]:
    """Answers by id, without what may differ; fails if an id is there twice."""
    answers: dict[str, Any] = {}
    for answer in map(json.loads, path.read_bytes().splitlines()):
        del answer["checksum"]
        if answer["error"] is None:
            body = answer["response"]["body"]
            body.pop("created", None)
            body["usage"].pop("prompt_tokens_details", None)
            for one in body.get("results", ()):
                one["relevance_score"] = round(one["relevance_score"], 4)
        assert answer["id"] not in answers
        answers[answer["id"]] = answer
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "num_actors", "stages"), [(2, 0, 1), (1, 1, 2)])
def test_a_cluster_answers_as_one_process_does(
    replicas: int, num_actors: int, stages: int, cluster: str, source: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    job = make_job(source, tmp_path / "out", pipeline_parallel_size=stages, data_parallel_size=replicas)
    assert run_on_ray(job, num_actors) == Status.LINES_FAILED
    assert read_answers(tmp_path / "out") == expected and len(expected) == NUM_LINES
    assert [a["error"]["line"] for a in expected.values() if a["error"] and a["error"]["code"] == "duplicate_id"] == [
        101
    ]


@pytest.mark.slow
def test_anybodys_pipeline_may_use_the_engine_and_its_batches_overlap(cluster: str, reciter: Path) -> None:
    class Counting(RayLLM):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._two = Barrier(2, timeout=60)

        def generate(self, batch: Any) -> dict[str, Any]:
            self._two.wait()
            result = super().generate(batch)
            return {**result, "num_steps": [self._llm.stats()["num_steps"]] * len(batch["prompt"])}

    rows = ray.data.from_items([{"prompt": letter} for letter in "abcdefgh"], override_num_blocks=2)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    outputs = rows.map_batches(
        Counting,
        fn_constructor_args=(str(reciter), params),
        fn_constructor_kwargs={**OPTIONS, "max_num_seqs": 8},
        batch_size=2,
        **actors(),
    ).take_all()
    assert {row["prompt"]: row["generated_text"][:2] for row in outputs}["a"] == "bc"
    assert len(outputs) == 8 and not any(row["error"] for row in outputs)
    assert max(row["num_steps"] for row in outputs) < 600, "four batches, one after another, take 800"


@pytest.mark.slow
def test_an_actor_holds_several_replicas_that_end_with_it(cluster: str, reciter: Path) -> None:
    class Telling(RayLLM):
        def generate(self, batch: Any) -> dict[str, Any]:
            pids = [replica.process.pid for replica in self._llm.engine.runner.replicas]
            threads = [replica.start.variables["OMP_NUM_THREADS"] for replica in self._llm.engine.runner.replicas]
            return {**super().generate(batch), "pids": [pids] * len(batch["prompt"]), "threads": [threads] * 8}

    rows = ray.data.from_items([{"prompt": letter} for letter in "abcdefgh"], override_num_blocks=1)
    pool = actors(data_parallel_size=2)
    assert pool["num_cpus"] == 2
    outputs = rows.map_batches(
        Telling,
        fn_constructor_args=(str(reciter), GREEDY),
        fn_constructor_kwargs={**OPTIONS, "data_parallel_size": 2},
        batch_size=8,
        **pool | {"num_cpus": 1},  # `from_items` needs a CPU, too
    ).take_all()
    assert {row["prompt"]: row["generated_text"][:2] for row in outputs}["a"] == "bc"
    assert len(outputs) == 8 and not any(row["error"] for row in outputs)
    pids = list(outputs[0]["pids"])
    assert len(pids) == 2 and list(outputs[0]["threads"]) == ["1", "1"]
    wait_for(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
def test_a_job_on_a_cluster_of_its_own_shows_no_error_of_rays_insides(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", [{"prompt": "x", "max_tokens": 2}])
    command = [sys.executable, "-m", "nanovllm", "run-batch", "--ray", "-i", str(source), "-o", str(tmp_path / "out")]
    done = subprocess.run([*command, "--model", "tiny-qwen3"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "")
    assert "1 of 1 lines answered" in done.stderr
    assert not re.search(r"core_worker|RuntimeWarning| E \d", done.stderr)


@pytest.mark.slow
def test_the_pages_example_prints_what_it_shows(cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    (code,), (shown,) = (re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) for language in ("python", "text"))
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in printed if "->" in line] == shown.splitlines()


@pytest.mark.slow
def test_a_pool_that_leaves_no_cpu_for_reading_is_warned_of(cluster: str, caplog: pytest.LogCaptureFixture) -> None:
    def find_warnings() -> list[str]:
        # Ray's threads of an earlier test may still write to Ray's own loggers.
        return [record.getMessage() for record in caplog.records if record.name.startswith("nanovllm")]

    actors(replicas=1)
    assert not find_warnings()
    actors(replicas=2)
    (warning,) = find_warnings()
    assert "has 2 CPUs; 2 actors of 1 and one for reading need 3" in warning
    assert actors(pipeline_parallel_size=2)["num_cpus"] == 2


@pytest.mark.slow
def test_more_engines_than_the_cluster_holds_are_refused_before_anything_waits(
    cluster: str, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_on_ray(make_job(source, tmp_path / "out", data_parallel_size=3)) == Status.USAGE
    assert "--replicas 2" in caplog.text
