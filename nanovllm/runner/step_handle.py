"""A step under way: its first half, its results on the device, its times, and the handle that waits for both."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import EMBED, IntArray, StepPlan, StepResult
from nanovllm.outputs import Logprob
from nanovllm.runner.device import start_copy
from nanovllm.runner.logprobs import Logprobs
from nanovllm.utils.clock import Clock


class Front(NamedTuple):
    """The first half of a step, up to the hidden states, and all that the second half needs of it.

    In a pipeline other steps begin between the two halves, and a row may have a new owner by then. So the first half
    keeps what the second one needs of the rows' tables.

    Attributes:
        hidden: [num_tokens, hidden].
        targets: int32 [num_scored in all], on the device.
        scored: [num_scored in all], the row of `hidden` that each target needs; None without targets.
        sampled: int [n], which row of `hidden` gives the logits of each sample; None if the plan samples nothing, and
            after `ModelRunner.replay`, where every row does.
        rows: int32 [n], the row that gets each sample.
        positions: int32 [n], the index in its sequence of each token that is sampled.
        num_logprobs: int32 [num_seqs], -1 for a sequence that wants none.
        num_prompt_logprobs: int32 [num_seqs], -1 for a sequence that wants none.
        sampling: int32 [n, width], the packed sampling values of `rows`, which a pipeline keeps; None elsewhere.
    """

    plan: StepPlan
    hidden: Tensor
    targets: Tensor
    scored: NDArray[np.intp] | None
    sampled: Tensor | None
    rows: Tensor
    positions: Tensor
    num_logprobs: IntArray
    num_prompt_logprobs: IntArray
    sampling: Tensor | None = None


class DeviceResult(NamedTuple):
    """The results of a step, as the device will have them.

    token_ids int32 [1 + num_drafts of each sequence], None if the plan samples nothing; logprobs, and the indices of
    the token_ids that they belong to; scores and embeddings of the plan's targets.
    """

    token_ids: Tensor | None = None
    logprobs: tuple[Logprobs, NDArray[np.intp]] | None = None
    scores: Logprobs | None = None
    embeddings: Tensor | None = None


class Stopwatch:
    """Times the host from the making of this object to `start`, and the device from there to `stop`.

    Neither call waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock()
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            make: Any = torch.cuda.Event  # its constructor has no types
            self._events = make(enable_timing=True), make(enable_timing=True)

    def start(self) -> None:
        """End the host's time, and begin the device's."""
        self._clock.span("prepare")
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        """End the device's time, once it has done all that was launched before."""
        self._clock.span("step")
        if self._events:
            self._events[1].record()

    def read(self) -> tuple[float, float]:
        """Return the seconds of the host and of the device; waits until the device has ended the step."""
        (_, _, prepare), (_, _, step) = self._clock.spans
        if self._events:
            self._events[1].synchronize()
            step = float(self._events[0].elapsed_time(self._events[1])) / 1000
        return prepare, step


class StepHandle:
    """A launched step. `result()` waits for it, and is called once."""

    def __init__(self, plan: StepPlan, result: DeviceResult, stopwatch: Stopwatch) -> None:
        # Samples that nobody asked for are dropped: those of sequences whose num_sampled is 0.
        self._sampled = np.flatnonzero(np.repeat(plan.num_sampled > 0, 1 + plan.num_drafts))
        self._targets = plan.targets[plan.targets != EMBED]
        self._stopwatch = stopwatch
        if result.token_ids is not None:
            result = result._replace(token_ids=start_copy(result.token_ids))
        if result.embeddings is not None:
            result = result._replace(embeddings=start_copy(result.embeddings))
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
