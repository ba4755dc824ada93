"""Checks that a long batch job takes no more memory than a short one: 100,000 lines against 1,000.

    python scripts/batch_memory.py [--lines 100000] [--model tiny-qwen3]

It runs `nanovllm run-batch` on both files, each in its own process, and compares their peak resident memory. The last
line is one JSON document. The exit status is 1 if the long job takes more than 100 MiB more.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ALLOWED_MB = 100
SHORT = 1000


def write_requests(path: Path, num_lines: int) -> None:
    """Write a batch file of short prompts of many lengths: chats and completions in turn, each with its own id."""
    with open(path, "w") as file:
        for i in range(num_lines):
            question = f"What is {i % 977} plus {i % 89}?" + " Please." * (i % 4)
            if i % 2:
                url = "/v1/completions"
                body = {"prompt": question}
            else:
                url = "/v1/chat/completions"
                body = {"messages": [{"role": "user", "content": question}]}
            line = {"custom_id": f"request-{i}", "method": "POST", "url": url, "body": {**body, "max_tokens": 4}}
            file.write(json.dumps(line) + "\n")


def run(folder: Path, num_lines: int, options: list[str]) -> dict[str, float]:
    """Run a job of `num_lines` lines. Return its own statistics, its peak memory in MiB and its seconds."""
    source, results, stats = (folder / f"{num_lines}.{name}" for name in ("requests", "results", "stats"))
    write_requests(source, num_lines)
    command = [sys.executable, "-m", "nanovllm", "run-batch", "-i", str(source), "-o", str(results)]
    since = time.perf_counter()
    process = os.spawnv(os.P_NOWAIT, sys.executable, [*command, "--stats", str(stats), *options])
    _, status, usage = os.wait4(process, 0)
    seconds = time.perf_counter() - since
    if status:
        raise SystemExit(f"the job of {num_lines} lines ended with status {os.waitstatus_to_exitcode(status)}")
    with open(results, "rb") as lines:
        num_answers = sum(1 for _ in lines)
    if num_answers != num_lines:
        raise SystemExit(f"{num_answers} answers to {num_lines} lines")
    counts = json.loads(stats.read_text())
    peak_mb = usage.ru_maxrss / 1024  # Linux reports KiB
    return {**counts, "lines": num_lines, "peak_mb": round(peak_mb, 1), "wall_seconds": round(seconds, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=100_000, help="lines of the long job (default: 100000)")
    parser.add_argument("--model", default="tiny-qwen3", help="as LLM's option (default: tiny-qwen3)")
    arguments = parser.parse_args()
    options = ["--model", arguments.model, "--max-model-len", "256", "--max-num-seqs", "256"]
    options += ["--kvcache-memory-bytes", str(48 << 20)]  # counted in the peak as soon as a block is used
    with tempfile.TemporaryDirectory() as folder:
        short, long = (run(Path(folder), n, options) for n in (SHORT, arguments.lines))
    more = long["peak_mb"] - short["peak_mb"]
    for job in (short, long):
        print(f"{job['lines']:>8} lines: peak {job['peak_mb']} MiB, {job['wall_seconds']} s")
    print(f"{more:.1f} MiB more for {arguments.lines - SHORT} lines more; at most {ALLOWED_MB} are allowed")
    print(json.dumps({"short": short, "long": long, "more_mb": round(more, 1), "allowed_mb": ALLOWED_MB}))
    return 0 if more <= ALLOWED_MB else 1


if __name__ == "__main__":
    sys.exit(main())
