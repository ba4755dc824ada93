"""Attacks by the world outside: kills, signals, machines that vanish, disks that are full, files that rot.

Everything here is drawn with a seed. NANOVLLM_ATTACKS is the share of the full counts that is tried: 0.1 by default,
and 1 for the figures of docs/reliability.md.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.batch_jobs import ask, openai_line, read_answers, run, write_lines
from helpers.paths import BOX_MODEL, TESTS

from nanovllm.apps.jobs.job import Job, Status
from nanovllm.apps.jobs.run import run_job
from nanovllm.config import EngineConfig

SHARE = float(os.environ.get("NANOVLLM_ATTACKS", "0.1"))
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "kvcache_memory_bytes": 16 << 20,
    "seed": 7,
}


def count_of(full: int) -> int:
    return max(1, round(full * SHARE))


NUM_NODE_KILLS = max(2, count_of(10))
MOST_LINES = 96 + 48 * NUM_NODE_KILLS


# ---- a job's life


def make_line(number: int) -> Any:
    """By turns greedy, with a seed of its own, with one from its id or number; some plain, some bad, some rankings.

    Of six lines the second three ask what the first three ask.
    """
    if number % 16 == 15:
        return b'{"custom_id": "torn'
    asked = number - 3 * (number % 6 // 3)
    sampling = [{"temperature": 0}, {"seed": asked}, {}][asked % 3]
    limits = {"max_tokens": 20 + asked % 8, "ignore_eos": True}
    if number % 7 == 6:
        return ask("/v1/rerank", f"id-{number}", query="3 + 4?", documents=[f"{asked}", "3 + 4 = 7", "apples"])
    if number % 5 == 4:
        return {"prompt": f"Question {asked}:", **sampling, **limits}
    return openai_line(f"id-{number}", prompt=f"Question {asked}:", **sampling, **limits)


class Undisturbed:
    """A job of so many lines, and what it answers if nothing happens.

    Args:
        content: what the job of all lines answers. No answer depends on another line.
    """

    def __init__(self, folder: Path, num_lines: int, content: list[tuple[str, str, str]]) -> None:
        self.num_lines = num_lines
        self.source = write_lines(folder / "in.jsonl", map(make_line, range(num_lines)))
        self.content = [one for one in content if int(one[0].removeprefix("batch_req_")) <= num_lines]
        assert len(self.content) == num_lines

    def start(self, out: Path, *options: str) -> "subprocess.Popen[str]":
        given = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
        command = [sys.executable, "-m", "nanovllm", "run-batch", "--model=tiny-qwen3", *given, *options]
        return subprocess.Popen([*command, "-i", self.source, "-o", out], stderr=subprocess.PIPE, text=True)

    @staticmethod
    def content_of(out: Path) -> list[tuple[str, str, str]]:
        """(id, custom_id, what was said) of every answer, in the order of the ids: two of one id make it longer."""
        return sorted(
            (a["id"], str(a["custom_id"]), json.dumps(a["error"] or Undisturbed.said_by(a["response"]["body"])))
            for a in read_answers(out)
        )

    @staticmethod
    def said_by(body: dict[str, Any]) -> Any:
        """Return the answers of a body. Of scores only the order counts, as their last digits may differ."""
        return body["choices"] if "choices" in body else [one["index"] for one in body["results"]]

    def finish(self, out: Path, *options: str, seconds: float = 600) -> None:
        """Run to the end, and compare with what should be there."""
        process = self.start(out, *options)
        try:
            said = process.communicate(timeout=seconds)[1]
        finally:
            process.kill()
        self.check(process.returncode, said, out)

    def check(self, status: int, said: str, out: Path) -> None:
        assert status == Status.LINES_FAILED and "Traceback" not in said, said
        assert self.content_of(out) == self.content


def num_answers(out: Path) -> int:
    return out.read_bytes().count(b"\n") if out.exists() else 0


def wait_for_answers(process: "subprocess.Popen[str]", out: Path, count: int, seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while num_answers(out) < count and process.poll() is None:
        assert time.monotonic() < deadline, "no answers"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, str]]:
    """Run the job of all lines undisturbed, and return its answers."""
    folder = tmp_path_factory.mktemp("whole")
    source = write_lines(folder / "in.jsonl", map(make_line, range(MOST_LINES)))
    config = EngineConfig("tiny-qwen3", **OPTIONS)
    assert run_job(Job(str(source), str(folder / "out.jsonl"), config, "tiny-qwen3")) == Status.LINES_FAILED
    return Undisturbed.content_of(folder / "out.jsonl")


@pytest.fixture(scope="module")
def job(content: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return Undisturbed(tmp_path_factory.mktemp("job"), 64, content)


@pytest.mark.slow
def test_a_job_of_one_process_survives_signals_at_any_moment(job: Undisturbed, tmp_path: Path) -> None:
    """40 signals: while it starts, at a number of answers, near its end, and two at once."""
    draw = random.Random(5)
    num_sent = 0
    jobs = 0
    while num_sent < count_of(40):
        out = tmp_path / f"out-{jobs}"
        jobs = jobs + 1
        for _ in range(draw.randint(2, 5)):
            process = job.start(out)
            if (where := draw.choice(["start", "answers", "answers", "end", "twice"])) == "start":
                time.sleep(draw.uniform(0, 3))
            else:
                left = job.num_lines - num_answers(out)
                goal = left if where == "end" else draw.randint(0, max(0, left - 1))
                wait_for_answers(process, out, num_answers(out) + goal)
            number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
            if process.poll() is None:
                process.send_signal(number)
                num_sent += 1
                if where == "twice":
                    time.sleep(draw.uniform(0, 0.05))
                    process.send_signal(draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
            process.communicate(timeout=600)
            if num_sent == count_of(40):
                break
        job.finish(out)


# ---- a job on several machines

TAG = f"NANOVLLM_TEST_{uuid.uuid4().hex}"
"""In the environment of this module's cluster, so that only its processes are ever killed."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, of which the head has a CPU and the other two. Commands find it by RAY_ADDRESS.

    The last of its tests ends both.
    """
    pytest.importorskip("ray.data")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TAG, "1")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.other = cluster.add_node(num_cpus=2)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        cluster.shutdown()


def engines() -> list[int]:
    """The processes of this module's cluster that run an engine."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if b"MapWorker" in (folder / "cmdline").read_bytes() and TAG.encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
        except OSError:  # it has ended, or is another user's
            continue
    return pids


