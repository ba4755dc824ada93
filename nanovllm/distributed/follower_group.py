"""All followers together: starting them, telling them what to do, and noticing when one has failed.

How nobody waits for the dead: each follower holds a socket to rank 0. If rank 0 ends, however it ends, the operating
system closes the socket, and a thread of the follower ends its process. If a follower ends, a thread of rank 0 learns
why and ends the other followers, whose connections to rank 0 close in turn (with NCCL, the communicator is aborted).
So whatever rank 0 waits for fails, and it raises what the thread has learnt.

A follower that is stopped neither ends nor goes on: after 60 s of silence it counts as failed. If rank 0 is killed
meanwhile, the stopped follower ends when it goes on. Rank 0 may be stopped and go on, as by Ctrl-Z: its followers wait.

No port is opened for the ranks to meet: they do so through a file, in a folder that only this user may enter, which is
removed at the end or as soon as a rank has died. The sockets of gloo and of NCCL are on loopback.
"""

import json
import logging
import os
import shutil
import tempfile
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
from nanovllm.distributed.follower_process import FollowerProcess
from nanovllm.distributed.ring import Ring, anonymous_file
from nanovllm.engine.plan import StepPlan

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

GRACE = 1.0
"""Seconds in which a rank that lost its peers may learn which of them was the cause."""
PATIENCE = 5.0
"""Seconds that followers have to end when told to."""


class FollowerGroup:
    """Ranks 1 to n-1, and the first reason why they no longer follow."""

    def __init__(
        self,
        config: ResolvedConfig,
        hf_config: "PretrainedConfig",
        folder: Path | None,
        abort_collectives: Callable[[], None],
    ) -> None:
        """Start them. What fails in one of them is raised by `check`.

        Args:
            config: of rank 0.
            abort_collectives: ends what rank 0 waits for on the device, once the others are dead.
        """
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._deadline: float | None = None
        """By when they should have ended: set once they were told to."""
        self._in_step = False
        self._abort_collectives = abort_collectives
        self._followers: list[FollowerProcess] = []
        self.meeting = Path(tempfile.mkdtemp(prefix="nanovllm-"))
        """A folder of this user's alone, through which the ranks find each other."""
        ring_fd = anonymous_file()
        try:
            self._ring = Ring(ring_fd, config.tensor_parallel_size - 1, StepPlan.max_packed_size(config))
            num_threads = torch.get_num_threads() if torch.device(config.device).type == "cpu" else None
            for rank in range(1, config.tensor_parallel_size):
                start = start_message(config, hf_config, folder, rank)
                start |= {"ring_fd": ring_fd, "meeting": str(self.meeting)}
                follower = FollowerProcess(rank, start, ring_fd, num_threads)
                self._followers.append(follower)
                thread = threading.Thread(target=self._watch, args=(follower,), daemon=True, name=f"watch-{rank}")
                thread.start()
                follower.watcher = thread
        except BaseException:
            self.stop(by_force=True)
            raise
        finally:
            os.close(ring_fd)

    @property
    def pids(self) -> list[int]:
        return [follower.process.pid for follower in self._followers]

    # ---- noticing

    def _watch(self, follower: FollowerProcess) -> None:
        """Take in what a follower reports, until it ends; one thread for each."""
        try:
            for report in follower.reports():
                if "stage" in report:
                    with self._changed:
                        follower.stages.add(report["stage"])
                        self._changed.notify_all()
                elif report:
                    self._fail(follower, report["error"], report["is_cause"])
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self._kill()  # one that is stopped keeps the others in the group, and rank 0 with them
        except TimeoutError as error:
            self._fail(follower, str(error))
        except Exception as error:
            self._fail(follower, f"its report cannot be read: {error!r}")
        self._fail(follower, follower.how_it_ended())

    def _fail(self, follower: FollowerProcess, reason: str, is_cause: bool = True) -> None:
        """Settle on a reason, and end the rest. A mere consequence counts if no cause is heard of in time."""
        with self._changed:
            if not is_cause:
                self._changed.wait_for(self._is_over, GRACE)
            if self._is_over():
                return
            self._failure = f"rank {follower.rank} of {len(self._followers) + 1} failed: {reason}"
            self._changed.notify_all()
        self._kill()

    def _is_over(self) -> bool:
        return self._failure is not None or self._deadline is not None

    def _kill(self) -> None:
        for follower in self._followers:
            follower.process.kill()
        shutil.rmtree(self.meeting, ignore_errors=True)
        # Not waited for: NCCL's abort returns when no CUDA graph holds its collectives any more, and it is the thread
        # that has called this which must let go of the graphs.
        threading.Thread(target=self._abort_collectives, daemon=True, name="abort").start()

    # ---- waiting

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
        while not wait([done], timeout=0.1).done:
            self.check()
        done.result()

    # ---- telling

    def tell(self, plan: StepPlan) -> None:
        """Send a plan to all followers; raises as `check` does."""
        self.check()
        self._ring.write(plan.pack(), self.check)

    def dismiss(self, by_force: bool = False) -> None:
        """Tell them that there is nothing more to do; where they would not hear it, as in a step, kill them."""
        with self._changed:
            self._deadline = deadline = time.monotonic() + PATIENCE
        if by_force or self._failure is not None or self._in_step:
            self._kill()
            return

        def check() -> None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"a follower has not read its plans for {PATIENCE} s")

        try:
            self._ring.write(np.empty(0, np.int32), check)
        except RuntimeError as error:
            logger.warning("killing the other ranks: %s", error)
            self._kill()

    def stop(self, by_force: bool = False) -> None:
        """Dismiss them, if that was not done, and return when they are gone."""
        if os.getpid() != self._pid:
            return  # a fork of rank 0 has no followers
        if by_force or self._deadline is None:
            self.dismiss(by_force)
        for follower in self._followers:
            if follower.watcher is not None:
                follower.watcher.join(2 * PATIENCE)
            if follower.process.poll() is None:
                logger.error("rank %d, process %d, cannot be killed", follower.rank, follower.process.pid)
            else:
                follower.socket.close()
        shutil.rmtree(self.meeting, ignore_errors=True)


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
