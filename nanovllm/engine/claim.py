"""Which activity an engine belongs to: a run, `add_request` and `step`, a load of weights, sleep, wake, reset or close.

    free ---- held_by("sleep()") ----> held ----> free
     |                                  | for each step or command: with work(), which holds the lock
     +------------ close() -------------+----> closed

Nobody waits for a claim: an activity is refused while another one has the engine. So a claim cannot deadlock. Two locks
exist. One is held while the claim is taken, which calls nobody. The other is held during one step or one command.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from weakref import WeakMethod


class ClosedError(RuntimeError):
    """The engine is closed, or belongs to another process."""


@dataclass(frozen=True, eq=False)
class Holder:
    """An activity that has an engine. Two of them are never equal."""

    refusal: str
    """It says to another activity why that is refused."""


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
        self.refusal: str | None = None
        """Why no activity may begin, although none has the engine. Only an activity that has the engine sets it."""
        self.on_begin: Callable[[str], None] = lambda activity: None
        """Called with the name of each activity, when that has the engine. uses/adapters.py sets it."""
        self._free = WeakMethod(free)  # a strong reference would be a cycle: `del llm` would not free memory at once
        self._pid = os.getpid()
        self._holder: Holder | None = None
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

    def check(self, but_for: tuple[str, ...] = ()) -> None:
        """Raise a RuntimeError if no activity may begin now. The refusals in `but_for` do not count."""
        self.check_open()
        if (holder := self._holder) is not None:
            raise RuntimeError(holder.refusal)
        if (refusal := self.refusal) is not None and refusal not in but_for:
            raise RuntimeError(refusal)

    @contextmanager
    def held_by(self, activity: str, advice: str = "", but_for: tuple[str, ...] = ()) -> Iterator[None]:
        """Claim the engine until the block ends; raises as `check` does.

        Args:
            activity: its name, for the error that others get.
            advice: what the error says they can do.
        """
        self.check_open()  # before the lock
        holder = Holder(f"{activity} {advice or 'is running in this engine: wait until it has returned'}")
        try:
            with self._lock:
                self.check(but_for)
                self._holder = holder
            self.on_begin(activity)
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
        """Mark the engine closed, wait for the step or command in hand, and free the engine. A fork does nothing.

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
