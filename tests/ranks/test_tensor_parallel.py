"""Several ranks say what one says; and nobody waits for the dead: each death is that of a real process."""

import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.integrity import check_scheduler
from helpers.processes import is_alive, list_children, list_segments, wait_for
from helpers.tiny import CROWDED, draw_prompts, save_random
from safetensors import safe_open

from nanovllm import LLM, SamplingParams
from nanovllm.engine.plan import StepPlan
from nanovllm.features.distributed import follower_group
from nanovllm.features.distributed.collectives import GroupParallel, PeerLostError
from nanovllm.features.distributed.follower_group import FollowerGroup
from nanovllm.features.distributed.follower_process import FollowerProcess
from nanovllm.features.distributed.leader import LeadingRunner, ThreadShare
from nanovllm.features.distributed.rank_commands import DRAFT
from nanovllm.features.distributed.ring import HEADER, pack_plan
from nanovllm.models import weight_reader
from nanovllm.models.model_folder import ModelFolder
from nanovllm.outputs import Output

SOON = 50.0
"""Seconds within which a failure must show, or its traces be gone."""


# ---- The same tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two KV heads, which four ranks hold twice each, and a vocabulary that neither two nor four ranks divide."""
    folder = tmp_path_factory.mktemp("uneven")
    save_random(folder, vocab_size=501)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **CROWDED) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(model: Path) -> Iterator[LLM]:
    with LLM(str(model), tensor_parallel_size=2, **CROWDED) as llm:
        yield llm


@pytest.fixture(scope="module")
def four(model: Path) -> Iterator[LLM]:
    with LLM(str(model), tensor_parallel_size=4, **CROWDED) as llm:
        yield llm


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and seeded requests; some prompts are longer than a step's budget, some share a prefix."""
    prefix, *rest = draw_prompts([40, 1, 15, 16, 17, 31, 70, 100, 5, 9])
    prompts = [*rest, *(prefix + tail for tail in draw_prompts([1, 8, 20], seed=1)), prefix]
    params = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        if i % 2
        else SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=30, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return prompts, params


def tokens(outputs: list[Output]) -> list[list[int]]:
    return [output["token_ids"] for output in outputs]


@pytest.fixture(scope="module")
def expected(alone: LLM) -> list[list[int]]:
    return tokens(alone.generate(*requests(), use_tqdm=False))


@pytest.mark.parametrize(("ranks", "depth"), [("two", 1), ("two", 2), pytest.param("four", 2, marks=pytest.mark.slow)])
def test_ranks_say_what_one_says(
    ranks: str, depth: int, expected: list[list[int]], request: pytest.FixtureRequest
) -> None:
    llm: LLM = request.getfixturevalue(ranks)
    llm.engine.depth = depth
    before = llm.stats()
    outputs = llm.generate(*requests(), use_tqdm=False)
    assert tokens(outputs) == expected
    after = llm.stats()
    for met in ("num_preemptions", "num_cached_tokens"):
        assert after[met] > before[met], f"the test never met {met}"
    assert after["num_free_blocks"] == after["num_blocks"]
    check_scheduler(llm.engine.scheduler)


def test_logprobs_are_those_of_one_rank(alone: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3)
    outputs = [llm.generate([[7, 8, 9]], params, use_tqdm=False)[0]["logprobs"] for llm in (alone, two)]
    assert [list(step) for step in outputs[0]] == [list(step) for step in outputs[1]]
    for one, other in zip(*outputs, strict=True):
        # float32 sums in another order: relative errors of 1e-7 a term, over logits of some tens
        assert list(one.values()) == pytest.approx(list(other.values()), abs=1e-4)


