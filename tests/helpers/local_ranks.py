"""Ranks and stages in this process. They load and compute what those in processes of their own do, in less time.

tests/ranks/ proves what processes need beside: that they start, exchange numbers, notice failures, and end.
"""

import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import Tensor

from helpers.stages import LocalPipeline
from nanovllm.config import ResolvedConfig
from nanovllm.engine.interfaces import Handle
from nanovllm.engine.plan import StepPlan
from nanovllm.features.distributed.follower_group import make_start_message
from nanovllm.features.distributed.rank_commands import as_bytes, pack_command, receive_command
from nanovllm.features.distributed.ring import pack_plan, unpack_plan
from nanovllm.features.renewal import Command, RankRenewal
from nanovllm.load import make_runner
from nanovllm.models.layers.parallel import Parallel
from nanovllm.models.model_config import load_model_config
from nanovllm.runner.kv_memory import make_cache
from nanovllm.runner.model_runner import LaunchedLayers, ModelRunner
from nanovllm.runner.sampler import StepEdits


class ThreadParallel(Parallel):
    """One of several ranks. Each collective is two meetings: all have given, and all have taken."""

    def __init__(self, rank: int, given: list[Any], barrier: Barrier) -> None:
        super().__init__(rank, len(given))
        self._given = given
        self._barrier = barrier

    def abort(self) -> None:
        """Let no rank wait for one that has failed."""
        self._barrier.abort()

    def _exchange(self, value: Any, take: Callable[[list[Any]], Any]) -> Any:
        self._given[self.rank] = value
        self._barrier.wait()
        taken = take(self._given)
        self._barrier.wait()
        return taken

    def all_reduce(self, x: Tensor) -> Tensor:
        total: Tensor = self._exchange(x, lambda parts: torch.stack(parts).sum(0))
        return total

    def gather(self, x: Tensor) -> Tensor | None:
        gathered: Tensor | None = self._exchange(x, lambda parts: None if self.rank else torch.cat(parts, dim=-1))
        return gathered

    def broadcast(self, x: Tensor) -> Tensor:
        def take(parts: list[Tensor]) -> Tensor:
            assert parts[0].shape == x.shape and parts[0].dtype == x.dtype
            return parts[0].clone()

        sent: Tensor = self._exchange(x, take)
        return sent

    def minimum(self, value: int) -> int:
        least: int = self._exchange(value, min)
        return least


MakeRunner = Callable[[Parallel, Callable[..., ModelRunner]], ModelRunner]


def lead_local(
    config: ResolvedConfig, hf_config: Any, folder: Path | None, make_first: MakeRunner
) -> "LocalPipeline | LocalRanks":
    """Return what takes the place of `LeadingRunner`. As followers do, all ranks but 0 load what a message says."""

    def make(parallel: Parallel, runner_class: Callable[..., ModelRunner]) -> ModelRunner:
        if parallel.rank == 0:
            return make_first(parallel, runner_class)
        start = pickle.loads(pickle.dumps(make_start_message(config, hf_config, folder, parallel.rank)))
        its_config = load_model_config(start["hf_config"], "rank 0")
        return make_runner(start["config"], its_config, start["folder"], parallel, runner_class)

    if config.pipeline_parallel_size > 1:
        return LocalPipeline(config, hf_config, folder, make)
    return LocalRanks(config, make)


class LocalRanks:
    """Ranks that share layers, each in a thread. Every rank gets the plans and commands as messages of the ring."""

    draft = None
    choose_running = None
    take_spans = tuple

    def __init__(self, config: ResolvedConfig, make: MakeRunner) -> None:
        assert config.speculative_config is None
        size = config.tensor_parallel_size
        barrier = Barrier(size)
        given: list[Any] = [None] * size
        self.parallels = [ThreadParallel(rank, given, barrier) for rank in range(size)]
        self.runners = [make(parallel, ModelRunner) for parallel in self.parallels]
        self.local = self.runners[0]
        self._renewals = [RankRenewal(runner) for runner in self.runners[1:]]
        self._threads = ThreadPoolExecutor(size)

    def _start(self, *calls: Callable[[], Any]) -> list[Future[Any]]:
        """Call a function for each rank, all at once."""

        def call(function: Callable[[], Any]) -> Any:
            try:
                return function()
            except BaseException:
                self.parallels[0].abort()
                raise

        return [self._threads.submit(call, function) for function in calls]

    def _end(self, futures: list[Future[Any]]) -> Any:
        """Wait until all ranks are done, and return what the first of them returns."""
        wait(futures)
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error  # if one failed by itself, it is the first
        return futures[0].result()

    def _run(self, *calls: Callable[[], Any]) -> Any:
        return self._end(self._start(*calls))

    def make_cache(self) -> int:
        num_blocks: int = self._run(*(lambda runner=runner: make_cache(runner) for runner in self.runners))
        return num_blocks

    def _follow(self, plan: StepPlan) -> list[Callable[[], Handle]]:
        """Return the calls by which the ranks but 0 run a step."""
        message = pack_plan(plan)
        return [lambda runner=runner: runner.launch(unpack_plan(message)) for runner in self.runners[1:]]

    def launch(self, plan: StepPlan, edits: StepEdits | None = None) -> Handle:
        handle: Handle = self._run(lambda: self.local.launch(plan, edits), *self._follow(plan))
        return handle

    def launch_layers(self, plan: StepPlan) -> tuple[LaunchedLayers, list[Future[Any]]]:
        """Start the first part of a step on rank 0. The others start all of it, and wait for rank 0's samples."""
        first, *others = self._start(lambda: self.local.launch_layers(plan), *self._follow(plan))
        return self._end([first]), others

    def launch_head(self, layers: tuple[LaunchedLayers, list[Future[Any]]], edits: StepEdits | None = None) -> Handle:
        of_first, others = layers
        handle: Handle = self._end(self._start(lambda: self.local.launch_head(of_first, edits)) + others)
        return handle

    def send_command(self, command: Command, tensor: Tensor | None) -> None:
        message = pack_command(command)
        others = [
            lambda renewal=renewal, parallel=parallel: renewal.run(
                *receive_command(message, parallel, self.local.device)
            )
            for renewal, parallel in zip(self._renewals, self.parallels[1:], strict=True)
        ]
        if tensor is None:
            self._run(lambda: None, *others)
        else:
            self._run(lambda: self.parallels[0].broadcast(as_bytes(tensor)), *others)

    def reason_to_close(self) -> str:
        return "the ranks no longer agree"

    def close(self) -> None:
        self._threads.shutdown()
        for runner in self.runners:
            runner.close()
