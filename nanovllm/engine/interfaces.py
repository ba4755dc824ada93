"""The interfaces of what the engine has in several kinds. load.py makes them and hands them in.

Runner        runs plans, and returns a Handle for each    runner/, features/distributed/
Editor        collects the edits of logits                 features/edits/
Scorer        chooses the prompt tokens of a step          features/scoring/
              that are scored or embedded
Speculation   plans drafts, and learns from them           features/drafts/
StepObserver  is told of every step                        features/trace.py, the progress bar, measurements
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nanovllm.engine.plan import IntArray, StepPlan, StepResult
from nanovllm.engine.rows import Rows
from nanovllm.engine.scheduled_step import ScheduledStep, Scored
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import FinishReason
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.clock import Clock


class Handle(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step, and return what it sampled and scored. To be called once."""


class Runner(Protocol):
    """Runs steps on the device, in the order of their launch."""

    def launch(self, plan: StepPlan, edits: Any = None) -> Handle:
        """Start a step. On a GPU this returns at once. On a CPU the step is computed before it returns.

        Args:
            edits: the edits of the step's logits, a `StepEdits` (runner/sampler.py). Planning does not look into it.
        """

    def launch_layers(self, plan: StepPlan) -> Any:
        """Start the first part of a step, its layers. Between this and `launch_head` nothing else may be launched.

        A pipeline has no such launch: it plans no sequence whose edits would need a token that is not known.

        Returns:
            What `launch_head` needs. It is the runner's own.
        """

    def launch_head(self, layers: Any, edits: Any = None) -> Handle:
        """Start the second part of a step, its logits and its samples."""

    def reason_to_close(self) -> str | None:
        """Return why nothing can run after a step has failed; None if the next step can."""

    def close(self) -> None:
        """Free the device's memory. Nothing is launched afterwards."""


class Editor(Protocol):
    """Collects the edits of logits that requests ask for: penalties, biases, masks, grammars."""

    def read_request(self, params: SamplingParams) -> Any:
        """Return the edits that a request asks for, a `RowEdits`. ValueError if this model cannot have them."""

    def lacks_tokens(self, step: ScheduledStep) -> bool:
        """Return whether the edits of the step that was planned last depend on tokens of steps in flight."""

    def collect(self, step: ScheduledStep) -> Any:
        """Return the edits of the step that was planned last, a `StepEdits`; None if there are none."""


class Scorer(Protocol):
    """Chooses the prompt tokens that each step scores or embeds, and gives sequences what was computed.

    Attributes:
        seqs: {row: sequence} of sequences with prompt tokens that are not scored yet, and of all without output.
    """

    seqs: dict[int, Sequence]

    def add(self, seq: Sequence) -> None:
        """Learn of a new sequence that asks for scores or an embedding."""

    def move_in(self, seq: Sequence) -> None:
        """Learn that a sequence has got a row."""

    def release(self, row: int) -> None:
        """Learn that a row is free."""

    def choose_targets(self, rows: Rows, ends: IntArray) -> tuple[IntArray, IntArray, list[Scored], NDArray[np.bool_]]:
        """Choose the targets of the next step, which computes each row's tokens before `ends`.

        Returns:
            How many targets each row has; all targets, as in `StepPlan.targets`; the sequences that have some; and for
            each row whether its sequence has output.
        """

    def give(self, scored: Seq[Scored], result: StepResult) -> list[tuple[Sequence, FinishReason]]:
        """Give sequences the scores or embeddings of a step. Return the sequences that end with them, and how."""


class Drafter(Protocol):
    """Guesses the tokens that come next."""

    def offer(self, seqs: Seq[Sequence], limits: IntArray) -> IntArray:
        """Return how many drafts it has for each sequence: at most its limit, 0 if it has no guess."""

    def write_drafts(self, step: ScheduledStep) -> None:
        """Write the drafts into the plan, whose token_ids have room for as many as were chosen. Nobody else writes into
        a plan, and nobody has read this one yet."""

    def note_end(self, seq: Sequence) -> None:
        """Learn that a sequence has ended. It is called once for each, when its last token is appended."""


class Speculation(Protocol):
    """Plans drafts, which are guessed tokens that a step verifies, and learns how many of them prove right."""

    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def drafter(self) -> Drafter:
        """The object that guesses the tokens."""

    def plan_drafts(self, rows: Rows, ends: IntArray, num_running: int) -> IntArray:
        """Add drafts to a step that is being planned. Return the new ends of the rows."""

    def learn(self, step: ScheduledStep, ended: Iterable[Sequence]) -> None:
        """Learn from a step that was read, and of the sequences that ended with it."""


class StepObserver(Protocol):
    """Is told of every step. The engine calls it, in the thread that runs the loop."""

    def planned(self, number: int, at: float, step: ScheduledStep) -> None:
        """Step `number`, counted from 1, is planned and not launched yet. Planning began `at` (time.perf_counter)."""

    def finished(self, number: int, step: ScheduledStep, clock: Clock, result: StepResult) -> None:
        """Step `number` was read, and its tokens are in the sequences. `clock` has the host's spans of time."""

    def close(self) -> None:
        """The engine is closed."""
