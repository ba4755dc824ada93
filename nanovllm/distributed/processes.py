"""Starting the other ranks, telling them what to do, and noticing when one has failed.

How nobody waits for the dead: each follower holds a socket to rank 0. If rank 0 ends, however it ends, the operating
system closes the socket, and a thread of the follower ends the process. If a follower ends, a thread of rank 0 learns
why, and ends the other followers, whose sockets of the process group close in turn (with NCCL, the communicator is
aborted): whatever rank 0 waits for fails, and it raises what the thread has learnt. A follower that is stopped, and so
neither ends nor goes on, is known by its silence; if rank 0 is killed meanwhile, it ends only when it goes on. Rank 0
may be stopped and go on, as by Ctrl-Z: its followers wait.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.config import ResolvedConfig
from nanovllm.distributed.collectives import PeerLostError, rank_device
from nanovllm.distributed.ring import Ring, anonymous_file
from nanovllm.engine.plan import StepPlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds in which a rank that lost its peers may learn which of them was the cause."""
PATIENCE = 5.0
"""Seconds that followers have to end when told to."""
SILENCE = 60.0
"""Seconds without a sign of life, of which a follower gives one a second, after which it counts as failed. So many,
because one that loads a large library from a slow disk gives none until it has it."""
SLICES = 10
"""Equal parts in which these seconds are waited for: when a paused machine goes on, one of them ends at once, and the
others leave the followers time to be heard of."""


class Follower:
    """A started rank: its process, and the socket on which it reports."""

    def __init__(self, rank: int, size: int, ring_fd: int, num_threads: int | None, message: dict[str, Any]) -> None:
        self.rank, self.size = rank, size
        self.stages: set[str] = set()
        self.socket, theirs = socket.socketpair()
        self.socket.sendall(json.dumps(message).encode() + b"\n")  # it waits in the socket
        self.socket.settimeout(SILENCE / SLICES)
        env = os.environ | {"PYTHONPATH": os.pathsep.join(os.fspath(path) or os.getcwd() for path in sys.path)}
        if num_threads is not None:
            env["OMP_NUM_THREADS"] = str(num_threads)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "nanovllm.distributed.worker", str(theirs.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), ring_fd),
                start_new_session=True,  # a Ctrl-C of the terminal goes to rank 0 alone
            )

    def messages(self) -> Iterator[dict[str, Any]]:
        """What it reports, until it ends; TimeoutError if it neither reports nor ends."""
        rest, silent = b"", 0
        while True:
            try:
                received = self.socket.recv(1 << 16)
            except TimeoutError:
                silent += 1
                if silent == SLICES:
                    raise
                continue
            except OSError:
                return  # it was killed with something unread: the same as an end
            if not received:
                return
            silent = 0
            *lines, rest = (rest + received).split(b"\n")
            yield from map(json.loads, filter(None, lines))

    def how_it_ended(self) -> str:
        code = self.process.wait()
        known = {number.value: number.name for number in signal.Signals}
        how = f"was killed by {known.get(-code, -code)}" if code < 0 else f"ended with exit status {code}"
        return f"its process {self.process.pid} {how}"


