"""A step that was launched, and what it sampled."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.runner.logprobs import Logprobs
from nanovllm.runner.staging import start_copy
from nanovllm.utils.clock import Clock


class Stopwatch:
    """Times what the host does up to `start`, and what the device does from there to `stop`, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock()
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            make: Any = torch.cuda.Event  # its constructor has no types
            self._events = make(enable_timing=True), make(enable_timing=True)

    def start(self) -> None:
        self._clock.span("prepare")
        if self._events:
            self._events[0].record()

    def stop(self) -> None:
        self._clock.span("step")
        if self._events:
            self._events[1].record()

    def read(self) -> tuple[float, float]:
        """(Seconds of the host, seconds of the device); waits until the device has ended the step."""
        (_, _, prepare), (_, _, step) = self._clock.spans
        if self._events:
            self._events[1].synchronize()
            step = float(self._events[0].elapsed_time(self._events[1])) / 1000
        return prepare, step


class StepHandle:
    """A launched step; `result()` waits for it, and is to be called once."""

    def __init__(
        self,
        plan: StepPlan,
        token_ids: Tensor | None,
        logprobs: tuple[Logprobs, NDArray[np.intp]] | None,
        scores: Logprobs | None,
        stopwatch: Stopwatch,
    ) -> None:
        """
        Args:
            token_ids: int32 [1 + num_drafts of each sequence], on the device; None if the plan samples nothing.
            logprobs: and which of token_ids they are of.
            scores: of the plan's targets.
        """
        self._sampled = np.flatnonzero(np.repeat(plan.num_sampled > 0, 1 + plan.num_drafts))
        self._targets = plan.targets
        self._logprobs, self._scores, self._stopwatch = logprobs, scores, stopwatch
        self._token_ids = None if token_ids is None else start_copy(token_ids)
        stopwatch.stop()

    def result(self) -> StepResult:
        """Wait for the device, and read what it sampled and scored."""
        prepare_seconds, device_seconds = self._stopwatch.read()  # first: it waits
        token_ids, logprobs = np.empty(0, np.int32), {}
        if self._token_ids is not None:
            of_all = self._token_ids.numpy()
            token_ids = of_all[self._sampled]
            if self._logprobs is not None:
                found, asking = self._logprobs
                places = np.searchsorted(self._sampled, asking).tolist()
                logprobs = dict(zip(places, found.read(of_all[asking]), strict=True))
        scores = self._scores.read(self._targets) if self._scores is not None else ()
        return StepResult(token_ids, logprobs, scores, prepare_seconds, device_seconds)
