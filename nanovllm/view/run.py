"""Reads the trace of a run, whole or torn."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST_SPANS = ("schedule", "prepare", "launch", "update")
"""The host's own work; "wait" is the device's."""


@dataclass(frozen=True)
class Run:
    """A run, step by step. Lists have an entry a step, in order of the steps' numbers, which start at 1.

    Attributes:
        device, num_blocks, block_size, budget: the engine's; the budget is max_num_batched_tokens.
        start, host, device_time: milliseconds: when the step was planned, and what it cost the host and the device.
            On a CPU the launch is the device's work; the host's share is the rest. None for a step never read.
        charts: name -> values: running, waiting, used (blocks), and for each kind of token (decode, prefill) its count.
        records: what happened to requests and blocks, in order: ("plan" | "update" | "end", index of the step, what).
            "end", after the last step, has those that no step ended: (number, reason, None if it has none).
        texts: the text of each token id.
        complete: False if the end of the file is missing: the run was killed, or goes on.
        stopped: the recording stopped before the run did.
    """

    device: str
    num_blocks: int
    block_size: int
    budget: int
    start: list[float]
    host: list[float | None]
    device_time: list[float | None]
    charts: dict[str, list[int]]
    records: list[tuple[str, int, dict[str, Any]]]
    texts: dict[str, str]
    complete: bool
    stopped: bool

    @property
    def num_steps(self) -> int:
        return len(self.start)


def read_run(path: Path) -> Run:
    """The run that `LLM(..., trace=path)` recorded.

    Raises:
        ValueError: the file cannot be read, is no trace, or has no steps.
    """
    events = _read_events(path)
    header: dict[str, Any] = {"device": "cpu"}
    for event in events:
        if event["ph"] == "M":
            header |= event["args"]
    steps = _Steps()
    for event in events:
        steps.take(event)
    if not steps.start or "num_blocks" not in header:
        raise ValueError(f"{path} has no steps to show; it must be a file that LLM(..., trace=...) wrote")
    host = steps.host
    if header["device"] == "cpu":
        host = [_minus(total, device) for total, device in zip(host, steps.device, strict=True)]
    return Run(
        device=header["device"],
        num_blocks=header["num_blocks"],
        block_size=header["block_size"],
        budget=header["budget"],
        start=steps.start,
        host=host,
        device_time=steps.device,
        charts=steps.charts,
        records=steps.records,
        texts=steps.texts,
        complete=steps.records[-1][0] == "end",
        stopped=steps.records[-1][2].get("stopped", False),
    )


class _Steps:
    """Gathers what events tell of each step."""

    def __init__(self) -> None:
        self.start: list[float] = []
        self.host: list[float | None] = []
        self.device: list[float | None] = []
        self.charts: dict[str, list[int]] = {}
        self.records: list[tuple[str, int, dict[str, Any]]] = []
        self.texts: dict[str, str] = {}
        self._index: dict[int, int] = {}

    def take(self, event: dict[str, Any]) -> None:
        name, args = event["name"], event["args"]
        if event["ph"] == "C" and name != "prompt tokens":
            for series, value in args.items():
                self.charts.setdefault(series, []).append(value)
        elif name == "plan":
            self._index[args["step"]] = len(self.start)
            self.start.append(event["ts"] / 1e3)
            self.host.append(None)
            self.device.append(None)
            self._record("plan", args)
        elif name == "end" and self.start:
            self.records.append(("end", len(self.start) - 1, args))
        elif event["ph"] == "X":
            self._take_span(event)

    def _take_span(self, event: dict[str, Any]) -> None:
        name, args, milliseconds = event["name"], event["args"], event["dur"] / 1e3
        index = self._index[args["step"]]
        if name == "step":
            self.device[index] = milliseconds
        elif name in HOST_SPANS:
            self.host[index] = (self.host[index] or 0.0) + milliseconds
        if name == "update":
            self._record("update", args)

    def _record(self, kind: str, args: dict[str, Any]) -> None:
        self.texts |= args.get("texts", {})
        what = {name: value for name, value in args.items() if name not in ("step", "texts")}
        self.records.append((kind, self._index[args["step"]], what))


def _read_events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace; one that ends early, because its run did, is read as far as its last whole line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    events: list[dict[str, Any]]
    try:
        try:
            events = json.loads(text)
        except ValueError:
            lines = text.splitlines()[1:]
            whole = lines if text.endswith("\n") else lines[:-1]
            events = [json.loads(line.rstrip(",")) for line in whole]
        if not events or not all({"ph", "name", "args"} <= event.keys() for event in events):
            raise ValueError("its events have other keys")
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is not a trace that LLM(..., trace=...) wrote: {error}") from error
    return events


def _minus(host: float | None, device: float | None) -> float | None:
    return None if host is None or device is None else max(host - device, 0.0)