@pytest.mark.longest
@pytest.mark.slow
def test_a_job_on_two_nodes_survives_the_loss_of_its_driver_of_engines_and_of_nodes(
    content: list[tuple[str, str, str]], cluster: Any, tmp_path: Path
) -> None:
    """10 kills, by turns of the driver and of an engine; then a node is replaced.

    `test_a_job_outlives_a_raylet_and_ends_with_its_own` loses one for good.
    """
    draw = random.Random(2)
    job = Undisturbed(tmp_path, MOST_LINES, content)
    out = tmp_path / "out.jsonl"
    options = ("--ray", "--replicas=2")
    process = job.start(out, *options)

    def let_answer(least: int) -> None:
        wait_for_answers(process, out, num_answers(out) + draw.randint(least, 32))
        assert process.poll() is None, "it ended before it was disturbed"

    try:
        for kill in range(NUM_NODE_KILLS):
            let_answer(1)
            if kill % 2:
                os.kill(draw.choice(engines()), signal.SIGKILL)
            else:
                process.kill()
                process.wait()
                process = job.start(out, *options)
        let_answer(16)
        cluster.remove_node(cluster.other, allow_graceful=False)
        cluster.other = cluster.add_node(num_cpus=2)
        said = process.communicate(timeout=600)[1]
    finally:
        process.kill()
        process.wait()
    job.check(process.returncode, said, out)


