"""Several replicas are one engine to the user: the same bits, and nobody waits for the dead."""

import itertools
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.processes import is_alive, list_children, list_segments, wait_for
from helpers.tiny import CROWDED, draw_prompts
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.backends.cpu.backend import CpuBackend
from nanovllm.config import EngineConfig
from nanovllm.features.distributed import replicas
from nanovllm.features.distributed.replica import INTERVAL, Start, serve
from nanovllm.features.distributed.replicas import Replica, ReplicatedEngine, share_cores, share_gpus, share_machine

HAS_KERNELS = CpuBackend.why_cannot(torch.device("cpu")) is None
OPTIONS: dict[str, Any] = CROWDED | {"attention_backend": "cpu" if HAS_KERNELS else "torch"}
LONG = SamplingParams(temperature=1.0, max_tokens=140, ignore_eos=True)
SOON = 50.0
"""Seconds within which a failure must show."""

needs_two_cores = pytest.mark.skipif(
    len(share_cores(replicas.list_sockets(), 2)) < 2 or not all(share_cores(replicas.list_sockets(), 2)),
    reason="each of two replicas needs a core",
)


# ---- shares


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12))
def test_each_replica_has_whole_cores_of_one_socket_and_nobody_elses(sizes: list[int], count: int) -> None:
    sockets = [[{100 * i + 2 * j, 100 * i + 2 * j + 1} for j in range(size)] for i, size in enumerate(sizes)]
    shares = share_cores(sockets, count)
    assert len(shares) == count
    cpus = [cpu for cores in shares for core in cores for cpu in core]
    assert len(cpus) == len(set(cpus))
    for cores in shares:
        assert len({cpu // 100 for core in cores for cpu in core}) <= 1
        assert all(any(core in socket for socket in sockets) for core in cores)
    if count <= sum(sizes):
        assert all(shares)
    if count >= len(sizes) and len(set(sizes)) == 1:
        assert max(map(len, shares)) <= -(-sizes[0] // (count // len(sizes)))


def test_each_replica_sees_gpus_of_its_own() -> None:
    assert share_gpus(None, 4, 2, 2) == ["0,1", "2,3"]
    assert share_gpus("3,GPU-5f", 2, 2, 1) == ["3", "GPU-5f"]
    with pytest.raises(ValueError, match=r"a replica has 2 GPUs: 3 replicas need 6 GPUs, and there are 4\. Lower"):
        share_gpus(None, 4, 3, 2)


def test_memory_cores_and_the_quota_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(replicas, "list_sockets", lambda: [[{i, i + 8} for i in range(8)]])
    monkeypatch.setattr(replicas, "free_memory", lambda: 9 << 30)
    monkeypatch.setattr(replicas, "cpu_quota", lambda: float("inf"))
    config = EngineConfig("m", device="cpu", data_parallel_size=3)
    shares = share_machine(config)
    assert [share.cpus for share in shares] == [{0, 8, 1, 9}, {2, 10, 3, 11, 4, 12}, {5, 13, 6, 14, 7, 15}]
    assert {share.memory for share in shares} == {3 << 30}
    assert [share.variables for share in shares] == [{"OMP_NUM_THREADS": n} for n in "233"]
    monkeypatch.setattr(replicas, "cpu_quota", lambda: 5.0)
    assert [share.variables for share in share_machine(config)] == [{"OMP_NUM_THREADS": "1"}] * 3
    monkeypatch.setattr(replicas, "list_sockets", lambda: [[{0}, {1}]])
    with pytest.raises(ValueError, match=r"data_parallel_size is 3; it must be at most 2, the cores"):
        share_machine(config)
    with pytest.raises(ValueError, match=r"""device is 'cuda:1'; it must be "cuda", "cpu" or "auto\""""):
        share_machine(EngineConfig("m", device="cuda:1", data_parallel_size=2))


# ---- requests, counts, ends


class Waiting:
    """A request that waits, as the queue of several replicas has it."""

    lead = None
    seq_id = seed = limit = 7
    prompt = "a"
    prompt_token_ids = (1,)

    def __init__(self, n: int) -> None:
        self.params = SamplingParams(n=n)
        self.others: list[Any] = []
        self.finish_reason: str | None = None
        self.error: str | None = None


@pytest.mark.parametrize("most", [1, 2, 4, 9])
def test_a_replica_without_requests_takes_any_request(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of as many completions as there are rows, and one that has seen others end and runs without company."""
    for n, num_deaths in itertools.product({1, most}, (0, replicas.MOST_MOVES)):
        ours, theirs = Pipe()
        monkeypatch.setattr(replicas, "start_process", lambda *_, ours=ours: (ours, None))
        replica = Replica(0, Start(EngineConfig("tiny-qwen3"), set(), 0, {}))
        vars(replica)["config"] = OPTIONS
        requests: Any = [Waiting(n) for _ in range(20)]
        engine: Any = object.__new__(ReplicatedEngine)
        engine.config = SimpleNamespace(max_num_seqs=most)
        engine.scheduler = SimpleNamespace(waiting=deque(requests))
        engine.runner = SimpleNamespace(replicas=[replica])
        engine._deaths = Counter(dict.fromkeys(requests, num_deaths))
        engine._deal_out()
        num_taken = 20 - len(engine.scheduler.waiting)
        assert num_taken == (1 if num_deaths else most * 5 // 4 // n)
        assert [theirs.recv()[2].n for _ in range(num_taken)] == [n] * num_taken and not theirs.poll()


@pytest.mark.parametrize("loading", [[], [0], [2], [0, 1, 2]], ids=str)
def test_a_replica_that_loads_is_killed_at_once_and_the_others_have_time_to_end(loading: list[int]) -> None:
    done: list[tuple[str, int]] = []

    def make(number: int) -> Any:
        kill = partial(done.append, ("kill", number))
        process = SimpleNamespace(kill=kill, wait=lambda _: done.append(("wait", number)))
        send = partial(done.append, ("send", number))
        connection = SimpleNamespace(close=lambda: None)
        rest = {"limit_waits": lambda _: None, "send": lambda _: send(), "connection": connection}
        return SimpleNamespace(config=None if number in loading else OPTIONS, process=process, **rest)

    ended = [make(number) for number in range(3)]
    replicas._end_replicas(ended, os.getpid() + 1)
    assert not done, "a fork ends nobody"
    replicas._end_replicas(ended, os.getpid())
    first_wait = done.index(("wait", 0))
    assert [number for verb, number in done[:first_wait] if verb == "kill"] == loading
    assert [number for verb, number in done[:first_wait] if verb == "send"] == [0, 1, 2]
    assert {number for verb, number in done[first_wait:] if verb == "kill"} == {0, 1, 2}


def test_a_replica_that_cannot_be_killed_is_named_and_keeps_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def wait(_: float) -> None:
        raise subprocess.TimeoutExpired("replica", 1)

    process = SimpleNamespace(kill=lambda: None, wait=wait, pid=77)
    rest = {"limit_waits": lambda _: None, "send": lambda _: None, "connection": SimpleNamespace(close=lambda: None)}
    ended: list[Any] = [SimpleNamespace(number=number, config=OPTIONS, process=process, **rest) for number in (0, 5)]
    replicas._end_replicas(ended, os.getpid())
    assert [record.message for record in caplog.records] == [
        f"replica {i}, process 77, cannot be killed" for i in (0, 5)
    ]


def test_requests_of_a_replica_that_ends_go_to_the_front_in_their_order_and_the_cause_ends_with_its_reason() -> None:
    requests: Any = [Waiting(1) for _ in range(4)]
    waiting = deque(requests[3:])
    engine: Any = object.__new__(ReplicatedEngine)
    engine.scheduler = SimpleNamespace(waiting=waiting)
    engine.runner = SimpleNamespace(replace=lambda _: None)
    engine._deaths = Counter({requests[1]: replicas.MOST_MOVES})
    engine._past = Counter(num_steps=5)
    for seq in requests:
        seq.others = [Waiting(1)]
    stats = {"num_steps": 3, "num_free_blocks": 9}
    ended: Any = SimpleNamespace(
        number=6, error="it has met an error", stats=stats, sequences=dict(enumerate(requests[:3]))
    )
    assert engine._replace(ended) == [requests[1]]
    assert [*waiting] == [requests[0], *requests[2:]]
    assert requests[1].error.endswith("has ended 3 replicas; the last: replica 6 failed: it has met an error")
    assert requests[1].finish_reason == requests[1].others[0].finish_reason == "error"
    assert engine._past == {"num_steps": 8}
    engine.runner.replicas = []
    engine.close = lambda: None
    with pytest.raises(RuntimeError, match=r"^replica 6 failed: it has met an error$"):
        engine.step()


def test_counts_are_sent_ten_times_a_second_and_what_has_ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("nanovllm.features.distributed.replica.time", SimpleNamespace(monotonic=lambda: now))
    steps = [(seconds, ended) for seconds in (0.01, 0.04, INTERVAL, 0.35) for ended in [False] * 9 + [True] * 2]
    random.Random(0).shuffle(steps)
    inbox: Any = SimpleQueue()
    due = []
    sent = []

    def step() -> list[Any]:
        nonlocal now
        seconds, has_ended = steps.pop()
        now += seconds
        due.append((now, [len(steps)] * has_ended))
        if not steps:
            inbox.put(None)
        return [SimpleNamespace(seq_id=len(steps))] * has_ended

    def send(stats: Any, ended: list[Any]) -> None:
        sent.append((now, [number for number, _ in ended]))

    engine = SimpleNamespace(has_work=True, step=step, make_output=lambda seq: seq, stats=lambda: {})
    serve(engine, send, inbox)
    assert [one for one in due if one[1]] == [one for one in sent if one[1]]
    for (before, _), (at, ended) in itertools.pairwise([(0.0, []), *sent]):
        assert ended or at > before + INTERVAL
        assert not [when for when, _ in due if before + INTERVAL < when < at], "they were due with an earlier step"


# ---- two replicas


@pytest.fixture(scope="module")
def one(random_model: Path) -> Iterator[LLM]:
    with LLM(random_model, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(random_model: Path) -> Iterator[LLM]:
    with LLM(random_model, data_parallel_size=2, **OPTIONS) as llm:
        yield llm


def engine_of(llm: LLM) -> ReplicatedEngine:
    assert isinstance(llm.engine, ReplicatedEngine)
    return llm.engine


def list_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of all kinds; some prompts are longer than a step's budget, some share a prefix, some have no seed."""
    prompts = draw_prompts([1 + 13 * i % 70 for i in range(30)])
    prompts += [prompts[0] + [i] for i in range(6)]
    kinds = (
        SamplingParams(temperature=0.0, max_tokens=30),
        SamplingParams(temperature=1.0, max_tokens=40, n=3, logprobs=2),
        SamplingParams(temperature=0.8, top_k=20, max_tokens=20, seed=-5, presence_penalty=1.0),
        SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1),
        SamplingParams(temperature=1.0, max_tokens=25, logit_bias={7: 4.0}, stop_token_ids=[7, 11]),
    )
    return prompts, [kinds[i % len(kinds)] for i in range(len(prompts))]


@needs_two_cores
def test_replicas_give_the_bits_the_numbers_and_the_order_of_one_engine(one: LLM, two: LLM) -> None:
    prompts, params = list_requests()
    for _ in range(2):  # the second time, requests without a seed have other numbers, and so other seeds
        expected = one.generate(prompts, params, use_tqdm=False)
        outputs = two.generate(prompts, params, use_tqdm=False)
        for output, wanted in zip(outputs, expected, strict=True):
            if not HAS_KERNELS:
                output = {name: value for name, value in output.items() if "logprobs" not in name}
                wanted = {name: value for name, value in wanted.items() if "logprobs" not in name}
            output["num_cached_tokens"] = wanted["num_cached_tokens"]  # each replica has a prefix cache of its own
            assert output == wanted
        assert [output.request_id for output in outputs] == [wanted.request_id for wanted in expected]
    counts = two.stats()
    assert counts["num_generated_tokens"] == one.stats()["num_generated_tokens"]
    assert counts["num_prompt_tokens"] == one.stats()["num_prompt_tokens"]
    assert counts["num_blocks"] == counts["num_free_blocks"] == 2 * one.stats()["num_blocks"]
    assert all(replica.stats["num_steps"] > 10 for replica in engine_of(two).runner.replicas), "both have worked"


@needs_two_cores
def test_each_replica_runs_on_cores_of_its_own_with_as_many_threads(two: LLM) -> None:
    pids = [replica.process.pid for replica in engine_of(two).runner.replicas]
    cpus = [os.sched_getaffinity(pid) for pid in pids]
    assert not cpus[0] & cpus[1]
    for pid, own in zip(pids, cpus, strict=True):
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        assert all(os.sched_getaffinity(int(thread.name)) == own for thread in threads), "set before any thread began"
        assert b"OMP_NUM_THREADS=" in Path(f"/proc/{pid}/environ").read_bytes()


@needs_two_cores
def test_streams_scores_vectors_and_submitted_requests_are_those_of_one_engine(one: LLM, two: LLM) -> None:
    prompts = draw_prompts([2 + 5 * i for i in range(12)])
    params = SamplingParams(temperature=0.0, max_tokens=9)
    expected = [output["token_ids"] for output in one.generate(prompts, params, use_tqdm=False)]
    streamed = dict(two.stream(iter(prompts), params))
    assert [streamed[i]["token_ids"] for i in range(12)] == expected
    futures = [two.submit(prompt, params) for prompt in prompts]
    assert [future.result(SOON)["token_ids"] for future in futures] == expected
    scores = two.score(prompts, prompts[::-1], use_tqdm=False)
    for score, wanted in zip(scores, one.score(prompts, prompts[::-1], use_tqdm=False), strict=True):
        assert score["token_ids"] == wanted["token_ids"] and score["logprob"] == pytest.approx(wanted["logprob"], 1e-4)
    vectors = [embedding.embedding for embedding in two.embed(prompts, use_tqdm=False)]
    wanted_vectors = [embedding.embedding for embedding in one.embed(prompts, use_tqdm=False)]
    np.testing.assert_allclose(vectors, wanted_vectors, rtol=1e-4, atol=1e-5)


@needs_two_cores
def test_who_leaves_a_stream_early_aborts_what_runs(two: LLM) -> None:
    for _ in two.stream([[1, 2, 3]] * 40, LONG):
        break
    counts = two.stats()
    assert counts["num_free_blocks"] == counts["num_blocks"]
    assert len(two.generate([[5, 6]], SamplingParams(max_tokens=4), use_tqdm=False)[0]["token_ids"]) == 4


@needs_two_cores
def test_what_is_for_one_engine_is_refused_by_name(two: LLM, random_model: Path) -> None:
    uses = {
        "add_request": lambda: two.add_request([1]),
        "step": two.step,
        "sleep": two.sleep,
        "load_weights": lambda: two.load_weights([]),
        "observe": lambda: two.observe(None),  # type: ignore[arg-type]
        "reset_prefix_cache": two.reset_prefix_cache,
    }
    for name, use in uses.items():
        with pytest.raises(ValueError, match=rf"{name}\(\) is for one engine, and data_parallel_size is above 1"):
            use()
    with pytest.raises(ValueError, match=r"trace is .*it must be None with data_parallel_size=2"):
        LLM(random_model, data_parallel_size=2, trace="steps.json", **OPTIONS)
    adapter = LoRARequest("any", 1, "anywhere")
    with pytest.raises(ValueError, match="data_parallel_size is 2; it must be 1 where requests have lora_request"):
        two.generate([[1]], use_tqdm=False, lora_request=adapter)
    assert two.is_finished()


@needs_two_cores
@pytest.mark.slow
def test_a_mistake_that_replicas_find_is_a_value_error(random_model: Path) -> None:
    before = list_children(os.getpid())
    with pytest.raises(ValueError, match=r"replica \d failed: .*num_kvcache_blocks"):
        LLM(random_model, data_parallel_size=2, **OPTIONS | {"num_kvcache_blocks": 2})
    assert list_children(os.getpid()) == before


# ---- kills


def kill(replica: Replica) -> None:
    os.kill(replica.process.pid, signal.SIGKILL)


def stop(replica: Replica) -> None:
    """Stop a replica between two messages."""
    os.kill(replica.process.pid, signal.SIGSTOP)


def fill_its_socket(replica: Replica) -> None:
    """Stop a replica, and send it more than its socket holds."""
    os.kill(replica.process.pid, signal.SIGSTOP)
    replica.send(bytes(1 << 24))


def cut_its_message(replica: Replica) -> None:
    """Let the begin of a message arrive, and nothing more."""
    vars(replica)["former"] = replica.connection  # so that it stays open
    replica.connection, theirs = Pipe()
    vars(replica)["theirs"] = theirs
    replica.limit_waits(2)
    os.write(theirs.fileno(), struct.pack("!i", 100))


ATTACKS = {
    stop: "has given no sign of life for 2 s",
    fill_its_socket: "has given no sign of life for 2 s",
    cut_its_message: "has given no sign of life for 2 s",
    kill: "was killed by SIGKILL",
}
"""Attacks, and how rank 0 then says that the replica failed."""


@pytest.mark.slow
@needs_two_cores
def test_the_requests_of_a_killed_or_stopped_replica_go_to_others_and_keep_their_tokens(
    random_model: Path, one: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    """One attack after the other, each on the process that took the place of the one before."""
    prompts = [[i + 1] for i in range(30)]
    params = [SamplingParams(temperature=1.0, max_tokens=100, seed=i) for i in range(30)]
    expected = [output["token_ids"] for output in one.generate(prompts, params, use_tqdm=False)]
    with LLM(random_model, data_parallel_size=2, **OPTIONS) as llm:
        for attack, reason in ATTACKS.items():
            victim, other = engine_of(llm).runner.replicas
            caplog.clear()
            outputs = {}
            for number, output in llm.stream(zip(prompts, params, strict=True)):
                if not outputs:
                    victim.max_silence = 2
                    victim.limit_waits(2)
                    attack(victim)
                    since = time.monotonic()
                outputs[number] = output["token_ids"]
            assert time.monotonic() - since < SOON
            assert [outputs[i] for i in range(30)] == expected
            assert f"replica 0 failed: its process {victim.process.pid} {reason}" in caplog.text
            assert "Its requests go to the others: " in caplog.text
            assert not is_alive(victim.process.pid)
            wait_for(lambda: llm.generate([[1]] * 30, LONG, False) and engine_of(llm).runner.replicas[0].config, SOON)
            assert engine_of(llm).runner.replicas[1] is other, "it went on"
        pids = [replica.process.pid for replica in engine_of(llm).runner.replicas]
        counts = llm.stats()
        assert counts["num_blocks"] == counts["num_free_blocks"] == 48
    assert not any(map(is_alive, pids))


@pytest.mark.slow
@needs_two_cores
def test_neither_who_asks_seldom_nor_a_pause_of_all_is_taken_for_silence(random_model: Path) -> None:
    with LLM(random_model, data_parallel_size=2, **OPTIONS) as llm:
        both = engine_of(llm).runner.replicas[:]
        for replica in both:
            replica.max_silence = 3
        stream = llm.stream([[1, 2, 3]] * 40, LONG)
        next(stream)
        time.sleep(5)
        next(stream)
        for replica in both:
            os.kill(replica.process.pid, signal.SIGSTOP)
        time.sleep(5)
        for replica in both:
            threading.Timer(0.5, os.kill, (replica.process.pid, signal.SIGCONT)).start()
        assert len(list(stream)) == 38
        assert engine_of(llm).runner.replicas == both


SLOW_STEP = """
import time
from nanovllm.features.distributed import replica

serve = replica.serve

def serve_slowly(engine, send, inbox):
    step = engine.step
    def step_slowly():
        engine.step = step
        time.sleep(10)  # like a kernel, it leaves the interpreter to other threads
        return step()
    engine.step = step_slowly
    serve(engine, send, inbox)

replica.serve = serve_slowly
"""


@pytest.mark.slow
@needs_two_cores
def test_a_step_that_is_longer_than_max_silence_is_not_silence(
    random_model: Path, one: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_STEP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    params = SamplingParams(temperature=0.0, max_tokens=5)
    expected = one.generate([[1], [2]], params, use_tqdm=False)
    with LLM(random_model, data_parallel_size=2, **OPTIONS) as llm:
        for replica in engine_of(llm).runner.replicas:
            replica.max_silence = 4
            replica.limit_waits(4)
        since = time.monotonic()
        outputs = llm.generate([[1], [2]], params, use_tqdm=False)
        assert time.monotonic() - since > 10
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]
    assert "failed" not in caplog.text


@pytest.mark.slow
@needs_two_cores
def test_a_request_that_three_replicas_did_not_survive_is_an_error_and_the_others_go_on(
    random_model: Path, one: LLM
) -> None:
    """Whoever has request 5 dies. The first two times it has company."""
    prompts = [[i + 1] for i in range(12)]
    params = [SamplingParams(temperature=1.0, max_tokens=100, seed=i) for i in range(12)]
    expected = one.generate(prompts, params, use_tqdm=False)
    with LLM(random_model, data_parallel_size=2, **OPTIONS) as llm:
        killed: list[Replica] = []
        llm.generate([[1]] * 2, LONG, use_tqdm=False)
        first = int(llm.generate([[1]], LONG, use_tqdm=False)[0].request_id) + 1

        def attack() -> None:
            while len(killed) < 3:
                for replica in list(engine_of(llm).runner.replicas):
                    if first + 5 in replica.sequences and replica not in killed:
                        killed.append(replica)
                        kill(replica)
                time.sleep(0.001)

        thread = threading.Thread(target=attack, daemon=True)
        thread.start()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        thread.join()
    assert [i for i, output in enumerate(outputs) if output["finish_reason"] == "error"] == [5]
    assert f"request {first + 5} has ended 3 replicas; the last: replica" in str(outputs[5].error)
    for i, output in enumerate(outputs):
        assert i == 5 or output["token_ids"] == expected[i]["token_ids"]


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGSTOP, "has given no sign of life for 2 s"), (signal.SIGKILL, "was killed by SIGKILL")],
)
def test_a_replica_that_is_killed_or_stopped_while_it_loads_is_an_error(
    number: signal.Signals, reason: str, random_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list_children(os.getpid())
    segments = list_segments()
    made: list[Replica] = []

    class NotedReplica(Replica):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            made.append(self)

    def attack() -> None:
        wait_for(lambda: len(made) == 2)
        time.sleep(0.5)
        made[0].process.send_signal(number)
        made[0].max_silence = 2

    monkeypatch.setattr(replicas, "Replica", NotedReplica)
    thread = threading.Thread(target=attack, daemon=True)
    thread.start()
    with pytest.raises(RuntimeError, match=rf"replica 0 failed: its process \d+ {reason}"):
        LLM(random_model, data_parallel_size=2, **OPTIONS)
    thread.join()
    assert list_children(os.getpid()) == before
    assert list_segments() == segments


DRIVER = """
import json, sys
from nanovllm import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
params = SamplingParams(temperature=1.0, max_tokens=140, ignore_eos=True)
print(*(replica.process.pid for replica in llm.engine.runner.replicas), flush=True)
try:
    num_ended = 0
    for _ in llm.stream(([1, 2] for _ in iter(int, 1)), params):
        num_ended += 1
        if num_ended == 1:
            print("running", flush=True)
except KeyboardInterrupt:
    print("interrupted", len(llm.generate([[1]] * 3, params, use_tqdm=False)), flush=True)
"""


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, {}), (signal.SIGKILL, {"tensor_parallel_size": 2})])
def test_ctrl_c_leaves_an_engine_that_works_and_a_kill_leaves_nothing(
    number: signal.Signals, ranks: dict[str, int], random_model: Path, tmp_path: Path
) -> None:
    options = OPTIONS | ranks | {"data_parallel_size": 2}
    segments = list_segments()
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(random_model), json.dumps(options)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    pids += [child for pid in pids for child in list_children(pid)]
    assert len(pids) == (4 if ranks else 2)
    assert process.stdout.readline() == "running\n"
    process.send_signal(number)
    rest, _ = process.communicate(timeout=SOON)
    assert rest == ("interrupted 3\n" if number == signal.SIGINT else "")
    wait_for(lambda: not any(map(is_alive, pids)), SOON)
    assert not list(tmp_path.iterdir())
    assert list_segments() == segments


