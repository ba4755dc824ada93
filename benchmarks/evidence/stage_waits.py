"""Prints which share of the time each rank of a pipeline waits, from a trace.

    python bench.py --preset cpu --pipeline-parallel-size 2 --trace run.json
    python benchmarks/evidence/stage_waits.py run.json

A rank works while it computes layers or the LM head. It waits the rest of the time: for hidden states of another rank,
or for a plan. The time runs from the first step that counts to the end of the last span.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

WORK = ("layers", "head")


def measure_waits(path: Path, first_step: int) -> dict[str, float]:
    """Return {rank: share of the time in which it waits}."""
    events = [json.loads(line.rstrip(",")) for line in path.read_text().splitlines()[1:] if line != "]"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    busy: dict[str, float] = defaultdict(float)
    start = float("inf")
    end = 0.0
    for event in events:
        if event["name"] in WORK and event["ph"] == "X" and event["args"]["step"] >= first_step:
            start = min(start, event["ts"])
            end = max(end, event["ts"] + event["dur"])
            busy[names[event["tid"]]] += event["dur"]
    return {rank: 1 - seconds / (end - start) for rank, seconds in sorted(busy.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--first-step", type=int, default=1, help="leave out what comes before, such as a warm-up")
    args = parser.parse_args()
    for rank, share in measure_waits(args.trace, args.first_step).items():
        print(f"{rank} waits {100 * share:.1f} % of the time")


if __name__ == "__main__":
    main()
