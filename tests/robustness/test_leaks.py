"""Nothing grows while requests and engines come and go: memory, descriptors, threads, processes, shared memory, files.

The full counts are those of `python scripts/find_leaks.py`: 50,000 requests, 200 engines, a job of 1,000,000 lines.
Here fewer are tried: so many that the warm-up, the first third, is over when measuring begins.
"""

import subprocess
import sys

import pytest
from helpers.paths import ROOT

pytest.importorskip("llguidance")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "count"),
    [("requests", 5_000), ("engines", 60), ("lines", 60_000), ("arrays", 30_000), ("texts", 60_000)],
)
def test_nothing_grows(task: str, count: int) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "find_leaks.py"), task, "--count", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
