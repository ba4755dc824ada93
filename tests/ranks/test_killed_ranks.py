"""kill -9 of any rank at any moment: the others end, rank 0 says why within seconds, and nothing is left behind.

The moments are drawn with a seed, in turn from the load, from steps and from the closing, and for rank 0 from the
compilation of its kernels, too. NANOVLLM_ATTACKS is the share of the 50 kills of each rank that is tried. By default
there is one in each of these phases. After NANOVLLM_ATTACK_SECONDS, by default 60, no further one begins.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import is_alive, list_followers, list_segments, wait_for
from helpers.tiny import CROWDED, save_random
from safetensors.torch import load_file

from nanovllm import LLM

SHARE = float(os.environ.get("NANOVLLM_ATTACKS", "0"))
MOST_SECONDS = float(os.environ.get("NANOVLLM_ATTACK_SECONDS", "60"))
SOON = 50.0
"""Seconds within which rank 0 must say why, and all traces must be gone."""
NUM_RANKS = 3
KIND = os.environ.get("NANOVLLM_RANKS", "tensor_parallel_size")
"""NANOVLLM_RANKS=pipeline_parallel_size does the same to the stages of a pipeline."""
OPTIONS = CROWDED | {KIND: NUM_RANKS}
DRIVER = """
import json, sys
from nanovllm import LLM, SamplingParams
import nanovllm.features.distributed.leader
print("imported", flush=True)
params = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)
for line in sys.stdin:
    rounds = float(line)
    try:
        with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
            print("ready", flush=True)
            while rounds > 0:
                llm.generate([[1, 2, 3]] * 10, params, use_tqdm=False)
                rounds -= 1
            print("closing", flush=True)
        print("closed", flush=True)
    except RuntimeError as error:
        print(json.dumps(str(error)), flush=True)
"""
COMPILER = """#!/bin/sh
for a; do shift; test "$a" = -O3 && a=-O0; set -- "$@" "$a"; done
exec ${0%/*}/real "$@"
"""
"""Compiles without optimisation, which takes two seconds instead of seven."""


def list_own_segments() -> set[str]:
    """All shared memory but Ray's, whose tests may run at the same time."""
    return {name for name in list_segments() if not name.startswith(("plasma", "ray"))}


class Driver:
    """A process that makes an engine for each line. It generates as often as the line says, or fails."""

    def __init__(self, model: Path, scratch: Path, options: dict[str, Any], **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(model), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        )
        assert self.read() == "imported"

    def start(self, rounds: float = float("inf")) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{rounds}\n")
        self.process.stdin.flush()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Arena:
    """Where ranks are killed: a model, a folder for temporary files, and one driver after another.

    Attributes:
        load_seconds, close_seconds: how long an undisturbed load and an undisturbed closing take.
    """

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        save_random(self.model, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=3)
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.kernels = folder / "kernels 0"
        self.segments = list_own_segments()
        self._compiler = self._make_compiler(folder / "bin")
        self._drivers: list[Driver] = []
        driver = self.give_driver()
        since = time.monotonic()
        driver.start(rounds=1)
        assert driver.read() == "ready"
        self.load_seconds = time.monotonic() - since
        assert len(list_followers(driver.process.pid)) == NUM_RANKS - 1
        assert driver.read() == "closing"
        since = time.monotonic()
        assert driver.read() == "closed"
        self.close_seconds = time.monotonic() - since

    @staticmethod
    def _make_compiler(folder: Path) -> Path:
        folder.mkdir()
        (folder / "c++").write_text(COMPILER)
        (folder / "c++").chmod(0o755)
        if found := shutil.which(os.environ.get("CXX") or "g++"):
            (folder / "real").symlink_to(found)
        return folder / "c++"

    @property
    def compiles(self) -> bool:
        return self._compiler.with_name("real").exists()

    def give_driver(self) -> Driver:
        """The driver that runs, or a new one."""
        if not self._drivers or self._drivers[-1].process.poll() is not None:
            self._drivers.append(Driver(self.model, self.scratch, OPTIONS))
        return self._drivers[-1]

    def make_compiling_driver(self, is_fresh: bool = True, **changes: Any) -> Driver:
        """A new driver, whose engines need kernels that are not compiled yet, unless it is not fresh."""
        if is_fresh:
            self.kernels = self.kernels.with_name(f"kernels {len(self._drivers)}")
        environment = {"CXX": str(self._compiler), "XDG_CACHE_HOME": str(self.kernels)}
        options = OPTIONS | {"attention_backend": "cpu"} | changes
        self._drivers.append(Driver(self.model, self.scratch, options, **environment))
        return self._drivers[-1]

    def end(self) -> None:
        for driver in self._drivers:
            driver.end()

    def wait_until_nothing_is_left(self, driver: Driver, followers: list[int]) -> None:
        wait_for(lambda: not any(map(is_alive, followers)), SOON)
        wait_for(lambda: not list_followers(driver.process.pid), SOON)
        wait_for(lambda: not list(self.scratch.glob("nanovllm-*")), SOON)
        assert list_own_segments() <= self.segments


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    arena = Arena(tmp_path_factory.mktemp("arena"))
    yield arena
    arena.end()


def wait_for_moment(driver: Driver, arena: Arena, phase: str, rank: int, share: float) -> list[int]:
    """Have the driver load, step or close, and wait for a share of the time that this takes. Returns the followers.

    While the driver loads they may be few, but they include the rank.
    """
    if phase == "compile":
        driver.start()
        wait_for(lambda: list(arena.kernels.glob("*/*")), 60)
        time.sleep(2 * share)
    if phase == "load":
        driver.start()
        wait_for(lambda: list_followers(driver.process.pid) or rank == 0)
        time.sleep(arena.load_seconds * share)
        wait_for(lambda: len(list_followers(driver.process.pid)) >= rank)
    if phase in ("compile", "load"):
        return list_followers(driver.process.pid)
    driver.start(rounds=1 if phase == "close" else float("inf"))
    assert driver.read() == "ready"
    followers = list_followers(driver.process.pid)
    if phase == "close":
        assert driver.read() == "closing"
    time.sleep((arena.close_seconds if phase == "close" else 1.0) * share)
    return followers


def read_last_word(driver: Driver) -> str:
    """The driver's error, or "closed"."""
    while (said := driver.read()) in ("ready", "closing"):
        pass
    return said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [*range(1, NUM_RANKS), 0])  # only a kill of rank 0 ends the driver
