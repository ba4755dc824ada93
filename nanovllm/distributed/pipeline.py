"""Pipeline parallelism: each rank (a stage) computes some of the layers. distributed/__init__.py has the picture.

Every rank runs all plans in one order, so every link carries its tensors in that order, too: one from each stage to the
next for every plan, and one from the last stage to rank 0 for every plan that wants logits. Both ends of a link read
the shapes from the plan. No rank decides anything.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.config import ResolvedConfig
from nanovllm.distributed.collectives import GroupParallel
from nanovllm.distributed.stages import choose_stages
from nanovllm.engine.hooks import Handle, StepEdits
from nanovllm.engine.plan import StageSpan, StepPlan, StepResult
from nanovllm.layers.parallel import Parallel, Stage
from nanovllm.runner.device import to_device
from nanovllm.runner.model_runner import Front, ModelRunner
from nanovllm.runner.step_handle import StepHandle, Stopwatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NUM_KEPT = 12
"""How many transfers a stage keeps before it looks whether they have ended: more than a ring has slots."""


class StageParallel(Parallel):
    """One rank of a pipeline. It shares no layer with another rank, so the layers' collectives do nothing."""

    def __init__(self, group: GroupParallel, stage: Stage) -> None:
        super().__init__(ranks_per_device=group.ranks_per_device, stage=stage)
        self.number = group.rank
        self._group = group

    def minimum(self, value: int) -> int:
        return self._group.minimum(value)


def make_parallel(config: ResolvedConfig, hf_config: "PretrainedConfig", group: GroupParallel) -> Parallel:
    """Return what the layers of a rank share with those of other ranks: the group itself, unless it is a pipeline."""
    if config.pipeline_parallel_size == 1:
        return group
    return StageParallel(group, choose_stages(hf_config, group.size)[group.rank])


class PipelineStage:
    """Runs one stage's part of every plan: receives from the stage before, computes its layers, sends on."""

    def __init__(self, runner: ModelRunner, group: GroupParallel, report: Callable[[StageSpan], None] | None) -> None:
        """
        Args:
            report: called with each span of time in which this rank computed or waited; None if nobody wants them.
        """
        self._runner = runner
        self._group = group
        self._report = report
        self._num_plans = 0
        self._sent: deque[Any] = deque()
        """Transfers that may still be under way, with their tensors."""

    def run(self, plan: StepPlan) -> Front:
        """Run the plan's layers of this stage, and send the result to the next stage; the last one sends to rank 0."""
        runner = self._runner
        stage = runner.model.stage
        self._num_plans += 1
        with runner.computing(plan.num_tokens):
            packed = runner.staging.send(plan.arrays())
            runner.tables.update(plan, packed[plan.head_size :])
            x = None if stage.is_first else self.receive(plan.num_tokens, self._group.rank - 1, self._num_plans)
            since = time.perf_counter()
            # The staging buffer belongs to the next plan soon, and the second half of this one comes later.
            front = runner.start(plan, packed[: plan.head_size].clone(), x)
            if not stage.is_last:
                self._send(front.hidden, self._group.rank + 1)
            elif count_wanted(front):
                self._send(front.hidden[choose_wanted(front)], 0)
        self.note("layers", since, self._num_plans)
        return front

    def receive(self, num_rows: int, rank: int, number: int) -> Tensor:
        """Wait for [num_rows, hidden] of plan `number` from another rank."""
        since = time.perf_counter()
        runner = self._runner
        x = torch.empty(num_rows, runner.shape.hidden, dtype=runner.dtype)
        self._group.receive(x, rank)
        self.note("receive", since, number)
        return x.to(runner.device)

    def _send(self, x: Tensor, rank: int) -> None:
        """Start to send x. This never waits for the receiver: a stage that did could wait for itself, all around.

        What was sent NUM_KEPT plans ago has arrived: the ring of plans has fewer slots, so no rank is that far behind
        another. The end of that transfer is only collected here.
        """
        self._sent.append(self._group.start_send(x, rank))
        if len(self._sent) > NUM_KEPT:
            self._group.end_send(self._sent.popleft())

    def note(self, name: str, since: float, number: int) -> None:
        """Report a span of time that ends now."""
        if self._report is not None:
            self._report(StageSpan(self._group.rank, name, number, since, time.perf_counter() - since))


