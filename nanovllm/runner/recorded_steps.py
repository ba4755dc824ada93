"""Decode steps on a CPU, recorded: the kernels of a step are called again, without the Python between them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.engine.plan import StepPlan
from nanovllm.kernels.cpu_library import RecordedCalls, record_calls
from nanovllm.kernels.scratch import Scratch, borrow_from
from nanovllm.runner.cuda_graphs import HEAD, Decoded

Half = Literal["model", "sampler"]

MOST_SEQS = 64
"""The most sequences of a recorded step. In a larger one the Python between the kernels takes next to nothing."""


@dataclass
class Recording:
    """The calls of half a step, and the tensors that they write: always at the same addresses."""

    calls: RecordedCalls
    result: Any = None


class RecordedSteps:
    """Repeats decode steps on a CPU, as `CudaGraphs` do on a GPU: from the staging buffer to the sampled tokens.

    Python prepares a few hundred calls of kernels in a step: for a small model that takes longer than the kernels. What
    it prepares depends on the number of sequences alone. So the first step of each size is recorded while it runs, as
    two halves, the model's and the sampler's. Later steps repeat the calls, in C++.

    Steps share the memory of what they compute, because only one runs at a time. So results must be read before the
    next step runs, of whatever size.

    Operators of torch are not recorded. If a step calls one, or a kernel that C++ cannot call again, it cannot be
    repeated, and no step is recorded from then on.

    Attributes:
        most_seqs: of a step; 0 if no step can be recorded.
    """

    def __init__(self, buffer: Tensor, max_num_seqs: int) -> None:
        """
        Args:
            buffer: the staging buffer, where the inputs of each step begin.
        """
        self._buffer = buffer
        self.most_seqs = min(max_num_seqs, MOST_SEQS)
        self._scratch = Scratch(keeps_all=True)
        self._recordings: dict[tuple[Half, int], Recording] = {}

    def pad(self, plan: StepPlan) -> StepPlan:
        """Return the plan: each size has a recording of its own."""
        return plan

    def replay(self, size: int) -> Decoded | None:
        """Run the model on what the staging buffer holds. None if it is not recorded: see `record`."""
        decoded: Decoded | None = self._repeat("model", size)
        return decoded

    def replay_sampler(self, size: int) -> Tensor | None:
        """Sample from the results of `replay`; returns token ids int32 [size]. None if it is not recorded."""
        sampled: Tensor | None = self._repeat("sampler", size)
        return sampled

    def _repeat(self, half: Half, size: int) -> Any:
        recording = self._recordings.get((half, size))
        if recording is None:
            return None
        recording.calls.repeat()
        return recording.result

    @contextmanager
    def record(self, half: Half, size: int) -> Iterator[Recording]:
        """Within, the caller runs half a step, reading from `inputs` or from the results of the other half.

        It puts the result into the recording.
        """
        with borrow_from(self._scratch), record_calls() as calls, _TorchWatch() as watch:  # type: ignore[no-untyped-call]
            recording = Recording(calls)
            yield recording
        if watch.computes or not calls.can_repeat:
            self.most_seqs = 0
            self.release()
        elif self.most_seqs:
            self._recordings[half, size] = recording

    def inputs(self, size: int) -> Tensor:
        """Return the part of the staging buffer that a step of that size reads: see `CudaGraphs.inputs`."""
        return self._buffer[: HEAD * size].view(HEAD, size)

    def release(self) -> None:
        """Forget all recordings: weights have moved or go, or a half cannot be repeated."""
        self._recordings.clear()


class _TorchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches whether torch itself computes or copies, or only makes views of tensors.

    Attributes:
        computes: whether it did more than that.
    """

    computes = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # In inference mode `contiguous`, `to` and `reshape` come whole. Only their parts show whether they copy.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        self.computes = self.computes or not func.is_view
        return func(*args, **kwargs)