def raylet_of(node: Any) -> int:
    """The process of a node's raylet."""
    (found,) = node.all_processes["raylet"]
    return int(found.process.pid)


@pytest.mark.slow
def test_a_job_outlives_a_raylet_and_ends_with_its_own(
    content: list[tuple[str, str, str]], cluster: Any, tmp_path: Path
) -> None:
    """kill -9 of the other node's raylet, then of the driver's. What that one leaves is resumed without Ray.

    The job has begun without Ray, too, and was killed.
    """
    job = Undisturbed(tmp_path, 160, content)
    out = tmp_path / "out.jsonl"
    process = job.start(out)
    try:
        wait_for_answers(process, out, 1)
        assert process.poll() is None, "it ended before it was killed"
    finally:
        process.kill()
        process.communicate()
    process = job.start(out, "--ray", "--replicas=2")
    try:
        for node in (cluster.other, cluster.head_node):
            wait_for_answers(process, out, num_answers(out) + 16)
            assert process.poll() is None, "it ended before it was disturbed"
            os.kill(raylet_of(node), signal.SIGKILL)
        said = process.communicate(timeout=300)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == Status.BROKEN and "raylet has died" in said, said
    assert num_answers(out) < job.num_lines
    job.finish(out)


# ---- disks

LINES = [{"prompt": f"p{i}"} for i in range(120)]


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """The folder is a disk of so many bytes; skips the test where this process may not mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def short_files(_: Path, size: int) -> Iterator[None]:
    """No file of this process may have more bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limited", [small_disk, short_files])
