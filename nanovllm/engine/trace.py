"""A timeline of every step, for chrome://tracing and https://ui.perfetto.dev, and for scripts/draw_trace.py.

The file is a JSON array of events, written as the run goes; the format allows its end to be missing, so the trace of
a run that was killed can still be read. Format: "Trace Event Format", Google.
"""

import json
import time
from typing import Any, TextIO

from nanovllm.engine.plan import StepResult
from nanovllm.engine.scheduler import Batch, Scheduler
from nanovllm.utils.clock import Clock

HOST, DEVICE = 1, 2
"""The two threads of the timeline."""


class Trace:
    """Writes the trace of one engine; a `StepObserver`."""

    def __init__(self, path: str, device: str) -> None:
        """device is the engine's. Raises a ValueError if the file cannot be written."""
        try:
            self._file: TextIO | None = open(path, "w", encoding="utf-8")  # noqa: SIM115  # lives as long as the engine
        except OSError as error:
            raise ValueError(f"trace file {path} cannot be written: {error}") from error
        self._start = time.perf_counter()
        self._device_free_at = 0.0
        self._file.write("[\n")
        self._write({"name": "engine", "ph": "M", "pid": 1, "tid": HOST, "args": {"device": device}})
        for thread, name in ((HOST, "host"), (DEVICE, "device")):
            self._write({"name": "thread_name", "ph": "M", "pid": 1, "tid": thread, "args": {"name": name}})

    def planned(self, at: float, batch: Batch, scheduler: Scheduler) -> None:
        """Charts of what a step is made of, and of the state it was planned in."""
        plan, manager = batch.plan, scheduler.block_manager
        charts = {
            "tokens": {"decode": plan.num_decodes, "prefill": plan.num_tokens - plan.num_decodes},
            "sequences": {"running": len(scheduler.running), "waiting": len(scheduler.waiting)},
            "KV blocks": {"used": manager.num_used, "free": manager.num_free},
            "prompt tokens": {"cached": scheduler.num_cached_tokens, "all": scheduler.num_prompt_tokens},
        }
        for name, series in charts.items():
            self._write({"name": name, "ph": "C", "pid": 1, "ts": self._microseconds(at), "args": series})

    def finished(self, number: int, clock: Clock, result: StepResult) -> None:
        """The spans of a step that has been read: what the host did for it, and the device's work.

        The device's work is timed but not placed: it began once launched, and not before the step before had ended.
        """
        for name, start, seconds in clock.spans:
            if name == "launch":
                self._span("prepare", HOST, start, result.prepare_seconds, number)
                start, seconds = start + result.prepare_seconds, seconds - result.prepare_seconds
                began = max(start, self._device_free_at)
                self._device_free_at = began + result.device_seconds
                self._span("step", DEVICE, began, result.device_seconds, number)
            self._span(name, HOST, start, seconds, number)

    def close(self) -> None:
        """Finish the file. Closing twice is allowed."""
        if self._file is not None:
            self._file.write('{"name": "end", "ph": "i", "pid": 1, "tid": 1, "ts": 0, "s": "g"}\n]\n')
            self._file.close()
            self._file = None

    def _span(self, name: str, thread: int, start: float, seconds: float, step: int) -> None:
        event = {"name": name, "ph": "X", "pid": 1, "tid": thread, "args": {"step": step}}
        self._write({**event, "ts": self._microseconds(start), "dur": round(seconds * 1e6, 1)})

    def _microseconds(self, at: float) -> float:
        return round((at - self._start) * 1e6, 1)

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(event) + ",\n")
