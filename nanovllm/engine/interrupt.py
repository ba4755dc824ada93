"""Holds Ctrl-C until a step has ended, so that the engine is never left in the middle of one."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class HoldInterrupt:
    """A `with` block that holds Ctrl-C: its KeyboardInterrupt is raised at the end of the block.

    A second Ctrl-C calls `on_second`, which closes the engine, and is raised at once. Python handles signals only
    between its own instructions, so both wait for a call into C++ that is under way, such as a collective. The block
    does nothing outside the main thread, the only one that receives signals, and if SIGINT has a handler of the user's.
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
