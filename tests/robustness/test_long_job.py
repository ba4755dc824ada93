"""A long job: memory, descriptors and threads stay as they are after the first lines."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers.batch_jobs import read_answers, write_lines

NUM_LINES = 18_000
WARM_UP = 8_000
"""Until then caches fill: of kernels for each number of tokens, of the tokenizer, of the KV pool."""
BYTES_A_LINE = 500
"""The most that resident memory may grow by for each further line. 9 bytes are what a line costs by design. Measured
over 14,000 lines: -103 in float32, the allocator's noise; 800 to 1,300 in bfloat16, because oneDNN compiles code for
each number of tokens and drops it again (docs/reliability.md). A request that is not let go has at least 2,000."""


class Sample(NamedTuple):
    num_answers: int
    resident: int
    descriptors: int
    threads: int


def take_sample(pid: int, results: Path) -> Sample | None:
    """None if the process has ended."""
    try:
        with open(results, "rb") as file:
            num_answers = sum(1 for _ in file)
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        resident = int(status["VmRSS"].split()[0]) * 1024
        return Sample(num_answers, resident, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))
    except (OSError, KeyError):
        return None


def slope(points: list[tuple[int, int]]) -> float:
    """Of the line through the points, by least squares."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


@pytest.mark.slow
def test_a_long_job_grows_in_nothing_but_the_bytes_of_its_lines(tmp_path: Path) -> None:
    lines = [{"prompt": f"What is {i % 977}?" + " Please." * (i % 4), "max_tokens": 1} for i in range(NUM_LINES)]
    source = write_lines(tmp_path / "in", lines)
    results = tmp_path / "out"
    command = [sys.executable, "-m", "nanovllm", "run-batch", "-i", str(source), "-o", str(results)]
    options = [
        "--model=tiny-qwen3",
        "--dtype=float32",
        "--max-model-len=64",
        "--max-num-seqs=256",
        "--kvcache-memory-bytes=8388608",
    ]
    samples: list[Sample] = []
    with open(tmp_path / "said", "wb") as said:
        process = subprocess.Popen([*command, *options], stderr=said)
    try:
        while process.poll() is None:
            if (sample := take_sample(process.pid, results)) is not None:
                samples.append(sample)
            time.sleep(0.25)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, (tmp_path / "said").read_text()
    assert len(read_answers(results)) == NUM_LINES
    warm = [sample for sample in samples if WARM_UP <= sample.num_answers < NUM_LINES]
    assert len(warm) > 20, "too few samples to tell"
    growth = slope([(sample.num_answers, sample.resident) for sample in warm])
    assert growth < BYTES_A_LINE, f"{growth:.0f} bytes a line"
    for name in ("descriptors", "threads"):
        counts = [getattr(sample, name) for sample in warm]
        assert max(counts) - min(counts) <= 2, f"{name}: {min(counts)} to {max(counts)}"
    print(f"{growth:.1f} bytes a line over {len(warm)} samples, up to {warm[-1].resident >> 20} MiB")
