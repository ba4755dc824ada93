"""A launched step: its results on the device, and the handle that waits for them."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.backends import Backend
from nanovllm.backends.steps import Stopwatch
from nanovllm.engine.plan import NO_EMBEDDINGS, StepPlan, StepResult
from nanovllm.outputs import Logprob
from nanovllm.runner.logprobs import Logprobs

if TYPE_CHECKING:
    from nanovllm.runner.targets import Targets


class DeviceResult(NamedTuple):
    """The results of a step, as the device will have them.

    Attributes:
        token_ids: int32 [1 + num_drafts of each sequence]; None if the plan samples nothing.
        logprobs: log-probabilities of sampled tokens, and the indices of the token_ids that they belong to.
        targets: the results for the plan's targets; None if it has none.
    """

    token_ids: Tensor | None = None
    logprobs: tuple[Logprobs, NDArray[np.intp]] | None = None
    targets: "Targets | None" = None


class StepHandle:
    """A launched step. `result()` waits for it, and is called once."""

    def __init__(self, plan: StepPlan, result: DeviceResult, stopwatch: Stopwatch, backend: Backend) -> None:
        # Samples that nobody asked for are dropped: those of sequences whose num_sampled is 0.
        self._kept = np.flatnonzero(np.repeat(plan.num_sampled > 0, 1 + plan.num_drafts))
        self._stopwatch = stopwatch
        if result.token_ids is not None:
            result = result._replace(token_ids=backend.start_copy(result.token_ids))
        self._result = result
        stopwatch.stop()

    def result(self) -> StepResult:
        """Wait for the device, and return the tokens and scores of the step."""
        prepare_seconds, device_seconds = self._stopwatch.read()  # first: it waits
        token_ids = np.empty(0, np.int32)
        logprobs: dict[int, dict[int, Logprob]] = {}
        if self._result.token_ids is not None:
            every_sample = self._result.token_ids.numpy()
            token_ids = every_sample[self._kept]
            if self._result.logprobs is not None:
                found, asking = self._result.logprobs
                indices = np.searchsorted(self._kept, asking).tolist()  # among the samples that are kept
                logprobs = dict(zip(indices, found.read(every_sample[asking]), strict=True))
        targets = ([], NO_EMBEDDINGS) if self._result.targets is None else self._result.targets.read()
        return StepResult(token_ids, logprobs, *targets, prepare_seconds, device_seconds)
