"""Streams and events that keep the order of work, without a device.

Each stream counts its pieces of work. A time is a count for each stream: all work up to there has come before. A stream
knows of another's work by an event or by a wait, the host by a synchronisation.
"""

import itertools
import time
from collections.abc import Callable

Time = dict[int, int]
"""By a stream's number: how many pieces of its work have come before."""


class RehearsalError(AssertionError):
    """The program asks of CUDA what CUDA would refuse, or would do at another time than is meant."""


def merge(time: Time, other: Time) -> None:
    """Add to `time` all that came before `other`."""
    for number, count in other.items():
        time[number] = max(time.get(number, 0), count)


class Timeline:
    """The host, and all streams."""

    def __init__(self, check_may_wait: Callable[[str], None], settle: Callable[[], None]) -> None:
        """
        Args:
            check_may_wait: called before the host waits; raises if it may not.
            settle: called after the host has learned what has ended.
        """
        self.host: Time = {}
        self.streams: list[Stream] = []
        self.numbers = itertools.count()
        self.check_may_wait = check_may_wait
        self._settle = settle

    def host_learns(self, time: Time) -> None:
        """Note that the host has waited for all work up to a time."""
        merge(self.host, time)
        self._settle()

    def synchronize(self) -> None:
        """Wait for all streams."""
        self.check_may_wait("synchronises")
        for stream in self.streams:
            self.host_learns(stream.now())


class Stream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, timeline: Timeline, device: int) -> None:
        self._timeline = timeline
        self.device_index = device
        self.number = next(timeline.numbers)
        self._known: Time = {}
        self._count = 0
        timeline.streams.append(self)

    def now(self) -> Time:
        """Return the time after all work that the stream has been given."""
        return {**self._known, self.number: self._count}

    def knows(self) -> Time:
        """Return the time before the stream's next piece of work."""
        time = self.now()
        merge(time, self._timeline.host)
        return time

    def work(self) -> Time:
        """Add a piece of work, and return the time after it. It comes after all that the host has waited for."""
        merge(self._known, self._timeline.host)
        self._count += 1
        return self.now()

    def wait_event(self, event: "Event") -> None:
        merge(self._known, event.time or {})

    def wait_stream(self, other: "Stream") -> None:
        merge(self._known, other.now())

    def synchronize(self) -> None:
        self._timeline.check_may_wait("waits for a stream")
        self._timeline.host_learns(self.now())


class Event:
    """Stands in for torch.cuda.Event."""

    def __init__(self, timeline: Timeline, current: Callable[[], Stream], enable_timing: bool) -> None:
        self._timeline = timeline
        self._current = current
        self._timed = enable_timing
        self._seconds = 0.0
        self.time: Time | None = None
        """The time of the last `record`; None before the first."""

    def record(self, stream: Stream | None = None) -> None:
        self.time = (stream or self._current()).now()
        self._seconds = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._current()).wait_event(self)

    def synchronize(self) -> None:
        if self.time is None:
            raise RehearsalError("the host waits for an event that was never recorded")
        self._timeline.check_may_wait("waits for an event")
        self._timeline.host_learns(self.time)

    def elapsed_time(self, end: "Event") -> float:
        """Return milliseconds."""
        for event in (self, end):
            if not event._timed:
                raise RehearsalError("the time of an event without enable_timing is read")
            if event.time is None or not has_passed(event.time, self._timeline.host):
                raise RehearsalError("the time of an event is read before the host has waited for it")
        return 1000 * (end._seconds - self._seconds)


def has_passed(time: Time, now: Time) -> bool:
    """Return whether all work up to `time` has come before `now`."""
    return all(now.get(number, 0) >= count for number, count in time.items())