@pytest.mark.slow
def test_engines_of_several_ranks_run_side_by_side(two: LLM, four: LLM, expected: list[list[int]]) -> None:
    prompts, params = requests()
    streams = [llm.stream(zip(prompts, params, strict=True)) for llm in (two, four)]
    outputs: list[dict[int, Any]] = [{}, {}]
    for pair in zip(*streams, strict=True):
        for found, (i, output) in zip(outputs, pair, strict=True):
            found[i] = output["token_ids"]
    for found in outputs:
        assert [found[i] for i in range(len(prompts))] == expected


def test_threads_of_the_cpu_are_shared_among_the_ranks(two: LLM) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert torch.get_num_threads() <= share
    for pid in two.engine.runner.pids:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert f"OMP_NUM_THREADS={torch.get_num_threads()}".encode() in environment


def test_nothing_lies_in_dev_shm_while_ranks_run(model: Path, two: LLM) -> None:
    assert not [name for name in list_segments() if "nanovllm" in name]
    maps = Path(f"/proc/{two.engine.runner.pids[0]}/maps").read_text()
    assert "memfd:nanovllm-plans (deleted)" in maps


def test_followers_ignore_an_interrupt(two: LLM) -> None:
    for pid in two.engine.runner.pids:
        os.kill(pid, signal.SIGINT)
    time.sleep(0.1)
    assert two.generate([[1, 2, 3]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert all(map(is_alive, two.engine.runner.pids))


# ---- What cannot be shared


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "num_attention_heads is 6, which 4 ranks"),
        ({"intermediate_size": 90}, 4, "intermediate_size is 90, which 4 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "num_key_value_heads is 3, which 4 ranks"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "num_key_value_heads is 3, which 2 ranks"),
    ],
)
def test_what_does_not_divide_is_refused_before_a_process_starts(
    changes: dict[str, int], ranks: int, message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((model / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), load_format="dummy", tensor_parallel_size=ranks, **CROWDED)


def test_nccl_is_refused_on_a_cpu(model: Path) -> None:
    with pytest.raises(ValueError, match='distributed_backend="nccl" needs CUDA devices; on a CPU use "gloo"'):
        LLM(str(model), tensor_parallel_size=2, distributed_backend="nccl", **CROWDED)


# ---- Followers that fail


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process makes its temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def start_two(model: Path) -> LLM:
    return LLM(str(model), tensor_parallel_size=2, **CROWDED)


def expect_the_end(llm: LLM, message: str) -> str:
    """Generate until the engine fails; it says why, in time, is closed, and leaves no process. Returns its message."""
    pids = llm.engine.runner.pids
    since = time.monotonic()
    with pytest.raises(RuntimeError, match=message) as error:
        while time.monotonic() < since + 2 * SOON:
            llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert time.monotonic() < since + SOON
    wait_for(lambda: not any(map(is_alive, pids)))
    with pytest.raises(RuntimeError, match="the engine is closed"):
        llm.generate([[1]], use_tqdm=False)
    return str(error.value)


@pytest.mark.slow
def test_a_follower_killed_while_rank_0_waits_for_it_fails_rank_0(model: Path) -> None:
    llm = start_two(model)
    (victim,) = llm.engine.runner.pids
    os.kill(victim, signal.SIGSTOP)  # so that rank 0 is inside a collective when the follower dies
    threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()
    expect_the_end(llm, f"rank 1 of 2 failed: its process {victim} was killed by SIGKILL")


@pytest.mark.slow
def test_an_abort_that_waits_for_the_graphs_does_not_keep_rank_0_from_freeing_them(model: Path) -> None:
    """NCCL's abort returns only when no CUDA graph holds its collectives; close() is what frees the graphs."""
    llm = start_two(model)
    freed = threading.Event()
    llm.engine.runner._followers._abort_collectives = freed.wait
    close_runner = llm.engine.runner.local.close
    llm.engine.runner.local.close = lambda: (freed.set(), close_runner())
    os.kill(llm.engine.runner.pids[0], signal.SIGKILL)
    expect_the_end(llm, r"rank 1 of 2 failed: .* was killed by SIGKILL")
    assert freed.is_set()


@pytest.mark.slow
def test_a_follower_killed_while_the_engine_closes_does_not_keep_rank_0(model: Path) -> None:
    """Rank 0 may be waiting for a collective with it, which ends when it is aborted."""
    llm = start_two(model)
    (victim,) = llm.engine.runner.pids
    aborted = threading.Event()
    llm.engine.runner._followers._abort_collectives = aborted.set
    close_runner = llm.engine.runner.local.close

    def close_after_the_abort() -> None:
        os.kill(victim, signal.SIGKILL)
        assert aborted.wait(SOON)
        close_runner()

    llm.engine.runner.local.close = close_after_the_abort
    os.kill(victim, signal.SIGSTOP)  # else it might end in order before it is killed
    llm.close()


@pytest.mark.slow
def test_a_follower_that_raises_fails_rank_0_with_its_traceback(model: Path) -> None:
    llm = start_two(model)
    others = llm.engine.runner._followers
    beyond = CROWDED["max_num_seqs"] + 1

    def send_wrongly(packed: Any) -> None:
        packed[HEADER] = 10 * beyond  # the first sequence's row
        others._ring.write(packed, others.raise_failure)

    threading.Timer(0.5, setattr, (others, "send", send_wrongly)).start()
    message = expect_the_end(llm, "rank 1 of 2 failed")
    assert "Traceback (most recent call last)" in message
    assert "worker.py" in message and "IndexError" in message


@pytest.mark.slow
def test_a_follower_killed_between_requests_fails_the_next_one_and_the_folder_is_gone(
    model: Path, scratch: Path
) -> None:
    llm = start_two(model)
    (victim,) = llm.engine.runner.pids
    assert list(scratch.iterdir())
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: not list(scratch.iterdir()))
    expect_the_end(llm, "rank 1 of 2 failed: .* was killed by SIGKILL")


