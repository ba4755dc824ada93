"""The protocols by which other rooms attach to the engine. It knows none of those rooms:

    Runner        runs plans, and returns a Handle for each         runner/, distributed/
    StepObserver  is told of every step                             view/, the progress bar, measurements
    LogitEditor   makes the edits of logits that requests ask for   edits/
    OutputParser  reads more out of an output than its text         parsing/
    Speculator    guesses tokens for the next step to verify        drafts/

load.py makes them and hands them in.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from nanovllm.engine.plan import IntArray, StepPlan, StepResult
from nanovllm.engine.rows import Rows
from nanovllm.engine.sequence import RequestEdits, Sequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.outputs import Output
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.clock import Clock

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.backends import Backend
    from nanovllm.ops.sample import Sampled


class Handle(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step, and return what it sampled and scored. To be called once."""


class StepEdits(Protocol):
    """The edits of one step's logits. The runner samples such a step through it, on rank 0 alone."""

    def sample(
        self, backend: "Backend", logits: "Tensor", table: "Tensor", rows: "Tensor", positions: "Tensor"
    ) -> "Sampled":
        """Sample from edited logits as `Backend.sample` does. `logits` [n, vocab] themselves stay as they are."""


class Runner(Protocol):
    """Runs steps on the device, in the order of their launch."""

    def launch(self, plan: StepPlan, edits: StepEdits | None = None) -> Handle:
        """Start a step and return at once. With edits, its tokens are sampled by `edits.sample`."""

    def reason_to_close(self) -> str | None:
        """Return why nothing can run after a step has failed; None if the next step can."""

    def close(self) -> None:
        """Free the device's memory. Nothing is launched afterwards."""


class StepObserver(Protocol):
    """Is told of every step. The engine calls it, in the thread that runs the loop."""

    def planned(self, number: int, at: float, step: ScheduledStep) -> None:
        """Step `number`, counted from 1, is planned and not launched yet. Planning began `at` (time.perf_counter)."""

    def finished(self, number: int, step: ScheduledStep, clock: Clock, result: StepResult) -> None:
        """Step `number` was read, and its tokens are in the sequences. `clock` has the host's spans of time."""

    def close(self) -> None:
        """The engine is closed."""


class LogitEditor(Protocol):
    """Reads which edits of logits requests ask for, and collects them for each step."""

    def read_request(self, params: SamplingParams) -> RequestEdits:
        """Return the edits that a request asks for; ValueError if this model cannot have them."""

    def collect(self, step: ScheduledStep, read_tokens: Callable[[], None]) -> StepEdits | None:
        """Return the edits of all sequences of the step that was planned last; None if there are none.

        Args:
            read_tokens: reads all steps in flight. If the edits depend on their tokens, `StepEdits.sample` calls it
                first: by then the model of the planned step runs.
        """


class OutputParser(Protocol):
    """Reads thinking or calls of tools out of the outputs of requests that have ended."""

    def parse(self, seq: Sequence, output: Output) -> None:
        """Put what it finds in the output of one completion under keys of their own, and take it out of the text."""


class Speculator(Protocol):
    """Guesses tokens (drafts), and decides how many of them a step verifies.

    Attributes:
        num_draft_tokens: drafts verified so far.
        num_accepted_tokens: those of them that were right.
    """

    num_draft_tokens: int
    num_accepted_tokens: int

    def plan_drafts(self, rows: Rows, ends: IntArray, num_running: int) -> IntArray:
        """Return up to which token each row computes in a step, drafts included. `Scheduler.schedule` calls it.

        Args:
            ends: the same without drafts.
            num_running: so many of the rows, the first ones, ran before; the others were just admitted.
        """

    def write_drafts(self, step: ScheduledStep) -> None:
        """Write the drafts into the plan, whose token_ids have room for as many as `plan_drafts` asked for."""

    def update(self, step: ScheduledStep, result: StepResult) -> list[Sequence]:
        """Do for the tokens of a step with drafts what `Scheduler.update` does for those of the others."""

    def note_end(self, seq: Sequence) -> None:
        """Learn that a sequence has ended. The engine calls it once for each, when its last token is appended."""
