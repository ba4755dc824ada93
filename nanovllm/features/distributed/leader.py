"""Rank 0's runner: it makes every rank run the steps that it runs.

rank 0   plan -+-> launch ------ all-reduce, gather -> sample -> broadcast -> last token of each row
               |                      |                              |
    ring (shared memory)          NCCL or gloo                   NCCL or gloo
               |                      |                              |
rank r         +-> launch ------ all-reduce, gather                  +------> last token of each row
"""

import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import ResolvedConfig
from nanovllm.engine.interfaces import Handle
from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.engine.rows import Rows, RowTable
from nanovllm.features.distributed.collectives import GroupParallel
from nanovllm.features.distributed.follower_group import FollowerGroup
from nanovllm.features.distributed.pipeline import FirstStage, StageParallel, StageRunner
from nanovllm.features.distributed.rank_commands import DRAFT, as_bytes, pack_command
from nanovllm.features.distributed.ring import pack_plan
from nanovllm.features.distributed.stages import StageSpan
from nanovllm.features.renewal import Command
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.model_folder import ModelFolder
from nanovllm.runner.kv_memory import make_cache
from nanovllm.runner.model_runner import LaunchedLayers, ModelRunner
from nanovllm.runner.sampler import StepEdits
from nanovllm.utils.machine import physical_cores

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class LeadingHandle:
    """A step that was launched on all ranks."""

    def __init__(self, handle: Handle, followers: FollowerGroup) -> None:
        self._handle = handle
        self._followers = followers

    def result(self) -> StepResult:
        """Wait for the step and return rank 0's result; raises the failure of a follower."""
        with self._followers.guard():
            return self._handle.result()


class LeadingDraft:
    """The runner of a draft model that all ranks share."""

    def __init__(self, draft: ModelRunner, followers: FollowerGroup) -> None:
        self._draft = draft
        self._followers = followers

    def launch(self, plan: StepPlan) -> LeadingHandle:
        """Start a step of the draft model on all ranks."""
        with self._followers.guard():
            self._followers.send(np.insert(pack_plan(plan), 0, DRAFT))
            return LeadingHandle(self._draft.launch(plan), self._followers)


