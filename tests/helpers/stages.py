"""A pipeline whose stages are all in this process. A random one of those that can go on runs its next plan."""

import itertools
import os
import random
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nanovllm import LLM
from nanovllm.config import EngineConfig, ResolvedConfig
from nanovllm.engine.interfaces import Handle
from nanovllm.engine.plan import IntArray, StepPlan
from nanovllm.features.distributed import options
from nanovllm.features.distributed.pipeline import FirstStage, StageParallel, StageRunner
from nanovllm.features.distributed.ring import pack_plan, unpack_plan
from nanovllm.runner.kv_memory import make_cache
from nanovllm.runner.sampler import StepEdits

Mail = defaultdict[tuple[int, int], deque[Tensor]]
"""Tensors that were sent and not received yet, by sender and receiver."""


_resolve_ranks = options.resolve_ranks


def resolve_with_overlap(asked: EngineConfig, config: ResolvedConfig, is_described: bool = False) -> ResolvedConfig:
    """Return the options as over NCCL, where rank 0 hands tokens over on the device. Takes `resolve_ranks`' place."""
    resolved = _resolve_ranks(asked, config, is_described)
    return replace(resolved, depth=resolved.depth + (config.speculative_config is None))


@contextmanager
def ctrl_c_at_launch(llm: LLM, number: int) -> Iterator[None]:
    """Send a Ctrl-C at the launch with this number, counted from 1. The block must raise it."""
    runner = llm.engine.runner
    launch = runner.launch
    count = itertools.count(1)

    def interrupt(*args: Any) -> Any:
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return launch(*args)

    with mock.patch.object(runner, "launch", interrupt), pytest.raises(KeyboardInterrupt):
        yield


class LocalGroup:
    """One rank's links. A receiver that would wait lets other stages go on, and fails if none can."""

    ranks_per_device = 1

    def __init__(self, rank: int, size: int, mail: Mail, go_on: Callable[[], None]) -> None:
        self.rank = rank
        self.size = size
        self._mail = mail
        self._go_on = go_on

    def raise_failure(self) -> None:
        pass

    def start_send(self, x: Tensor, rank: int) -> Tensor:
        self._mail[self.rank, rank].append(x.clone())
        return x

    def end_send(self, sent: Tensor) -> None:
        pass

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Tensor:
        box = self._mail[rank, self.rank]
        while not box:
            self._go_on()
        sent = box.popleft()
        assert sent.shape == shape and sent.dtype == dtype
        return sent

    def minimum(self, value: int) -> int:
        return value


class LocalPipeline:
    """Takes the place of `LeadingRunner`. `order` decides which stage goes on, and how far behind the others are."""

    order = random.Random(0)

    def __init__(
        self, config: ResolvedConfig, hf_config: Any, folder: Path | None, make_runner: Callable[..., Any]
    ) -> None:
        size = config.pipeline_parallel_size
        self.mail: Mail = defaultdict(deque)
        groups: list[Any] = [LocalGroup(rank, size, self.mail, self.go_on) for rank in range(size)]

        def make(group: Any) -> Any:
            return make_runner(StageParallel(group), partial(StageRunner, group=group, report=None))

        self.runners = [make(group) for group in groups]
        self.local, *self.others = self.runners
        self.first = FirstStage(self.local, groups[0], None)
        self.choose_running = self.first.choose_running
        self.draft = self.local.draft
        self.queues: list[deque[IntArray]] = [deque() for _ in self.others]
        self.num_slots = config.depth + 1
        self.unfinished: list[StepPlan] = []
        """Plans whose second half has not run."""
        self.most_unfinished = 0

    def make_cache(self) -> int:
        return min(make_cache(runner) for runner in self.runners)

    def launch(self, plan: StepPlan, edits: StepEdits | None = None) -> Handle:
        for queue in self.queues:
            while len(queue) > self.num_slots:
                self.go_on()
            queue.append(pack_plan(plan))
        handle = self.first.launch(plan, edits)
        self.unfinished.append(plan)
        self.most_unfinished = max(self.most_unfinished, len(self.unfinished))
        for _ in range(self.order.randrange(2 * len(self.runners))):
            if self.find_ready():
                self.go_on()
        return _Watched(self, plan, handle)

    def find_ready(self) -> list[int]:
        """Return the ranks that have a plan, and the hidden states to begin it with."""
        return [rank for rank, queue in enumerate(self.queues, 1) if queue and self.mail[rank - 1, rank]]

    def go_on(self) -> None:
        ready = self.find_ready()
        assert ready, "each rank waits for another"
        rank = self.order.choice(ready)
        self.others[rank - 1].run_stage(unpack_plan(self.queues[rank - 1].popleft()))

    def reason_to_close(self) -> str:
        return "the stages no longer agree"

    def close(self) -> None:
        for runner in self.runners:
            runner.close()


class _Watched:
    def __init__(self, pipeline: LocalPipeline, plan: StepPlan, handle: Handle) -> None:
        self.pipeline = pipeline
        self.plan = plan
        self.handle = handle

    def result(self) -> Any:
        assert self.pipeline.unfinished.pop(0) is self.plan, "second halves run in the order of plans"
        with torch.inference_mode():
            return self.handle.result()