def test_whichever_rank_is_killed_at_whatever_moment_nothing_is_left(rank: int, arena: Arena) -> None:
    draw = random.Random(rank)
    phases = ["load", "serve", "close"]
    if rank == 0 and arena.compiles:
        phases.insert(1, "compile")
    since = time.monotonic()
    counts = dict.fromkeys(phases, 0)
    slowest = 0.0
    for kill in range(max(len(phases), round(50 * SHARE))):
        if time.monotonic() - since > MOST_SECONDS:
            break
        phase = phases[kill % len(phases)]
        share = draw.random()
        driver = arena.make_compiling_driver() if phase == "compile" else arena.give_driver()
        followers = wait_for_moment(driver, arena, phase, rank, share)
        victim = followers[rank - 1] if rank else driver.process.pid
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:  # it has just ended by itself
            assert phase == "close"
        killed_at = time.monotonic()
        if rank:
            said = read_last_word(driver)
            reason = rf"rank {rank} of {NUM_RANKS} failed: its process {victim} was killed by SIGKILL"
            is_over = phase == "close" and said == "closed"
            assert is_over or re.search(reason, json.loads(said)), (said, rank, phase, share)
        else:
            driver.process.wait()
        try:
            arena.wait_until_nothing_is_left(driver, followers)
        except AssertionError as error:
            raise AssertionError(f"after a kill of rank {rank} in {phase}, at {share:.2f} of it, {counts}") from error
        seconds = time.monotonic() - killed_at
        assert seconds < SOON, (seconds, rank, phase, share)
        slowest = max(slowest, seconds)
        counts[phase] += 1
    print(f"rank {rank}: {counts}, the slowest was over after {slowest:.1f} s; a load took {arena.load_seconds:.1f} s")
    assert sum(counts.values()) >= 2
    if counts.get("compile"):  # what a kill left of the kernels does no harm
        driver = arena.make_compiling_driver(is_fresh=False, **{KIND: 1})
        driver.start(rounds=1)
        assert [driver.read() for _ in range(3)] == ["ready", "closing", "closed"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["asleep without weights", "between weights", "while weights come"])
def test_a_rank_that_is_killed_outside_steps_is_named_and_nothing_is_left(moment: str, tmp_path: Path) -> None:
    save_random(tmp_path, num_attention_heads=6, num_key_value_heads=3, num_hidden_layers=3)
    tensors = list(load_file(tmp_path / "model.safetensors").items())
    segments = list_own_segments()
    llm = LLM(tmp_path, **OPTIONS)
    followers = list_followers(os.getpid())
    kill = partial(os.kill, followers[1], signal.SIGKILL)
    if moment == "asleep without weights":
        llm.sleep(level=2)
    if moment == "between weights":
        llm.load_weights(tensors[:1], finish=False)
    if moment == "while weights come":
        threading.Timer(0.3, kill).start()
    else:
        kill()
    since = time.monotonic()
    with pytest.raises(RuntimeError, match=rf"rank 2 of {NUM_RANKS} failed: .* was killed by SIGKILL"):
        while moment == "while weights come":
            llm.load_weights(tensors)
        if moment == "between weights":
            llm.load_weights(tensors[1:])
        llm.wake_up()
    assert time.monotonic() - since < SOON
    with pytest.raises(RuntimeError, match="the engine is closed"):
        llm.generate([[1]], use_tqdm=False)
    wait_for(lambda: not any(map(is_alive, followers)), SOON)
    assert list_own_segments() <= segments


@pytest.mark.slow
def test_ranks_need_no_room_in_dev_shm_and_read_nothing_there(tmp_path: Path) -> None:
    save_random(tmp_path)
    mount = "mount -t tmpfs -o size=16k tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("only root may have a /dev/shm of its own")
    stale = "for n in nanovllm-plans torch_1_1 sem.mp-1; do echo x > /dev/shm/$n; done; cat /dev/zero > /dev/shm/rest"
    script = f'{mount}; {stale}; exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", DRIVER, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, json.dumps(CROWDED | {KIND: 2})],
        input="1\n",
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.stdout.split() == ["imported", "ready", "closing", "closed"]
