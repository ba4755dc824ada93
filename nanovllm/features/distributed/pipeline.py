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

from nanovllm.backends.steps import EAGER, Steps
from nanovllm.config import ResolvedConfig
from nanovllm.engine.interfaces import Handle
from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.engine.rows import Rows, RowTable
from nanovllm.features.distributed.collectives import GroupParallel
from nanovllm.features.distributed.stage_decoder import make_stage_decoder
from nanovllm.features.distributed.stages import StageSpan, choose_ready, choose_stages
from nanovllm.models.decoder import Decoder
from nanovllm.models.layers.parallel import Parallel
from nanovllm.ops.step_inputs import StepInputs
from nanovllm.runner.head_inputs import HeadInputs
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.sampler import StepEdits
from nanovllm.runner.step_handle import StepHandle

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nanovllm.features.quantized.loading import ModelQuantizer

NUM_KEPT = 12
"""How many transfers a stage keeps before it looks whether they have ended: more than a ring has slots."""


class StageParallel(Parallel):
    """One rank of a pipeline. It shares no layer with another rank, so the layers' collectives do nothing."""

    def __init__(self, group: GroupParallel) -> None:
        super().__init__(group.rank, ranks_per_device=group.ranks_per_device)
        self.raise_failure = group.raise_failure
        self._group = group

    def minimum(self, value: int) -> int:
        return self._group.minimum(value)


