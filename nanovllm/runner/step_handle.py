"""A launched step: its results on the device, and the handle that waits for them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.backends import Backend
from nanovllm.backends.steps import Stopwatch
from nanovllm.engine.plan import EMBED, StepPlan, StepResult
from nanovllm.outputs import Logprob
from nanovllm.runner.logprobs import Logprobs


class DeviceResult(NamedTuple):
    """The results of a step, as the device will have them.

    token_ids int32 [1 + num_drafts of each sequence], None if the plan samples nothing; logprobs, and the indices of
    the token_ids that they belong to; scores and embeddings of the plan's targets.
    """

    token_ids: Tensor | None = None
    logprobs: tuple[Logprobs, NDArray[np.intp]] | None = None
    scores: Logprobs | None = None
    embeddings: Tensor | None = None


class StepHandle:
    """A launched step. `result()` waits for it, and is called once."""

    def __init__(self, plan: StepPlan, result: DeviceResult, stopwatch: Stopwatch, backend: Backend) -> None:
        # Samples that nobody asked for are dropped: those of sequences whose num_sampled is 0.
        self._sampled = np.flatnonzero(np.repeat(plan.num_sampled > 0, 1 + plan.num_drafts))
        self._targets = plan.targets[plan.targets != EMBED]
        self._stopwatch = stopwatch
        if result.token_ids is not None:
            result = result._replace(token_ids=backend.start_copy(result.token_ids))
        if result.embeddings is not None:
            result = result._replace(embeddings=backend.start_copy(result.embeddings))
        self._result = result
        stopwatch.stop()

    def result(self) -> StepResult:
        """Wait for the device, and return the tokens and scores of the step."""
        prepare_seconds, device_seconds = self._stopwatch.read()  # first: it waits
        token_ids = np.empty(0, np.int32)
        logprobs: dict[int, dict[int, Logprob]] = {}
        if self._result.token_ids is not None:
            every_sample = self._result.token_ids.numpy()
            token_ids = every_sample[self._sampled]
            if self._result.logprobs is not None:
                found, asking = self._result.logprobs
                indices = np.searchsorted(self._sampled, asking).tolist()  # among the samples that are kept
                logprobs = dict(zip(indices, found.read(every_sample[asking]), strict=True))
        scores = self._result.scores.read(self._targets) if self._result.scores is not None else ()
        embeddings = [*self._result.embeddings.numpy()] if self._result.embeddings is not None else []
        return StepResult(token_ids, logprobs, scores, embeddings, prepare_seconds, device_seconds)