@pytest.mark.slow
def test_a_follower_that_is_stopped_fails_rank_0_by_its_silence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = start_two(model)
    (follower,) = llm.engine.runner._followers._followers
    monkeypatch.setattr(follower, "max_silence", 2)
    pid = follower.process.pid
    os.kill(pid, signal.SIGSTOP)
    expect_the_end(llm, f"rank 1 of 2 failed: its process {pid} has given no sign of life for 2 s")


@pytest.mark.slow
def test_ranks_that_were_stopped_go_on(model: Path) -> None:
    """Rank 0 alone is stopped for a while. Then it and its follower are, for longer than a follower may be silent.

    So a pause of the whole machine is not taken for silence.
    """
    command = [sys.executable, "-c", SCRIPT, str(model), json.dumps(CROWDED), "4"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        pids = [process.pid, *list_children(process.pid)]
        for stopped, seconds in ((pids[:1], 3.0), (pids, 5.5)):
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            assert [process.stdout.readline() for _ in range(2)] == ["more\n"] * 2
        assert all(map(is_alive, pids))
        process.kill()


@pytest.mark.slow
def test_followers_are_heard_over_large_descriptors_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 1200
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"no more than {hard} descriptors here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    gc.collect()  # descriptors of engines that were forgotten would become free below those taken here
    taken = [os.dup(0) for _ in range(1050)]
    try:
        with start_two(model) as llm:
            (follower,) = llm.engine.runner._followers._followers
            assert follower.connection.fileno() > 1024
            monkeypatch.setattr(follower, "max_silence", 2)
            time.sleep(3.5)
            assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_a_follower_killed_while_the_ranks_connect_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(list_children(os.getpid()))
    connect = GroupParallel.connect

    def kill_and_connect(*args: Any) -> None:
        (victim,) = set(list_children(os.getpid())) - before
        os.kill(victim, signal.SIGKILL)
        connect(*args)

    monkeypatch.setattr(GroupParallel, "connect", kill_and_connect)
    since = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed: .* was killed by SIGKILL"):
        start_two(model)
    assert time.monotonic() - since < 2 * SOON


def test_what_a_fork_closes_stays_open_for_rank_0(two: LLM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
        pid = os.fork()
    if pid == 0:
        try:
            two.close()
        finally:
            os._exit(0)
    assert wait_for(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid)
    assert two.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)


def test_the_last_of_several_engines_brings_the_threads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    share = ThreadShare()
    try:
        torch.set_num_threads(8)
        monkeypatch.setattr("nanovllm.features.distributed.leader.physical_cores", lambda: 8)
        found = []
        for act in (lambda: share.take(2), lambda: share.take(4), share.give_back, share.give_back):
            act()
            found.append(torch.get_num_threads())
        assert found == [4, 2, 2, 8]
    finally:
        torch.set_num_threads(threads)


def test_a_follower_killed_while_rank_0_loads_fails_rank_0(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(list_children(os.getpid()))
    fill = weight_reader._fill
    filled: list[tuple[Any, ...]] = []
    with safe_open(model / "model.safetensors", "pt") as tensors:
        num_tensors = len(tensors.keys())
    assert num_tensors > 20  # half a second each

    def fill_slowly(*args: Any) -> None:
        if not filled:
            (victim,) = set(list_children(os.getpid())) - before
            os.kill(victim, signal.SIGKILL)
        filled.append(args)
        time.sleep(0.5)
        fill(*args)

    monkeypatch.setattr(weight_reader, "_fill", fill_slowly)
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed: .* was killed by SIGKILL"):
        start_two(model)
    assert len(filled) < num_tensors, "the load went on although a rank was lost"
    assert set(list_children(os.getpid())) <= before


@pytest.mark.slow
def test_a_rank_that_cannot_start_fails_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(list_children(os.getpid()))
    make_start_message = follower_group.make_start_message
    save_random(tmp_path / "model", num_attention_heads=6, num_key_value_heads=3)

    def name_another_folder(*args: Any) -> dict[str, Any]:
        message = make_start_message(*args)
        return message | {"folder": ModelFolder(tmp_path)} if message["rank"] == 1 else message

    monkeypatch.setattr(follower_group, "make_start_message", name_another_folder)
    with pytest.raises(RuntimeError, match="rank 1 of 3 failed") as error:
        LLM(str(tmp_path / "model"), tensor_parallel_size=3, **CROWDED)
    assert "Traceback" in str(error.value) and "has no safetensors files" in str(error.value)
    wait_for(lambda: set(list_children(os.getpid())) <= before)


def test_a_rank_that_finds_the_meeting_folder_gone_has_lost_its_peers(tmp_path: Path) -> None:
    """A rank that fails removes the folder. The others must not be called the cause, although they may fail first."""
    group = GroupParallel(1, 2, "gloo", torch.device("cpu"))
    with pytest.raises(PeerLostError, match="rank 1 could not meet its peers"):
        group.connect(tmp_path / "gone")


@pytest.mark.slow
def test_what_rank_0_cannot_do_is_its_own_error_and_the_folder_is_gone(model: Path, scratch: Path) -> None:
    before = set(list_children(os.getpid()))
    with pytest.raises(ValueError, match="the KV cache has 3 blocks of 16 tokens"):
        LLM(str(model), tensor_parallel_size=2, **CROWDED | {"num_kvcache_blocks": 3})
    assert not list(scratch.iterdir())
    wait_for(lambda: set(list_children(os.getpid())) <= before)


# ---- Rank 0 that fails

SCRIPT = """
import json, os, sys
from nanovllm import LLM, SamplingParams

llm = LLM(sys.argv[1], tensor_parallel_size=2, **json.loads(sys.argv[2]))
for max_silence in sys.argv[3:]:
    for follower in llm.engine.runner._followers._followers:
        follower.max_silence = int(max_silence)
print("ready", flush=True)
while True:
    llm.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=40, ignore_eos=True), use_tqdm=False)
    print("more", flush=True)
"""


@pytest.fixture
def script(model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A script without a main guard that generates with two ranks for ever, in a process group of its own."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(path), str(model), json.dumps(CROWDED)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        process_group=0,
    )
    with process:
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["starting", "generating"])
def test_rank_0_killed_leaves_no_process_no_segment_and_no_folder(
    when: str, script: subprocess.Popen[str], tmp_path: Path
) -> None:
    before = list_segments()
    if when == "generating":
        assert script.stdout is not None and script.stdout.readline() == "ready\n"
        time.sleep(0.5)
    pids = wait_for(lambda: list(tmp_path.glob("nanovllm-*")) and list_children(script.pid), 60)
    script.send_signal(signal.SIGKILL)
    wait_for(lambda: not list(tmp_path.glob("nanovllm-*")), 10)
    wait_for(lambda: not any(map(is_alive, pids)))
    assert list_segments() <= before


@pytest.mark.slow
def test_ctrl_c_prints_one_traceback_and_ends_all(script: subprocess.Popen[str]) -> None:
    assert script.stdout is not None and script.stdout.readline() == "ready\n"
    time.sleep(0.5)
    pids = list_children(script.pid)
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does, to all of the foreground
    _, stderr = script.communicate(timeout=2 * SOON)
    assert stderr.count("Traceback") == 1 and stderr.rstrip().endswith("KeyboardInterrupt")
    assert len(pids) == 1
    wait_for(lambda: not any(map(is_alive, pids)))


# ---- Coming and going


@pytest.mark.slow
def test_host_memory_does_not_multiply(tmp_path: Path) -> None:
    """Each follower's own memory, at its highest while it loads, is its share of the weights, not all of them."""
    ranks = 2
    large = tmp_path / "large"
    small = tmp_path / "small"
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512}
    save_random(large, **shape, hidden_size=1024, intermediate_size=8192, num_hidden_layers=2)
    save_random(small, **shape, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
    weights = sum(path.stat().st_size for path in large.glob("*.safetensors"))
    assert weights > 150 << 20

    def peaks(folder: Path) -> list[int]:
        """Of each follower: the most bytes of its own, which files that are mapped are not."""
        highest: dict[int, int] = {}
        done = threading.Event()

        def look() -> None:
            for pid in set(list_children(os.getpid())) - before:
                with suppress(OSError):
                    # Between fork and exec the memory is that of this process, so exec must come before the memory.
                    if b"distributed.worker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                        continue
                    status = Path(f"/proc/{pid}/status").read_text()
                    if found := re.search(r"RssAnon:\s+(\d+) kB", status):
                        highest[pid] = max(highest.get(pid, 0), int(found[1]) << 10)

        def watch() -> None:
            while not done.is_set():
                look()
                time.sleep(0.005)

        before = set(list_children(os.getpid()))
        thread = threading.Thread(target=watch)
        thread.start()
        try:
            with LLM(str(folder), tensor_parallel_size=ranks, **CROWDED) as llm:
                pids = llm.engine.runner.pids
                look()  # the thread may not have run lately
        finally:
            done.set()
            thread.join()
        return [highest[pid] for pid in pids]

    for with_weights, without in zip(peaks(large), peaks(small), strict=True):
        assert 0.8 * weights / ranks < with_weights - without < 1.3 * weights / ranks


@pytest.mark.slow
def test_engines_one_after_another_leave_nothing_behind_and_closing_waits_for_no_patience(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_group, "PATIENCE", 20 * SOON)

    def counts() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(list_children(os.getpid()))

    gc.collect()  # what earlier tests left in cycles would otherwise be freed while this one counts
    found = []
    for _ in range(3):
        llm = start_two(model)
        pids = llm.engine.runner.pids
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
        since = time.monotonic()
        llm.close()
        assert time.monotonic() - since < SOON  # and not the patience that ends in a kill
        assert not any(map(is_alive, pids))
        del llm
        found.append(counts())
    assert found[2] == found[1]  # the first may load what stays: libraries, thread pools


@pytest.mark.slow
def test_a_rank_0_that_raises_in_a_step_ends_all_at_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = start_two(model)
    pids = llm.engine.runner.pids

    def fail(*_: Any) -> None:
        raise MemoryError("rank 0 has no more")

    monkeypatch.setattr(llm.engine.runner.local.model, "compute_logits", fail)
    monkeypatch.setattr(follower_group, "PATIENCE", 20 * SOON)
    since = time.monotonic()
    with pytest.raises(MemoryError, match="rank 0 has no more"):
        llm.generate([[1, 2, 3]], use_tqdm=False)
    assert time.monotonic() - since < SOON  # and not the patience that ends in a kill
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_an_engine_that_is_forgotten_takes_its_ranks_along(model: Path) -> None:
    llm = start_two(model)
    pids = llm.engine.runner.pids
    del llm
    wait_for(lambda: not any(map(is_alive, pids)))


class OptionsRecorder:
    """Stands in for a process group: notes the options of each collective, and returns no work, as NCCL does."""

    def __init__(self) -> None:
        self.options: list[Any] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.options.append(options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> None:
        self.options.append(options)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> None:
        self.options.append(options)


@pytest.mark.parametrize("rank", [0, 1])
def test_every_collective_asks_for_the_current_stream(rank: int) -> None:
    """On a stream of its own, a captured collective would be a second branch of the CUDA graph."""
    parallel = GroupParallel(rank, 2, "gloo", torch.device("cpu"))
    parallel._group = OptionsRecorder()
    x = torch.ones(2, 3)
    assert torch.equal(parallel.all_reduce(x), x)
    assert torch.equal(parallel.broadcast(x), x)
    gathered = parallel.gather(x)
    assert gathered is None if rank else gathered is not None and gathered.shape == (2, 6)
    assert parallel.minimum(5) == 5
    assert [options.asyncOp for options in parallel._group.options] == [False] * 4
    assert parallel._group.options[3].reduceOp == torch.distributed.ReduceOp.MIN


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 3)])
def test_collectives_that_send_nothing_give_the_shapes_of_those_that_do(rank: int, size: int) -> None:
    """A step that only measures memory has them."""
    parallel = GroupParallel(rank, size, "gloo", torch.device("cpu"))
    group = OptionsRecorder()
    parallel._group = group
    x = torch.ones(2, 3)
    found = []
    for sends_nothing in (False, True):
        parallel.sends_nothing = sends_nothing
        results = [parallel.all_reduce(x), parallel.gather(x), parallel.broadcast(x)]
        found.append([None if result is None else result.shape for result in results])
    assert found[0] == found[1]
    assert len(group.options) == 3


