"""Recordings of steps. A device may record the work of a step in which every sequence computes one token, and replay it
in later steps. Here nothing is recorded: every step runs eagerly."""

from typing import Any, Literal

from nanovllm.engine.plan import StepPlan
from nanovllm.utils.clock import Clock

StepPart = Literal["layers", "head"]
"""The two parts of a step: the model's layers; then LM head and sampler."""


class Steps:
    """Replays steps in which every sequence computes one token. This class has no recording: every step runs eagerly.

    `CudaGraphs` (on a GPU) records the sizes of `graph_batch_sizes` when the KV cache is made. `RecordedSteps` (with
    the C++ kernels) records a size when the first step of this size runs. A size is a number of sequences. Both record
    two calls: `ModelRunner.forward_decodes`, and `ModelRunner.sample_decodes` of its results. These depend on the size
    alone, and read the same addresses in each step: the staging buffer, the tables of `DeviceRows`, the caches and the
    weights.

    Attributes:
        most_seqs: the most sequences of a step that can be replayed; 0 if none can.
    """

    most_seqs = 0

    def pad(self, plan: StepPlan) -> StepPlan:
        """Return the plan, filled up to a size that can be replayed. Here nothing is replayed, so the plan stays."""
        return plan

    def replay(self, part: StepPart, size: int) -> Any:
        """Run a part of a step of `size` sequences, at most `most_seqs`. The plan is in the staging buffer.

        Returns:
            What `forward_decodes` or `sample_decodes` returns. It is overwritten when the part runs again.
        """
        raise RuntimeError("no step is recorded")

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
        (_, _, prepare_seconds), (_, _, step_seconds) = self._clock.spans  # each is (name, start, seconds)
        return prepare_seconds, step_seconds