# ---- jobs


@pytest.mark.slow
@needs_two_cores
def test_a_job_on_two_replicas_has_the_results_of_one_engine(tmp_path: Path) -> None:
    from helpers.batch_jobs import read_answers, texts_by_id, write_lines

    from nanovllm.apps.cli import main

    lines: list[Any] = [{"prompt": f"what is {n} + 17?", "temperature": 1, "max_tokens": 12} for n in range(60)]
    source = write_lines(tmp_path / "in.jsonl", [*lines, {"prompt": ""}, b"no json"])
    found = []
    for count in ("1", "2"):
        out = tmp_path / f"out{count}.jsonl"
        command = ["run-batch", "-i", str(source), "-o", str(out), "--model", "tiny-qwen3", "--device", "cpu"]
        assert main([*command, "--replicas", count, "--dtype", "float32", "--attention-backend", "torch"]) == 1
        errors = sorted(answer["id"] for answer in read_answers(out) if answer["error"] is not None)
        found.append((texts_by_id(out), errors))
    assert found[0] == found[1] and len(found[0][0]) == 60


@pytest.mark.slow
@needs_two_cores
def test_replicas_of_several_ranks_give_the_tokens_of_one_engine(random_model: Path, one: LLM) -> None:
    prompts, params = list_requests()
    params = [SamplingParams(temperature=1.0, max_tokens=20, seed=i) for i in range(len(params))]
    expected = [output["token_ids"] for output in one.generate(prompts, params, use_tqdm=False)]
    with LLM(random_model, data_parallel_size=2, pipeline_parallel_size=2, **OPTIONS) as llm:
        assert [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)] == expected
