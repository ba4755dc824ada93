"""kill -9 of any rank at any moment: the others end, rank 0 says why within seconds, and nothing is left behind.

The moments are drawn with a seed. NANOVLLM_ATTACKS is the share of the 50 kills that is tried: 0.1 by default. After
two minutes no further one begins.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.processes import is_alive, list_followers, list_segments, wait_for
from helpers.tiny import CROWDED, save_random

SHARE = float(os.environ.get("NANOVLLM_ATTACKS", "0.1"))
NUM_KILLS = max(3, round(50 * SHARE))
MOST_SECONDS = 120.0
SOON = 10.0
"""Seconds within which rank 0 must say why, and all traces must be gone."""
NUM_RANKS = 3
OPTIONS = CROWDED | {"tensor_parallel_size": NUM_RANKS}
DRIVER = """
import json, sys
from nanovllm import LLM, SamplingParams
import nanovllm.distributed.leader
print("imported", flush=True)
params = SamplingParams(max_tokens=40, ignore_eos=True, seed=0)
for line in sys.stdin:
    try:
        with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
            print("ready", flush=True)
            while True:
                llm.generate([[1, 2, 3]] * 10, params, use_tqdm=False)
    except RuntimeError as error:
        print(json.dumps(str(error)), flush=True)
"""


class Driver:
    """A process that makes an engine of three ranks for each line, and generates until the engine fails."""

    def __init__(self, model: Path, scratch: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(model), json.dumps(OPTIONS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.read() == "imported"

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_random(tmp_path / "model", num_attention_heads=6, num_key_value_heads=3)
    return tmp_path / "model"


@pytest.fixture
def drivers(model: Path, tmp_path: Path) -> Iterator[Callable[[], Driver]]:
    """Gives the driver that runs, or a new one."""
    (tmp_path / "scratch").mkdir()
    made: list[Driver] = []

    def give() -> Driver:
        if not made or made[-1].process.poll() is not None:
            made.append(Driver(model, tmp_path / "scratch"))
        return made[-1]

    yield give
    for driver in made:
        driver.end()


@pytest.mark.slow
def test_whichever_rank_is_killed_at_whatever_moment_nothing_is_left(
    drivers: Callable[[], Driver], tmp_path: Path
) -> None:
    segments = list_segments()
    draw = random.Random(5)
    driver = drivers()
    driver.start()
    since = time.monotonic()
    assert driver.read() == "ready"
    start_seconds = time.monotonic() - since
    followers = list_followers(driver.process.pid)
    assert len(followers) == NUM_RANKS - 1
    os.kill(followers[0], signal.SIGKILL)
    assert "rank 1 of 3 failed" in json.loads(driver.read())
    since = time.monotonic()
    num_killed = dict.fromkeys(range(NUM_RANKS), 0)
    slowest = 0.0
    for _ in range(NUM_KILLS):
        if time.monotonic() - since > MOST_SECONDS:
            break
        rank = draw.randrange(NUM_RANKS)
        moment = draw.uniform(0, 1.3 * start_seconds)  # the last quarter is in steps
        driver = drivers()
        driver.start()
        wait_for(lambda: list_followers(driver.process.pid) or rank == 0)  # noqa: B023  # called at once
        time.sleep(moment)
        if rank:
            followers = wait_for(lambda: (found := list_followers(driver.process.pid))[rank - 1 :] and found)  # noqa: B023
            victim = followers[rank - 1]
        else:
            followers = list_followers(driver.process.pid)
            victim = driver.process.pid
        os.kill(victim, signal.SIGKILL)
        killed_at = time.monotonic()
        if rank:
            said = driver.read()
            if said == "ready":
                said = driver.read()
            reason = rf"rank {rank} of {NUM_RANKS} failed: its process {victim} was killed by SIGKILL"
            assert re.search(reason, json.loads(said)), (said, rank, moment)
        else:
            driver.process.wait()
        wait_for(lambda: not any(map(is_alive, followers)), SOON)  # noqa: B023
        wait_for(lambda: not list_followers(driver.process.pid), SOON)  # noqa: B023
        wait_for(lambda: not list((tmp_path / "scratch").glob("nanovllm-*")), SOON)
        seconds = time.monotonic() - killed_at
        assert seconds < SOON, (seconds, rank, moment)
        slowest = max(slowest, seconds)
        num_killed[rank] += 1
    assert list_segments() <= segments
    print(f"killed {num_killed}, the slowest was over after {slowest:.1f} s, a start took {start_seconds:.1f} s")
    assert sum(num_killed.values()) >= 3
