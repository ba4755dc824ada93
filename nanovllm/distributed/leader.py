"""Rank 0's side of tensor parallelism: a runner that makes every rank run what it runs.

    rank 0   schedule -> plan -+-> launch ------ all-reduce, gather -> sample -> broadcast
                               |                      |                              |
                    ring (shared memory)          NCCL or gloo                   NCCL or gloo
                               |                      |                              |
    rank r                     +-> launch ------ all-reduce, gather                token ids

What a follower does is in worker.py; how the death of any rank is noticed by the others, in follower_group.py.
"""

import os
import time
import weakref
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanovllm.config import ResolvedConfig
from nanovllm.distributed.collectives import GroupParallel
from nanovllm.distributed.follower_group import FollowerGroup
from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.step_handle import StepHandle
from nanovllm.utils.machine import physical_cores

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nanovllm.edits.logit_edits import LogitEdits


class LeadingHandle:
    """A launched step of all ranks."""

    def __init__(self, handle: StepHandle, followers: FollowerGroup, command_seconds: float) -> None:
        self._handle, self._followers, self._command_seconds = handle, followers, command_seconds

    def result(self) -> StepResult:
        """Wait for the step, and read what rank 0 sampled; raises what made a follower fail."""
        with self._followers.guard():
            return replace(self._handle.result(), command_seconds=self._command_seconds)


class ThreadShare:
    """While engines of several ranks are open on the CPU, rank 0 computes with its share of the cores."""

    def __init__(self) -> None:
        self._num_open = 0
        self._alone = 0

    def take(self, size: int) -> None:
        """Leave the others of `size` ranks their cores."""
        if self._num_open == 0:
            self._alone = torch.get_num_threads()
        self._num_open += 1
        torch.set_num_threads(min(max(1, physical_cores() // size), self._alone))

    def give_back(self) -> None:
        """Once for each `take`; the last one brings back the number of threads that the first one found."""
        self._num_open -= 1
        if self._num_open == 0:
            torch.set_num_threads(self._alone)


_threads = ThreadShare()


class LeadingRunner:
    """Rank 0's runner, and with it all the others: what it launches, every rank runs."""

    def __init__(self, config: ResolvedConfig, hf_config: "PretrainedConfig", folder: Path | None) -> None:
        """Load the model on all ranks. Arguments and errors as for `ModelRunner`.

        Raises:
            ValueError: as `ModelRunner`.
            RuntimeError: another rank failed, with its traceback; then none is left.
        """
        size = config.tensor_parallel_size
        device = torch.device(config.device)
        self._pid = os.getpid()
        self._parallel = parallel = GroupParallel(0, size, config.distributed_backend, device)
        with ExitStack() as stack:  # undone if the start fails, and by whoever ends the ranks
            if device.type == "cpu":
                _threads.take(size)
                stack.callback(_threads.give_back)
            self._followers = FollowerGroup(config, hf_config, folder, parallel.abort)
            stack.callback(self._followers.stop)
            try:
                self._runner = ModelRunner(config, hf_config, folder, parallel, self._followers.check)
                self._followers.wait_until("loaded")
            except BaseException:
                self._followers.dismiss(by_force=True)
                raise
            self._end = weakref.finalize(self, stack.pop_all().close)  # for who forgets close(), and at exit

    def make_cache(self) -> int:
        """Let the ranks meet, and make every one's KV cache; see `ModelRunner.make_cache`. If it fails: `close`."""
        parallel, meeting = self._parallel, self._followers.meeting
        # One guard for both: a follower that has met the others may refuse its cache before rank 0 does.
        with self._followers.guard():
            # The thread that connects may outlive a failure: it holds no model.
            self._followers.while_they_live(lambda: parallel.connect(meeting))
            num_blocks = self._runner.make_cache()
        self._followers.wait_until("ready")
        return num_blocks

    @property
    def pids(self) -> list[int]:
        """The processes of ranks 1 to n-1."""
        return self._followers.pids

    def launch(self, plan: StepPlan, edits: "LogitEdits | None" = None) -> LeadingHandle:
        """Start a step on all ranks. Rank 0 samples, so edits of the logits are its alone."""
        with self._followers.guard():
            since = time.perf_counter()
            self._followers.tell(plan)
            command_seconds = time.perf_counter() - since
            return LeadingHandle(self._runner.launch(plan, edits), self._followers, command_seconds)

    def reason_to_close(self) -> str | None:
        return "after a failed step its ranks no longer agree"

    def close(self) -> None:
        """End all ranks, and let go of the device's memory."""
        if os.getpid() != self._pid:
            return  # a fork of rank 0 has neither followers nor the group's threads
        self._followers.dismiss()
        try:
            self._runner.close()
            self._parallel.close()
        finally:
            self._end()
