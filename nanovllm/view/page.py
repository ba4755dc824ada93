"""Reads a trace, whole or torn, and writes it as one page for a browser."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from nanovllm.utils.checks import quote

CHAPTERS = {
    "preemption": "6-scheduler",
    "queue": "6-scheduler",
    "hit": "5-prefixes",
    "eviction": "5-prefixes",
}
"""The chapter of the guide that explains each kind of event."""

HOST_SPANS = ("schedule", "prepare", "launch", "update")
"""The spans that are the host's own work. During "wait" the device works."""


@dataclass(frozen=True)
class Recording:
    """A run of the engine, step by step. Each list has one entry per step, in order; steps are numbered from 1.

    Attributes:
        device, num_blocks, block_size: the engine's.
        budget: the engine's max_num_batched_tokens.
        rows: its max_num_seqs; None in a trace of an older version.
        start: when each step was planned, in milliseconds.
        host, device_time: milliseconds of the host's and the device's work; None for a step that was never read. On a
            CPU the launch is the device's work.
        charts: name -> values: running, waiting, used (blocks), and the tokens of each kind (decode, prefill, draft).
        records: what happened to requests and blocks, in order: ("plan" | "update" | "end", index of the step, fields).
            "end" comes after the last step. It lists the requests that no step ended: (number, reason or None).
        texts: the text of each token id.
        complete: False if the end of the file is missing, because the run was killed or still goes on.
        stopped: the recording stopped before the run did.
    """

    device: str
    num_blocks: int
    block_size: int
    budget: int
    rows: int | None
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


def read_recording(path: Path) -> Recording:
    """Read the file that `LLM(..., trace=path)` wrote.

    Raises:
        ValueError: the file cannot be read, is no trace, is damaged, or has no steps.
    """
    try:
        events = _read_events(path.read_text(encoding="utf-8"))
        header: dict[str, Any] = {"device": "cpu"}
        steps = _Steps()
        for event in events:
            if event["ph"] == "M":
                header |= event["args"]
            steps.add(event)
        if not steps.start or "num_blocks" not in header:
            raise ValueError("it has no steps to show")
        host = steps.host
        if header["device"] == "cpu":
            host = [_subtract(total, device) for total, device in zip(host, steps.device, strict=True)]
        kind, _, last = steps.records[-1]
        return Recording(
            device=header["device"],
            num_blocks=header["num_blocks"],
            block_size=header["block_size"],
            budget=header["budget"],
            rows=header.get("rows"),
            start=steps.start,
            host=host,
            device_time=steps.device,
            charts=steps.charts,
            records=steps.records,
            texts=steps.texts,
            complete=kind == "end",
            stopped=last.get("stopped", False),
        )
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        reason = quote(str(error)) if isinstance(error, ValueError) else f"{type(error).__name__} {quote(str(error))}"
        raise ValueError(f"{path} is not a trace that LLM(..., trace=...) wrote, or is damaged: {reason}") from error


class _Steps:
    """Collects what the events tell of each step."""

    def __init__(self) -> None:
        self.start: list[float] = []
        self.host: list[float | None] = []
        self.device: list[float | None] = []
        self.charts: dict[str, list[int]] = {}
        self.records: list[tuple[str, int, dict[str, Any]]] = []
        self.texts: dict[str, str] = {}
        self._index: dict[int, int] = {}

    def add(self, event: dict[str, Any]) -> None:
        name = event["name"]
        args = event["args"]
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
            self._add_span(name, args, event["dur"] / 1e3)

    def _add_span(self, name: str, args: dict[str, Any], milliseconds: float) -> None:
        index = self._index[args["step"]]
        if name == "step":
            self.device[index] = milliseconds
        elif name in HOST_SPANS:
            self.host[index] = (self.host[index] or 0.0) + milliseconds
        if name == "update":
            self._record("update", args)

    def _record(self, kind: str, args: dict[str, Any]) -> None:
        self.texts |= args.get("texts", {})
        fields = {name: value for name, value in args.items() if name not in ("step", "texts")}
        self.records.append((kind, self._index[args["step"]], fields))


