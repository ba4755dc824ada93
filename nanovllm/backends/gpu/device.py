"""A CUDA device: pinned copies, events, CUDA graphs and the memory of a GPU, whatever kernels compute the operators."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.backends.base import Backend
from nanovllm.backends.gpu.cuda_graphs import CudaGraphs
from nanovllm.backends.gpu.memory import measure_memory
from nanovllm.backends.gpu.pinned import PinnedCopier, PinnedStaging
from nanovllm.backends.steps import Steps, Stopwatch

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class CudaBackend(Backend):
    """Runs the references on a GPU. Steps cannot become CUDA graphs, because the references read lengths on the host.

    A subclass that has kernels replaces the operators, too.

    Attributes:
        runs_on_fake_tensors: whether steps can run on tensors that have shapes but no values, to show which kernels
            they launch.
    """

    runs_on_fake_tensors = True

    def on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device)

    def make_steps(self, runner: "ModelRunner") -> Steps:
        if not runner.config.use_graphs:
            return super().make_steps(runner)
        graphs = CudaGraphs(runner)
        graphs.capture(show_progress=runner.parallel.rank == 0)
        return graphs

    def make_staging(self, size: int) -> PinnedStaging:
        return PinnedStaging(size, self.device)

    def to_device(self, values: NDArray[np.generic]) -> Tensor:
        # The pinned tensor is dropped here at once. That is safe, because torch reuses its memory only when the copy
        # has ended.
        return torch.from_numpy(values).pin_memory().to(self.device, non_blocking=True)

    def start_copy(self, values: Tensor) -> Tensor:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return host.copy_(values, non_blocking=True)

    def make_stopwatch(self) -> Stopwatch:
        return CudaStopwatch()

    def make_copier(self) -> Callable[[Tensor, Tensor], object]:
        return PinnedCopier(self.device).copy

    def free_memory(self) -> int:
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved(self.device)
        return free - torch.cuda.memory_allocated(self.device)

    def room_beside(self, weights: int, utilization: float) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return min(free, int(total * utilization)) - weights

    def room_for_cache(self, runner: "ModelRunner", most: int) -> int:
        memory = measure_memory(runner)
        logger.info("GPU memory: %s", memory.describe())
        return memory.left_for_cache(runner.config.gpu_memory_utilization, runner.parallel.ranks_per_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def compile_kernels(self, runner: "ModelRunner") -> None:
        if self.captures_steps:
            from nanovllm.backends.gpu.startup import compile_kernels  # plain torch needs no Triton

            # Triton 3.6 leaves a mark in its context where a compile fails.
            copy_context().run(compile_kernels, runner, self.runs_on_fake_tensors)

    def why_broken(self) -> str | None:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:  # some CUDA errors make every later call fail
            return "after this CUDA error nothing on the device can be trusted"
        return None


class CudaStopwatch(Stopwatch):
    """Times the device by events on its stream."""

    def __init__(self) -> None:
        super().__init__()
        make: Any = torch.cuda.Event  # its constructor has no types
        self._begin = make(enable_timing=True)
        self._end = make(enable_timing=True)

    def start(self) -> None:
        super().start()
        self._begin.record()

    def stop(self) -> None:
        super().stop()
        self._end.record()

    def read(self) -> tuple[float, float]:
        self._end.synchronize()
        return super().read()[0], float(self._begin.elapsed_time(self._end)) / 1000
