"""Reads a trace, whole or torn, and writes it as one page for a browser."""

import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from nanovllm.utils.checks import quote

HOST_SPANS = ("schedule", "prepare", "launch", "update")
"""The spans that are the host's own work. During "wait" the device works."""


@dataclass
class Recording:
    """A run of the engine, step by step. Each list has one entry per step, in order; steps are numbered from 1.

    Attributes:
        device, num_blocks, block_size: the engine's device, and its pool of blocks.
        budget: the engine's max_num_batched_tokens.
        rows: the engine's max_num_seqs; None in a trace of an older version.
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
    start: list[float] = field(default_factory=list)
    host: list[float | None] = field(default_factory=list)
    device_time: list[float | None] = field(default_factory=list)
    charts: dict[str, list[int]] = field(default_factory=dict)
    records: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    stopped: bool = False

    @property
    def num_steps(self) -> int:
        return len(self.start)


def read_recording(path: Path) -> Recording:
    """Read the file that `LLM(..., trace=path)` wrote.

    Raises:
        ValueError: the file cannot be read, is no trace, is damaged, or has no steps.
    """
    try:
        return _collect_steps(_read_events(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        reason = quote(str(error)) if isinstance(error, ValueError) else f"{type(error).__name__} {quote(str(error))}"
        raise ValueError(f"{path} is not a trace that LLM(..., trace=...) wrote, or is damaged: {reason}") from error


def _collect_steps(events: list[dict[str, Any]]) -> Recording:
    """Return what the events tell of each step."""
    header: dict[str, Any] = {"device": "cpu"}
    for event in events:
        if event["ph"] == "M":
            header |= event["args"]
    if "num_blocks" not in header or all(event["name"] != "plan" for event in events):
        raise ValueError("it has no steps to show")
    run = Recording(
        header["device"], header["num_blocks"], header["block_size"], header["budget"], rows=header.get("rows")
    )
    indices: dict[int, int] = {}
    """The index of each step, by its number."""
    for event in events:
        kind = event["ph"]
        name = event["name"]
        args = event["args"]
        if kind == "C" and name != "prompt tokens":
            for series, value in args.items():
                run.charts.setdefault(series, []).append(value)
        elif name == "plan":
            indices[args["step"]] = run.num_steps
            run.start.append(event["ts"] / 1e3)
            run.host.append(None)
            run.device_time.append(None)
        elif name == "end" and run.start:
            run.records.append(("end", run.num_steps - 1, args))
            run.complete = True
            run.stopped = args.get("stopped", False)
        elif kind == "X":
            index = indices[args["step"]]
            milliseconds = event["dur"] / 1e3
            if name == "step":
                run.device_time[index] = milliseconds
            elif name in HOST_SPANS:
                run.host[index] = (run.host[index] or 0.0) + milliseconds
        if name in ("plan", "update"):
            run.texts |= args.get("texts", {})
            fields = {key: value for key, value in args.items() if key not in ("step", "texts")}
            run.records.append((name, indices[args["step"]], fields))
    if run.device == "cpu":
        times = zip(run.host, run.device_time, strict=True)
        run.host = [None if host is None or device is None else max(host - device, 0.0) for host, device in times]
    return run


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


def render_pair(runs: list[tuple[Recording, str]]) -> str:
    """Return a page that shows the pages of two (recording, title) in frames and keeps them at the same step."""
    (first, _), (second, _) = runs
    data = {
        "titles": [title for _, title in runs],
        "pages": [render_page(recording, title) for recording, title in runs],
        "num_steps": max(first.num_steps, second.num_steps),
        "first_difference": find_first_difference(first, second),
    }
    return _fill("page.pair.html", {"data": _to_script(data)})


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
        guide: for kinds of events ("preemption", "queue", "hit", "eviction"), links to pages that explain them.
    """
    data = {"title": title, "guide": guide or {}, **vars(recording)}
    parts = {"style": _read_part("page.css"), "script": _read_part("page.js"), "data": _to_script(data)}
    return _fill("page.html", parts)


def _fill(template: str, parts: dict[str, str]) -> str:
    """Return a page of this folder with the text of each part in its place, which is a comment with the part's name."""
    page = _read_part(template)
    for name, text in parts.items():
        before, after = page.split(f"/* {name} */")
        page = before + text + after
    return page


def _read_part(name: str) -> str:
    return files("nanovllm.apps.view").joinpath(name).read_text(encoding="utf-8")


def _to_script(data: dict[str, Any]) -> str:
    """Return data as JSON that cannot end the script in which it stands."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
