"""What the engine asks of its runner, and tells its observers."""

from typing import TYPE_CHECKING, Protocol

from nanovllm.engine.plan import StepPlan, StepResult
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import ScheduledStep
from nanovllm.utils.clock import Clock

if TYPE_CHECKING:
    from nanovllm.edits.logit_edits import LogitEdits


class Handle(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Wait for the step, and read what it sampled."""
        ...


class Runner(Protocol):
    """What does the plans' work: steps run in the order of their launch."""

    def launch(self, plan: StepPlan, edits: "LogitEdits | None" = None) -> Handle:
        """Start a step; edits are what is done to its logits before tokens are sampled."""
        ...

    def reason_to_close(self) -> str | None:
        """Why nothing can run after a step has failed; None if the next step can."""
        ...

    def close(self) -> None: ...


class StepObserver(Protocol):
    """Is told of every step: the trace, or who measures."""

    def planned(self, number: int, at: float, step: ScheduledStep, scheduler: Scheduler) -> None:
        """Step `number`, counted from 1, was planned, from `at` on (`time.perf_counter`); it is not launched yet."""
        ...

    def finished(self, number: int, step: ScheduledStep, clock: Clock, result: StepResult) -> None:
        """Step `number` was read, and its tokens taken in; the clock has its spans on the host."""
        ...

    def close(self) -> None:
        """The engine is closed."""
        ...
