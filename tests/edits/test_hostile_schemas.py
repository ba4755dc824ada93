"""Random JSON schemas, ordinary and hostile: each is kept or refused, and no process ends or hangs.

NANOVLLM_ATTACKS is the share of the 2,000 schemas that is tried: a quarter by default.
"""

import os
import queue
import subprocess
import sys
import threading
from collections import Counter

import pytest
from helpers.paths import TESTS

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

NUM_SCHEMAS = round(2000 * float(os.environ.get("NANOVLLM_ATTACKS", "0.25")))
SECONDS = 120
"""Until the next schema must be done. The slowest takes two seconds on an idle machine."""


@pytest.mark.slow
def test_schemas_of_any_kind_are_kept_or_refused() -> None:
    """A random walk along the masks of an ordinary schema ends in JSON that validates."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "helpers.hostile_schemas", "0", str(NUM_SCHEMAS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    lines: queue.Queue[str] = queue.Queue()
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def read() -> None:
        assert victim.stdout is not None
        for line in victim.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    found: Counter[str] = Counter()
    try:
        for number in range(NUM_SCHEMAS):
            line = lines.get(timeout=SECONDS)
            if not line:
                assert victim.stderr is not None
                said = f"ended the process with {victim.wait()}:\n{victim.stderr.read()[-2000:]}"
                pytest.fail(f"draw_schema({number}) {said}")
            assert line.split()[0] == str(number)
            found[line.partition(" ")[2].strip()] += 1
    except queue.Empty:
        pytest.fail(f"draw_schema({number}) takes more than {SECONDS} s")
    finally:
        victim.kill()
        victim.wait()
    print(dict(found))
    assert found["kept"] > NUM_SCHEMAS / 4 and found["refused"] > NUM_SCHEMAS / 20
    assert found["gave up"] < NUM_SCHEMAS / 20
