"""No C++ kernel reads or writes beyond its tensors, or does what C++ leaves undefined, whatever the shapes.

The kernels are built with AddressSanitizer and UndefinedBehaviorSanitizer, and called with random shapes.
NANOVLLM_ATTACKS is the share of the 200 seconds that they are called: 0.1 by default.
"""

import os
from pathlib import Path

import pytest
from helpers.instrumented_kernels import FAULT, build, find_runtime, start

SHARE = float(os.environ.get("NANOVLLM_ATTACKS", "0.1"))

pytestmark = [
    pytest.mark.targets,
    pytest.mark.skipif(find_runtime() is None, reason="needs g++ with AddressSanitizer"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("instrumented"))


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        ("overrun", "252-byte region"),
        ("misalign", "load of misaligned address"),
    ],
)
def test_the_library_is_instrumented(fault: str, report: str, library: Path) -> None:
    """A fault made on purpose is reported, with the place in the kernels' sources."""
    done = start(library, fault)
    assert done.returncode == FAULT, (done.returncode, done.stderr[-2000:])
    assert f"loaded {library}" in done.stdout
    assert report in done.stderr and "nanovllm/backends/cpu/" in done.stderr, done.stderr[-3000:]


def test_kernels_with_random_shapes_stay_within_their_tensors(library: Path) -> None:
    done = start(library, "fuzz", 200 * SHARE)
    assert done.returncode == 0, done.stderr[-5000:]
    print(done.stdout)
    assert f"loaded {library}" in done.stdout
