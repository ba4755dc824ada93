"""Which activity an engine belongs to: a run, `add_request` and `step`, a load of weights, sleep, wake, reset or close.

    free ---- held_by("sleep()") ----> held ----> free
     |                                  | for each step or command: with work(), which holds the lock
     +------------ close() -------------+----> closed

A free engine has a `State`. In most states it refuses all but one or two activities. Asleep, for example, it takes only
`wake_up`.

Nobody waits for a claim: an activity is refused while another one has the engine. So a claim cannot deadlock. There
are two locks. `_lock` is held only while a claim is taken, and code under it calls nothing else. `_work_lock` is held
during one step or one command.
"""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from threading import RLock
from typing import NamedTuple
from weakref import WeakMethod


class ClosedError(RuntimeError):
    """The engine is closed, or belongs to another process."""


class State(Enum):
    """Says what an engine waits for while no activity has it. `Claim.is_closed` tells whether it is closed."""

    READY = auto()
    """Any activity may begin."""
    UNFINISHED = auto()
    """Requests of `LLM.add_request` wait for calls of `LLM.step`."""
    LOADING = auto()
    """Some new weights have come, and the others have not."""
    LOADED = auto()
    """A whole model has come. More may come, and any other activity ends the load when it begins."""
    ASLEEP = auto()
    REPLACED = auto()
    """The engine was woken with the weights of the model's folder, and the caller had loaded others before."""


REFUSALS = {
    State.UNFINISHED: "requests of add_request() are unfinished: call step() until is_finished()",
    State.LOADING: "new weights are being loaded: give those that lack, or end the load of some layers by "
    "load_weights([]) (or reset_prefix_cache(), under `nanovllm run`)",
    State.ASLEEP: "the engine is asleep: call wake_up() first",
    State.REPLACED: "the weights that load_weights() had brought were freed by sleep(level=2): "
    "call load_weights() again first",
}
"""{state: the error of an activity that may not begin in it}."""


class Activity(NamedTuple):
    """Names an activity that claims an engine. Others are refused meanwhile; their error joins the name and the advice.

    Attributes:
        name: the method that has the engine.
        advice: what it does there, and what the others can do.
    """

    name: str
    advice: str = "is running in this engine: wait until it has returned"


@dataclass(frozen=True, eq=False)
class _Holder:
    """One claim of an activity. Two of them are never equal, even if several threads want the same activity."""

    activity: Activity


class Claim:
    """The claim of one engine. Several threads may call every method at the same time.

    The locks are reentrant, because a signal's handler or the collection of a generator may call `close` or `work` in a
    thread that holds one of them. In a forked process no lock is ever taken: a thread that is not there may hold it.
    """

    def __init__(self, free: Callable[[], None]) -> None:
        """
        Args:
            free: a method that frees the engine's memory. It is called once, when the engine is closed.
        """
        self.state = State.READY
        """Only an activity that has the engine sets it."""
        self.on_begin: Callable[[str], None] = lambda activity: None
        """Called with the name of each activity, when that has the engine. features/adapters/groups.py sets it."""
        self._free = WeakMethod(free)  # a strong reference would be a cycle: `del llm` would not free memory at once
        self._pid = os.getpid()
        self._holder: _Holder | None = None
        self._is_closed = False
        self._is_freed = False
        self._is_working = False
        """Whether a step or a command runs. Only the thread that has `_work_lock` may read it."""
        self._lock = RLock()
        self._work_lock = RLock()

    @property
    def is_closed(self) -> bool:
        """Whether no step may run any more. In a forked process every engine counts as closed."""
        return self._is_closed or os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise a ClosedError if this process was forked after the engine was made."""
        if os.getpid() != self._pid:
            raise ClosedError(
                "this process was forked after the engine was made, and torch would hang in it: start processes with "
                "spawn or subprocess, and make an engine there"
            )

    def check_open(self) -> None:
        """Raise a ClosedError if the engine is closed, or as `check_process` does."""
        self.check_process()
        if self._is_closed:
            raise ClosedError("the engine is closed")

    def check(self, also_in: Collection[State] = ()) -> None:
        """Raise a RuntimeError if an activity may not begin now.

        Args:
            also_in: the states, beside READY and LOADED, in which it may begin.
        """
        self.check_open()
        if (holder := self._holder) is not None:
            raise RuntimeError(" ".join(holder.activity))
        if (state := self.state) in REFUSALS and state not in also_in:
            raise RuntimeError(REFUSALS[state])

    @contextmanager
    def held_by(self, activity: Activity, also_in: Collection[State] = ()) -> Iterator[None]:
        """Claim the engine until the block ends; raises as `check` does."""
        self.check_open()  # before the lock
        holder = _Holder(activity)
        try:
            with self._lock:
                self.check(also_in)
                self._holder = holder
            if self.state is State.LOADED and State.LOADED not in also_in:
                self.state = State.READY
            self.on_begin(activity.name)
            yield
        finally:
            # No lock: nobody else changes `_holder` as long as it is this one.
            if self._holder is holder:
                self._holder = None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Put this around one step or one command; raises as `check_open` does.

        If the engine is closed meanwhile, it is freed at the end of the block.
        """
        self.check_open()  # before the lock
        try:
            with self._work_lock:
                was_working = self._is_working
                self._is_working = True
                try:
                    self.check_open()
                    yield
                finally:
                    self._is_working = was_working
        finally:
            if self._is_closed:
                self.close()

    def close(self) -> None:
        """Mark the engine closed, wait for the step or command in hand, and free the engine.

        In a forked process this does nothing.

        Within a step or a command, in its own thread, this does not wait: the engine is freed at the end of that.
        """
        if os.getpid() != self._pid:
            return
        self._is_closed = True
        with self._work_lock:
            if not self._is_working and not self._is_freed:
                self._is_freed = True
                if (free := self._free()) is not None:
                    free()