def _read_events(text: str) -> list[dict[str, Any]]:
    """Return the events. A trace without its end, because the run was killed, is read up to its last whole line."""
    events: list[dict[str, Any]]
    try:
        events = json.loads(text)
    except ValueError:
        lines = text.splitlines()[1:]
        whole = lines if text.endswith("\n") else lines[:-1]
        events = [json.loads(line.rstrip(",")) for line in whole]
    if not events or not all({"ph", "name", "args"} <= event.keys() for event in events):
        raise ValueError("its events have other keys")
    return events


def _subtract(host: float | None, device: float | None) -> float | None:
    return None if host is None or device is None else max(host - device, 0.0)


def write_page(trace: Path, output: Path, other: Path | None = None) -> Recording:
    """Write the page that shows a trace; return the recording.

    Args:
        other: a second trace. The page then shows both runs side by side, step by step.

    Raises:
        ValueError: a trace cannot be read, or the page cannot be written.
    """
    recording = read_recording(trace)
    page = render_page(recording, trace.name)
    if other is not None:
        page = render_pair([(recording, trace.name), (read_recording(other), other.name)])
    try:
        if output.exists() and any(output.samefile(path) for path in (trace, other) if path is not None):
            raise ValueError(f"-o {output} is the trace itself: name another file for the page")
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"-o {output} cannot be written: {error}") from error
    return recording


def find_guide() -> dict[str, str]:
    """Return {kind of event: link to its chapter} if the package lies beside its documentation; {} otherwise."""
    folder = Path(__file__).resolve().parents[2] / "docs" / "guide"
    pages = {kind: folder / f"{chapter}.md" for kind, chapter in CHAPTERS.items()}
    return {kind: page.as_uri() for kind, page in pages.items() if page.is_file()}


def render_pair(runs: list[tuple[Recording, str]]) -> str:
    """Return a page that shows the pages of two (recording, title) in frames and keeps them at the same step."""
    (first, _), (second, _) = runs
    data = {
        "titles": [title for _, title in runs],
        "pages": [render_page(recording, title) for recording, title in runs],
        "num_steps": max(first.num_steps, second.num_steps),
        "first_difference": find_first_difference(first, second),
    }
    template = files("nanovllm.view").joinpath("page.pair.html").read_text(encoding="utf-8")
    before, after = template.split("/* data */")
    return before + json.dumps(data, separators=(",", ":")).replace("<", "\\u003c") + after


def find_first_difference(first: Recording, second: Recording) -> int | None:
    """Return the index of the first step at which two runs did not do the same; None if there is none.

    Times are not compared, nor are the texts of tokens, which are recorded where a token first appears.
    """
    for (kind, step, what), other in zip(first.records, second.records, strict=False):
        if (kind, step, what) != other:
            return min(step, other[1])
    if first.num_steps == second.num_steps and len(first.records) == len(second.records):
        return None
    return min(first.num_steps, second.num_steps) - 1


def render_page(recording: Recording, title: str, guide: dict[str, str] | None = None) -> str:
    """Return the page: template, style sheet, script and data in one, so that a browser fetches nothing.

    Text from the run, such as prompts and the file's name, never becomes markup.

    Args:
        guide: the links of `CHAPTERS`, where they are known; None looks for the guide on this machine.
    """
    links = find_guide() if guide is None else guide
    data = json.dumps({"title": title, "guide": links, **vars(recording)}, separators=(",", ":"))
    folder = files("nanovllm.view")
    parts = {
        "/* style */": folder.joinpath("page.css").read_text(encoding="utf-8"),
        "/* script */": folder.joinpath("page.js").read_text(encoding="utf-8"),
        "/* data */": data.replace("<", "\\u003c"),
    }
    page = folder.joinpath("page.html").read_text(encoding="utf-8")
    for place, text in parts.items():
        before, after = page.split(place)
        page = before + text + after
    return page
