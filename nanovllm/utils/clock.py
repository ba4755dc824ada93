"""Measures how long each part of a step takes on the host."""

import time


class Clock:
    """Named spans of time, one after another: (name, start, duration), in seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.resume()

    def resume(self) -> None:
        """Start the next span now. The time since the last span belongs to none."""
        self._last = time.perf_counter()

    def span(self, name: str) -> None:
        """End the current span, give it a name, and start the next one."""
        now = time.perf_counter()
        self.spans.append((name, self._last, now - self._last))
        self._last = now
