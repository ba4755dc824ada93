"""Decode steps on a CPU, recorded: the kernels of a step are called again, without the Python between them."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.backends.cpu.library import RecordedCalls, record_calls
from nanovllm.backends.cpu.scratch import Scratch, borrow_from
from nanovllm.backends.steps import StepPart, Steps

if TYPE_CHECKING:
    from nanovllm.runner.model_runner import ModelRunner

MOST_SEQS = 64
"""The most sequences of a recorded step. In a larger one the Python between the kernels takes next to nothing."""


class RecordedSteps(Steps):
    """Replays decode steps on a CPU, as CUDA graphs do on a GPU: from the staging buffer to the sampled tokens.

    Python prepares a few hundred calls of kernels in a step: for a small model that takes longer than the kernels. What
    it prepares depends on the number of sequences alone. So the first step of each size is recorded while it runs, as
    two parts, the model's and the sampler's. Later steps replay the calls, in C++.

    Steps share the memory of what they compute, because only one runs at a time. So results must be read before the
    next step runs, of whatever size.

    Operators of torch are not recorded. If a step calls one, or a kernel that C++ cannot call again, it cannot be
    replayed, and no step is recorded from then on.

    Attributes:
        most_seqs: the most sequences of a step that can be recorded; 0 if no step can be.
    """

    def __init__(self, runner: "ModelRunner") -> None:
        """Nothing is recorded yet.

        Args:
            runner: the runner whose steps are recorded.
        """
        # No strong reference: the runner has this object, and a cycle would keep a dropped engine's memory.
        self._runner: ModelRunner = weakref.proxy(runner)
        self.most_seqs = min(runner.config.max_num_seqs, MOST_SEQS)
        self._scratch = Scratch(keeps_all=True)
        self._recordings: dict[tuple[StepPart, int], tuple[RecordedCalls, Any]] = {}
        """{part and size of a step: its calls, and the tensors that they write, always at the same addresses}."""
        self._layers: Any = None
        """Holds what the layers of the current step have returned."""

    def replay(self, part: StepPart, size: int) -> Any:
        if part == "layers":
            self._layers = self._replay(part, size, partial(self._runner.forward_decodes, size))
            return self._layers
        return self._replay(part, size, partial(self._runner.sample_decodes, *self._layers))

    def _replay(self, part: StepPart, size: int, work: Callable[[], Any]) -> Any:
        """Replay a part of a step. The first time `work` runs it, and is recorded."""
        if (part, size) in self._recordings:
            calls, result = self._recordings[part, size]
            calls.replay()
            return result
        with borrow_from(self._scratch), record_calls() as calls, _TorchWatch() as watch:  # type: ignore[no-untyped-call]
            result = work()
        if watch.computes or not calls.can_replay:
            self.most_seqs = 0
            self.release()
        elif self.most_seqs:
            self._recordings[part, size] = calls, result
        return result

    def renew(self) -> None:
        self.release()

    def release(self) -> None:
        """Forget all recordings: weights have moved or go, or a part cannot be replayed."""
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
