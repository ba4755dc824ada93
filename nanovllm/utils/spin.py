"""Bounds how long torch's idle threads wait for work without sleeping.

libgomp reads the bound from the environment, when torch is loaded. The threads of the CPU kernels have rules of their
own (backends/cpu/team.h).
"""

import os
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