def test_a_full_disk_costs_no_answer_and_the_job_resumes_where_there_is_room(limited: Any, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", LINES)
    assert run(source, tmp_path / "whole") == Status.OK
    content = Undisturbed.content_of(tmp_path / "whole")
    size = (tmp_path / "whole").stat().st_size
    draw = random.Random(3)
    page = os.sysconf("SC_PAGE_SIZE")
    disk = tmp_path / "disk"
    disk.mkdir()
    for _ in range(6):
        with limited(disk, page * draw.randint(1, size // page - 1)):
            assert run(source, disk / "out") == Status.OUTPUT_FAILED
            for path in disk.iterdir():  # to where there is room
                shutil.copy(path, tmp_path)
                path.unlink()
        left = (tmp_path / "out").read_bytes()
        assert left.endswith(b"\n") or not left
        assert run(source, tmp_path / "out") == Status.OK
        assert (tmp_path / "out").read_bytes().startswith(left)
        assert Undisturbed.content_of(tmp_path / "out") == content
        (tmp_path / "out").unlink()


# ---- models

TRY_MODELS = """
import resource, sys
from nanovllm import LLM, SamplingParams
resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
for folder in map(str.strip, sys.stdin):
    try:
        with LLM(folder, dtype="float32", max_model_len=64, max_num_seqs=4, kvcache_memory_bytes=8 << 20) as llm:
            llm.generate([[5, 6, 7]], params, use_tqdm=False)
            said = "answered"
    except ValueError as error:
        said = "refused" if 0 < len(str(error)) < 5000 else f"BAD a message of {len(str(error))} characters"
    except BaseException as error:
        said = f"BAD {error!r}"[:300].replace(chr(10), " ")
    print("@" + said, flush=True)
"""


def damage_model(folder: Path, draw: random.Random) -> str:
    """Damage one file of a model folder; returns what was done."""
    kinds = ["config.json", "config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"]
    kind = draw.choice([*kinds, "header", "header", "length", "data", "cut"])
    path = folder / (kind if kind.endswith(".json") else "model.safetensors")
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    if kind == "cut":
        content = content[: draw.choice([0, 1, 7, 8, 9, size, size + 8, draw.randrange(len(content))])]
    elif kind == "length":
        content[:8] = draw.choice([0, 1, size - 1, size + 1, 2**32, 2**63, 2**64 - 1]).to_bytes(8, "little")
    elif kind.endswith(".json") and kind != "tokenizer.json" and draw.random() < 0.4:
        data = json.loads(content)
        name = draw.choice(list(data))
        values = [None, -1, 0, 10**12, 10**400, "x", [], {}, True, 1.5, [1, 2], "\ud800", 2**31, 1e-30, -1e30]
        data[name] = draw.choice(values)
        content = bytearray(json.dumps(data).encode())
        kind = f"{kind}: {name} = {data[name]!r}"[:100]
    else:
        first, last = {"header": (8, 8 + size), "data": (8 + size, len(content))}.get(kind, (0, len(content)))
        for _ in range(draw.choice([1, 1, 3])):
            content[draw.randrange(first, last)] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return kind


@pytest.mark.slow
def test_a_model_folder_with_a_flipped_byte_answers_or_is_refused(tmp_path: Path) -> None:
    """200 damaged folders, through one process; it neither ends nor hangs, nor raises anything but a ValueError."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", TRY_MODELS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None
    said: dict[str, list[str]] = {}
    try:
        for number in range(count_of(200)):
            folder = tmp_path / "model"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(BOX_MODEL, folder)
            what = damage_model(folder, random.Random(number))
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
            line = next((line for line in process.stdout if line.startswith("@")), "@BAD the process ended")
            said.setdefault(line[1:].strip(), []).append(f"{number} ({what})")
    finally:
        process.kill()
        process.wait()
    assert {"answered", "refused"} >= said.keys(), {key: said[key] for key in said.keys() - {"answered", "refused"}}


# ---- Ctrl-C

TRY_INTERRUPTS = """
import gc, os, random, signal, sys, threading, time
sys.path.append(sys.argv[2])
from helpers.integrity import check_scheduler
from nanovllm import LLM, SamplingParams
draw, count = random.Random(4), int(sys.argv[1])
options = dict(dtype="float32", max_model_len=128, max_num_seqs=4, kvcache_memory_bytes=8 << 20)
params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
prompts = ["the", "a b", "c d e", "x"] * 3
since = time.perf_counter()
llm = LLM("tiny-qwen3", **options)
load_seconds = time.perf_counter() - since
expected = [o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)]
since = time.perf_counter()
llm.generate(prompts, params, use_tqdm=False)
run_seconds = time.perf_counter() - since
work = {
    "load": lambda: LLM("tiny-qwen3", **options).close(),
    "generate": lambda: llm.generate(prompts, params, use_tqdm=False),
    "stream": lambda: [None for _ in llm.stream((prompt, params) for prompt in prompts)],
}
interrupted = 0
for number in range(count):
    kind = ("load", "generate", "stream")[number % 3]
    delay = draw.uniform(0, load_seconds / 4 if kind == "load" else run_seconds)
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        work[kind]()
        timer.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        interrupted += 1
    try:
        timer.join()
        time.sleep(0.001)
    except KeyboardInterrupt:
        pass
    check_scheduler(llm.engine.scheduler)
    assert not llm.engine.scheduler.running and llm.engine.scheduler.block_manager.num_used == 0, (number, kind)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    got = [o["token_ids"] for o in llm.generate(prompts[:3], params, use_tqdm=False)]
    assert got == expected[:3], (number, kind)
gc.collect()
print(interrupted, threading.active_count(), len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.slow
def test_ctrl_c_at_any_moment_of_load_generate_and_stream_leaves_an_engine_that_answers() -> None:
    """200 real SIGINTs, of which most come while something runs; nothing stays behind."""
    count = count_of(200)
    command = [sys.executable, "-c", TRY_INTERRUPTS, str(count), str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    interrupted, num_threads, num_files = map(int, done.stdout.split())
    assert interrupted >= count // 3 and num_threads < 8 and num_files < 40, done.stdout