def test_collectives_over_gloo_compute_what_they_say(tmp_path: Path) -> None:
    """Two ranks in two threads, with the options as they are."""
    found: dict[int, tuple[Any, ...]] = {}

    def run(rank: int) -> None:
        parallel = GroupParallel(rank, 2, "gloo", torch.device("cpu"))
        parallel.connect(tmp_path)
        x = torch.arange(3.0) + 10 * rank
        gathered = parallel.gather(x)
        found[rank] = (
            parallel.all_reduce(x.clone()).tolist(),
            None if gathered is None else gathered.tolist(),
            parallel.broadcast(x.clone()).tolist(),
            parallel.minimum(7 - rank),
        )
        parallel.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    total = [10.0, 12.0, 14.0]
    assert found[0] == (total, [0.0, 1.0, 2.0, 10.0, 11.0, 12.0], [0.0, 1.0, 2.0], 6)
    assert found[1] == (total, None, [0.0, 1.0, 2.0], 6)


def test_a_step_that_is_read_while_another_is_launched_does_not_end_the_launch() -> None:
    """If the launch then fails, the followers are in the middle of a step, and must be killed."""
    group = object.__new__(FollowerGroup)
    group._in_step = False
    group._failure = None
    with group.guard():
        with group.guard():
            pass
        assert group._in_step
    assert not group._in_step