class StageInputs:
    """The memory from which a stage's graphs read what other stages send. Each step's is copied here before they run.

    The first stage samples. The second part of a step runs after the first parts of later steps, which write the
    outputs anew. So `keep` copies what the second part needs, and `fill` writes that here when it runs.

    Attributes:
        hidden: [num_seqs, hidden], what the stage before has sent; in the first stage, what the last one has sent.
    """

    def __init__(self, num_seqs: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            num_seqs: the most sequences of a step. It is also the row of padding, to which the graphs write while they
                are captured.
        """
        self.hidden = torch.zeros(num_seqs, hidden_size, dtype=dtype, device=device)
        self._rows = torch.full((num_seqs,), num_seqs, dtype=torch.int32, device=device)
        self._positions = torch.zeros(num_seqs, dtype=torch.int32, device=device)

    def keep(self, head: HeadInputs, num_tokens: int) -> HeadInputs:
        """Return a graph's outputs, copied: the hidden states of the first num_tokens, rows and positions."""
        hidden = head.hidden[:num_tokens].clone()
        return head._replace(hidden=hidden, rows=head.rows.clone(), positions=head.positions.clone())

    def fill(self, head: HeadInputs, hidden: Tensor) -> HeadInputs:
        """Write here what the first part has kept, and the hidden states that came for it; return what is here then.

        Args:
            hidden: [n, hidden], without the step's padding.
        """
        size = len(head.rows)
        self.hidden[: len(hidden)].copy_(hidden)
        self._rows[:size].copy_(head.rows)
        self._positions[:size].copy_(head.positions)
        hidden, rows, positions = self.view(size)
        return head._replace(hidden=hidden, rows=rows, positions=positions)

    def view(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the hidden states, rows and positions of the first `size` samples, as views of this memory."""
        return self.hidden[:size], self._rows[:size], self._positions[:size]


class StageRunner(ModelRunner):
    """Runs one stage's part of every plan: receives from the stage before, computes its layers, sends on."""

    def __init__(
        self,
        config: ResolvedConfig,
        hf_config: "PretrainedConfig",
        read_weights: Callable[[Decoder], None],
        parallel: Parallel,
        quantizer: "ModelQuantizer | None",
        decoder: type[Decoder],
        *,
        group: GroupParallel,
        report: Callable[[StageSpan], None] | None,
    ) -> None:
        """
        Args:
            group: sends to the other stages, and receives from them.
            report: called with each span of time in which this rank computed or waited; None if nobody wants them.
        """
        self.stage = choose_stages(hf_config, group.size)[group.rank]
        super().__init__(config, hf_config, read_weights, parallel, quantizer, make_stage_decoder(decoder, self.stage))
        self.has_head = self.stage.is_first
        self.inputs: StageInputs | None = None
        """The memory that the CUDA graphs read beside the staging buffer; None without graphs."""
        if config.use_graphs:
            self.inputs = StageInputs(config.max_num_seqs, hf_config.hidden_size, self.dtype, self.device)
        self._received: Tensor | None = None
        self._group = group
        self._report = report
        self._num_plans = 0
        self._sent: deque[Any] = deque()
        """Transfers that may still be under way, with their tensors."""

    def launch(self, plan: StepPlan, edits: StepEdits | None = None) -> StepHandle:
        """See `ModelRunner.launch`. A stage does it to measure its memory, with the tensors that its links may hold."""
        num_transfers = self.config.depth + 3  # sends of the plans in the ring, and receives for two
        shape = (num_transfers, plan.num_tokens, self.hf_config.hidden_size)
        in_transfer = torch.empty(shape, dtype=self.dtype, device=self.device)
        handle = super().launch(plan, edits)
        del in_transfer
        return handle

    def run_stage(self, plan: StepPlan) -> "Front":
        """Run the plan's layers of this stage, and send the result to the next stage; the last one sends to rank 0."""
        self._num_plans += 1
        with self.computing():
            steps = self.choose_steps(plan)
            padded = steps.pad(plan)
            *_, entries, new_rows = torch.split(self.staging.send(padded.arrays()), padded.lengths)
            self.device_rows.add_blocks(entries)
            if not self.stage.is_first:
                self._received = self.receive(plan.num_tokens, self._group.rank - 1, self._num_plans)
            since = time.perf_counter()
            if steps is not EAGER and self._received is not None:
                assert self.inputs is not None
                self.inputs.hidden[: plan.num_tokens].copy_(self._received)
            head = self.run_layers(padded, steps)
            self._received = None
            # The second part of the step comes later. The next plan overwrites the staging buffer soon, and the next
            # step what a graph has written.
            head = head._replace(rows=head.rows.clone())
            if steps is not EAGER:
                assert self.inputs is not None
                head = self.inputs.keep(head, plan.num_tokens)
            if not self.stage.is_last:
                self._send(head.hidden, self._group.rank + 1)
            elif count_wanted(plan):
                self._send(self._choose_wanted(head), 0)
            self.note("layers", since, self._num_plans)
        return Front(head, steps, new_rows.clone())

    def forward(self, plan: StepPlan) -> tuple[StepInputs, Tensor]:
        """See `ModelRunner.forward`. The model takes what the stage before has sent."""
        self._hand_to_model(self._received, plan.num_tokens)
        return super().forward(plan)

    def forward_decodes(self, num_seqs: int) -> tuple[StepInputs, Tensor]:
        """See `ModelRunner.forward_decodes`. A graph reads from `inputs` what the stage before has sent."""
        self._hand_to_model(None if self.inputs is None else self.inputs.hidden[:num_seqs], num_seqs)
        return super().forward_decodes(num_seqs)

    def _hand_to_model(self, x: Tensor | None, num_tokens: int) -> None:
        """Give the model the output of the stage before. A step that only measures or compiles has none: zeros do."""
        if self.stage.is_first:
            return
        if x is None:
            x = torch.zeros(num_tokens, self.hf_config.hidden_size, dtype=self.dtype, device=self.device)
        self.model.received = x

    def run_head(self, head: HeadInputs, edits: StepEdits | None = None, steps: Steps = EAGER) -> StepHandle:
        """See `ModelRunner.run_head`. Only the first stage has a head."""
        return super().run_head(head, edits, steps) if self.has_head else StepHandle(head.plan)

    def sample_decodes(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """See `ModelRunner.sample_decodes`. The hidden states come from the last stage, when later steps have begun."""
        if self.inputs is None:
            return super().sample_decodes(inputs, hidden)
        hidden, rows, positions = self.inputs.view(len(inputs.rows))
        return self.sampler.sample(self.model.compute_logits(hidden), rows, positions)[0]

    def receive(self, num_rows: int, rank: int, number: int) -> Tensor:
        """Wait for [num_rows, hidden] of plan `number` from another rank. Over NCCL only the device waits."""
        since = time.perf_counter()
        x = self._group.receive((num_rows, self.hf_config.hidden_size), self.dtype, rank)
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

    def _choose_wanted(self, head: HeadInputs) -> Tensor:
        """Return the hidden states that want logits, [n, hidden]: those that score, then those that sample."""
        plan = head.plan
        if head.sample_indices is None and head.target_indices is None:
            return head.hidden
        parts = [] if head.target_indices is None else [head.hidden[self.backend.to_device(head.target_indices)]]
        if plan.num_sampled.any():
            parts.append(head.hidden if head.sample_indices is None else head.hidden[head.sample_indices])
        return torch.cat(parts)

    def note(self, name: str, since: float, number: int) -> None:
        """Report a span of time that ends now, or when the device has done what it was given."""
        if self._report is None:
            return
        stopwatch = self.backend.make_stopwatch()
        stopwatch.start()
        stopwatch.stop()
        stopwatch.read()  # waits for this stream only: on another a send may wait for a rank that waits for this one
        self._report(StageSpan(self._group.rank, name, number, since, time.perf_counter() - since))


def count_wanted(plan: StepPlan) -> int:
    """Return how many rows of a step's hidden states want logits. A step that samples does so for each sequence."""
    num_sampled = plan.num_seqs + int(plan.num_drafts.sum()) if plan.num_sampled.any() else 0
    return len(plan.targets) + num_sampled


class Front(NamedTuple):
    """A step whose first part a stage has launched: what the second part needs.

    Attributes:
        steps: runs the step.
        new_rows: the plan's new_rows on the device. Other steps begin between the two parts, and a row may have a new
            owner by then. So only the second part writes sampling values into the table of the first stage.
    """

    head: HeadInputs
    steps: Steps
    new_rows: Tensor


class PipelineHandle:
    """A step whose first part was launched on rank 0.

    Attributes:
        back: the second part; None until it is launched.
    """

    def __init__(self, stage: "FirstStage", number: int, plan: StepPlan, edits: StepEdits | None) -> None:
        """
        Args:
            plan: the plan as it came, without padding.
        """
        self._stage = stage
        self.number = number
        self.num_wanted = count_wanted(plan)
        self.edits = edits
        with stage.runner.backend.on_device():
            self.stopwatch = stage.runner.backend.make_stopwatch()
            self.stopwatch.start()
            self.front = stage.runner.run_stage(plan)
            self.stopwatch.stop()
        head = self.front.head
        if self.front.steps is EAGER:  # the hidden states are sent, so their memory is free for others
            head = head._replace(hidden=head.hidden.new_empty(0, head.hidden.shape[1]))
            self.front = self.front._replace(head=head)
        self.back: StepHandle | None = None

    def result(self) -> StepResult:
        """Launch the second parts of all steps up to this one, in the order of their plans, and wait for this one's."""
        while self.back is None:
            self._stage.launch_back()
        result = self.back.result()
        _, seconds = self.stopwatch.read()
        self._stage.read_number = self.number
        return replace(result, device_seconds=seconds)


class FirstStage:
    """Rank 0's stage. A step is launched as its first part, the front. The second part, the back, follows later.

    With p stages the back of plan n - p + 1 comes after the front of plan n: the last stage sends its hidden states
    while rank 0 computes the fronts of later plans. There are two ways, and the engine's depth decides:

        depth p        The back is launched when the result is asked for. The host waits for it, and then plans.
        depth p + 1    The back is launched with front n. The next front takes the sampled token on the device, and the
                       host reads the token while that front runs. This needs a receive for which no host waits: NCCL's.
    """

    def __init__(self, runner: StageRunner, group: GroupParallel, spans: deque[StageSpan] | None) -> None:
        """
        Args:
            spans: collects the spans of all ranks; None if nobody wants them.
        """
        self.runner = runner
        self._num_stages = group.size
        self._hands_tokens_over = runner.config.depth > group.size
        self._spans = spans
        self._num_plans = 0
        self._num_backs = 0
        self._fronts: deque[PipelineHandle] = deque()
        """The steps whose back is not launched."""
        self._drawn_by = np.zeros(runner.config.max_num_seqs + 1)
        """By row, that of padding included: the number of the last plan that has the row. What is launched after the
        back of that plan finds the row's last token. Infinity for edited rows: the host must know their tokens."""
        self._is_edited = np.zeros(len(self._drawn_by), bool)
        """By row, whether the logits of its owner are edited."""
        self.read_number = 0
        """The number of the plan whose result was read last."""

    def launch(self, plan: StepPlan, edits: StepEdits | None = None) -> Handle:
        """Launch the front of a step and, if tokens are handed over, the back that comes after it."""
        self._num_plans += 1
        handle = PipelineHandle(self, self._num_plans, plan, edits)
        self._is_edited[plan.new_rows["row"]] = plan.new_rows["is_edited"]
        self._drawn_by[plan.rows] = np.where(self._is_edited[plan.rows], np.inf, self._num_plans)
        self._fronts.append(handle)
        if self._hands_tokens_over and len(self._fronts) == self._num_stages:
            self.launch_back()
        return handle

    def choose_running(self, table: RowTable) -> Rows:
        """Choose the rows that the next step may compute: see `choose_ready`."""
        return choose_ready(table, self._num_stages, self._drawn_by <= self._num_backs)

    def launch_back(self) -> None:
        """Launch the second part of the oldest step without one: receive its hidden states, compute logits, sample."""
        handle = self._fronts.popleft()
        self._num_backs += 1
        runner = self.runner
        with runner.computing():
            head, steps, new_rows = handle.front
            runner.device_rows.move_in(new_rows, head.plan.new_rows)
            hidden = head.hidden[:0]
            if handle.num_wanted:
                hidden = runner.receive(handle.num_wanted, self._num_stages - 1, handle.number)
            since = time.perf_counter()
            stopwatch = runner.backend.make_stopwatch()
            stopwatch.start()
            handle.back = runner.run_head(self._take_hidden(head, hidden, steps), handle.edits, steps)
            handle.back.start_reading(stopwatch, runner.backend)
            runner.note("head", since, handle.number)

    def _take_hidden(self, head: HeadInputs, hidden: Tensor, steps: Steps) -> HeadInputs:
        """Return what the head of a step needs, with the hidden states that have come: those that want logits."""
        if steps is not EAGER:
            assert self.runner.inputs is not None
            return self.runner.inputs.fill(head, hidden)
        num_scored = len(head.plan.targets)
        sample_indices = torch.arange(num_scored, len(hidden), device=hidden.device)
        return head._replace(hidden=hidden, target_indices=np.arange(num_scored), sample_indices=sample_indices)

    def take_spans(self) -> list[StageSpan]:
        """Return the spans that were reported since the last call, with plans counted from the one read last."""
        spans = []
        while self._spans:
            span = self._spans.popleft()
            spans.append(span._replace(plan=span.plan - self.read_number))
        return spans
