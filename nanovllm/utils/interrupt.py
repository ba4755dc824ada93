"""Holding Ctrl-C until a step has ended, so that an interrupted engine is whole."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class HoldInterrupt:
    """Within this block a Ctrl-C waits, and is raised as KeyboardInterrupt at its end; a second one does not wait.

    A second one calls `on_second` (which should close what can no longer be left whole) and raises at once; but Python
    hears of either only when a call into C++ returns, so in a collective both wait for it. Outside the main thread,
    which alone receives signals, and where SIGINT is not Python's own, the block changes nothing.
    """

    def __init__(self, on_second: Callable[[], None]) -> None:
        self._on_second = on_second
        self._held = False
        self._installed = False

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._held:
            self._on_second()
            raise KeyboardInterrupt
        self._held = True

    def __enter__(self) -> None:
        self._held = False
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False
        if self._held and (kind is None or issubclass(kind, Exception)):
            raise KeyboardInterrupt from error