@pytest.mark.parametrize("failure", [None, "rank 1 of 2 failed: it ended"])
@pytest.mark.parametrize("error", [ValueError, MemoryError, RuntimeError, PeerLostError, KeyboardInterrupt])
def test_no_error_of_rank_0_is_lost_and_a_follower_s_failure_is_told_in_its_place(
    error: type[BaseException], failure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a ValueError and a Ctrl-C are rank 0's own."""
    monkeypatch.setattr(follower_group, "GRACE", 0.01)
    group = object.__new__(FollowerGroup)
    group._in_step = False
    group._failure = failure
    group._changed = threading.Condition()
    own = error("rank 0's")
    with pytest.raises(BaseException) as raised, group.guard():
        raise own
    if failure is None or error in (ValueError, KeyboardInterrupt):
        assert raised.value is own
    else:
        assert type(raised.value) is RuntimeError and str(raised.value) == failure
        assert raised.value.__cause__ is own
    assert group._in_step


@pytest.mark.parametrize("seconds", [None, 60.0, -1.0])
def test_a_follower_that_only_shows_life_after_its_time_to_end_is_killed(seconds: float | None, tmp_path: Path) -> None:
    """And not before: it is told to end after three signs of life."""
    group = object.__new__(FollowerGroup)
    group._failure = None
    group._changed = threading.Condition()
    group._deadline = None if seconds is None else time.monotonic() + seconds
    group._abort_collectives = lambda: None
    group.meeting = tmp_path
    with subprocess.Popen(["sleep", "60"]) as process:

        def read_reports() -> Iterator[dict[str, Any]]:
            for _ in range(3):
                yield {}
            process.terminate()

        follower: Any = SimpleNamespace(rank=1, process=process, read_reports=read_reports)
        group._followers = [follower]
        group._watch(follower)
    assert process.returncode == (-signal.SIGKILL if seconds == -1 else -signal.SIGTERM)
    assert (group._failure is None) == (seconds is not None), "nothing fails that was told to end"


@pytest.mark.parametrize("polls", ["", "r", "-r", "---r", "r--r", "r-r---r"])
@pytest.mark.parametrize("max_silence", [4, 5])
def test_a_follower_may_be_silent_for_all_of_max_silence_after_its_start_and_each_report(
    polls: str, max_silence: int
) -> None:
    """Each poll takes a second. It finds a report (r), or none (-)."""
    coming = iter(polls)
    follower: Any = object.__new__(FollowerProcess)
    follower.max_silence = max_silence
    follower.process = SimpleNamespace(pid=1)
    follower.connection = SimpleNamespace(poll=lambda _: next(coming, "-") == "r", recv=lambda: {"stage": "loaded"})
    reports = []
    with pytest.raises(TimeoutError, match=f"no sign of life for {max_silence} s"):
        for report in follower.read_reports():
            reports.append(report)
    assert reports == [{"stage": "loaded"} if poll == "r" else {} for poll in polls] + [{}] * max_silence


def test_whoever_stops_the_followers_goes_on_when_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take as long as they need after they were told to end."""
    closed = []

    class Slow:
        """A follower that ends a while after it was started."""

        watcher = None

        def __init__(self, start: dict[str, Any], *_: Any) -> None:
            self.rank = start["rank"]
            self.process = subprocess.Popen(["sleep", f"{0.2 * self.rank}"])
            self.connection = SimpleNamespace(close=lambda: closed.append(self.rank))

        def read_reports(self) -> Iterator[dict[str, Any]]:
            self.process.wait()
            return iter(())

    ring = SimpleNamespace(write=lambda *_: None)
    monkeypatch.setattr(follower_group, "FollowerProcess", Slow)
    monkeypatch.setattr(follower_group, "make_ring", lambda *_: ring)
    monkeypatch.setattr(follower_group, "make_start_message", lambda *arguments: {"rank": arguments[-1]})
    config: Any = SimpleNamespace(num_ranks=3)
    model: Any = None
    group = FollowerGroup(config, model, None, lambda: None)
    processes = [follower.process for follower in group._followers]
    group.stop()
    assert [process.returncode for process in processes] == [0, 0]
    assert closed == [1, 2] and not group.meeting.exists()


class Followers:
    """Stands in for the followers of a `LeadingRunner`: notes what they are told."""

    raise_failure = abort = wait_until = staticmethod(lambda *_: None)
    guard = nullcontext

    def __init__(self) -> None:
        self.told: list[Any] = []

    def send(self, message: Any) -> None:
        self.told.append(message.tolist())

    def dismiss(self, by_force: bool = False) -> None:
        self.told.append(f"dismiss {by_force}")

    def stop(self) -> None:
        self.told.append("stop")


def lead(make_runner: Any, followers: Followers, monkeypatch: pytest.MonkeyPatch) -> LeadingRunner:
    """Return rank 0 of two, whose followers are stand-ins."""
    monkeypatch.setattr("nanovllm.features.distributed.leader.FollowerGroup", lambda *_: followers)
    config: Any = SimpleNamespace(num_ranks=2, device="cpu", distributed_backend="gloo", pipeline_parallel_size=1)
    model: Any = None
    return LeadingRunner(config, model, None, make_runner)


def test_every_step_of_a_draft_model_goes_to_the_followers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    own = SimpleNamespace(draft=SimpleNamespace(launch=launched.append), close=lambda: None)
    followers = Followers()
    runner = lead(lambda *_: own, followers, monkeypatch)
    plans = [StepPlan.largest(2, size, 64) for size in (2, 3, 16)]
    for plan in plans:
        runner.draft.launch(plan)  # type: ignore[union-attr]
    assert launched == plans
    assert followers.told == [[DRAFT, *pack_plan(plan).tolist()] for plan in plans]
    runner.close()
    own.draft = None  # type: ignore[assignment]
    runner = lead(lambda *_: own, followers, monkeypatch)
    assert runner.draft is None
    runner.close()


@pytest.mark.parametrize("error", [MemoryError, ValueError, KeyboardInterrupt])
def test_followers_are_killed_when_rank_0_cannot_load(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They load, too, and would take as long as they need. The threads of rank 0 are its own again."""
    threads = torch.get_num_threads()
    followers = Followers()

    def fail(*_: Any) -> None:
        raise error

    with pytest.raises(error):
        lead(fail, followers, monkeypatch)
    assert followers.told == ["dismiss True", "stop"]
    assert torch.get_num_threads() == threads


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2])
def test_two_ranks_share_a_gpu_over_gloo(depth: int, model: Path) -> None:
    options = CROWDED | {"device": "cuda", "enforce_eager": True}
    with LLM(str(model), **options) as llm:
        expected = tokens(llm.generate(*requests(), use_tqdm=False))
    with LLM(str(model), tensor_parallel_size=2, distributed_backend="gloo", **options) as llm:
        llm.engine.depth = depth
        assert tokens(llm.generate(*requests(), use_tqdm=False)) == expected
        assert np.all([is_alive(pid) for pid in llm.engine.runner.pids])


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_share_its_memory(model: Path) -> None:
    options = CROWDED | {"device": "cuda", "num_kvcache_blocks": None, "gpu_memory_utilization": 0.5}
    with LLM(str(model), tensor_parallel_size=2, distributed_backend="gloo", **options) as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
        free, total = torch.cuda.mem_get_info()
        assert free >= 0.45 * total
