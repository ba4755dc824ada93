"""The handle of a launched step, which waits for its results."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.backends import Backend
from nanovllm.backends.steps import Stopwatch
from nanovllm.engine.plan import NO_EMBEDDINGS, StepPlan, StepResult
from nanovllm.engine.token_scores import NO_SCORES, TokenScores
from nanovllm.runner.logprobs import Logprobs

if TYPE_CHECKING:
    from nanovllm.runner.targets import Targets


class StepHandle:
    """A launched step, and its results as the device will have them. `result()` waits for them, and is called once."""

    def __init__(
        self,
        plan: StepPlan,
        token_ids: Tensor | None = None,
        logprobs: tuple[Logprobs, NDArray[np.intp]] | None = None,
        targets: "Targets | None" = None,
    ) -> None:
        """
        Args:
            token_ids: int32 [1 + num_drafts of each sequence]; None if the plan samples nothing.
            logprobs: log-probabilities of sampled tokens, and the indices of the token_ids that they belong to.
            targets: the results for the plan's targets; None if it has none.
        """
        self._plan = plan
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._targets = targets

    def start_reading(self, stopwatch: Stopwatch, backend: Backend) -> None:
        """Start to copy the tokens to the host. The step's work ends with the copy, so the stopwatch stops."""
        # Samples that nobody asked for are dropped: those of sequences whose num_sampled is 0.
        self._kept = np.flatnonzero(np.repeat(self._plan.num_sampled > 0, 1 + self._plan.num_drafts))
        self._stopwatch = stopwatch
        if self._token_ids is not None:
            self._token_ids = backend.start_copy(self._token_ids)
        stopwatch.stop()

    def result(self) -> StepResult:
        """Wait for the device, and return the tokens and scores of the step."""
        prepare_seconds, device_seconds = self._stopwatch.read()  # first: it waits
        token_ids = np.empty(0, np.int32)
        logprobs: dict[int, TokenScores] = {}
        if self._token_ids is not None:
            every_sample = self._token_ids.numpy()
            token_ids = every_sample[self._kept]
            if self._logprobs is not None:
                found, asking = self._logprobs
                indices = np.searchsorted(self._kept, asking).tolist()  # among the samples that are kept
                logprobs = dict(zip(indices, found.read_rows(), strict=True))
        targets = (NO_SCORES, NO_EMBEDDINGS) if self._targets is None else self._targets.read()
        return StepResult(token_ids, logprobs, *targets, prepare_seconds, device_seconds)
