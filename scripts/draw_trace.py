"""Draw a trace that `LLM(..., trace="run.json")` wrote: batches, KV occupancy, host and device time, step by step."""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

HOST_SPANS = ("schedule", "prepare", "launch", "update")
"""The host's own work; "wait" is the device's."""


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace; one that ends early, because its run did, is read as far as it goes."""
    text = path.read_text(encoding="utf-8")
    try:
        events: list[dict[str, Any]] = json.loads(text)
    except ValueError:
        lines = text.splitlines()[1:-1]  # without the opening bracket and the torn last line
        events = [json.loads(line.rstrip(",")) for line in lines]
    return events


def series(events: list[dict[str, Any]], chart: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, values) of one series of a chart."""
    points = [(e["ts"] / 1e6, e["args"][name]) for e in events if e["ph"] == "C" and e["name"] == chart]
    times, values = np.array(points, float).reshape(-1, 2).T
    return times, values


def step_times(events: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start in seconds, host ms, device ms) of each step, in order."""
    start: dict[int, float] = {}
    host: dict[int, float] = defaultdict(float)
    device: dict[int, float] = defaultdict(float)
    for event in events:
        if event["ph"] != "X":
            continue
        step = event["args"]["step"]
        if event["name"] == "step":
            start[step] = event["ts"] / 1e6
            device[step] = event["dur"] / 1e3
        elif event["name"] in HOST_SPANS:
            host[step] += event["dur"] / 1e3
    steps = sorted(start)
    return tuple(np.array([table[s] for s in steps]) for table in (start, host, device))  # type: ignore[return-value]


def device_idle_share(events: list[dict[str, Any]]) -> float:
    """The share of the time between the first step's start and the last one's end in which the device had no work."""
    spans = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["name"] == "step")
    if not spans:
        return 0.0
    total = spans[-1][0] + spans[-1][1] - spans[0][0]
    return 1 - sum(duration for _, duration in spans) / total


def draw(events: list[dict[str, Any]], output: Path, host_is_device: bool) -> None:
    """Three charts over time, one above the other.

    Args:
        host_is_device: a CPU run: the launch is the device's work itself, and the host's share is the rest.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (batch, memory, times) = plt.subplots(3, 1, figsize=(10, 7.5), sharex=True, layout="constrained")
    at, decode = series(events, "tokens", "decode")
    _, prefill = series(events, "tokens", "prefill")
    batch.stackplot(at, decode, prefill, step="post", labels=["decode", "prefill"], colors=["#4878a8", "#e0a458"])
    batch.plot(*series(events, "sequences", "waiting"), color="#888888", lw=1, label="sequences waiting")
    batch.set_yscale("symlog", linthresh=max(16.0, float(decode.max(initial=1))))
    batch.set_ylim(bottom=0)
    batch.set_ylabel("tokens per step")
    batch.legend(loc="upper right")

    _, used = series(events, "KV blocks", "used")
    _, free = series(events, "KV blocks", "free")
    memory.fill_between(at, 100 * used / np.maximum(used + free, 1), step="post", color="#6a9f58")
    memory.set_ylabel("KV blocks in use, %")
    memory.set_ylim(bottom=0)

    start, host, device = step_times(events)
    if host_is_device:
        host = np.maximum(host - device, 0)
    times.plot(start, device, ".", ms=3, color="#4878a8", label="device")
    times.plot(start, host, ".", ms=3, color="#c44e52", label="host (schedule, prepare, launch, update)")
    times.set_yscale("log")
    times.set_ylabel("ms per step")
    times.set_xlabel("seconds")
    times.legend(loc="upper right")
    figure.suptitle(f"{len(start)} steps; device idle {100 * device_idle_share(events):.1f} % of the time")
    figure.savefig(output, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="the file that LLM(..., trace=...) wrote")
    parser.add_argument("-o", "--output", type=Path, help="picture to write (default: the trace's name, .png)")
    args = parser.parse_args()
    try:
        events = read_trace(args.trace)
    except (OSError, ValueError) as error:
        parser.error(f"{args.trace} cannot be read as a trace: {error}")
    if not any(e["ph"] == "X" for e in events):
        parser.error(f"{args.trace} has no steps")
    output = args.output or args.trace.with_suffix(".png")
    device = next((e["args"]["device"] for e in events if e["name"] == "engine"), "cpu")
    draw(events, output, host_is_device=device == "cpu")
    print(f"{output}: {sum(e['name'] == 'step' for e in events)} steps")


if __name__ == "__main__":
    main()
