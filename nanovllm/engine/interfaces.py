"""The interfaces of what the engine has in several kinds. load.py makes them and hands them in.

Runner        runs plans, and returns a Handle for each    runner/, features/distributed/
StepObserver  is told of every step                        view/, the progress bar, measurements
"""

from typing import Any, Protocol

from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.engine.scheduled_step import ScheduledStep
from nanovllm.utils.clock import Clock


class Handle(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step, and return what it sampled and scored. To be called once."""


class Runner(Protocol):
    """Runs steps on the device, in the order of their launch."""

    def launch(self, plan: StepPlan, edits: Any = None) -> Handle:
        """Start a step and return at once.

        Args:
            edits: the edits of the step's logits, a `StepEdits` (runner/sampler.py). Planning does not look into it.
        """

    def launch_layers(self, plan: StepPlan) -> Any:
        """Start the first part of a step, its layers, and return at once. Nothing may be launched before `launch_head`.

        A pipeline has no such launch: it plans no sequence whose edits would need a token that is not known.

        Returns:
            What `launch_head` needs. It is the runner's own.
        """

    def launch_head(self, layers: Any, edits: Any = None) -> Handle:
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
