"""Runs the parts of a step. Here each part runs eagerly. A device may record a part once, and then replay it."""

from collections.abc import Callable
from typing import Literal, TypeVar

from nanovllm.engine.plan import StepPlan
from nanovllm.utils.clock import Clock

T = TypeVar("T")
StepPart = Literal["layers", "head"]
"""The two parts of a step: the model's layers; then LM head and sampler."""


class Steps:
    """Runs the parts of steps eagerly. A subclass records the parts of steps in which every sequence computes one
    token, and replays them.

    `CudaGraphs` (on a GPU) records the sizes of `graph_batch_sizes` when the KV cache is made. `RecordedSteps` (with
    the C++ kernels) records a size when the first step of this size runs. A size is a number of sequences.

    Attributes:
        most_seqs: the most sequences of a step that can be replayed; 0 if none can.
    """

    most_seqs = 0

    def pad(self, plan: StepPlan) -> StepPlan:
        """Return the plan, filled up to a size that can be replayed. Here nothing is replayed, so the plan stays."""
        return plan

    def run(self, part: StepPart, size: int, work: Callable[[], T]) -> T:
        """Run a part of a step of `size` sequences, and return its results.

        Args:
            work: computes the part, and returns its results. Each step has its own `work` function. All the
                functions for one part and one size read the same addresses: the staging buffer, the tables of
                `DeviceRows`, the caches and the weights. The functions of the head also read the results of the
                layers. So one recording can stand for all functions of a part and a size.
                `RecordedSteps` records the first `work` of a size. `CudaGraphs` records earlier, without any `work`: it
                calls `ModelRunner.forward` and `sample_decodes`, which compute the same.
        """
        return work()

    def renew(self) -> None:
        """Call this when weights may have moved in memory. On a GPU they never move."""

    def release(self) -> None:
        """Forget all recordings. Call this before the memory that they use is freed."""


EAGER = Steps()


class Stopwatch:
    """Times the host from the making of this object to `start`, and the device from `start` to `stop`.

    Neither call waits for the device.
    """

    def __init__(self) -> None:
        self._clock = Clock()

    def start(self) -> None:
        """End the host's time, and begin the device's."""
        self._clock.span("prepare")

    def stop(self) -> None:
        """Mark the end of the device's time. On a GPU the mark counts when the device reaches it."""
        self._clock.span("step")

    def read(self) -> tuple[float, float]:
        """Return the seconds of the host and of the device. On a GPU this waits until the device has ended the step."""
        (_, _, prepare), (_, _, step) = self._clock.spans
        return prepare, step
