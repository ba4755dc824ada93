"""Pipeline parallelism: each rank (a stage) computes some of the layers. distributed/__init__.py has the picture.

Every rank runs all plans in one order, so every link carries its tensors in that order, too: one from each stage to the
next for every plan, and one from the last stage to rank 0 for every plan that wants logits. Both ends of a link read
the shapes from the plan. No rank decides anything.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanovllm.backends.gpu.cuda_graphs import graph_batch_sizes
from nanovllm.config import ResolvedConfig
from nanovllm.distributed.collectives import GroupParallel
from nanovllm.distributed.stage_inputs import StageInputs
from nanovllm.distributed.stages import choose_stages
from nanovllm.engine.interfaces import Handle, StepEdits
from nanovllm.engine.plan import StageSpan, StepPlan, StepResult
from nanovllm.layers.parallel import Parallel, Stage
from nanovllm.runner.device import to_device
from nanovllm.runner.model_runner import Graphs, ModelRunner
from nanovllm.runner.step_handle import DeviceResult, Front, StepHandle, Stopwatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NUM_KEPT = 12
"""How many transfers a stage keeps before it looks whether they have ended: more than a ring has slots."""


class StageParallel(Parallel):
    """One rank of a pipeline. It shares no layer with another rank, so the layers' collectives do nothing."""

    def __init__(self, group: GroupParallel, stage: Stage, inputs: StageInputs | None = None) -> None:
        """
        Args:
            inputs: the inputs of the stage's CUDA graphs; None without graphs.
        """
        super().__init__(ranks_per_device=group.ranks_per_device, stage=stage)
        self.number = group.rank
        self.num_transfers = group.size + 3  # sends of the plans in the ring, and receives for two
        self.inputs = inputs
        self._stage = stage
        self._group = group

    def minimum(self, value: int) -> int:
        return self._group.minimum(value)

    def bind_halves(
        self, decode: Callable[..., Any], sample: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        if self.inputs is not None:
            return self.inputs.bind(self._stage.is_first, decode, sample)
        return decode, sample if self._stage.is_first else None


def make_parallel(config: ResolvedConfig, hf_config: "PretrainedConfig", group: GroupParallel) -> Parallel:
    """Return what the layers of a rank share with those of other ranks: the group itself, unless it is a pipeline."""
    if config.pipeline_parallel_size == 1:
        return group
    inputs = None
    if config.use_graphs:
        num_seqs = graph_batch_sizes(config.max_num_seqs)[-1]
        dtype = getattr(torch, config.dtype)
        device = torch.device(config.device)
        inputs = StageInputs(num_seqs, hf_config.hidden_size, dtype, device, row=config.max_num_seqs)
    return StageParallel(group, choose_stages(hf_config, group.size)[group.rank], inputs)


class Half(NamedTuple):
    """The first half of a step on one stage.

    Attributes:
        plan: as rank 0 sent it.
        front: the front of the plan, or of the plan padded to the size of a CUDA graph.
        graphs: the graphs that ran it; None if it ran eagerly.
    """

    plan: StepPlan
    front: Front
    graphs: Graphs | None


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

    def run(self, plan: StepPlan) -> Half:
        """Run the plan's layers of this stage, and send the result to the next stage; the last one sends to rank 0."""
        runner = self._runner
        stage = runner.model.stage
        self._num_plans += 1
        with runner.computing(plan.num_tokens):
            graphs = runner.choose_graphs(plan)
            padded = plan if graphs is None else graphs.pad(plan)
            packed = runner.staging.send(padded.arrays())
            runner.device_rows.update(padded, packed[padded.head_size :])
            x = None if stage.is_first else self.receive(plan.num_tokens, self._group.rank - 1, self._num_plans)
            since = time.perf_counter()
            if graphs is None:
                # The staging buffer belongs to the next plan soon, and the second half of this one comes later.
                front = runner.start(plan, packed[: plan.head_size].clone(), x)
            else:
                front = self._replay(graphs, padded, plan.num_tokens, x)
            if stage.is_first:
                front = front._replace(sampling=runner.device_rows.sampling[front.rows])
            half = Half(plan, front, graphs)
            if not stage.is_last:
                self._send(front.hidden, self._group.rank + 1)
            elif count_wanted(plan):
                self._send(choose_wanted(half), 0)
            self.note("layers", since, self._num_plans)
        return half

    def _replay(self, graphs: Graphs, padded: StepPlan, num_tokens: int, x: Tensor | None) -> Front:
        """Run the layers of a plan that only decodes as a CUDA graph; returns copies of what the graph has written."""
        inputs = self.inputs
        if x is not None:
            inputs.hidden[:num_tokens].copy_(x)
        return inputs.keep(self._runner.replay(graphs, padded), num_tokens)

    @property
    def inputs(self) -> StageInputs:
        """The inputs of this stage's CUDA graphs."""
        parallel = self._runner.parallel
        assert isinstance(parallel, StageParallel) and parallel.inputs is not None
        return parallel.inputs

    def receive(self, num_rows: int, rank: int, number: int) -> Tensor:
        """Wait for [num_rows, hidden] of plan `number` from another rank. Over NCCL only the device waits."""
        since = time.perf_counter()
        x = self._group.receive((num_rows, self._runner.shape.hidden), self._runner.dtype, rank)
        self.note("receive", since, number)
        return x

    def _send(self, x: Tensor, rank: int) -> None:
        """Start to send x. This never waits for the receiver: a stage that did could wait for itself, all around.

        What was sent NUM_KEPT plans ago has arrived: the ring of plans has fewer slots, so no rank is that far behind
        another. The end of that transfer is only collected here.
        """
        if (sent := self._group.start_send(x, rank)) is not None:
            self._sent.append(sent)
        if len(self._sent) > NUM_KEPT:
            self._group.end_send(self._sent.popleft())

    def note(self, name: str, since: float, number: int) -> None:
        """Report a span of time that ends now, or when the device has done what it was given."""
        if self._report is None:
            return
        if self._runner.device.type == "cuda":
            torch.cuda.current_stream(self._runner.device).synchronize()
        self._report(StageSpan(self._group.rank, name, number, since, time.perf_counter() - since))


def count_wanted(plan: StepPlan) -> int:
    """Return how many rows of a step's hidden states want logits. A step that samples does so for each sequence."""
    num_sampled = plan.num_seqs + int(plan.num_drafts.sum()) if plan.num_sampled.any() else 0
    return len(plan.targets) + num_sampled


def choose_wanted(half: Half) -> Tensor:
    """Return the hidden states that want logits, [n, hidden]: those that score, then those that sample."""
    front = half.front
    if half.graphs is not None:  # each sequence has one, and samples
        return front.hidden
    parts = [] if front.scored is None else [to_device(front.scored, front.hidden.device)]
    return front.hidden[torch.cat(parts if front.sampled is None else [*parts, front.sampled.long()])]


class PipelineHandle:
    """A step whose first half was launched on rank 0."""

    def __init__(
        self, stage: "FirstStage", number: int, half: Half, edits: StepEdits | None, stopwatch: Stopwatch
    ) -> None:
        self._stage = stage
        self.number = number
        self.half = half
        self.edits = edits
        self.stopwatch = stopwatch
        """Has timed the first half."""
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
        with self._runner.on_device():
            stopwatch = Stopwatch(self._runner.device)
            stopwatch.start()
            half = self.run(plan)
            stopwatch.stop()
        if half.graphs is None:  # the hidden states are sent, so their memory is free for others
            nothing = half.front.hidden.new_empty(0, self._runner.shape.hidden)
            half = half._replace(front=half.front._replace(hidden=nothing))
        handle = PipelineHandle(self, self._num_plans, half, edits, stopwatch)
        self._unread.append(handle)
        return handle

    def finish_oldest(self) -> None:
        """Run the second half of the oldest step: wait for its hidden states, compute logits, sample."""
        handle = self._unread.popleft()
        half = handle.half
        num_rows = count_wanted(half.plan)
        with self._runner.computing(num_rows):
            hidden = half.front.hidden[:0]
            if num_rows:
                hidden = self.receive(num_rows, self._group.size - 1, handle.number)
            since = time.perf_counter()
            stopwatch = Stopwatch(self._runner.device)
            stopwatch.start()
            device_result = self._finish(half, hidden, handle.edits)
            result = StepHandle(half.front.plan, device_result, stopwatch).result()
            self.note("head", since, handle.number)
            _, seconds = handle.stopwatch.read()
        spans = self._take_spans(handle.number)
        handle.step_result = replace(result, device_seconds=seconds, spans=spans)

    def _finish(self, half: Half, hidden: Tensor, edits: StepEdits | None) -> DeviceResult:
        """Compute logits and sample.

        Args:
            hidden: [n, hidden], the rows that `choose_wanted` has chosen.
        """
        front = half.front
        if half.graphs is not None:
            if not len(hidden):
                return DeviceResult()
            front = self.inputs.fill(front, hidden)
            return self._runner.finish_replay(half.graphs, front, edits, is_edited=edits is not None)
        num_scored = len(half.plan.targets)
        scored = None if front.scored is None else np.arange(num_scored)
        sampled = None
        if front.sampled is not None:
            sampled = torch.arange(num_scored, len(hidden), device=hidden.device)
        return self._runner.finish(front._replace(hidden=hidden, scored=scored, sampled=sampled), edits)

    def _take_spans(self, number: int) -> list[StageSpan]:
        """Return the spans that were reported since the last call, with plans counted from plan `number`."""
        spans = []
        while self._spans:
            span = self._spans.popleft()
            spans.append(span._replace(plan=span.plan - number))
        return spans