def count_wanted(front: Front) -> int:
    """Return how many rows of a step's hidden states want logits."""
    return sum(0 if rows is None else len(rows) for rows in (front.scored, front.sampled))


def choose_wanted(front: Front) -> Tensor:
    """Return which rows of a step's hidden states want logits, int64 [n]: those that score, then those that sample."""
    parts = [] if front.scored is None else [to_device(front.scored, front.hidden.device)]
    return torch.cat(parts if front.sampled is None else [*parts, front.sampled.long()])


class PipelineHandle:
    """A step whose first half was launched on rank 0."""

    def __init__(self, stage: "FirstStage", number: int, front: Front, edits: StepEdits | None, seconds: float) -> None:
        self._stage = stage
        self.number = number
        self.front = front
        self.edits = edits
        self.seconds = seconds
        """How long the first half took."""
        self.step_result: StepResult | None = None

    def result(self) -> StepResult:
        """Run the second halves of all steps up to this one, in the order of their plans."""
        while self.step_result is None:
            self._stage.finish_oldest()
        return self.step_result


class FirstStage(PipelineStage):
    """Rank 0's stage. A step is launched as its first half. The second half runs when the result is asked for.

    With p stages the engine keeps p steps in flight. So the result that is asked for after launch n is that of plan
    n - p + 1, whose hidden states the last stage sends while rank 0 computes the first halves of later plans.
    """

    def __init__(self, runner: ModelRunner, group: GroupParallel, spans: deque[StageSpan] | None) -> None:
        """
        Args:
            spans: collects the spans of all ranks; None if nobody wants them.
        """
        super().__init__(runner, group, None if spans is None else spans.append)
        self._spans = spans
        self._unread: deque[PipelineHandle] = deque()

    def launch(self, plan: StepPlan, edits: StepEdits | None = None) -> Handle:
        """Run the first half of a step. A draft model is on rank 0 alone."""
        if plan.for_draft_model:
            return self._runner.launch(plan)
        since = time.perf_counter()
        front = self.run(plan)
        handle = PipelineHandle(self, self._num_plans, front, edits, time.perf_counter() - since)
        self._unread.append(handle)
        return handle

    def finish_oldest(self) -> None:
        """Run the second half of the oldest step: wait for its hidden states, compute logits, sample."""
        handle = self._unread.popleft()
        front = handle.front
        num_scored = 0 if front.scored is None else len(front.scored)
        num_rows = count_wanted(front)
        hidden = front.hidden[:0]
        if num_rows:
            hidden = self.receive(num_rows, self._group.size - 1, handle.number)
        since = time.perf_counter()
        with self._runner.computing(num_rows):
            stopwatch = Stopwatch(self._runner.device)
            stopwatch.start()
            scored = None if front.scored is None else torch.arange(num_scored).numpy()
            sampled = None
            if front.sampled is not None:
                sampled = torch.arange(num_scored, num_rows, device=hidden.device)
            front = front._replace(hidden=hidden, scored=scored, sampled=sampled)
            device_result = self._runner.finish(front, handle.edits)
            result = StepHandle(front.plan, device_result, stopwatch).result()
        self.note("head", since, handle.number)
        spans = self._take_spans(handle.number)
        handle.step_result = replace(result, device_seconds=handle.seconds, spans=spans)

    def _take_spans(self, number: int) -> list[StageSpan]:
        """Return the spans that were reported since the last call, with plans counted from plan `number`."""
        spans = []
        while self._spans:
            span = self._spans.popleft()
            spans.append(span._replace(plan=span.plan - number))
        return spans
