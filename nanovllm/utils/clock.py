"""Where a step's time on the host goes."""

import time


class Clock:
    """Named spans of time, one after another: (name, start, seconds) each, in seconds of `time.perf_counter`."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.resume()

    def resume(self) -> None:
        """Start the next span now: what came before it belongs to none."""
        self._last = time.perf_counter()

    def span(self, name: str) -> None:
        """End a span, and start the next one."""
        now = time.perf_counter()
        self.spans.append((name, self._last, now - self._last))
        self._last = now