class Followers:
    """Ranks 1 to n-1, and the first reason why they no longer follow."""

    def __init__(
        self,
        config: ResolvedConfig,
        hf_config: "PretrainedConfig",
        folder: Path | None,
        port: int,
        abort_group: Callable[[], None],
    ) -> None:
        """Start them. What fails in one of them is raised by `check`.

        Args:
            config: resolved, of rank 0.
            port: of rank 0's store.
            abort_group: ends what rank 0 waits for on the device, once the others are dead.
        """
        size = config.tensor_parallel_size
        capacity = StepPlan.max_packed_size(
            config.max_num_seqs, config.max_num_batched_tokens, config.max_blocks_per_seq
        )
        ring_fd = anonymous_file()
        self._ring = Ring(ring_fd, size - 1, capacity)
        shared = {"port": port, "ring_fd": ring_fd, "capacity": capacity}
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._ending = False
        self._in_step = False
        self._abort_group = abort_group
        self._followers: list[Follower] = []
        self._threads: list[threading.Thread] = []
        self._reaper: threading.Timer | None = None
        num_threads = torch.get_num_threads() if torch.device(config.device).type == "cpu" else None
        try:
            for rank in range(1, size):
                message = start_message(config, hf_config, folder, rank)
                follower = Follower(rank, size, ring_fd, num_threads, message | shared)
                self._followers.append(follower)
                thread = threading.Thread(target=self._watch, args=(follower,), daemon=True, name=f"watch-{rank}")
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.stop(by_force=True)
            raise
        finally:
            os.close(ring_fd)

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    # ---- noticing

    def _watch(self, follower: Follower) -> None:
        """Take in what a follower reports, until it ends; one thread for each."""
        try:
            for message in follower.messages():
                with self._changed:
                    if "stage" in message:
                        follower.stages.add(message["stage"])
                        self._changed.notify_all()
                        continue
                self._fail(follower, message["error"], message["is_cause"])
        except TimeoutError:
            pid, seconds = follower.process.pid, SLICES * (follower.socket.gettimeout() or 0.0)
            self._fail(follower, f"its process {pid} has given no sign of life for {seconds:g} s", is_cause=True)
        except Exception as error:
            self._fail(follower, f"its report cannot be read: {error!r}", is_cause=True)
        self._fail(follower, follower.how_it_ended(), is_cause=True)

    def _fail(self, follower: Follower, reason: str, is_cause: bool) -> None:
        """Settle on a reason, and end the rest. A mere consequence counts if no cause is heard of in time."""
        with self._changed:
            if not is_cause:
                self._changed.wait_for(lambda: self._failure is not None or self._ending, GRACE)
            if self._failure is not None or self._ending:
                return
            self._failure = f"rank {follower.rank} of {follower.size} failed: {reason}"
            self._changed.notify_all()
        self._kill()

    def check(self) -> None:
        """Raise a RuntimeError, with a failed follower's traceback, if there is one."""
        if self._failure is not None:
            raise RuntimeError(self._failure)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around whatever waits for other ranks: a failed follower becomes a RuntimeError that says why it failed.

        A ValueError of rank 0's own goes before it: all ranks refuse what cannot be had, and the caller's mistake is
        the reason.
        """
        self._in_step = True  # and for ever, if this is left by an exception: the ranks do not agree any more
        try:
            yield
        except ValueError:
            raise
        except Exception as error:
            if isinstance(error, PeerLostError):
                with self._changed:
                    self._changed.wait_for(lambda: self._failure is not None, 2 * GRACE)
            if self._failure is not None:
                raise RuntimeError(self._failure) from error
            raise
        self._in_step = False
        self.check()  # what was computed with an aborted group is worth nothing

    def wait_until(self, stage: str) -> None:
        """Wait until every follower has reached a stage; raises as `check` does."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or all(stage in follower.stages for follower in self._followers)
            )
        self.check()

    def while_they_live(self, work: Callable[[], None]) -> None:
        """Do work that blocks for as long as a follower does not do its part, but no longer than all of them live."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True, name="connect").start()
        while True:
            wait([done], timeout=0.1)
            if done.done():
                return done.result()
            self.check()

    # ---- telling

    def tell(self, plan: StepPlan) -> None:
        """Send a plan to all followers; raises as `check` does."""
        self.check()
        self._ring.write(plan.pack(), self.check)

    def dismiss(self, by_force: bool = False) -> None:
        """Tell them that there is nothing more to do; where they would not hear it, as in a step, kill them."""
        if os.getpid() != self._pid:
            return  # a fork of rank 0 has no followers
        with self._changed:
            self._ending = True
        if by_force or self._failure is not None or self._in_step:
            self._kill()
            return
        deadline = time.monotonic() + PATIENCE

        def check() -> None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"a follower has not read its plans for {PATIENCE} s")

        try:
            self._ring.write(np.empty(0, np.int32), check)
        except RuntimeError as error:
            logger.warning("killing the other ranks: %s", error)
            self._kill()
        self._reaper = threading.Timer(PATIENCE, self._kill)  # one that is stopped keeps the others in the group
        self._reaper.daemon = True
        self._reaper.start()

    def stop(self, by_force: bool = False) -> None:
        """Dismiss them, if that was not done, and return when they are gone."""
        if os.getpid() != self._pid:
            return  # a fork of rank 0 has no followers
        if by_force or not self._ending:
            self.dismiss(by_force)
        deadline = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self._kill()
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper.join()
            self._reaper = None
        for thread, follower in zip(self._threads, self._followers, strict=False):  # if one could not be started
            thread.join(PATIENCE)
            if thread.is_alive():
                logger.error("rank %d, process %d, cannot be killed", follower.rank, follower.process.pid)
            else:
                follower.socket.close()

    def _kill(self) -> None:
        if os.getpid() == self._pid:
            for follower in self._followers:
                follower.process.kill()
            # Not waited for: NCCL's abort returns when no CUDA graph holds its collectives any more, and it is the
            # thread that has called this which must let go of the graphs.
            threading.Thread(target=self._abort_group, daemon=True, name="abort").start()


def start_message(
    config: ResolvedConfig, hf_config: "PretrainedConfig", folder: Path | None, rank: int
) -> dict[str, Any]:
    """What a follower is to load, as JSON."""
    device = str(rank_device(torch.device(config.device), rank))
    return {
        "rank": rank,
        "config": asdict(replace(config, device=device)),
        "hf_config": json.loads(hf_config.to_json_string(use_diff=False)),
        "folder": None if folder is None else str(folder),
    }
