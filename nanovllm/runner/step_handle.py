"""A step that was launched, and what it sampled."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm.engine.plan import IntArray, StepPlan, StepResult
from nanovllm.runner.staging import ReturnBuffers
from nanovllm.utils.clock import Clock


def _start_copy(values: Tensor) -> Tensor:
    """values on their way to the host: they are there once the device has reached the end of the step."""
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


class Logprobs:
    """Log-probabilities of raw distributions: of the sampled token and of the k most likely, for who asked."""

    ROWS_AT_A_TIME = 64
    """Bounds the float32 copies of logits: 40 MB each for 151,936 tokens."""

    def __init__(self, logits: Tensor, token_ids: Tensor, asking: NDArray[np.intp], counts: IntArray) -> None:
        """
        Args:
            logits, token_ids: [num_asking, vocab], and int32 [num_asking], the tokens sampled from them.
            asking: [num_asking], which of the plan's sequences they are of.
            counts: [num_seqs], how many each sequence asked for; -1 is none, not even the sampled one's.
        """
        self._counts, self._place = counts, {int(i): place for place, i in enumerate(asking)}
        k = min(int(counts.max()), logits.shape[1])
        parts = []
        for some, ids in zip(
            *(torch.split(values, self.ROWS_AT_A_TIME) for values in (logits, token_ids)), strict=True
        ):
            logprobs = some.float().log_softmax(-1)
            parts.append((logprobs.gather(1, ids.long().unsqueeze(1)).squeeze(1), *logprobs.topk(k, dim=1)))
        of_sampled, top, top_ids = (torch.cat(values) for values in zip(*parts, strict=True))
        self._of_sampled, self._top, self._top_ids = map(_start_copy, (of_sampled, top, top_ids))

    def read(self, token_ids: IntArray, sampled: IntArray) -> list[dict[int, float] | None]:
        """For each of the plan's sampled sequences; only after the step has ended on the device."""
        of_sampled, top_ids, top = self._of_sampled.tolist(), self._top_ids.tolist(), self._top.tolist()
        read: list[dict[int, float] | None] = []
        for token_id, i in zip(token_ids.tolist(), sampled.tolist(), strict=True):
            place = self._place.get(i)
            if place is None:
                read.append(None)
                continue
            count = int(self._counts[i])
            likely = dict(zip(top_ids[place][:count], top[place][:count], strict=True))
            read.append({token_id: of_sampled[place], **likely})
        return read


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
        logprobs: Logprobs | None,
        stopwatch: Stopwatch,
        buffers: ReturnBuffers,
    ) -> None:
        """token_ids int32 [num_seqs or more], on the device; None if the plan samples nothing."""
        self._sampled = np.flatnonzero(plan.samples).astype(np.int32)
        self._logprobs, self._stopwatch, self._buffers = logprobs, stopwatch, buffers
        self._token_ids, self._pinned = token_ids, None
        if token_ids is not None and token_ids.is_cuda:
            self._pinned = buffers.take()
            self._token_ids = self._pinned[: len(token_ids)]
            self._token_ids.copy_(token_ids, non_blocking=True)
        stopwatch.stop()

    def result(self) -> StepResult:
        """Wait for the device, and read what it sampled."""
        times = self._stopwatch.read()  # first: it waits
        if self._token_ids is None:
            return StepResult(np.empty(0, np.int32), None, *times)
        token_ids = self._token_ids.numpy()[self._sampled]  # a copy: the buffer may go
        if self._pinned is not None:
            self._buffers.give_back(self._pinned)
        logprobs = self._logprobs.read(token_ids, self._sampled) if self._logprobs is not None else None
        return StepResult(token_ids, logprobs, *times)