class ThreadShare:
    """Sets how many threads rank 0 computes with: its share of the cores, while an engine of several ranks is open."""

    def __init__(self) -> None:
        self._num_open = 0
        self._num_threads_alone = 0

    def take(self, size: int) -> None:
        """Compute with one `size`-th of the cores from now on."""
        if self._num_open == 0:
            self._num_threads_alone = torch.get_num_threads()
        self._num_open += 1
        torch.set_num_threads(min(max(1, physical_cores() // size), self._num_threads_alone))

    def give_back(self) -> None:
        """Undo a `take`. The last of several restores the number of threads that the first `take` found."""
        self._num_open -= 1
        if self._num_open == 0:
            torch.set_num_threads(self._num_threads_alone)


_threads = ThreadShare()


class LeadingRunner:
    """The runner of rank 0, which also starts, leads and ends the followers."""

    def __init__(
        self,
        config: ResolvedConfig,
        hf_config: "PretrainedConfig",
        folder: ModelFolder | None,
        make_runner: Callable[[Parallel, Callable[..., ModelRunner]], ModelRunner],
    ) -> None:
        """Load the model on all ranks.

        Args:
            folder: the checkpoint's folder; None for random weights.
            make_runner: loads the model of rank 0. Its second argument makes the runner.

        Raises:
            ValueError: as `ModelRunner`.
            RuntimeError: a follower failed, with its traceback; all followers have ended.
        """
        size = config.num_ranks
        device = torch.device(config.device)
        self._pid = os.getpid()
        is_pipeline = config.pipeline_parallel_size > 1
        self._parallel = GroupParallel(0, size, config.distributed_backend, device, is_pipeline)
        parallel: Parallel = self._parallel
        runner_class: Callable[..., ModelRunner] = ModelRunner
        with ExitStack() as stack:  # what it holds is undone if loading fails, else by close()
            if device.type == "cpu":
                _threads.take(size)
                stack.callback(_threads.give_back)
            self._followers = FollowerGroup(config, hf_config, folder, self._parallel.abort)
            stack.callback(self._followers.stop)
            self._parallel.raise_failure = self._followers.raise_failure
            # Each holds the other now. Undone, a dropped engine frees its process group at once.
            stack.callback(setattr, self._parallel, "raise_failure", lambda: None)
            try:
                if is_pipeline:
                    spans = self._followers.spans if config.trace is not None else None
                    report = None if spans is None else spans.append
                    parallel = StageParallel(self._parallel)
                    runner_class = partial(StageRunner, group=self._parallel, report=report)
                self.local = make_runner(parallel, runner_class)
                self._first: ModelRunner | FirstStage = self.local
                self.choose_running: Callable[[RowTable], Rows] | None = None  # see `Scheduler.choose_running`
                self.take_spans: Callable[[], Iterable[StageSpan]] = tuple  # see `Trace`
                self.draft: ModelRunner | LeadingDraft | None = self.local.draft
                if isinstance(self.local, StageRunner):
                    self._first = FirstStage(self.local, self._parallel, spans)
                    self.choose_running = self._first.choose_running
                    self.take_spans = self._first.take_spans
                elif self.local.draft is not None:
                    self.draft = LeadingDraft(self.local.draft, self._followers)
                self._followers.wait_until("loaded")
            except BaseException:
                self._followers.dismiss(by_force=True)
                raise
            # Runs at the latest when this object is collected or the interpreter exits, if nobody calls close().
            self._end = weakref.finalize(self, stack.pop_all().close)

    def make_cache(self) -> int:
        """Connect the ranks and make the KV cache of each; see `kv_memory.make_cache`. Call `close` if it fails."""
        parallel = self._parallel
        meeting = self._followers.meeting
        # One guard around both: a follower that is connected may refuse its cache before rank 0 does.
        with self._followers.guard():
            # If a follower fails, the thread that connects goes on: so it must not refer to the model.
            self._followers.run_while_alive(lambda: parallel.connect(meeting))
            num_blocks = make_cache(self.local)
        self._followers.wait_until("ready")
        return num_blocks

    @property
    def pids(self) -> list[int]:
        """The process ids of ranks 1 to n - 1."""
        return self._followers.pids

    def launch(self, plan: StepPlan, edits: StepEdits | None = None) -> LeadingHandle:
        """Start a step on all ranks. Only rank 0 gets the edits, because only it has logits to sample from."""
        with self._followers.guard():
            self._followers.send(pack_plan(plan))
            return LeadingHandle(self._first.launch(plan, edits), self._followers)

    def launch_layers(self, plan: StepPlan) -> LaunchedLayers:
        """Start the first part of a step on rank 0. The followers start all of it, and wait for rank 0's samples."""
        with self._followers.guard():
            self._followers.send(pack_plan(plan))
            return self.local.launch_layers(plan)

    def launch_head(self, layers: LaunchedLayers, edits: StepEdits | None = None) -> LeadingHandle:
        """Start the second part of a step on rank 0."""
        with self._followers.guard():
            return LeadingHandle(self.local.launch_head(layers, edits), self._followers)

    def send_command(self, command: Command, tensor: Tensor | None) -> None:
        """Have all followers run a command, which the caller then runs on rank 0. They get the tensor, too."""
        with self._followers.guard():
            self._followers.send(pack_command(command))
            if tensor is not None:
                self._parallel.broadcast(as_bytes(tensor.to(self.local.device)))
            else:
                self._followers.wait_for_readers()  # one that has died is named here

    def reason_to_close(self) -> str | None:
        return "after a failed step its ranks no longer agree"

    def close(self) -> None:
        """End the followers and free the device's memory."""
        if os.getpid() != self._pid:
            return  # this process is a fork of rank 0: it has neither followers nor the group's threads
        self._followers.dismiss()
        try:
            self.local.close()
            self._parallel.close()
        finally:
            self._end()
