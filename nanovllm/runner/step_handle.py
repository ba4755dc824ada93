"""A step that was launched, and what it sampled."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import IntArray, StepPlan, StepResult
from nanovllm.utils.clock import Clock


def _start_copy(values: Tensor) -> Tensor:
    """values on their way to the host: they are there once the device has reached the end of the step.

    Torch keeps pinned memory from being taken anew until the copies into it have ended.
    """
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class Logprobs:
    """Log-probabilities of raw distributions: of one token of each row of logits, and of the k most likely."""

    ROWS_AT_A_TIME = 64
    """Bounds the float32 copies of logits: 40 MB each for 151,936 tokens."""

    def __init__(self, logits: Iterable[tuple[Tensor, Tensor]], counts: IntArray) -> None:
        """
        Args:
            logits: piece by piece, [n, vocab], and the token of each row, int32 [n]. Only one piece is held at a time.
            counts: int32, how many of the most likely tokens each row of all the pieces wants.
        """
        self._counts = counts
        self._most = max(int(counts.max()), 0)
        parts = [part for piece in logits for part in self._reduce(*piece)]
        self._tensors = [_start_copy(torch.cat(values)) for values in zip(*parts, strict=True)]

    def _reduce(self, logits: Tensor, token_ids: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For some rows at a time: the log-probabilities of token_ids, of the most likely tokens, and their ids."""
        for some, ids in zip(*(torch.split(x, self.ROWS_AT_A_TIME) for x in (logits, token_ids)), strict=True):
            some = some.float()
            total = some.logsumexp(1, keepdim=True)
            top, top_ids = some.topk(min(self._most, some.shape[1]), dim=1)
            yield (some.gather(1, ids.long().clamp(min=0).unsqueeze(1)) - total).squeeze(1), top - total, top_ids

    def read(self, token_ids: IntArray) -> list[dict[int, float]]:
        """{token id: log-probability} of each row; only after the step has ended on the device."""
        of_token, top, top_ids = (values.tolist() for values in self._tensors)
        rows = zip(token_ids.tolist(), of_token, top_ids, top, self._counts.tolist(), strict=True)
        return [{own: value, **dict(zip(ids[:k], values[:k], strict=True))} for own, value, ids, values, k in rows]


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
            token_ids: int32 [the plan's num_drawn in all], on the device; None if the plan samples nothing.
            logprobs: and which of token_ids they are of.
            scores: of the plan's targets.
        """
        self._sampled, self._targets = np.flatnonzero(np.repeat(plan.num_sampled > 0, plan.num_drawn)), plan.targets
        self._logprobs, self._scores, self._stopwatch = logprobs, scores, stopwatch
        self._token_ids = None if token_ids is None else _start_copy(token_ids)
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
