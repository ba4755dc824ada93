"""The interfaces of what the engine has in several kinds. load.py makes them and hands them in.

Runner        runs plans, and returns a Handle for each    runner/, distributed/
StepEdits     samples from edited logits                   edits/
StepObserver  is told of every step                        view/, the progress bar, measurements
"""

from typing import TYPE_CHECKING, Any, Protocol

from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.engine.scheduled_step import ScheduledStep
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

    def launch_layers(self, plan: StepPlan) -> Any:
        """Start the first part of a step, its layers, and return at once. Nothing may be launched before `launch_head`.

        A pipeline has no such launch: it plans no sequence whose edits would need a token that is not known.

        Returns:
            What `launch_head` needs. It is the runner's own.
        """

    def launch_head(self, layers: Any, edits: StepEdits | None = None) -> Handle:
        """Start the second part of a step, its logits and its samples, and return at once."""

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
