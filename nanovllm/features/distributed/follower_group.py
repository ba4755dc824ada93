"""All followers of rank 0: starting them, sending them plans, noticing that one has failed, ending them.

The picture in distributed/__init__.py says what happens when a rank dies. This file is rank 0's part of it. A thread
for each follower reads its reports until it ends. The first failure is kept as `_failure`, the other followers are
killed, and whatever rank 0 waits for then fails or ends. Rank 0 raises the kept failure in its place.
"""

import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nanovllm.config import ResolvedConfig
from nanovllm.engine.plan import IntArray
from nanovllm.features.distributed.collectives import PeerLostError, choose_device
from nanovllm.features.distributed.follower_process import FollowerProcess, describe_end
from nanovllm.features.distributed.ring import make_anonymous_file, make_ring
from nanovllm.features.distributed.stages import StageSpan
from nanovllm.models.model_folder import ModelFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

GRACE = 1.0
"""When a rank loses its peers, the failure that caused it is awaited for so many seconds."""
PATIENCE = 5.0
"""Seconds in which followers must end after they were told to."""


class FollowerGroup:
    """Ranks 1 to n - 1, and the first failure among them."""

    def __init__(
        self,
        config: ResolvedConfig,
        hf_config: "PretrainedConfig",
        folder: ModelFolder | None,
        abort_collectives: Callable[[], None],
    ) -> None:
        """Start the followers, and return before they have loaded. `raise_failure` raises what fails in one of them.

        Args:
            config: rank 0's.
            hf_config: the model's.
            folder: the checkpoint's; None for random weights.
            abort_collectives: called when the followers are dead; ends the collectives that the device waits for.
        """
        self._pid = os.getpid()
        self._changed = threading.Condition()
        """Notified when a follower has reached a stage, or the failure is known."""
        self._failure: str | None = None
        self._deadline: float | None = None
        """When the followers must have ended (`time.monotonic`); None until they are told to."""
        self._in_step = False
        self._abort_collectives = abort_collectives
        self._followers: list[FollowerProcess] = []
        self.spans: deque[StageSpan] = deque()
        """The followers' reports of what they did when."""
        ranks = range(1, config.num_ranks)
        starts = [make_start_message(config, hf_config, folder, rank) for rank in ranks]
        ring_fd = make_anonymous_file()
        # As late as possible: if rank 0 is killed before a follower's process exists, nobody removes the folder.
        self.meeting = Path(tempfile.mkdtemp(prefix="nanovllm-"))
        """The folder through which the ranks find each other; only this user may enter it."""
        try:
            self._ring = make_ring(config, ring_fd)
            for rank, start in zip(ranks, starts, strict=True):
                follower = FollowerProcess(start | {"ring_fd": ring_fd}, self.meeting, torch.get_num_threads())
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

    # ---- noticing that a follower has failed

    def _watch(self, follower: FollowerProcess) -> None:
        """Handle a follower's reports until it ends. Each follower has a thread that runs this."""
        try:
            for report in follower.read_reports():
                if "stage" in report:
                    with self._changed:
                        follower.stages.add(report["stage"])
                        self._changed.notify_all()
                elif "span" in report:
                    self.spans.append(report["span"])
                elif report:
                    self._fail(follower, report["error"], report["is_cause"])
                if self._deadline is not None and time.monotonic() > self._deadline:
                    self._kill()  # a stopped one keeps the others, and so rank 0, from leaving the group
        except TimeoutError as error:
            self._fail(follower, str(error))
        except Exception as error:
            self._fail(follower, f"its report cannot be read: {error!r}")
        end = describe_end(follower.process)
        if self._deadline is not None and follower.process.returncode != 0:
            self._kill()  # rank 0, which closes the engine, may be waiting for a collective with it
        self._fail(follower, end)

    def _fail(self, follower: FollowerProcess, reason: str, is_cause: bool = True) -> None:
        """Keep a reason as the failure, unless there is one or the followers were told to end; kill the followers.

        Args:
            is_cause: False if the follower only lost its peers: then wait first whether one of them gives the cause.
        """
        with self._changed:
            if not is_cause:
                self._changed.wait_for(self._is_settled, GRACE)
            if self._is_settled():
                return
            self._failure = f"rank {follower.rank} of {len(self._followers) + 1} failed: {reason}"
            self._changed.notify_all()
        self._kill()

    def _is_settled(self) -> bool:
        return self._failure is not None or self._deadline is not None

    def _kill(self) -> None:
        for follower in self._followers:
            follower.process.kill()
        shutil.rmtree(self.meeting, ignore_errors=True)
        # A thread of its own, which nobody joins: NCCL's abort returns only when no CUDA graph holds its collectives
        # any more, and the thread that is here now may be the one that has to release the graphs.
        threading.Thread(target=self._abort_collectives, daemon=True, name="abort").start()

    # ---- waiting for followers

    def raise_failure(self) -> None:
        """Raise a RuntimeError if a follower has failed; it has the follower's traceback, or says how it ended."""
        if self._failure is not None:
            raise RuntimeError(self._failure)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Put this around code that waits for other ranks: if a follower fails, its failure is raised.

        A ValueError of rank 0 itself goes first: it says that the caller asked for something impossible, which the
        followers refuse, too.
        """
        was_in_step = self._in_step  # while a step is launched, the step before it may be read
        self._in_step = True  # stays True after an exception: from then on the ranks do not agree
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
        self._in_step = was_in_step
        self.raise_failure()  # an aborted collective may have ended without an error, and with wrong values

    def wait_until(self, stage: str) -> None:
        """Wait until every follower has reached a stage; raises as `raise_failure` does."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or all(stage in follower.stages for follower in self._followers)
            )
        self.raise_failure()

    def run_while_alive(self, work: Callable[[], None]) -> None:
        """Run work that waits for the followers; stop waiting for it, and raise the failure, when one has failed.

        The work runs in a thread, which goes on if it is abandoned.
        """
        done: Future[None] = Future()

        def run() -> None:
            try:
                work()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True, name="connect").start()
        while not wait([done], timeout=0.1).done:
            self.raise_failure()
        done.result()

    # ---- telling followers what to do

    def send(self, message: IntArray) -> None:
        """Send a packed plan, or a command, to all followers; raises as `raise_failure` does."""
        self.raise_failure()
        self._ring.write(message, self.raise_failure)

    def wait_for_readers(self) -> None:
        """Wait until all followers have read what was sent; raises as `raise_failure` does."""
        self._ring.wait_for_readers(self.raise_failure)

    def dismiss(self, by_force: bool = False) -> None:
        """Tell the followers to end, without waiting for that.

        They are killed if they would not read the message: if one has failed, or rank 0 has left a step halfway.

        Args:
            by_force: kill them in any case.
        """
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            self._deadline = deadline
        if by_force or self._failure is not None or self._in_step:
            self._kill()
            return

        def check_deadline() -> None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"a follower has not read its plans for {PATIENCE} s")

        # Before the followers end: afterwards nobody would remove the folder if rank 0 were killed. The ranks have met.
        shutil.rmtree(self.meeting, ignore_errors=True)
        try:
            self._ring.write(np.empty(0, np.int32), check_deadline)
        except RuntimeError as error:
            logger.warning("killing the other ranks: %s", error)
            self._kill()

    def stop(self, by_force: bool = False) -> None:
        """Dismiss the followers if that was not done, and return when they have ended."""
        if os.getpid() != self._pid:
            return  # this process is a fork of rank 0, and the followers are not its own
        if by_force or self._deadline is None:
            self.dismiss(by_force)
        for follower in self._followers:
            if follower.watcher is not None:
                follower.watcher.join(2 * PATIENCE)
            if follower.process.poll() is None:
                logger.error("rank %d, process %d, cannot be killed", follower.rank, follower.process.pid)
            else:
                follower.connection.close()
        shutil.rmtree(self.meeting, ignore_errors=True)


def make_start_message(
    config: ResolvedConfig, hf_config: "PretrainedConfig", folder: ModelFolder | None, rank: int
) -> dict[str, Any]:
    """Return what a follower must know to load its share of the model: see `worker.follow`."""
    device = str(choose_device(torch.device(config.device), rank))
    return {
        "rank": rank,
        "config": replace(config, device=device),
        "hf_config": json.loads(hf_config.to_json_string(use_diff=False)),  # without classes, which would import torch
        "folder": folder,
    }
