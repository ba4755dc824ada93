"""Rank 0's side of tensor parallelism: a runner that makes every rank run what it runs.

    rank 0   schedule -> plan -+-> launch ------ all-reduce, gather -> sample -> broadcast
                               |                      |                              |
                    ring (shared memory)          NCCL or gloo                   NCCL or gloo
                               |                      |                              |
    rank r                     +-> launch ------ all-reduce, gather                token ids

What a follower does is in follower.py; how the death of any rank is noticed by the others, in followers.py.
"""

import os
import socket
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.collectives import HOST, GroupParallel
from nanovllm.engine.followers import Followers
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.plan import StepPlan
from nanovllm.engine.step_handle import StepHandle, StepResult
from nanovllm.layers.parallel import Parallel
from nanovllm.models.qwen3 import check_shards

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LeadingHandle:
    """A launched step of all ranks."""

    def __init__(self, handle: StepHandle, followers: Followers) -> None:
        self._handle, self._followers = handle, followers

    def result(self) -> StepResult:
        """Wait for the step, and read what rank 0 sampled; raises what made a follower fail."""
        with self._followers.guard():
            return self._handle.result()


class LeadingRunner:
    """Rank 0's runner, and with it all the others: what it launches, every rank runs."""

    def __init__(self, config: EngineConfig, hf_config: "PretrainedConfig", folder: Path | None) -> None:
        """Load the model on all ranks. Arguments and errors as for `ModelRunner`.

        Raises:
            ValueError: the ranks cannot share this model; before any is started.
            RuntimeError: another rank failed, with its traceback; then none is left.
        """
        size = config.tensor_parallel_size
        check_shards(hf_config, size)
        device = torch.device(config.device)
        self.command_seconds = 0.0
        """Spent so far in telling the followers what to do."""
        self._num_threads_before = torch.get_num_threads()
        if device.type == "cpu":
            share = max(1, len(os.sched_getaffinity(0)) // size)
            torch.set_num_threads(min(share, self._num_threads_before))
        self._parallel = GroupParallel(0, size, config.distributed_backend, device)
        listener = socket.create_server((HOST, 0))
        port = listener.getsockname()[1]
        self._followers = Followers(config, hf_config, folder, port, self._parallel.abort)
        self._end = weakref.finalize(self, self._followers.stop)  # for who forgets close(), and at exit
        try:
            self._runner = ModelRunner(config, hf_config, folder, self._parallel, self._followers.check)
            self._followers.wait_until("loaded")
            self._followers.while_they_live(lambda: self._parallel.connect(None, listener.detach()))
        except BaseException:
            listener.close()
            self._followers.stop(by_force=True)
            torch.set_num_threads(self._num_threads_before)
            raise

    def make_cache(self) -> int:
        """Make every rank's KV cache; see `ModelRunner.make_cache`."""
        try:
            with self._followers.guard():
                num_blocks = self._runner.make_cache()
            self._followers.wait_until("ready")
            return num_blocks
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes of ranks 1 to n-1."""
        return self._followers.pids

    def launch(self, plan: StepPlan) -> LeadingHandle:
        """Start a step on all ranks."""
        with self._followers.guard():
            since = time.perf_counter()
            self._followers.tell(plan)
            self.command_seconds += time.perf_counter() - since
            return LeadingHandle(self._runner.launch(plan), self._followers)

    def close(self) -> None:
        """End all ranks, and let go of the device's memory."""
        self._followers.dismiss()
        self._runner.close()
        self._parallel.close()
        self._end()
        torch.set_num_threads(self._num_threads_before)


def make_runner(
    config: EngineConfig, hf_config: "PretrainedConfig", folder: Path | None
) -> ModelRunner | LeadingRunner:
    """The runner of a resolved configuration: one rank in this process, and the others, if any, in theirs."""
    if config.tensor_parallel_size == 1:
        return ModelRunner(config, hf_config, folder, Parallel())
    return LeadingRunner(config, hf_config, folder)
