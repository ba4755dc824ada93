"""Bounds how long torch's idle threads wait for work without sleeping, and notices when that harms.

libgomp reads the bound from the environment, when torch is loaded. The threads of the CPU kernels have rules of their
own (backends/cpu/team.h).
"""

import os
import resource
import sys

SPIN_COUNT = "50000"
"""About 3 ms: longer than Python takes between two operators, and a tenth of libgomp's default."""


def bound_spinning() -> None:
    """Set the bound, unless torch is loaded already or the user has set one.

    On a busy machine, threads that wait without sleeping (spin) can keep the thread that they wait for from running.
    """
    is_bounded = os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    if "torch" not in sys.modules and not is_bounded:
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT


class Neighbours:
    """Tells whether other processes want the machine's cores: then this thread often loses its core."""

    def __init__(self) -> None:
        self._count = _count_preemptions()
        self._recent = 0.0

    def are_busy(self) -> bool:
        """Call it once a step. Return whether this thread lost its core more than twice in about the last ten steps."""
        count = _count_preemptions()
        self._recent = 0.9 * self._recent + count - self._count
        self._count = count
        return self._recent > 2


def _count_preemptions() -> int:
    """Return how often this thread lost its core; on systems that do not count this, how often the process did."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nivcsw
